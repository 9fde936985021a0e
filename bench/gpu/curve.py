"""Stage: the engine's steps by tokens and kinds of rows, next to the forecast, and what memory they took against the
plan.

Useful TFLOP/s count what training is worth: 6 per parameter in a matrix product and token, and attention. Hardware
TFLOP/s add the recomputed forward of the layers. With clipping, each step pays for the deferred update of the step
before. `host launched` is the share of compute's time in which the host had not launched all of it yet: near 100 % the
host waits for the device.
"""

from __future__ import annotations

import dataclasses
import faulthandler
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from bench.gpu.clocks import Clocks, sampled
from bench.gpu.engine import SetUp, job_trainer, set_up
from bench.gpu.machine import status_bytes
from bench.gpu.report import Report, read_results
from bench.gpu.shapes import SIZES, Base, Point
from bench.gpu.steps import (
    Model,
    choose_model,
    forget,
    hardware_flops_of,
    opened,
    rows_for,
    typical_s,
)
from bench.gpu.task import Task
from horizon_server.engine.device.protocol import Device
from horizon_server.errors import DoesNotFit
from horizon_server.figures import StepFigures
from horizon_server.planning.bandwidth import adamw_bytes_per_parameter
from horizon_server.store.host_store import HostStore

COLUMNS = {
    "shape": "",
    "tokens": ",d",
    "rows": "",
    "clip": "",
    "engine": "",
    "compiled": "",
    "kept": "",
    "inputs on": "",
    "tokens/s": ",.0f",
    "useful TFLOP/s": ".1f",
    "forecast": ".0f",
    "of forecast": ".2f",
    "hardware TFLOP/s": ".1f",
    "step s": ".3f",
    "first s": ".3f",
    "compute s": ".3f",
    "launching s": ".3f",
    "overlap": ".3f",
    "h2d exposed s": ".3f",
    "d2h exposed s": ".3f",
    "update exposed s": ".3f",
    "update s": ".3f",
    "update GB/s": ".0f",
    "SM MHz": ".0f",
    "W": ".0f",
    "note": "",
}
MEMORY_COLUMNS = {
    "point": "",
    "planned GiB": ".2f",
    "allocated GiB": ".2f",
    "reserved GiB": ".2f",
    "allocated/planned": ".3f",
    "host planned GiB": ".2f",
    "host resident GiB": ".2f",
}
RETURN_COLUMNS = {
    "point": "",
    "down GB": ".2f",
    "down s": ".3f",
    "predicted down s": ".3f",
    "down GB/s": ".1f",
    "down exposed s": ".3f",
    "update GB": ".1f",
    "update s": ".3f",
    "predicted update s": ".3f",
    "update GB/s": ".0f",
    "update exposed s": ".3f",
    "host launched": ".1%",
}
_LEAST_LIMIT_S, _LIMIT_SHARE, _LIMIT_TIMES = 20.0, 0.5, 3.0
"""Of a point: it may stand still for half of what is left, or for three times as long as the last one's tokens took."""
_HOST_TOLERANCE = 0.25
_MANY_TOKENS = 1 << 16
"""Of a point; up to here it takes three steps, above two."""


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """A point's steps and what they took. Units: bytes."""

    found: SetUp
    num_compiled: int
    attention: str
    refusals: list[str]
    reports: list[StepFigures]
    allocated_bytes: int
    reserved_bytes: int
    host_bytes: int
    clocks: Clocks


def run(task: Task, report: Report) -> None:
    """The points of the whole model; those without clipping come last, because their store has another form."""
    points = [Point(tokens=tokens) for tokens in task.tokens] or list(SIZES[task.device].points)
    run_points(task, report, points, lambda _: choose_model(task), "The curve")


