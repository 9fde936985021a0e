"""What decisions are made from: jobs, the node, and the rules. Times are Unix seconds, durations seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from horizon_server.records.plan import SharedBase


def kind_of(device: str) -> str:
    """The kind of a device, or of several with commas between: cuda of cuda:0,cuda:1."""
    return device.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that waits or is resident.

    `since_s` is when it began to wait: for memory since it was queued, for the device since it last gave it back.
    `order` is its place in the queue, the smaller the older. `device` is the kind that it needs (host or cuda),
    `num_devices` how many of them at least, and `more_devices` how many more it takes where they are free.
    `device_bytes` is what it needs on each. `remaining_s` are the seconds that it still needs with as many devices as
    it has, while it waits with `num_devices`, by prediction; None where unknown.
    """

    job_id: str
    user: str
    project: str
    priority: int
    order: int
    since_s: float
    device: str
    host_bytes: int
    device_bytes: int
    base: SharedBase | None = None
    """What of `host_bytes` is there once for all jobs on it."""
    num_devices: int = 1
    more_devices: int = 0
    further_nodes: int = 0
    """Nodes besides this one that it computes on too, at least."""
    remaining_s: float | None = None
    unload_s: float | None = None
    """The measured cost of taking the job's model out of host memory and loading it again, None where unknown."""
    load_s: float = 0.0
    """What it is expected to take from being loaded to its first turn."""
    change_s: float = 0.0
    """What it is expected to cost to continue on other devices, in the same memory: from the last step on those that it
    has to its first turn on the others."""

    @property
    def held(self) -> tuple[int, SharedBase | None]:
        """What it adds to the memory that jobs have together, see `HeldMemory`."""
        return self.host_bytes, self.base

    @property
    def most_devices(self) -> int:
        """How many devices it uses at most."""
        return self.num_devices + self.more_devices


@dataclass(frozen=True, kw_only=True)
class Resident(Job):
    """A job whose model is in host memory, on `devices`: their names (host, or cuda:0 and cuda:1), in the node's
    order."""

    devices: tuple[str, ...]
    more_nodes: int = 0
    """Those that it has beyond `further_nodes`."""
    resident_since_s: float
    ready_s: float = 0.0
    """When it takes turns; while it is being loaded, when it is expected to."""
    is_loading: bool = False
    """Whether it is being prepared, or its worker has not asked for its first turn yet."""
    waits_to_prepare: bool = False
    """Whether another job's data is prepared first; it uses no processor meanwhile, and goes on only where one more may
    be loaded."""
    is_stopping: bool = False
    """Whether its memory is being freed already."""
    on_since_s: float = 0.0
    """Since when it is on these devices."""
    can_change: bool = True
    """Whether it can continue on other devices now: not while it is being loaded, or is changing already."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """A maintenance window, in Unix seconds: the node is drained from its start to its end."""

    start_s: float
    end_s: float
    message: str = ""
    opens: bool = True
    """Whether jobs start after it: the node is neither cordoned nor drained besides."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """What there is to share. `devices` is each device's usable memory by name: host, or host:0, host:1, ..., and
    cuda:0, cuda:1, ..."""

    host_bytes: int
    devices: Mapping[str, int]
    process_bytes: int = 0
    """Memory of a GPU that each further process takes for as long as it lives, with or without a turn."""
    out: Mapping[str, str] = field(default_factory=dict)
    """Of `devices`, those that no job may use, and why: an admin has withdrawn them, or they have failed."""
    is_open: bool = True
    """Whether jobs may start: no admin has cordoned or drained the node."""
    closed_why: str = "the node is cordoned by an admin: no job starts"
    """What the reason is while the node is not open."""
    window: Window | None = None
    """A maintenance window that has not ended yet."""
    further: Mapping[str, str] = field(default_factory=dict)
    """Other nodes that jobs may use besides this one, and why none can use them now: nothing where they are free, or
    have a job of this node."""

    def in_service(self, kind: str) -> tuple[str, ...]:
        """The devices of a kind that jobs may use."""
        return tuple(name for name in self.devices if kind_of(name) == kind and name not in self.out)

    def out_text(self, kind: str) -> str:
        """What a reason says of the devices of a kind that are out of service, from its semicolon on."""
        return "".join(f"; {name} is {why}" for name, why in self.out.items() if kind_of(name) == kind)

    def open_from(self, time_s: float) -> float:
        """That time, or the end of the maintenance window where it falls into one: no job starts before."""
        inside = self.window is not None and self.window.start_s <= time_s < self.window.end_s
        return self.window.end_s if inside and self.window is not None else time_s


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings that decisions depend on."""

    time_slice_s: float = 60.0
    max_residence_s: float = 4 * 3600.0
    max_wait_s: float = 24 * 3600.0
    """A user who has waited this long for memory, with no resident job and without using a device, is served before all
    others, whatever was used before. It is the user who waits: otherwise many old jobs of one user would turn shares
    into first come, first served."""
    max_loading_jobs: int | None = None
    """Jobs that are loaded at the same time: imports, reading and preparing take processors outside of any turn. None:
    any number."""
    max_loading_jobs_of_user: int | None = None
    keep_devices_s: float = 300.0
    """How long a job that may use several numbers of devices keeps those that it has, before it gives some back or
    takes more."""
    max_resident_jobs: int | None = None
    """Resident jobs of a user for whom no admin has set another number."""
    most_unload_share: float = 0.05
    """A resident job is displaced only where unloading and loading it again takes less than this part of its
    residence."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is to be done now, and why the rest waits."""

    start: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Jobs to load, each with the devices that it gets, in this order."""
    displace: tuple[str, ...] = ()
    """Resident jobs to checkpoint, unload and queue again."""
    change: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Resident jobs that are to continue on other devices, each with those, in the node's order."""
    leave: tuple[str, ...] = ()
    """Resident jobs to checkpoint and queue again, as a device of theirs is out of service and the node has too few
    others."""
    why: Mapping[str, str] = field(default_factory=dict)
    """Of each job that keeps waiting: the reason, for people."""
