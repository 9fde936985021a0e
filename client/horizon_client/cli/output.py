"""`-o table|json|yaml|name` for every command: tables that fit the terminal, whole data for programs. Knows no resource."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import click

from horizon_client.cli.text import clean

ItemT = TypeVar("ItemT")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_GAP = "  "
_MIN_COLUMN = 6


@dataclass(frozen=True, kw_only=True)
class View(Generic[ItemT]):
    """How one kind of resource is shown: its table columns, its lines on its own page, and its id."""

    columns: Sequence[tuple[str, Callable[[ItemT], str]]]
    details: Callable[[ItemT], Sequence[tuple[str, str]]]
    name: Callable[[ItemT], str]


def output_option(command: CommandT) -> CommandT:
    """Add `-o` to a command, as the parameter `output`."""
    option = click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json", "yaml", "name"]),
        default="table",
        show_default=True,
        help="How to print: for people, for programs, or the ids alone.",
    )
    return option(command)


def print_list(items: Sequence[ItemT], view: View[ItemT], output: str) -> None:
    """Print several resources."""
    if output in ("json", "yaml"):
        print_plain(items, output)
    elif output == "name":
        for item in items:
            click.echo(view.name(item))
    else:
        rows = [[cell(item) for _, cell in view.columns] for item in items]
        click.echo(table([header for header, _ in view.columns], rows, terminal_width()))


def print_one(item: ItemT, view: View[ItemT], output: str) -> None:
    """Print one resource."""
    if output in ("json", "yaml"):
        print_plain(item, output)
    elif output == "name":
        click.echo(view.name(item))
    else:
        click.echo(details(view.details(item)))


def print_plain(value: object, output: str) -> None:
    """Print a resource, or a list of them, as JSON or YAML."""
    from horizon_client.conversion import to_plain

    plain = to_plain(value)
    if output == "json":
        click.echo(json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        import yaml

        click.echo(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), nl=False)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Return rows under headers, columns aligned; with a `width`, long cells are cut, never those of the first column."""
    cells = [[clean(cell) for cell in row] for row in rows]
    widths = [max(len(header), *(len(row[i]) for row in cells), 0) for i, header in enumerate(headers)]
    while width is not None and sum(widths) + len(_GAP) * (len(widths) - 1) > width:
        widest = max(range(1, len(widths)), key=lambda i: widths[i], default=0)
        if widest == 0 or widths[widest] <= _MIN_COLUMN:
            break
        widths[widest] -= 1
    right = [bool(cells) and all(_is_figure(row[i]) for row in cells) for i in range(len(headers))]
    return "\n".join(_line(row, widths, right) for row in [list(headers), *cells])


def details(pairs: Sequence[tuple[str, str]]) -> str:
    """Return one fact a line, values aligned."""
    width = max(len(label) for label, _ in pairs) + len(_GAP)
    return "\n".join(f"{label + ':':<{width}}{clean(value) or '-'}" for label, value in pairs)


def terminal_width() -> int | None:
    """Return the width to fit into, or None when stdout goes to a file or a program."""
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else None


def notice(sentence: str) -> None:
    """Print one sentence on stderr."""
    click.echo(clean(sentence), err=True)


def _line(row: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    parts = []
    for text, width, to_right in zip(row, widths, right, strict=True):
        cut = text if len(text) <= width else f"{text[: width - 3]}..."
        parts.append(cut.rjust(width) if to_right else cut.ljust(width))
    return _GAP.join(parts).rstrip()


def _is_figure(text: str) -> bool:
    return text == "-" or text[:1].isdigit()