def run_points(
    task: Task, report: Report, points: Sequence[Point], model_for: Callable[[Base], Model], title: str
) -> None:
    """A row for each point, and tables of memory and of what comes back to the host.

    A point that fails costs the others nothing but its device: where it ended its process or stood still, the next
    process goes on behind it.
    """
    if task.points:
        points = [point for name in task.points for point in points if point.name == name]
    clock, measured_points = task.clock(), list[tuple[Point, Model, _Measured]]()
    report.table(title, COLUMNS)
    rows = [row for row in read_results(task.folder) if row["stage"] == task.stage]
    begun, finished = ({row[key] for row in rows if key in row} for key in ("begun", "point_name"))
    pending = [point for point in points if point.name not in begun]
    for point in points:
        if point.name in begun - finished:
            report.row(**_who(task.shape, point), note="its process ended; the file of this table says how")
    seconds_per_token, model = 0.0, None
    while pending:
        clip, base = pending[0].clip, pending[0].base
        if model is None or model.base != base:
            model = model_for(base)
        with opened(task, model, keep_gradients=clip) as (store, device):
            works = True
            # A device that has failed stays so, and the next point gets a new one.
            while works and pending and (pending[0].clip, pending[0].base) == (clip, base):
                point = pending.pop(0)
                cells = _who(model.shape, point)
                expected_s = (_num_steps(point) + 0.5) * seconds_per_token * point.tokens
                if not clock.allows(expected_s):
                    report.row(**cells, note="no time left")
                    continue
                found = threads_for(task, point.host_gbps)
                if isinstance(found, str):
                    report.row(**cells, note=found)
                    continue
                report.note(begun=point.name)
                try:
                    # Ends the process, whatever stands still in it.
                    limit_s = max(_LEAST_LIMIT_S, _LIMIT_SHARE * clock.left_s, _LIMIT_TIMES * expected_s)
                    faulthandler.dump_traceback_later(limit_s, exit=True)
                    measured = _measure(task, model, store, device, point, found)
                except Exception as error:  # noqa: BLE001 whatever a library raises on a machine that nobody has tried.
                    works = False
                    report.row(**cells, note=_why(error))
                    continue
                finally:
                    faulthandler.cancel_dump_traceback_later()
                seconds_per_token = typical_s([step.duration_s for step in measured.reports]) / point.tokens
                measured_points.append((point, model, measured))
                report.row(**cells, **_cells(model, point, measured), **_memory_cells(measured))
            for refusal in device.refusals:
                report.say(refusal)
    # The numbers are in the rows above too, so that they outlive a stop before this.
    report.table("Memory against the plan", MEMORY_COLUMNS)
    for point, _, measured in measured_points:
        report.row(point=_text(point), **_memory_cells(measured))
    report.table(
        "What comes back to the host: gradients, and the update from them; predicted for one H100", RETURN_COLUMNS
    )
    for point, model, measured in measured_points:
        report.row(**_return_cells(point, model, measured))


def threads_for(task: Task, host_gbps: float) -> int | str | None:
    """How many threads give AdamW this much, or why there are none; None where nothing is asked for."""
    if not host_gbps:
        return None
    key = "AdamW GB/s"
    counts = {row["threads"]: float(row[key]) for row in read_results(task.folder) if key in row}
    if not counts:
        return "AdamW's bytes per second by threads were not measured (stage bandwidth)"
    threads = min(counts, key=lambda count: abs(counts[count] - host_gbps))
    if abs(counts[threads] / host_gbps - 1) > _HOST_TOLERANCE:
        return (
            f"no number of update threads gives {host_gbps:g} GB/s here: the nearest is {counts[threads]:.0f} on "
            f"{threads}"
        )
    return int(threads)


def _who(shape: str, point: Point) -> dict[str, object]:
    return {
        "shape": f"{shape} LoRA {point.base}" if point.base else shape,
        "tokens": point.tokens,
        "rows": point.rows_text,
        "clip": "on" if point.clip else "off",
        "engine": point.engine_text,
        "point_name": point.name,
        "point": dataclasses.asdict(point),
    }


def _why(error: Exception) -> str:
    first = str(error).partition("\n")[0][:200]
    return first if isinstance(error, DoesNotFit) else f"failed: {type(error).__name__}: {first}"


def _num_steps(point: Point) -> int:
    return 3 if point.tokens <= _MANY_TOKENS else 2


def _measure(
    task: Task, model: Model, store: HostStore, device: Device, point: Point, threads: int | None
) -> _Measured:
    row_tokens = point.row_tokens or SIZES[task.device].row_tokens
    rows = rows_for(model.template.vocab_size, kind=point.rows, tokens=point.tokens, row_tokens=row_tokens)
    found = set_up(task, model, rows, point.engine, host_gbps=point.host_gbps)
    if threads is not None:
        found = dataclasses.replace(found, execution=dataclasses.replace(found.execution, optimizer_threads=threads))
    forget(model.kind)
    trainer = job_trainer(model, store, device, found)
    try:
        trainer.train_step(rows[:2])
        with sampled(on=model.kind == "cuda") as clocks:
            reports = [trainer.train_step(rows) for _ in range(_num_steps(point))]
    finally:
        trainer.close()
    allocated_bytes = reserved_bytes = sum(reports[-1].device_memory_bytes.values())
    if model.kind == "cuda":
        allocated_bytes, reserved_bytes = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return _Measured(
        found=found,
        num_compiled=found.layers.num_layers,
        attention=trainer.attention_text,
        refusals=found.layers.refusals,
        reports=reports,
        allocated_bytes=allocated_bytes,
        reserved_bytes=reserved_bytes,
        host_bytes=status_bytes("VmRSS"),
        clocks=clocks,
    )


