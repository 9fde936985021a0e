"""The summary: at most 60 lines out of results.jsonl, written again after every stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bench.gpu.report import read_results

MAX_LINES = 60
_FACTS = ("GPU", "GPU driver_version", "torch", "transformers", "cuDNN", "processor", "free host memory")
_NUM_NAMED = 4
_MAX_WHY = 160

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a stage ended, and why it did not end well."""

    stage: str
    state: Literal["done", "skipped", "failed"]
    why: str
    seconds: float


def summary_lines(folder: Path, outcomes: Sequence[Outcome], *, minutes: float, used_s: float) -> list[str]:
    """The summary of what is there so far."""
    results = read_results(folder)

    def rows(stage: str, table: str = "") -> list[Row]:
        return [row for row in results if row["stage"] == stage and row.get("table", "").startswith(table or " ")]

    lines = [f"# GPU bench: {used_s:.0f} of {60 * minutes:.0f} s", ""]
    lines += _machine(rows("environment", "The machine"))
    lines += _ceilings(rows)
    lines += _tests(rows("tests", "tests/gpu"))
    lines += _curve([*rows("curve", "The curve"), *rows("adapters", "The curve")])
    lines += _compiled(rows("compile", "Compiled"))
    for engine in ("job", "eager"):
        classes, parts = (
            f"{title}, {engine}" for title in ("One step by class of kernel", "Where the step's time went")
        )
        lines += _profile(engine, rows("profile", classes), rows("profile", parts))
    lines += [
        f"- rows of many lengths, {row['rows']}: first step {row['first s']:.2f} s, second {row['second s']:.2f} s"
        for row in rows("lengths", "First")
        if row["first s"]
    ]
    lines += [
        f"- streamed / resident at {row['tokens']:,} tokens: {row['streamed/resident']:.3f}"
        for row in rows("resident", "Streamed")
        if row["streamed/resident"]
    ]
    lines += [
        f"- ten runs of a compiled layer: the host returned after {row['share']:.0%} of their time"
        for row in rows("compile", "When the host")
        if row["share"]
    ]
    lines += [
        f"- the same steps twice, {row['engine']}: losses {row['all losses']}, weights {row['weights and moments']} "
        f"(expected to be the same: {row['expected of weights']})"
        for row in rows("twice", "2 steps")
        if row["all losses"]
    ]
    ended = _stages(outcomes)
    # What failed is never cut off.
    return [*lines[: MAX_LINES - len(ended)], *ended]


def _machine(rows: Iterable[Row]) -> list[str]:
    facts = {row["what"]: row["value"] for row in rows}
    named = [f"{name}: {facts[name]}" for name in _FACTS if name in facts]
    return [f"- {'; '.join(named)}"] if named else []


def _ceilings(rows: Any) -> list[str]:
    lines = []
    products = [row for row in rows("compute", "Matrix") if row["product"] == "all seven"]
    if products:
        listed = ", ".join(f"{row['forward']:.0f} at {row['rows']:,} rows" for row in products)
        lines.append(f"- a layer's products, TFLOP/s: {listed}")
    attention = [row for row in rows("compute", "Attention") if isinstance(row["forward"], float)]
    if attention:
        longest = max(row["tokens"] for row in attention)
        listed = ", ".join(
            f"{row['kind']} {row['forward']:.0f}/{_number(row['backward'])}"
            for row in attention
            if row["tokens"] == longest
        )
        lines.append(f"- attention at {longest:,} tokens, TFLOP/s forward/backward: {listed}")
    memory = rows("bandwidth", "Host memory")
    if memory:
        best = max(memory, key=lambda row: float(row["AdamW GB/s"]))
        lines.append(
            f"- AdamW: {best['AdamW GB/s']:.0f} GB/s on {best['threads']} threads, triad {best['triad GB/s']:.0f}"
        )
    link = [row for row in rows("bandwidth", "The link") if row["GB/s up"] or row["GB/s down"]]
    if link:
        listed = "; ".join(
            f"{row['what']} {_number(row['GB/s up'])} up {_number(row['GB/s down'])} down" for row in link
        )
        lines.append(f"- link, GB/s: {listed}")
    return lines


def _tests(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    counts = Counter(row["outcome"] for row in rows)
    bad = [row["test"] for row in rows if row["outcome"] in ("failed", "error")]
    named = f": {', '.join(bad[:_NUM_NAMED])}{' and more' if len(bad) > _NUM_NAMED else ''}" if bad else ""
    return [f"- tests/gpu: {', '.join(f'{count} {outcome}' for outcome, count in counts.items())}{named}"]


def _curve(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = [
        "",
        "| shape | tokens | rows | clip | engine | tokens/s | useful TFLOP/s | forecast | of it | step s | memory / "
        "plan |",
    ]
    lines.append("|" + " --- |" * (lines[-1].count("|") - 1))
    for row in rows:
        first = [row["shape"], f"{row['tokens']:,}", row["rows"], row["clip"], row["engine"]]
        if not row["step s"]:
            lines.append(f"| {' | '.join([*first, row['note'][:60], *[''] * 5])} |")
            continue
        figures = [
            f"{row['tokens/s']:,.0f}",
            f"{row['useful TFLOP/s']:.1f}",
            _number(row["forecast"]),
            f"{row['of forecast']:.2f}" if row["of forecast"] else "-",
            f"{row['step s']:.3f}",
            f"{row['allocated/planned']:.2f}",
        ]
        lines.append(f"| {' | '.join([*first, *figures])} |")
    return [*lines, ""]


def _compiled(rows: Sequence[Row]) -> list[str]:
    return [
        f"- compiled layer of {row['layers of']}, kind {row['kind']}: "
        + (
            row["note"][:_MAX_WHY]
            or f"{row['times as fast']:.2f} times as fast ({row['kernels']}), {row['s']:.0f} s to compile"
        )
        for row in rows
    ]


def _profile(engine: str, classes: Sequence[Row], parts: Sequence[Row]) -> list[str]:
    lines = []
    if classes:
        listed = ", ".join(f"{row['class']} {row['share']:.0%}" for row in classes if row["s"])
        lines.append(f"- kernels, {engine}: {listed}")
    gaps = [row for row in parts if row["what"].startswith(("launch gaps", "exposed"))]
    if gaps:
        listed = "; ".join(f"{row['what']} {row['share']:.1%}" for row in gaps)
        lines.append(f"- of the profiled step, {engine}: {listed}")
    return lines


def _stages(outcomes: Sequence[Outcome]) -> list[str]:
    done = [f"{outcome.stage} {outcome.seconds:.0f} s" for outcome in outcomes if outcome.state == "done"]
    others = [
        f"- {outcome.stage} {outcome.state}: {outcome.why[:_MAX_WHY]}"
        for outcome in outcomes
        if outcome.state != "done"
    ]
    return ["", f"- done: {', '.join(done) or 'nothing'}", *others]


def _number(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, (int, float)) else str(value or "-")[:20]
