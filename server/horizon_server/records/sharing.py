"""How jobs share the node: who has used how much of it, what users and projects may take, and what a job is waiting
for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

from horizon_server.records.times import UnixTime

NodeMode = Literal["open", "cordoned", "drained"]
"""open: jobs start; cordoned: resident jobs continue and none starts; drained: resident jobs are checkpointed and
queued too."""

Holder = Literal["user", "project"]
"""What a weight or a quota belongs to."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Where a job that has not ended stands: why it is there, and when it is expected to start and to end.

    `share` is the part of its device's time that it has while the present jobs share it; 0 while it waits. Times are
    Unix seconds, None where nothing is known of them. `place` is its place in the order in which waiting jobs are
    considered now, from 1; 0 for others.
    """

    why: str
    share: float = 0.0
    estimated_start_s: UnixTime | None = None
    estimated_end_s: UnixTime | None = None
    place: int = 0


@dataclass(frozen=True, kw_only=True)
class ShareUse:
    """Device seconds that a user has used in a project, decayed to `as_of_s` (Unix seconds)."""

    project: str
    user: str
    device_s: float
    as_of_s: UnixTime


@dataclass(frozen=True, kw_only=True)
class Quota:
    """What one user or project may take; None: no limit. Bytes; `device_hours_per_week` over the last 7 days."""

    max_queued_jobs: int | None = None
    max_resident_jobs: int | None = None
    max_host_bytes: int | None = None
    """Planned host memory of resident jobs."""
    max_stored_bytes: int | None = None
    """Datasets, models and checkpoints."""
    device_hours_per_week: float | None = None
    retained_bytes: int | None = None
    """Checkpoints of ended jobs. More is not refused: the oldest are deleted after a warning."""

    @property
    def limits(self) -> dict[str, int | float]:
        """The limits that are set, by name."""
        return {name: limit for name, limit in asdict(self).items() if limit is not None}


@dataclass(frozen=True, kw_only=True)
class QuotaUse:
    """How much of each limit of a `Quota` is used now; `device_hours` are those of the last 7 days."""

    queued_jobs: int = 0
    resident_jobs: int = 0
    host_bytes: int = 0
    stored_bytes: int = 0
    device_hours: float = 0.0
    retained_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """The weight and the quota of one user or project. A device's time is divided in proportion to weights."""

    holder: Holder
    name: str
    weight: float = 1.0
    quota: Quota = Quota()


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a user has used in a project over a time. `stored_bytes` is what they have stored now, under no project in
    particular."""

    project: str
    user: str
    device_s: float = 0.0
    num_tokens: int = 0
    stored_bytes: int = 0
    jobs: dict[str, int] = field(default_factory=dict)
    """Jobs that ended in that time, by state."""


@dataclass(frozen=True, kw_only=True)
class NodeCondition:
    """What an admin has set the node to. A maintenance window drains the node from `window_start_s` to `window_end_s`
    (Unix seconds)."""

    mode: NodeMode = "open"
    message: str = ""
    window_start_s: UnixTime | None = None
    window_end_s: UnixTime | None = None
    withdrawn: tuple[str, ...] = ()
    """Devices that are out of service: jobs leave them, and none uses them."""

    def at(self, now_s: float) -> NodeMode:
        """The mode that holds at a time, the maintenance window included."""
        in_window = self.window_start_s is not None and self.window_end_s is not None
        if in_window and self.window_start_s <= now_s < self.window_end_s:  # type: ignore[operator]
            return "drained"
        return self.mode
