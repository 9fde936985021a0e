"""Options and output that every horizond command shares."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import yaml


def with_settings_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --config and --state-dir, which every command takes."""
    config = click.option(
        "--config", type=click.Path(path_type=Path), envvar="HORIZOND_CONFIG", help="The daemon's TOML file."
    )
    state_dir = click.option(
        "--state-dir",
        type=click.Path(path_type=Path),
        help="Folder with everything the daemon owns. [default: /var/lib/horizond for root, else ~/.local/share/horizond]",
    )

    return config(state_dir(command))


def with_output_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add -o table|json|yaml|name."""
    kinds = click.Choice(["table", "json", "yaml", "name"])
    return click.option("-o", "--output", type=kinds, default="table", show_default=True, help="Output format.")(
        command
    )


def print_rows(rows: list[dict[str, Any]], output: str, *, name_key: str) -> None:
    """Print rows in the form asked for; `name_key` is what -o name prints."""
    if output == "json":
        click.echo(json.dumps(rows, indent=2))
    elif output == "yaml":
        click.echo(yaml.safe_dump(rows, sort_keys=False), nl=False)
    elif output == "name":
        for row in rows:
            click.echo(row[name_key])
    elif rows:
        cells = [[str(key).upper() for key in rows[0]], *([str(value) for value in row.values()] for row in rows)]
        widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
        for line in cells:
            click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    else:
        click.echo("none")


def print_mapping(mapping: dict[str, Any], output: str) -> None:
    """Print one thing; as a table, one key per line."""
    if output == "json":
        click.echo(json.dumps(mapping, indent=2))
    elif output == "yaml":
        click.echo(yaml.safe_dump(mapping, sort_keys=False), nl=False)
    else:
        width = max(map(len, mapping), default=0)
        for key, value in mapping.items():
            click.echo(f"{key:<{width}}  {value}")
