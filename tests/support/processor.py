"""How fast the processor is now, for limits in processor seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

# Of the work below on an AMD EPYC with Python 3.11: the least of 60 runs.
_USUAL_S = 0.007
_ROUNDS = 10


def _slowness() -> float:
    """How many times longer than usual Python takes, at least 1: where another process computes on the same core or
    the clock is low, every second of the processor does less."""
    began_s, table = time.thread_time(), dict[int, int]()
    for number in range(50_000):
        table[number % 1000] = table.get(7 * number % 1000, 0) + len(str(number))
    return max(1.0, (time.thread_time() - began_s) / _USUAL_S)


def least_s(work: Callable[[], object], limit_s: float) -> float:
    """The processor seconds of this thread for `work` at the processor's usual speed: of some rounds the least, or the
    first below the limit. What else the machine does makes some of them longer, and none shorter."""
    found: list[float] = []
    while not found or (min(found) >= limit_s and len(found) < _ROUNDS):
        before, began_s = _slowness(), time.thread_time()
        work()
        took_s = time.thread_time() - began_s
        # It may have changed meanwhile.
        found.append(2 * took_s / (before + _slowness()))
    return min(found)
