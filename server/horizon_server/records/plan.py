"""A job's memory plan and the predicted time of its steps."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from horizon_server.records.execution import Execution, Parallel, Residency
from horizon_server.texts import size_text

Bound = Literal["compute", "h2d", "d2h", "host memory", "drive", "network"]


@dataclass(frozen=True, kw_only=True)
class PlannedMachine:
    """A machine that a plan is asked about: its GPU by name, and 10^9 bytes per second of host memory, of the link, and
    of its drives for states, all of them together. None leaves the link to the GPU's data sheet, host memory without a
    limit, and the machine without drives."""

    gpu: str
    host_gbps: float
    link_gbps: float | None = None
    host_memory_bytes: int | None = None
    drive_read_gbps: float | None = None
    drive_write_gbps: float | None = None
    drive_endurance_bytes: int | None = None
    """What its drives are rated for, all of them together; None where that is not known."""


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """What a step is expected to take. `bound` is the queue that limits it; `total_s` is the whole job, where its steps
    are known, with the pass before the first one.

    `peak_flops_per_s` is the device's matrix product, which model FLOPs utilisation refers to; `model_flops_per_s` is
    what a step is worth in its time. `parts_s` are seconds by kind of work, which overlap; `ramp` and `tail`, in which
    compute waits at a step's ends, are parts of `exposed`. `machine` is what the rates belong to, and `measured`
    whether they were measured or estimated.
    """

    step_s: float
    tokens_per_second: float
    bound: Bound
    peak_flops_per_s: float
    total_s: float | None = None
    model_flops_per_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)
    machine: str = ""
    measured: bool = True


@dataclass(frozen=True, kw_only=True)
class PredictedWays:
    """Seconds of a step for the two ways in which several devices divide it; None where one is not possible or does not
    fit."""

    rows_s: float | None = None
    layers_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ReferencePass:
    """The pass over a job's data before its first step, for the log-probabilities of its starting weights, where its
    method needs them.

    `num_tokens` are those of all documents, trained and evaluated; None where the data is not known.
    `tokens_estimated`: they are estimated from the size of the files, as the data is not prepared. A job that finds the
    numbers of an earlier one has no pass.
    """

    tokens_per_second: float
    num_tokens: int | None = None
    tokens_estimated: bool = False
    total_s: float | None = None
    done_share: float = 0.0
    """What of it is done, 0 to 1, as the worker last reported."""


@dataclass(frozen=True, kw_only=True)
class SharedBase:
    """The frozen weights under a job's adapters, which are in memory once for all jobs of the node whose `key` is the
    same. `num_bytes` of the job's planned host memory are theirs: `base` in the ledger."""

    key: str
    """What decides their bytes: the model's files, which tensors are frozen, and how these are kept and laid out."""
    num_bytes: int
    num_jobs: int = 0
    """Resident jobs that were on them when the plan was made, without this one."""


@dataclass(frozen=True, kw_only=True)
class DriveUse:
    """What a job's steps move to and from the node's drives: `num_bytes` on all of them together, which a step reads
    once and writes once. What has its home there and stays on the device is not among it. `written_bytes` are the whole
    job's, where its steps are known; `endurance_bytes` is what the drives are rated for, where that is known."""

    num_layers: int
    num_bytes: int
    num_drives: int = 1
    num_ends: int = 0
    """Of embedding and head, those whose states are there too."""
    written_bytes: int | None = None
    endurance_bytes: int | None = None

    @property
    def endurance_share(self) -> float | None:
        """The part of that which the job writes."""
        if self.written_bytes is None or not self.endurance_bytes:
            return None
        return self.written_bytes / self.endurance_bytes

    def of_steps(self, num_steps: int) -> DriveUse:
        """The same of a job with this number of steps."""
        return dataclasses.replace(self, written_bytes=num_steps * self.num_bytes)

    @property
    def text(self) -> str:
        """In one line, for people."""
        if not self.num_layers:
            return "states of layers that stay on the device, written where they go home and not by steps"
        layers = f"states of {self.num_layers} layer{'' if self.num_layers == 1 else 's'}"
        layers += ("", " and of the head", ", the head and the embedding")[self.num_ends]
        text = f"{layers} ({size_text(self.num_bytes)}), written once a step"
        if self.written_bytes is not None:
            text += f", {size_text(self.written_bytes)} by the whole job"
        if self.endurance_share is not None:
            text += f", {self.endurance_share:.2%} of what the drives are rated for"
        return text


