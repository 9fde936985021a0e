"""What a step reports as hidden copying, against the same worked out from the trace, with emulated speeds of compute
and link."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from bench.trace_overlap import DirectionOverlap, overlap_of_step

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.timeline import Trace
from horizon_server.figures import StepFigures

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine

MOST_STEPS = 20
PIECE_S = 0.03
"""How long a piece of compute takes, at least: far longer than the small model needs for it, so that sleeps and not the
machine's load set the speeds of both sides."""
COMPUTED = ("forward", "backward", "head loss")


@dataclass(frozen=True, kw_only=True)
class TracedStep:
    """A step as it reports itself, and as its trace shows it."""

    report: StepFigures
    traced: dict[str, DirectionOverlap]

    @property
    def difference(self) -> float:
        """Of the two accounts, in the direction where they differ more."""
        reported = {"h2d": self.report.h2d, "d2h": self.report.d2h}
        return max(abs(reported[name].overlap_ratio - traced.ratio) for name, traced in self.traced.items())


def paced_device(**options: Any) -> HostDevice:
    """A host device on which each piece of compute takes `PIECE_S`."""
    device = HostDevice(num_threads=1, **options)
    submit = device.compute.submit

    def slow(work: Callable[[], object]) -> None:
        end_s = time.perf_counter() + PIECE_S
        work()
        time.sleep(max(0.0, end_s - time.perf_counter()))

    def submit_paced(work: Callable[[], object], *, label: str = "", **more: Any) -> None:
        submit(partial(slow, work) if label.startswith(COMPUTED) else work, label=label, **more)

    device.compute.submit = submit_paced  # type: ignore[method-assign]
    return device


@pytest.fixture
def traced_step(engine: Engine) -> Callable[..., TracedStep]:
    """Takes steps over a link of a given speed, with `num_slots` for weights and as many for gradients, until one is as
    it should be, or the last of twenty.

    Where the machine wakes a thread late, that thread neither copies nor computes: in some steps, while an error of the
    account or of the schedule is in all of them.
    """
    model = engine.tiny_model("llama")
    rows = [engine.pack(engine.documents(25)), engine.pack(engine.documents(15, 10))]

    def take(is_right: Callable[[TracedStep], bool], *, link_bytes_per_s: float, num_slots: int = 2) -> TracedStep:
        trace = Trace()
        device = paced_device(link_bytes_per_s=link_bytes_per_s, trace=trace)
        run = engine.start(model, device=device, num_weight_slots=num_slots, num_gradient_slots=num_slots)
        run.trainer.train_step(rows)
        for _ in range(MOST_STEPS):
            trace.clear()
            report = run.trainer.train_step(rows)
            traced = overlap_of_step(trace.spans(), num_gradient_slots=num_slots)
            if is_right(step := TracedStep(report=report, traced=traced)):
                break
        run.trainer.close()
        return step

    return take


@pytest.mark.parametrize(
    ("transfer_per_compute", "least_hidden"),
    [pytest.param(0.5, 0.6, id="compute-bound"), pytest.param(2.0, 0.2, id="transfer-bound")],
)
def test_the_reported_overlap_is_what_the_trace_shows_and_drops_without_double_buffering(
    transfer_per_compute: float, least_hidden: float, traced_step: Callable[..., TracedStep]
) -> None:
    free: list[StepFigures] = []

    def is_third(step: TracedStep) -> bool:
        free.append(step.report)
        return len(free) == 3

    traced_step(is_third, link_bytes_per_s=1e12)
    rate = free[0].h2d.bytes / (transfer_per_compute * min(step.compute_s for step in free))

    def is_hidden(step: TracedStep) -> bool:
        return step.difference <= 0.03 and step.report.h2d.overlap_ratio > least_hidden

    double = traced_step(is_hidden, link_bytes_per_s=rate)
    assert is_hidden(double), double
    single = traced_step(
        lambda step: step.report.h2d.overlap_ratio < least_hidden / 2, link_bytes_per_s=rate, num_slots=1
    )
    assert single.report.h2d.overlap_ratio < least_hidden / 2