def _cells(model: Model, point: Point, measured: _Measured) -> dict[str, object]:
    steps_s = [step.duration_s for step in measured.reports]
    step_s, last = typical_s(steps_s), measured.reports[-1]
    num_tokens, update_bytes = last.num_tokens, _update_bytes(model)
    # Of a frozen model a backward has another share, which nothing here counts.
    hardware = (
        "" if model.base else hardware_flops_of(model.template, model_flops=last.model_flops, num_tokens=num_tokens)
    )
    useful, predicted = last.model_flops / step_s / 1e12, measured.found.predicted
    forecast = predicted.model_flops_per_s / 1e12 if point.clip else ""
    skipped = [step.skipped for step in measured.reports if step.skipped]
    return {
        "compiled": f"{measured.num_compiled} of {model.template.num_layers}",
        "kept": measured.found.text(),
        "attention": measured.attention,
        "inputs_on": measured.found.execution.activation_placement,
        "tokens/s": num_tokens / step_s,
        "useful_TFLOP/s": useful,
        "forecast": forecast,
        "of_forecast": useful / forecast if isinstance(forecast, float) else "",
        "hardware_TFLOP/s": hardware / step_s / 1e12 if isinstance(hardware, float) else "",
        "step_s": step_s,
        "first_s": steps_s[0],
        "compute_s": last.compute_s,
        "launching_s": last.launching_s,
        "overlap": last.overlap_ratio,
        "h2d_exposed_s": last.h2d.exposed_s,
        "d2h_exposed_s": last.d2h.exposed_s,
        "update_exposed_s": last.optimizer_exposed_s,
        "update_s": last.optimizer_s,
        "update_GB/s": update_bytes / last.optimizer_s / 1e9 if last.optimizer_s else "",
        "SM_MHz": measured.clocks.sm_mhz or "",
        "W": measured.clocks.power_w or "",
        "note": ", ".join([*skipped, *measured.refusals[:1]]),
        "loss": last.loss,
        "steps_s": steps_s,
        "h2d_bytes": last.h2d.bytes,
        "h2d_busy_s": last.h2d.busy_s,
        "d2h_bytes": last.d2h.bytes,
        "d2h_busy_s": last.d2h.busy_s,
        "forecast_step_s": predicted.step_s,
        "forecast_parts_s": dict(predicted.parts_s),
    }


def _update_bytes(model: Model) -> float:
    trained = sum(unit.trained_elements for unit in model.template.layout.units)
    return trained * adamw_bytes_per_parameter(model.grad_dtype.itemsize)


def _return_cells(point: Point, model: Model, measured: _Measured) -> dict[str, object]:
    last, predicted = measured.reports[-1], measured.found.predicted.parts_s
    down, update_s = last.d2h, last.optimizer_s
    return {
        "point": _text(point),
        "down_GB": down.bytes / 1e9,
        "down_s": down.busy_s,
        "predicted_down_s": predicted["download"],
        "down_GB/s": down.bytes / down.busy_s / 1e9 if down.busy_s else "",
        "down_exposed_s": down.exposed_s,
        "update_GB": _update_bytes(model) / 1e9,
        "update_s": update_s,
        "predicted_update_s": predicted["adamw"],
        "update_GB/s": _update_bytes(model) / update_s / 1e9 if update_s else "",
        "update_exposed_s": last.optimizer_exposed_s,
        "host_launched": last.launching_s / last.compute_s if last.compute_s else "",
    }


def _text(point: Point) -> str:
    base = f", {point.base} base" if point.base else ""
    return f"{point.tokens} {point.rows_text}, {point.engine_text}{base}{'' if point.clip else ', clip off'}"


def _memory_cells(measured: _Measured) -> dict[str, object]:
    planned_bytes = measured.found.plan.device_total_bytes
    return {
        "planned_GiB": planned_bytes / 2**30,
        "allocated_GiB": measured.allocated_bytes / 2**30,
        "reserved_GiB": measured.reserved_bytes / 2**30,
        "allocated/planned": measured.allocated_bytes / planned_bytes,
        "host_planned_GiB": measured.found.plan.host_total_bytes / 2**30,
        "host_resident_GiB": measured.host_bytes / 2**30,
        "planned_device": dict(measured.found.plan.device_bytes),
        "measured_device": measured.reports[-1].device_memory_bytes,
    }
