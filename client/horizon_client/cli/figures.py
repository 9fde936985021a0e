"""`horizon job metrics` and `horizon job plot`: what jobs have measured, as rows and as curves."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from horizon_client.cli.completion import job_names
from horizon_client.cli.output import clean, print_result, table, terminal_width, uses_colour
from horizon_client.cli.session import Notices, connected, find_job
from horizon_client.errors import BadFile, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from horizon_client.metrics import JobMetrics
    from horizon_client.sync_client import Client

    Curves = Mapping[str, tuple[list[int], list[float]]]

_MOST_ROWS = 30
_HEIGHT = 20
_WIDTH_WITHOUT_TERMINAL = 100
# Curves look alike without colours, so each has dots of its own.
_DOTS = ("braille", "+", "x", "o", "*")
USUAL_FIGURES = ("loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_second")


@click.command(
    epilog="""\b
Example:
  horizon job metrics JOB -o csv > figures.csv
  horizon job metrics JOB --figure loss --figure eval_loss
  horizon job metrics JOB -o json | jq '.[-1].loss'

\b
A row is a step, with the evaluation after it; step 0 is the evaluation before
the first step. The table shows the usual figures of 30 rows; csv, json and yaml
have all figures of all rows."""
)
@click.argument("job_id", metavar="JOB", shell_complete=job_names)
@click.option("--figure", "figures", multiple=True, metavar="NAME", help="Only this figure, such as loss (repeatable).")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "csv", "json", "yaml"]),
    default="table",
    show_default=True,
    help="Output format: for people (table), for spreadsheets (csv), for programs (json, yaml).",
)
@connected
def metrics(client: Client, job_id: str, figures: tuple[str, ...], output: str) -> None:
    """Print what each step and each evaluation of a job has measured."""
    found = client.jobs.metrics(find_job(client, job_id).job_id, reporter=Notices())
    for name in figures:
        found.curve(name)  # refuses an unknown one, with the names that there are
    if output == "table":
        shown = figures or [name for name in USUAL_FIGURES if name in found.names]
        click.echo(_table(found, shown))
        return
    rows = [{name: row[name] for name in ("step", "time", *(figures or found.names))} for row in found.to_rows()]
    if output == "csv":
        sheet = csv.DictWriter(sys.stdout, ["step", "time", *(figures or found.names)], lineterminator="\n")
        sheet.writeheader()
        sheet.writerows({**row, "time": row["time"].isoformat()} for row in rows)
    else:
        print_result(rows, output, names=(), page=str)


def _table(found: JobMetrics, names: Sequence[str]) -> str:
    """Return at most 30 rows, evenly spaced; the last is always there."""
    shown, every = evenly(found, _MOST_ROWS)
    if len(shown) < len(found):
        Notices().notice(f"{len(shown)} of {len(found):,} rows, every {every:,}th; for all: -o csv")
    cells = [[str(row.step), *(_cell(row.figures.get(name)) for name in names)] for row in shown]
    return table(["STEP", *(name.upper() for name in names)], cells)


def evenly(found: JobMetrics, most: int) -> tuple[JobMetrics, int]:
    """Return at most `most` evenly spaced rows, the last one among them, and the distance between two."""
    every = -(-len(found) // most) or 1
    return found[(len(found) - 1) % every :: every], every


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.5g}"


@click.command(
    epilog="""\b
Example:
  horizon job plot JOB
  horizon job plot JOB OTHER --figure eval_loss
  horizon job plot JOB --figure grad_norm --to grad_norm.png

\b
The names of all figures: horizon job metrics JOB -o csv | head -1
--to needs matplotlib: pip install 'horizon-train[plot]'"""
)
@click.argument("job_ids", metavar="JOB...", nargs=-1, required=True, shell_complete=job_names)
@click.option("--figure", default="loss", show_default=True, metavar="NAME", help="What to plot.")
@click.option("--log", "is_log", is_flag=True, help="Logarithmic scale.")
@click.option("--to", "target", type=click.Path(path_type=Path), metavar="FILE", help="Write a PNG, SVG or PDF file.")
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json", "yaml"]),
    default="table",
    show_default=True,
    help="A plot for people (table), or the points of the curves for programs (json, yaml).",
)
@connected
def plot(client: Client, job_ids: tuple[str, ...], figure: str, is_log: bool, target: Path | None, output: str) -> None:
    """Plot a figure of one or several jobs over their steps."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for text in job_ids:
        found = find_job(client, text)
        # Two jobs may have one name
        label = found.job_id if found.name in curves else found.name
        curves[label] = client.jobs.metrics(found.job_id, reporter=Notices()).curve(figure)
    if output != "table":
        points = {label: {"steps": steps, figure: values} for label, (steps, values) in curves.items()}
        print_result(points, output, names=(), page=str)
    elif target is None:
        click.echo(terminal_plot(curves, figure, is_log=is_log, width=terminal_width(), color=uses_colour()))
    else:
        _write_plot(curves, figure, target, is_log=is_log)
        click.echo(f"wrote {target}", err=True)


def terminal_plot(curves: Curves, figure: str, *, is_log: bool, width: int | None, color: bool) -> str:
    """Return curves as lines of text."""
    import plotext  # only here, as most commands plot nothing

    plotext.clear_figure()
    plotext.theme("pro" if color else "clear")
    plotext.plot_size(width or _WIDTH_WITHOUT_TERMINAL, _HEIGHT)
    plotext.title(figure)
    plotext.xlabel("step")
    if is_log:
        _require_positive(curves, figure)
        plotext.yscale("log")
    for number, (label, (steps, values)) in enumerate(curves.items()):
        dots = "braille" if color else _DOTS[number % len(_DOTS)]
        plotext.plot(steps, values, marker=dots, label=clean(label) if len(curves) > 1 else None)
    text: str = plotext.build()
    if not color:
        text = plotext.uncolorize(text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def _write_plot(curves: Curves, figure: str, target: Path, *, is_log: bool) -> None:
    try:
        import matplotlib
    except ImportError:
        raise InvalidRequest(
            "--to draws with matplotlib, which is not installed: pip install 'horizon-train[plot]'; without --to the "
            "plot is printed here"
        ) from None
    matplotlib.use("agg")  # it draws into a file, on machines without a screen too
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(9, 5), layout="constrained")
    axes = drawing.subplots()
    for label, (steps, values) in curves.items():
        axes.plot(steps, values, label=label, linewidth=1.2)
    axes.set(xlabel="step", ylabel=figure)
    axes.grid(visible=True, alpha=0.3)
    if is_log:
        _require_positive(curves, figure)
        axes.set_yscale("log")
    axes.legend()
    try:
        drawing.savefig(target, dpi=150)
    except (OSError, ValueError) as error:  # a format that it does not know is a ValueError
        raise BadFile(f"cannot write {target}: {error}") from error


def _require_positive(curves: Curves, figure: str) -> None:
    if any(value <= 0 for _, values in curves.values() for value in values):
        raise InvalidRequest.of("log", f"--log: {figure} is not above 0 everywhere; leave out --log")