class HeldMemory:
    """Host memory that jobs have together: each base once, whatever number of them is on it. A job is the bytes that it
    has alone, and its base."""

    def __init__(self, jobs: Iterable[tuple[int, SharedBase | None]] = ()) -> None:
        self.num_bytes = 0
        self._users: Counter[str] = Counter()
        for num_bytes, base in jobs:
            self.add(num_bytes, base)

    def needed_bytes(self, num_bytes: int, base: SharedBase | None) -> int:
        """What one more job takes beside these."""
        return num_bytes - (base.num_bytes if base is not None and self._users[base.key] else 0)

    def add(self, num_bytes: int, base: SharedBase | None) -> None:
        """One more job is in memory."""
        self.num_bytes += self.needed_bytes(num_bytes, base)
        if base is not None:
            self._users[base.key] += 1

    def remove(self, num_bytes: int, base: SharedBase | None) -> None:
        """A job leaves: its base stays for as long as others are on it."""
        if base is not None:
            self._users[base.key] -= 1
        self.num_bytes -= self.needed_bytes(num_bytes, base)

    @property
    def bases(self) -> frozenset[str]:
        """The keys of those that are there."""
        return frozenset(key for key, number in self._users.items() if number)

    def num_on(self, base: SharedBase | None) -> int:
        """How many of the jobs are on a base."""
        return 0 if base is None else self._users[base.key]

    def copy(self) -> HeldMemory:
        """The same, to be changed by itself."""
        copied = HeldMemory()
        copied.num_bytes, copied._users = self.num_bytes, self._users.copy()
        return copied


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Bytes by component, such as weights and moments. The host's sum is the worker process's; the device's is its
    arena."""

    host_bytes: dict[str, int]
    device_bytes: dict[str, int]

    @property
    def host_total_bytes(self) -> int:
        """Sum over the host's components."""
        return sum(self.host_bytes.values())

    @property
    def device_total_bytes(self) -> int:
        """Sum over the device's components."""
        return sum(self.device_bytes.values())


@dataclass(frozen=True, kw_only=True)
class DeviceRange:
    """The numbers of devices, or of nodes, that a job may compute on, as far as they are there, and what is kept for it
    so that it can continue on any of them: of the number that takes the most, bytes of the host and of each device."""

    least: int
    most: int
    host_bytes: int
    device_bytes: int


