"""Other machines with daemons of their own, to which this one may send whole jobs, and what they say of themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from horizon_server.records.job import JobRecord
from horizon_server.records.sharing import Outlook
from horizon_server.records.times import UnixTime

BoxState = Literal["open", "closed", "lost"]


@dataclass(frozen=True, kw_only=True)
class Box:
    """A machine of the fleet, as it was when it was asked last. Units: bytes."""

    name: str
    address: str
    """HOST:PORT where it serves other daemons; empty for this one."""
    state: BoxState
    """Whether jobs start there; `lost` where it does not answer."""
    hostname: str = ""
    gpus: tuple[str, ...] = ()
    """Their names; none where its processors compute."""
    num_idle: int = 0
    """Devices that no job is on."""
    host_memory_limit_bytes: int = 0
    host_memory_available_bytes: int = 0
    num_jobs: int = 0
    """In memory and waiting, of all its users."""
    next_free_s: UnixTime = 0.0
    """When its first device is expected to be free; 0 where one is, or nothing is known."""
    message: str = ""
    """Why it is closed or lost."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """What a job would be on one machine of the fleet. Times are Unix seconds, None where nothing is known of them."""

    box: str
    chosen: bool = False
    """Whether it is sent there: where it is predicted to end first."""
    why_not: str = ""
    """Why it cannot run there; empty where it can."""
    devices: str = ""
    """Those it would have: 8 GPUs."""
    step_s: float | None = None
    tokens_per_second: float | None = None
    copied_bytes: int = 0
    """Of its model and data, what is not there yet."""
    estimated_start_s: UnixTime | None = None
    estimated_end_s: UnixTime | None = None


@dataclass(frozen=True, kw_only=True)
class SentEvent:
    """One event of a job in another box: its number there, its time and its payload as JSON."""

    sequence: int
    time_s: float
    body: str


@dataclass(frozen=True, kw_only=True)
class JobUpdate:
    """What has become of a job in another box."""

    job: JobRecord | None
    """None where the box has no such job any more."""
    outlook: Outlook | None = None
    events: tuple[SentEvent, ...] = field(default=())
    """The next ones after those that were asked for."""
