"""`-o table|json|yaml|name` for every command: tables that fit the terminal, complete data for programs.

Also numbers, times and untrusted text in the form that people read.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Generic, TypeVar

import click

from horizon_formats.problems import writable

ItemT = TypeVar("ItemT")
CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_GAP = 2
_MIN_COLUMN = 4
_SHORT_COLUMN = 12
"""Cells up to this length are shortened only when the long ones are not enough."""
_SENTENCES = "WHY"
"""Header of a last column whose cells are sentences."""
_MIN_SENTENCE = 30
"""Columns of the terminal that sentences need to be wrapped; with fewer they are shortened."""
_UNLIMITED = 100_000


@dataclass(frozen=True, kw_only=True)
class View(Generic[ItemT]):
    """How one kind of resource is shown: its table columns, the lines of its own page, and its id."""

    columns: Sequence[tuple[str, Callable[[ItemT], str]]]
    details: Callable[[ItemT], Sequence[tuple[str, str]]]
    name: Callable[[ItemT], str]


def output_option(command: CommandT) -> CommandT:
    """Add `-o` to a command, as the parameter `output`."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(["table", "json", "yaml", "name"]),
        default="table",
        show_default=True,
        help="Output format: for people (table), for programs (json, yaml), or the ids only (name).",
    )(command)


def state_option(states: Iterable[str]) -> Callable[[CommandT], CommandT]:
    """Return what adds `--state` to a command, as the parameter `states`."""
    choices = [state.lower() for state in states]
    return click.option(
        "--state",
        "states",
        multiple=True,
        type=click.Choice(choices, case_sensitive=False),
        help="Select by the job's state (repeatable).",
    )


def limit_option(command: CommandT) -> CommandT:
    """Add `--limit` to a command."""
    return click.option(
        "--limit",
        type=click.IntRange(min=1),
        default=100,
        show_default=True,
        help="Maximum number to list, newest first.",
    )(command)


def print_list(items: Sequence[ItemT], view: View[ItemT], output: str) -> None:
    """Print several resources."""

    def page() -> str:
        rows = [[cell(item) for _, cell in view.columns] for item in items]
        return table([header for header, _ in view.columns], rows)

    print_result(items, output, names=map(view.name, items), page=page)


def print_one(item: ItemT, view: View[ItemT], output: str, *, plain: object = None, message: str | None = None) -> None:
    """Print one resource; `plain` replaces it for programs, `message` replaces its page for people."""

    def page() -> str:
        return details(view.details(item)) if message is None else message

    print_result(item if plain is None else plain, output, names=[view.name(item)], page=page)


def print_result(value: object, output: str, *, names: Iterable[str], page: Callable[[], str]) -> None:
    """Print a result: `value` as JSON or YAML for programs, its `names` alone, or the `page` for people."""
    if output == "json":
        click.echo(json.dumps(to_plain(value), indent=2, ensure_ascii=False, allow_nan=False))
    elif output == "yaml":
        import yaml  # only here, because every `--help` imports this module

        click.echo(yaml.safe_dump(to_plain(value), sort_keys=False, allow_unicode=True), nl=False)
    elif output == "name":
        for name in names:
            click.echo(name)
    else:
        click.echo(page())


