"""How many lanes each rank computes, by how fast each was measured to be."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from horizon_server.planning.lane_tree import dealt

_MEASURED_STEPS = 3
"""By which lanes are dealt, after one that does not count."""
_WORTH_DEALING = 0.9
"""Lanes are divided again where the slowest rank would take less than this part of its time."""


class LaneDeal:
    """The same on all ranks, which come to the same result."""

    def __init__(self) -> None:
        self._speeds: list[list[float]] = []

    def after_step(self, measured: Sequence[Sequence[float]], sizes: Sequence[int]) -> Sequence[int] | None:
        """The lanes of each rank from now on, where that makes steps shorter than `sizes` do; else None. `measured`
        are the seconds and tokens of each rank in the last step."""
        # The first step of a process, or after other lanes, is slower than the next ones.
        if all(tokens > 0 and seconds > 0 for seconds, tokens in measured):
            self._speeds.append([tokens / seconds for seconds, tokens in measured])
        if len(self._speeds) <= _MEASURED_STEPS:
            return None
        by_rank = zip(*self._speeds[1:], strict=True)
        speeds = [statistics.median(of_rank) for of_rank in by_rank]
        self._speeds.clear()
        found = dealt(sum(sizes), speeds)

        def longest(sizes: Sequence[int]) -> float:
            return max(float(size / speed) for size, speed in zip(sizes, speeds, strict=True))

        return found if longest(found) < _WORTH_DEALING * longest(sizes) else None
