"""Stage: the engine's steps by tokens and kinds of rows, next to the forecast, and what memory they took against the plan.

Useful TFLOP/s count what training is worth: 6 per parameter in a matrix product and token, and attention. Hardware TFLOP/s add the
recomputed forward of the layers. With clipping, each step pays for the deferred update of the step before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.gpu.clocks import Clocks, sampled
from bench.gpu.engine import SetUp, job_trainer, set_up
from bench.gpu.machine import status_bytes
from bench.gpu.report import Report
from bench.gpu.shapes import SIZES, Point, Sizes
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
    "shape": "", "tokens": ",d", "rows": "", "clip": "", "engine": "", "compiled": "", "kept": "", "inputs on": "",
    "tokens/s": ",.0f", "useful TFLOP/s": ".1f",
    "forecast": ".0f", "of forecast": ".2f", "hardware TFLOP/s": ".1f", "step s": ".3f", "first s": ".3f",
    "compute s": ".3f", "launching s": ".3f", "overlap": ".3f",
    "h2d exposed s": ".3f", "d2h exposed s": ".3f", "update exposed s": ".3f", "update s": ".3f", "update GB/s": ".0f", "SM MHz": ".0f",
    "W": ".0f", "note": "",
}  # fmt: skip
MEMORY_COLUMNS = {
    "point": "", "planned GiB": ".2f", "allocated GiB": ".2f", "reserved GiB": ".2f", "allocated/planned": ".3f",
    "host planned GiB": ".2f", "host resident GiB": ".2f",
}  # fmt: skip
_MANY_TOKENS = 1 << 16
"""Of a point; up to here it takes three steps, above two."""


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """A point's steps and what they took. Units: bytes."""

    found: SetUp
    num_compiled: int
    refusals: list[str]
    reports: list[StepFigures]
    allocated_bytes: int
    reserved_bytes: int
    host_bytes: int
    clocks: Clocks


def run(task: Task, report: Report) -> None:
    """Both tables; points without clipping come last, because their store has another form."""
    sizes, clock, model = SIZES[task.device], task.clock(), choose_model(task)
    pending = [Point(tokens=tokens) for tokens in task.tokens] or list(sizes.points)
    memory: list[dict[str, object]] = []
    report.table("The curve", COLUMNS)
    seconds_per_token = 0.0
    while pending:
        clip = pending[0].clip
        with opened(task, model, keep_gradients=clip) as (store, device):
            works = True
            # A device that has failed stays so, and the next point gets a new one.
            while works and pending and pending[0].clip == clip:
                point = pending.pop(0)
                cells = {
                    "shape": model.shape,
                    "tokens": point.tokens,
                    "rows": point.rows,
                    "clip": "on" if clip else "off",
                    "engine": point.engine,
                }
                if not clock.allows((_num_steps(point) + 0.5) * seconds_per_token * point.tokens):
                    report.row(**cells, note="no time left")
                    continue
                try:
                    measured = _measure(task, model, store, device, point, sizes)
                except DoesNotFit as error:
                    works = False
                    report.row(**cells, note=error.message)
                    continue
                seconds_per_token = typical_s([step.duration_s for step in measured.reports]) / point.tokens
                memory.append(_memory_cells(point, measured))
                report.row(**cells, **_cells(model, point, measured), **memory[-1])
            for refusal in device.refusals:
                report.say(refusal)
    # The numbers are in the rows above too, so that they outlive a stop before this.
    report.table("Memory against the plan", MEMORY_COLUMNS)
    for memory_cells in memory:
        report.row(**memory_cells)


def _num_steps(point: Point) -> int:
    return 3 if point.tokens <= _MANY_TOKENS else 2


def _measure(task: Task, model: Model, store: HostStore, device: Device, point: Point, sizes: Sizes) -> _Measured:
    rows = rows_for(model.template.vocab_size, kind=point.rows, tokens=point.tokens, row_tokens=sizes.row_tokens)
    found = set_up(model, rows, point.engine)
    forget(model.kind)
    trainer, layers = job_trainer(task, model, store, device, rows, found, point.engine)
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
        num_compiled=layers.num_layers,
        refusals=layers.refusals,
        reports=reports,
        allocated_bytes=allocated_bytes,
        reserved_bytes=reserved_bytes,
        host_bytes=status_bytes("VmRSS"),
        clocks=clocks,
    )


def _cells(model: Model, point: Point, measured: _Measured) -> dict[str, object]:
    steps_s = [step.duration_s for step in measured.reports]
    step_s, last = typical_s(steps_s), measured.reports[-1]
    num_tokens, grad_bytes = last.num_tokens, model.grad_dtype.itemsize
    update_bytes = model.template.layout.num_elements * adamw_bytes_per_parameter(grad_bytes)
    hardware = hardware_flops_of(model.template, model_flops=last.model_flops, num_tokens=num_tokens)
    useful, predicted = last.model_flops / step_s / 1e12, measured.found.predicted
    forecast = predicted.model_flops_per_s / 1e12 if predicted and point.clip else ""
    skipped = [step.skipped for step in measured.reports if step.skipped]
    return {
        "compiled": f"{measured.num_compiled} of {model.template.num_layers}",
        "kept": measured.found.text(),
        "inputs_on": measured.found.placement,
        "tokens/s": num_tokens / step_s,
        "useful_TFLOP/s": useful,
        "forecast": forecast,
        "of_forecast": useful / forecast if isinstance(forecast, float) else "",
        "hardware_TFLOP/s": hardware / step_s / 1e12,
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
        "forecast_step_s": predicted.step_s if predicted else "",
        "forecast_parts_s": dict(predicted.parts_s) if predicted else {},
    }


def _memory_cells(point: Point, measured: _Measured) -> dict[str, object]:
    planned_bytes = measured.found.plan.device_total_bytes
    return {
        "point": f"{point.tokens} {point.rows}, {point.engine}{'' if point.clip else ', clip off'}",
        "planned_GiB": planned_bytes / 2**30,
        "allocated_GiB": measured.allocated_bytes / 2**30,
        "reserved_GiB": measured.reserved_bytes / 2**30,
        "allocated/planned": measured.allocated_bytes / planned_bytes,
        "host_planned_GiB": measured.found.plan.host_total_bytes / 2**30,
        "host_resident_GiB": measured.host_bytes / 2**30,
        "planned_device": dict(measured.found.plan.device),
        "measured_device": measured.reports[-1].device_memory_bytes,
    }