def to_plain(value: Any) -> Any:
    """Return plain data that JSON and YAML can write: datetimes as ISO text, numbers that are not finite as None."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {attribute.name: to_plain(getattr(value, attribute.name)) for attribute in dataclasses.fields(value)}
        kind = getattr(value, "kind", None)
        # `event` for a program that reads a stream of several kinds; a job's `last_step` has no number and needs no
        # kind
        return {"event": kind, **plain} if kind and plain.get("sequence") else plain
    if isinstance(value, Mapping):
        return {str(key): to_plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(inner) for inner in value]
    if isinstance(value, datetime):
        return value.isoformat()
    return None if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no NaN


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under headers, columns aligned; cells are shortened to fit the terminal, the first column last. The
    sentences of a last column WHY are wrapped instead, where there is room for it."""
    # rich is imported where it is used, because it would make every `--help` wait for it
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    width = terminal_width()
    columns = list(zip(headers, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    # rich shortens the columns that may wrap first; an id is useless when shortened
    is_rigid = [
        i == 0 or widest <= _SHORT_COLUMN or all(map(_is_figure, columns[i][1:])) for i, widest in enumerate(widths)
    ]
    # A narrow terminal gets one space between columns before a cell is shortened
    least = sum(w if rigid else min(w, _MIN_COLUMN) for w, rigid in zip(widths, is_rigid, strict=True))
    gap = _GAP if width is None or least + _GAP * (len(columns) - 1) <= width else 1
    grid = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="")
    others = sum(widths[:-1]) + gap * len(widths[:-1])
    wraps = headers[-1] == _SENTENCES and width is not None and width - others >= _MIN_SENTENCE
    for column, widest, rigid in zip(columns, widths, is_rigid, strict=True):
        grid.add_column(
            Text(column[0], no_wrap=True, overflow="ellipsis"),
            justify="right" if rows and all(map(_is_figure, column[1:])) else "left",
            no_wrap=rigid,
            min_width=min(widest, _MIN_COLUMN),
        )
    for row in rows:
        cells = [Text(clean(cell), no_wrap=True, overflow="ellipsis") for cell in row]
        cells[-1].no_wrap = not wraps
        grid.add_row(*cells)
    # Into a text, because rich would fill up every line with spaces
    sink = io.StringIO()
    Console(file=sink, width=width or _UNLIMITED, color_system=None).print(grid)
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines())


def details(pairs: Sequence[tuple[str, str]]) -> str:
    """Return one fact per line, values aligned."""
    width = max(len(label) for label, _ in pairs) + 1 + _GAP
    return "\n".join(f"{label + ':':<{width}}{clean(value) or '-'}" for label, value in pairs)


def terminal_width() -> int | None:
    """Return the terminal's width, or None when stdout is a file or a pipe: what a program reads is never shortened."""
    return shutil.get_terminal_size((80, 24)).columns if sys.stdout.isatty() else None


def uses_colour() -> bool:
    """Whether colours help: on a terminal whose user has not set NO_COLOR."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _is_figure(text: str) -> bool:
    return text == "-" or text[:1].isdigit()


def clean(text: str) -> str:
    """Return `text` on one line and without control characters, so that the server cannot control the terminal."""
    spaced = " ".join(writable(text).split())
    # Cf too: marks that turn the direction of text can make a name look like another
    return "".join(c for c in spaced if unicodedata.category(c) not in ("Cc", "Cf"))


def bytes_text(num_bytes: float) -> str:
    """Return a size with a binary unit."""
    from rich.filesize import pick_unit_and_suffix

    unit, suffix = pick_unit_and_suffix(int(abs(num_bytes)), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024)
    return f"{num_bytes:.0f} B" if unit == 1 else f"{num_bytes / unit:.1f} {suffix}"


def duration_text(seconds: float | None) -> str:
    """Return a duration as H:MM:SS, with days if there are any; '-' when unknown."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:  # protobuf carries infinity and NaN
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02d}:{second:02d}"
    return f"{days}d {clock}" if days else clock


def rough_text(seconds: float) -> str:
    """Return a duration as people say it: 45 s, 16 min, 3 h 20 min, 2 d 5 h."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minute = divmod(minutes, 60)
    if hours < 36:
        return f"{hours} h {minute} min" if minute else f"{hours} h"
    days, hour = divmod(round(minutes / 60), 24)
    return f"{days} d {hour} h" if hour else f"{days} d"


def age_text(moment: datetime | None, now: datetime | None = None) -> str:
    """Return the time since `moment` in its largest unit; '-' when unknown."""
    if moment is None:
        return "-"
    # The two machines' clocks may differ
    seconds = max(((now or datetime.now(timezone.utc)) - moment).total_seconds(), 0.0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def about_text(moment: datetime | None, now: datetime | None = None, *, seconds: bool = False) -> str:
    """Return an estimated moment in local time, to the minute or second: the time alone within a day; '-' when
    unknown."""
    if moment is None:
        return "-"
    local = moment.astimezone()
    is_near = abs((moment - (now or datetime.now(timezone.utc))).total_seconds()) < 12 * 3600
    clock = "%H:%M:%S" if seconds else "%H:%M"
    return local.strftime(clock if is_near else f"%Y-%m-%d {clock}")


def time_text(moment: datetime | None) -> str:
    """Return a moment in local time; '-' when unknown."""
    return "-" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