@dataclass(frozen=True, kw_only=True)
class Plan(Ledger):
    """What is decided of a job before its first step: its memory by component, how it runs, and what to expect of
    that."""

    execution: Execution = Execution()
    host_limit_bytes: int
    """What the job may have of the host's memory. What it may have on the device is in `execution`."""
    num_parameters: int
    num_trained_parameters: int = 0
    """The others are frozen."""
    plane_bytes: dict[str, int] = field(default_factory=dict)
    """The sizes of the store's planes, which the daemon lends the worker."""
    drives: DriveUse | None = None
    """What of its states is on drives; None where everything is in memory."""
    drive_file_bytes: tuple[int, ...] = ()
    """The size of its file on each drive, in the order of the execution's folders."""
    base: SharedBase | None = None
    """The frozen weights that it shares with other jobs on the same base; None where it has none, or none to share."""
    device: str
    """The name of the device: host, cuda, or of several such as cuda:1; of a job on several devices all their names
    with commas between. Before it starts, the kind alone."""
    message: str = ""
    """When it does not fit: the numbers and the smallest change that would make it fit; else nothing."""
    hint: str = ""
    """What would make the job faster: a change to the spec, with what it costs, or another tool; empty where none is
    known."""
    device_range: DeviceRange | None = None
    """None where the job wants one number of devices."""
    node_range: DeviceRange | None = None
    """None where the job wants one number of nodes. num_nodes is what is used; before the start, the fewest."""
    prediction: StepPrediction | None = None
    """None while the machine's speed has not been measured."""
    ways: PredictedWays | None = None
    """None for one device, or while the machine's speed has not been measured."""
    references: ReferencePass | None = None
    """None where the method needs no reference log-probabilities, or the machine's speed has not been measured."""
    num_steps: int | None = None
    """Steps of the whole job; None while nothing is known of its data, where only that decides."""
    steps_estimated: bool = False
    """Whether they are estimated from the size of the files, as the data is not prepared."""
    warnings: tuple[str, ...] = ()
    """What the job asks for and cannot be done, or is likely not meant, although it fits: one sentence each."""

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the devices."""
        return tuple(self.device.split(","))

    @property
    def is_on_host(self) -> bool:
        """Whether the processors compute the job: its device's memory is the host's then."""
        return self.device.partition(":")[0] == "host"

    @property
    def device_limit_bytes(self) -> int:
        """What the job may have on the device."""
        return self.execution.device_limit_bytes

    @property
    def compute_dtype(self) -> str:
        """What layers are computed in."""
        return self.execution.compute_dtype

    @property
    def num_devices(self) -> int:
        """Of each node that compute the job together; the device's bytes and limit are those of one."""
        return self.execution.ranks_per_node

    @property
    def num_nodes(self) -> int:
        """Nodes that compute the job together; the host's bytes are those of one."""
        return self.execution.num_nodes

    @property
    def least_devices(self) -> int:
        """The fewest that the job may continue on."""
        return self.num_devices if self.device_range is None else self.device_range.least

    @property
    def least_nodes(self) -> int:
        """The fewest that the job may start on."""
        return self.num_nodes if self.node_range is None else self.node_range.least

    @property
    def lanes(self) -> int:
        """Parts that each step is divided into."""
        return self.execution.lanes

    @property
    def parallel(self) -> Parallel:
        """How these devices divide a step."""
        return self.execution.parallel

    @property
    def kept(self) -> Residency | None:
        """What stays on the device, or waits in host memory that is to spare; None where there is none, or it would
        save nothing."""
        residency = self.execution.residency
        return residency if residency.is_anything else None

    @property
    def kept_host_bytes(self) -> int:
        """Host memory of this node that is kept for the job, on whatever number of devices or nodes."""
        kept = self.device_range or self.node_range
        return self.host_total_bytes if kept is None else kept.host_bytes

    @property
    def held(self) -> tuple[int, SharedBase | None]:
        """What it adds to the memory that jobs have together, see `HeldMemory`."""
        return self.kept_host_bytes, self.base

    @property
    def kept_device_bytes(self) -> int:
        """Memory of each of its devices that is kept for it, on whatever number of them or of nodes."""
        kept = self.device_range or self.node_range
        return self.device_total_bytes if kept is None else kept.device_bytes

    @property
    def fits(self) -> bool:
        """Whether its memory is within both limits, on every number of devices or nodes; slowness never counts."""
        return self.kept_host_bytes <= self.host_limit_bytes and self.kept_device_bytes <= self.device_limit_bytes

    @property
    def references_s(self) -> float:
        """Seconds of the pass before the first step, as far as they are known."""
        return 0.0 if self.references is None else self.references.total_s or 0.0

    def with_references_done(self, share: float) -> Plan:
        """The plan of a job of which that share of the pass before the first step is done."""
        if self.references is None:
            return self
        return dataclasses.replace(self, references=dataclasses.replace(self.references, done_share=share))

    def with_steps(self, num_steps: int, *, estimated: bool = False) -> Plan:
        """The plan of a job whose number of steps has become known."""
        drives = None if self.drives is None else self.drives.of_steps(num_steps)
        known = dataclasses.replace(self, num_steps=num_steps, steps_estimated=estimated, drives=drives)
        if self.prediction is None:
            return known
        total_s = num_steps * self.prediction.step_s + self.references_s
        return dataclasses.replace(known, prediction=dataclasses.replace(self.prediction, total_s=total_s))

    @property
    def summary(self) -> str:
        """The plan in one line, for people."""
        on_device = f" and {size_text(self.device_total_bytes)} on the device" if not self.is_on_host else ""
        if self.num_devices > 1 and on_device:
            on_device = f" and {size_text(self.device_total_bytes)} on each of {self.num_devices} devices"
        planned = f"planned {size_text(self.host_total_bytes)} on the host{on_device}, computed in {self.compute_dtype}"
        if self.num_nodes > 1:
            planned = planned.replace(" on the host", f" on each of {self.num_nodes} nodes", 1)
        if self.execution.num_ranks > 1:
            planned += f" by {self.execution.num_ranks} devices in {self.lanes} lanes, by {self.parallel}"
        if self.execution.layer_ranks:
            num_layers = Counter(self.execution.layer_ranks)
            planned += f" dealt {':'.join(str(num_layers[rank]) for rank in sorted(num_layers))}"
        if self.device_range is not None:
            planned += f" ({self.num_devices} of {self.device_range.least} to {self.device_range.most} devices)"
        if self.node_range is not None:
            planned += f" ({self.num_nodes} of {self.node_range.least} to {self.node_range.most} nodes)"
        if self.drives is not None:
            planned += f", on drives {self.drives.text}"
        if self.prediction is None:
            return planned
        speed = f"{self.prediction.tokens_per_second:,.0f} tokens/s, bound by {self.prediction.bound}"
        return f"{planned}, predicted {speed}"
