"""Stage: the whole table, predicted beside measured, out of what the stages before have left in results.jsonl."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.gpu.report import Report, read_results
from bench.gpu.shapes import SIZES, Base, Point
from bench.gpu.steps import folder_of, model_of
from bench.gpu.task import Task
from bench.gpu.variants import NOT_IN_THE_ENGINE, VARIANTS, Measures, Variant, forecast
from horizon_server.engine.attention.adoption import is_for_hopper
from horizon_server.planning.model_folder import ModelFolder

Row = dict[str, Any]
_MAX_NOTE = 200


def run(task: Task, report: Report) -> None:
    """A row for each variant, a column for each number of tokens; then rates and checks of single parts."""
    sizes, results = SIZES[task.device], read_results(task.folder)
    points = [row for row in results if row["stage"] in ("curve", "adapters") and "point_name" in row]
    folders: dict[tuple[str, Base], ModelFolder] = {}

    def folder(shape: str, base: Base) -> ModelFolder:
        if (shape, base) not in folders:
            folders[shape, base] = folder_of(model_of(shape, "cuda" if task.device == "cuda" else "host", base))
        return folders[shape, base]

    report.table(
        "Useful TFLOP/s: predicted for one H100 / measured (measured over predicted)",
        {"variant": "", **{_column(tokens): "" for tokens in sizes.table_tokens}, "note": ""},
    )
    for variant in VARIANTS:
        found = _points_of(variant, points)
        shape = next((row["shape"].split()[0] for row in found if row["step s"]), task.shape or sizes.shapes[0])
        cells, values = {}, []
        for tokens in sizes.table_tokens:
            predicted = forecast(variant, tokens, folder(shape, variant.base))
            predicted_tflops = predicted.model_flops_per_s / 1e12
            row = next((row for row in found if row["tokens"] == tokens), None)
            measured = row["useful TFLOP/s"] if row and row["step s"] else None
            values.append(
                {
                    "tokens": tokens,
                    "predicted": predicted_tflops,
                    "predicted_s": predicted.step_s,
                    "measured": measured,
                    "measured_s": row["step s"] if row and measured else None,
                }
            )
            cells[_column(tokens)] = _cell(predicted_tflops, measured)
        report.row(variant=variant.title, **cells, note=_note(variant, found), shape=shape, values=values)
    report.say(
        "\nA cell without a measured part has no point of its own, or its note says why. Predictions are for one H100 "
        "(80 GB) with host memory of 200 GB/s, whatever machine this is."
    )
    _long_rows(points, report)
    _parts(results, report)


def _column(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _cell(predicted: float, measured: float | None) -> str:
    return (
        f"{predicted:.0f} / -" if measured is None else f"{predicted:.0f} / {measured:.0f} ({measured / predicted:.2f})"
    )


def _points_of(variant: Variant, points: list[Row]) -> list[Row]:
    if variant.measured_by is None:
        return []
    found = []
    for row in points:
        point = Point(**row["point"])
        how = Measures(engine=point.engine, base=point.base, host_gbps=point.host_gbps)
        for_hopper = is_for_hopper(row.get("attention", ""))
        if how == variant.measured_by and point.clip and point.rows == "equal" and not point.row_tokens:
            found += [row] * (for_hopper == variant.for_hopper)
    return found


def _note(variant: Variant, found: list[Row]) -> str:
    if variant.measured_by is None:
        return NOT_IN_THE_ENGINE
    missing = {row["note"]: row["tokens"] for row in found if not row["step s"]}
    said = "; ".join(f"{_column(tokens)}: {note}" for note, tokens in missing.items())
    return said[:_MAX_NOTE] if found else "no point of this run measures it"


def _long_rows(points: list[Row], report: Report) -> None:
    report.table(
        "Long rows, the job's engine: useful TFLOP/s",
        {"tokens": ",d", "rows of": ",d", "predicted": ".0f", "measured": ".0f", "of it": ".2f", "note": ""},
    )
    for row in points:
        if (length := row["point"]["row_tokens"]) and row["point"]["clip"]:
            measured, predicted = row["useful TFLOP/s"], row["forecast"]
            ratio = measured / predicted if row["step s"] else ""
            report.row(
                tokens=row["tokens"],
                rows_of=length,
                predicted=predicted,
                measured=measured,
                of_it=ratio,
                note=row["note"],
            )


@dataclass(frozen=True)
class _Part:
    """One figure, in a column of a stage's table; the largest of its rows counts. `where` is what a row says in its
    first column."""

    what: str
    predicted: str
    stage: str
    table: str
    column: str
    where: str = ""
    scale: float = 1.0


_HOPPER, _DETERMINISTIC = "ours, FA4", "ours, deterministic"
_PARTS = (
    _Part("products of a layer, TFLOP/s", "690", "compute", "Matrix", "forward", "all seven"),
    _Part("attention forward, TFLOP/s", "330 to 430", "compute", "Attention", "forward", "ours"),
    _Part("attention backward, TFLOP/s", "250 to 360", "compute", "Attention", "backward", "ours"),
    _Part("FlashAttention 4 forward, TFLOP/s", "480", "compute", "Attention", "forward", _HOPPER),
    _Part("FlashAttention 4 backward, TFLOP/s", "400", "compute", "Attention", "backward", _HOPPER),
    _Part(
        "attention backward, deterministic, TFLOP/s", "230 to 330", "compute", "Attention", "backward", _DETERMINISTIC
    ),
    _Part("device memory, TB/s", "2.65", "compute", "Passes", "GB/s", scale=1e-3),
    _Part("nf4 to bf16, ms a layer", "3 to 6", "compute", "Weights in 4 bits", "ms a layer"),
    _Part("AdamW, GB/s of host memory", "200", "bandwidth", "Host memory", "AdamW GB/s"),
    _Part("link up, GB/s", "50", "bandwidth", "The link", "GB/s up"),
    _Part("link down, GB/s", "50", "bandwidth", "The link", "GB/s down"),
    _Part("compiled layer, times as fast as eager", "1.15 to 1.25", "compile", "Compiled", "times as fast"),
    _Part("compiled layer, error", "below 0.01", "compile", "Compiled", "error"),
    _Part(
        "ten runs of a compiled layer, share until the host returns", "below 0.5", "compile", "When the host", "share"
    ),
    _Part("rows of many lengths, first / second step", "at most 1.2", "lengths", "First", "first/second"),
    _Part("streamed / resident", "-", "resident", "Streamed", "streamed/resident"),
)


def _parts(results: list[Row], report: Report) -> None:
    report.table(
        "Parts: predicted for one H100, measured here", {"what": "", "predicted": "", "measured": ".3g", "note": ""}
    )
    for part in _PARTS:
        rows = [
            row
            for row in results
            if row["stage"] == part.stage
            and row.get("table", "").startswith(part.table)
            and (not part.where or part.where in row.values())
        ]
        values = [part.scale * row[part.column] for row in rows if isinstance(row.get(part.column), (int, float))]
        why = next((str(row[part.column]) for row in rows if row.get(part.column) and not values), "")
        note = "" if values else why or (f"not measured: see {part.stage}" if rows else f"{part.stage} has no such row")
        report.row(what=part.what, predicted=part.predicted, measured=max(values) if values else "", note=note)
    for row in results:
        if row["stage"] == "twice" and "weights and moments" in row:
            report.row(
                what=f"the same bits twice, {row['engine']}",
                predicted=row["expected of weights"],
                measured=row["weights and moments"],
                note=row["note"],
            )
