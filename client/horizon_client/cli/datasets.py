"""`horizon dataset`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from horizon_client.cli.completion import dataset_names, model_names
from horizon_client.cli.output import (
    View,
    age_text,
    bytes_text,
    count_text,
    limit_option,
    output_option,
    print_list,
    print_one,
    print_plain,
    time_text,
)
from horizon_client.cli.preview_view import place, print_preview
from horizon_client.cli.reporter import PUSH_INTERRUPTED, TransferReporter
from horizon_client.cli.root import Commands
from horizon_client.cli.session import connected

if TYPE_CHECKING:
    from horizon_client.resources import Dataset
    from horizon_client.sync_client import Client

_FORMATS = ["auto", "messages", "prompt-completion", "alpaca", "sharegpt", "text", "tokens"]
_TRAIN_ON = ["assistant", "last-assistant", "all"]
_NAME = click.argument("name", shell_complete=dataset_names)
_MAPPING = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.+")

_VIEW: View[Dataset] = View(
    columns=[
        ("NAME", lambda d: d.name),
        ("STATE", lambda d: d.state),
        ("FORMAT", lambda d: d.format or "-"),
        ("ROWS", lambda d: count_text(d.num_rows) if d.state == "READY" else "-"),
        ("SIZE", lambda d: bytes_text(d.size_bytes)),
        ("AGE", lambda d: age_text(d.create_time)),
    ],
    details=lambda d: [
        ("name", d.name),
        ("id", d.dataset_id),
        ("owner", d.owner),
        ("state", d.state),
        ("format", d.format or "-"),
        *([("map", ", ".join(f"{k}={v}" for k, v in d.field_map.items()))] if d.field_map else []),
        ("rows", count_text(d.num_rows) if d.state == "READY" else "-"),
        ("size", bytes_text(d.size_bytes)),
        ("files", ", ".join(f.path for f in d.files)),
        ("created", time_text(d.create_time)),
        ("digest", d.digest),
    ],
    name=lambda d: d.name,
)


@click.group(cls=Commands)
def dataset() -> None:
    """Push, list, preview and delete datasets."""


@dataset.command(
    epilog="""\b
Example:
  horizon dataset push train.jsonl --name notes
  horizon dataset push gsm8k.parquet --name gsm8k --map prompt=question --map completion=answer
  horizon dataset push corpus/ --name corpus

\b
Files: .jsonl .ndjson .json .txt, also with .gz or .zst, and .parquet; a folder
means the data files in it and in its subfolders. Content that the server
already has is not sent again; after an interruption the same command continues."""
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path())
@click.option("--name", help="Name of the dataset. Default: the first file's name without its endings.")
@click.option(
    "--format", "format_", type=click.Choice(_FORMATS), default="auto", show_default=True, help="Format of the rows."
)
@click.option(
    "--map", "mappings", multiple=True, metavar="FIELD=COLUMN", help="Use this column for a field (repeatable)."
)
@click.option(
    "--request-id", metavar="UUID", help="Repeating a request with the same id does not create a second dataset."
)
@output_option
@connected
def push(
    client: Client,
    files: tuple[str, ...],
    name: str | None,
    format_: str,
    mappings: tuple[str, ...],
    request_id: str | None,
    output: str,
) -> None:
    """Push data files as one dataset; every row is checked before the dataset is READY."""
    from horizon_client.local_inputs import valid_name

    paths, more_mappings = _split_mappings(files, has_map=bool(mappings))
    field_map = _field_map([*mappings, *more_mappings])
    with TransferReporter(PUSH_INTERRUPTED) as reporter:
        result = client.datasets.push(
            paths,
            name=name or valid_name(Path(paths[0])),
            format=format_,
            field_map=field_map,
            request_id=request_id,
            reporter=reporter,
        )
    click.echo(f"sent {bytes_text(result.sent_bytes)} of {bytes_text(result.dataset.size_bytes)}", err=True)
    print_one(result.dataset, _VIEW, output, plain=result)


@dataset.command(name="list", epilog="\b\nExample:\n  horizon dataset list -o json")
@limit_option
@output_option
@connected
def list_datasets(client: Client, limit: int, output: str) -> None:
    """List your datasets, newest first."""
    print_list(client.datasets.list(limit=limit), _VIEW, output)


@dataset.command(epilog="\b\nExample:\n  horizon dataset get notes")
@_NAME
@output_option
@connected
def get(client: Client, name: str, output: str) -> None:
    """Show one dataset by name or id."""
    print_one(client.datasets.get(name), _VIEW, output)


@dataset.command(epilog="\b\nExample:\n  horizon dataset delete notes")
@_NAME
@output_option
@connected
def delete(client: Client, name: str, output: str) -> None:
    """Delete a dataset that no active job needs."""
    gone = client.datasets.get(name)
    client.datasets.delete(gone.dataset_id)
    print_one(gone, _VIEW, output, message=f"deleted dataset {gone.name}")


@dataset.command(
    epilog="""\b
Example:
  horizon dataset preview notes --model tiny-base -n 2
  horizon dataset preview notes --model tiny-base --offset 6173 -n 1 --train-on last-assistant

Trained text is green on a terminal. Elsewhere, and with NO_COLOR, it is
between [[ and ]]."""
)
@_NAME
@click.option(
    "--model",
    required=True,
    shell_complete=model_names,
    help="Name of the pushed model whose chat template and tokenizer render the rows.",
)
@click.option(
    "-n", "--rows", "num_rows", type=click.IntRange(1, 100), default=3, show_default=True, help="Number of rows."
)
@click.option("--offset", type=click.IntRange(0), default=0, show_default=True, help="Number of rows to skip.")
@click.option(
    "--train-on", type=click.Choice(_TRAIN_ON), default="assistant", show_default=True, help="As in the job spec."
)
@click.option(
    "--method", type=click.Choice(["sft", "pretrain"]), default="sft", show_default=True, help="As in the job spec."
)
@click.option(
    "--sequence-length", type=click.IntRange(8), default=1024, show_default=True, help="Longest row in tokens."
)
@output_option
@connected
def preview(client: Client, name: str, output: str, **options: Any) -> None:
    """Show rows as the model sees them, with the trained part marked."""
    shown = client.datasets.preview(name, **options)
    if output in ("json", "yaml"):
        print_plain(shown, output)
    elif output == "name":
        for row in shown.rows:
            click.echo(place(row))
    else:
        print_preview(name, shown)


def _split_mappings(files: Sequence[str], *, has_map: bool) -> tuple[list[str], list[str]]:
    """Treat an argument `a=b` as a further mapping when --map is given and no file has that name."""
    extra = [f for f in files if has_map and _MAPPING.fullmatch(f) and not Path(f).exists()]
    paths = [f for f in files if f not in extra]
    if not paths:
        raise click.UsageError("Missing argument 'FILE...'.")
    return paths, extra


def _field_map(mappings: Sequence[str]) -> dict[str, str]:
    field_map: dict[str, str] = {}
    for mapping in mappings:
        field, separator, column = mapping.partition("=")
        if not separator or not field or not column:
            raise click.UsageError(f"--map {mapping}: write it as field=column, such as prompt=question")
        if field in field_map:
            raise click.UsageError(f"--map names the field {field!r} twice")
        field_map[field] = column
    return field_map
