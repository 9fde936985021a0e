"""What a stage's process is given, and its time. Only the standard library: it is loaded before anything that may be
missing."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

DeviceChoice = Literal["cuda", "cpu"]
_ENDING_S: Mapping[DeviceChoice, float] = {"cuda": 8.0, "cpu": 0.5}
"""What unpinning and unmapping 100 GB take."""
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq", "grad")
"""Of the host store, in memory files that outlive a stage's process: filling 100 GB once takes long enough."""


class Clock:
    """Says whether another piece of work of known cost still fits into the time given."""

    def __init__(self, budget_s: float) -> None:
        self._end_s = time.perf_counter() + budget_s

    @property
    def left_s(self) -> float:
        """Seconds left, 0 when none are."""
        return max(0.0, self._end_s - time.perf_counter())

    def allows(self, cost_s: float) -> bool:
        """Whether this many seconds are left."""
        return cost_s < self.left_s


@dataclass(frozen=True, kw_only=True)
class Task:
    """One stage's orders.

    `end_s`, of the machine's monotonic clock, is when its process is stopped. `shape` is empty where the largest model
    that fits is wanted, `tokens` where the stage chooses, `points` where all of a stage's are. `host_gib` replaces what
    the system says is free, for virtual machines whose memory grows when it is used. `plane_fds` are the store's memory
    files, of size 0 until a stage makes the store; `library` is the folder of compiled layers.
    """

    stage: str
    file: str
    out: str
    device: DeviceChoice
    end_s: float
    shape: str = ""
    tokens: tuple[int, ...] = ()
    points: tuple[str, ...] = ()
    host_gib: float = 0.0
    plane_fds: Mapping[str, int] = field(default_factory=dict)
    library: str = ""

    @classmethod
    def from_json(cls, text: str) -> Task:
        """The task that `to_json` wrote."""
        plain = json.loads(text)
        return cls(**{**plain, "tokens": tuple(plain["tokens"]), "points": tuple(plain["points"])})

    def to_json(self) -> str:
        """For the command line of the stage's process."""
        return json.dumps(dataclasses.asdict(self))

    def clock(self) -> Clock:
        """The stage's time, less what giving its memory back takes."""
        return Clock(self.end_s - time.monotonic() - _ENDING_S[self.device])

    @property
    def folder(self) -> Path:
        """Where results go."""
        return Path(self.out)
