"""Shows rendered rows with the trained part in colour, or between [[ and ]] without colour."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from horizon_client.cli.output import clean, clean_block, count_text

if TYPE_CHECKING:
    from horizon_client.resources import DatasetPreview, PreviewRow


def print_preview(name: str, preview: DatasetPreview) -> None:
    """Print the rows of dataset `name`, and the options that they were rendered with."""
    in_colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    click.echo(
        f"{clean(name)}: {count_text(preview.num_rows)} rows, {clean(preview.format)}; "
        f"method {preview.method}, train_on {preview.train_on}, sequence_length {preview.sequence_length}"
    )
    click.echo("trained text is green" if in_colour else "trained text is between [[ and ]]")
    for row in preview.rows:
        counts = f"{count_text(row.num_tokens)} tokens, {count_text(row.num_trained_tokens)} trained"
        if row.num_documents > 1:
            counts += f", in {row.num_documents} documents"
        click.echo(f"\n--- {clean(place(row))}: {counts} ---")
        pieces = []
        for span in row.spans:
            text = clean_block(span.text)
            if span.trained:
                text = click.style(text, fg="green") if in_colour else f"[[{text}]]"
            pieces.append(text)
        click.echo("".join(pieces), color=in_colour)
        if row.clipped:
            click.echo("... the row is longer; only its beginning is shown")
        if row.num_cut_tokens:
            cut = count_text(row.num_cut_tokens)
            click.echo(f"... {cut} more tokens are beyond the sequence length: not trained, not shown")
        for problem in row.problems:
            click.echo(clean(f"not trained: {problem}"))
    if not preview.rows:
        click.echo("no rows: the offset is after the last row")


def place(row: PreviewRow) -> str:
    """Return the place of a row: `train.jsonl line 17`."""
    return f"{row.file} {row.unit} {row.number}"
