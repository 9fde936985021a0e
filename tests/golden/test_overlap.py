"""What a step reports as hidden copying, against the same worked out from the trace, over an emulated link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from bench.trace_overlap import DirectionOverlap, overlap_of_step
from torch import Tensor

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.timeline import Trace
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.figures import StepFigures, TransferFigures

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine

Pack = Callable[[list[Tensor]], MicroBatch]
NUM_STEPS = 5
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step as it reports itself, and as its trace shows it."""

    report: StepFigures
    traced: dict[str, DirectionOverlap]

    def difference(self, direction: str) -> float:
        reported: TransferFigures = getattr(self.report, direction)
        return abs(reported.overlap_ratio - self.traced[direction].ratio)


@pytest.fixture
def traced_steps(engine: Engine) -> Callable[..., list[TracedStep]]:
    """Runs a few steps over a link of a given speed, with so many slots for weights and gradients."""
    model, rows = (
        engine.tiny_model("llama", **SIZES),
        [engine.pack(engine.documents(250)), engine.pack(engine.documents(150, 100))],
    )

    def take(*, link_bytes_per_s: float | None, num_slots: int = 2, num_steps: int = NUM_STEPS) -> list[TracedStep]:
        trace = Trace()
        device = HostDevice(num_threads=1, link_bytes_per_s=link_bytes_per_s, trace=trace)
        run = engine.start(model, device=device, num_weight_slots=num_slots, num_gradient_slots=num_slots)
        run.trainer.train_step(rows)
        steps = []
        for _ in range(num_steps):
            trace.clear()
            report = run.trainer.train_step(rows)
            steps.append(TracedStep(report=report, traced=overlap_of_step(trace.spans(), num_gradient_slots=num_slots)))
        run.trainer.close()
        return steps

    return take


@pytest.mark.alone
@pytest.mark.parametrize(("setting", "transfer_per_compute"), [("compute-bound", 0.5), ("transfer-bound", 2.0)])
def test_the_reported_overlap_is_what_the_trace_shows_and_drops_without_double_buffering(
    setting: str, transfer_per_compute: float, traced_steps: Callable[..., list[TracedStep]]
) -> None:
    free = traced_steps(link_bytes_per_s=None, num_steps=2)
    compute_s = min(step.report.compute_s for step in free)
    rate = free[0].report.h2d.bytes / (transfer_per_compute * compute_s)

    double = traced_steps(link_bytes_per_s=rate)
    single = traced_steps(link_bytes_per_s=rate, num_slots=1, num_steps=2)

    # A thread that the machine wakes up late neither copies nor computes, in some step; an error of the account is in
    # every one.
    differences = [[round(step.difference(direction), 3) for direction in ("h2d", "d2h")] for step in double]
    assert min(max(step) for step in differences) <= 0.03, differences
    hidden = max(step.report.h2d.overlap_ratio for step in double)
    hidden_with_one_slot = max(step.report.h2d.overlap_ratio for step in single)
    assert hidden > (0.6 if setting == "compute-bound" else 0.2)
    assert hidden_with_one_slot < hidden / 2
