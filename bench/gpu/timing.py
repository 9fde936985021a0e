"""Seconds of a piece of work on a device: of the first call, which may compile or choose a kernel, and of later ones.

CUDA: synchronises around the first call and around a batch of later ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# What an operation raises that this build of torch or this device does not have.
UNAVAILABLE = (RuntimeError, AttributeError, TypeError, ValueError)
_MAX_RUNS = 100


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds; `each_s` is the mean of a batch of runs."""

    first_s: float
    each_s: float


def timed(work: Callable[[], object], device: torch.device, *, budget_s: float) -> Timing:
    """Run the work once, once more to see how long it takes, and then as often as the budget allows."""
    first_s, second_s = _seconds(work, device, 1), _seconds(work, device, 1)
    num_runs = int(min(_MAX_RUNS, max(1.0, budget_s / max(second_s, 1e-9))))
    return Timing(first_s=first_s, each_s=_seconds(work, device, num_runs) / num_runs)


def try_timed(work: Callable[[], object], device: torch.device, *, budget_s: float) -> Timing | str:
    """As `timed`; where torch or the device cannot do it, why, in a few words."""
    try:
        return timed(work, device, budget_s=budget_s)
    except UNAVAILABLE as error:
        return f"not available: {str(error).partition(chr(10))[0][:80] or type(error).__name__}"


def rate(work_done: float, timing: Timing | str) -> float | str:
    """Work per second in units of 1e12, or why there is none."""
    return timing if isinstance(timing, str) else work_done / timing.each_s / 1e12


def _seconds(work: Callable[[], object], device: torch.device, num_runs: int) -> float:
    _synchronize(device)
    start_s = time.perf_counter()
    for _ in range(num_runs):
        work()
    _synchronize(device)
    return time.perf_counter() - start_s


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
