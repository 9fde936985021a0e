"""Stage: the engine against the same kernels on resident weights. The ratio is what streaming costs.

The resident side leaves the update out, whose states would not fit on the device with a model that needs streaming, and
copies weights within device memory; both are about a hundredth of a step of 7 B parameters and 64k tokens, in opposite
directions.
"""

from __future__ import annotations

import dataclasses
from contextlib import closing

import torch

from bench.gpu.report import Report
from bench.gpu.resident_device import ResidentDevice
from bench.gpu.shapes import SIZES
from bench.gpu.steps import Model, choose_model, forget, job_of, opened, placed, rows_for, trainer_for, typical_s
from bench.gpu.task import Clock, Task
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.errors import DoesNotFit
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution
from horizon_server.store.cpus import available_cpus
from horizon_server.store.host_store import HostStore

_NUM_STEPS = 3

Measured = tuple[list[float], float]
"""Seconds of the steps, and the first one's loss, which is of the same weights on both sides."""


def run(task: Task, report: Report) -> None:
    """A row per number of tokens."""
    sizes, clock, model = SIZES[task.device], task.clock(), choose_model(task)
    report.table(
        "Streamed against resident, the same kernels",
        {
            "tokens": ",d",
            "streamed tokens/s": ",.0f",
            "resident tokens/s": ",.0f",
            "streamed/resident": ".3f",
            "streamed loss": ".5f",
            "resident loss": ".5f",
            "note": "",
        },
    )
    torch.set_num_threads(available_cpus())
    tokens_left, seconds_per_token = list(task.tokens or sizes.resident_tokens), 0.0
    while tokens_left:
        tokens = tokens_left.pop(0)
        if not clock.allows((2 * _NUM_STEPS + 1) * seconds_per_token * tokens):
            report.row(tokens=tokens, note="no time left")
            continue
        rows = rows_for(model.template.vocab_size, kind="equal", tokens=tokens, row_tokens=sizes.row_tokens)
        forget(model.kind)
        try:
            (streamed_s, streamed_loss), (resident_s, resident_loss) = _both(task, model, rows, clock)
        except (DoesNotFit, torch.OutOfMemoryError) as error:
            report.row(tokens=tokens, note=f"does not fit: {str(error).partition(chr(10))[0]}")
            continue
        seconds_per_token = typical_s(streamed_s) / tokens
        report.row(
            tokens=tokens,
            streamed_loss=streamed_loss,
            resident_loss=resident_loss,
            streamed_steps_s=streamed_s,
            resident_steps_s=resident_s,
            **{
                "streamed_tokens/s": tokens / typical_s(streamed_s),
                "resident_tokens/s": tokens / typical_s(resident_s),
                "streamed/resident": typical_s(resident_s) / typical_s(streamed_s),
            },
        )


def _both(task: Task, model: Model, rows: list[MicroBatch], clock: Clock) -> tuple[Measured, Measured]:
    recipe, execution = job_of(model, rows)
    # A rate of zero, so that the small step that comes first leaves the weights as they are.
    job = dataclasses.replace(recipe, learning_rate=0.0), placed(model, recipe, execution)[1]
    with opened(task, model) as (store, device):
        dtypes = {"compute_dtype": device.compute_dtype, "gradient_dtype": device.gradient_dtype}
        # First, because the streamed steps change the weights.
        with closing(ResidentDevice(model.kind, store, **dtypes)) as resident_device:
            resident = _measure(model, store, resident_device, rows, job, clock)
        forget(model.kind)
        return _measure(model, store, device, rows, job, clock), resident


def _measure(
    model: Model,
    store: HostStore,
    device: Device,
    rows: list[MicroBatch],
    job: tuple[Recipe, Execution],
    clock: Clock,
) -> Measured:
    trainer = trainer_for(model, store, device, job)
    try:
        trainer.train_step(rows[:2])
        first = trainer.train_step(rows)
        steps_s = [first.duration_s]
        while len(steps_s) < _NUM_STEPS and clock.allows(2 * first.duration_s):
            steps_s.append(trainer.train_step(rows).duration_s)
        return steps_s, first.loss
    finally:
        trainer.close()
