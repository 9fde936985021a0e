"""How long a job takes from being loaded to its first turn, learned from the jobs before it."""

from __future__ import annotations

import itertools
import statistics
from collections import deque

# Older ones were of another load of the machine, and of other data.
MOST_SEEN = 24


class LoadTimes:
    """Durations of loading, and what the next one is expected to take. Thread: belongs to one event loop."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=MOST_SEEN)
        self._fixed_s, self._s_per_byte = 0.0, 0.0

    def add(self, num_bytes: int, duration_s: float) -> None:
        """Learn from a job that took `duration_s` to load `num_bytes`.

        A fixed part (a process and its libraries, data to prepare) and one that grows with the bytes: the median of the
        slopes between all pairs, and the median of what is left (Theil and Sen), which one job with much data to
        prepare does not bend.
        """
        self._seen.append((num_bytes, duration_s))
        slopes = [
            (second_s - first_s) / (second - first)
            for (first, first_s), (second, second_s) in itertools.combinations(self._seen, 2)
            if first != second
        ]
        self._s_per_byte = max(0.0, statistics.median(slopes)) if slopes else 0.0
        rest_s = statistics.median(seconds - self._s_per_byte * size for size, seconds in self._seen)
        self._fixed_s = max(0.0, rest_s)

    def expected_s(self, num_bytes: int) -> float:
        """Return how many seconds loading `num_bytes` is expected to take; 0 before the first `add`."""
        return self._fixed_s + self._s_per_byte * num_bytes
