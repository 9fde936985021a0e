"""The memory plan of a job: the store's own arithmetic over safetensors headers, held against this node's limits. Loads
no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server.errors import InvalidSpec
from horizon_server.network import interface_of
from horizon_server.planning.asked import lanes_of, with_spec
from horizon_server.planning.case import Case
from horizon_server.planning.chunks import check_chunks
from horizon_server.planning.data_size import DataSize
from horizon_server.planning.drives import (
    NO_DRIVES,
    NodeDrives,
    check_drives,
    check_wear,
    drive_use,
    drives_of_machine,
    space_warnings,
    without_drives,
)
from horizon_server.planning.gpus import gpu_named, rates_of_machine, usable_device_bytes
from horizon_server.planning.layer_probe import LayerProbe
from horizon_server.planning.ledger import LayerMemory, micro_batch_tokens
from horizon_server.planning.machine import (
    Accelerator,
    Gpu,
    HostMemory,
    RateBook,
    RatesByDevice,
    gpu_uuids,
    host_memory,
    numa_nodes_of,
    rates_name,
    rates_of_gpus,
)
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.nodes import check_exact, check_nodes, link_speed
from horizon_server.planning.pages import check_pages
from horizon_server.planning.rates import DeviceRates
from horizon_server.planning.sampling import evaluated_folder
from horizon_server.planning.settling import MAX_PLAN_BYTES, settle, settle_range
from horizon_server.planning.spec_warnings import keeping_everything, of_lanes, spec_warnings
from horizon_server.planning.trainable import open_for_training, shared_base
from horizon_server.records.execution import (
    DEFAULT_COMPUTE_DTYPE,
    ELEMENT_BYTES,
    ComputeDtype,
    DeviceKind,
    Execution,
)
from horizon_server.records.plan import Ledger, Plan, PlannedMachine, StepPrediction
from horizon_server.settings import Settings, child_environment
from horizon_server.spec import JobSpec, Span
from horizon_server.spec.fields import MAX_LANES
from horizon_server.store import numa
from horizon_server.store.cpus import update_threads
from horizon_server.store.drive_layout import INDEX_PLANE, DriveLayout
from horizon_server.store.generations import lent_planes

# Below this gain, predicted, bf16 is not worth a line in the plan.
_LEAST_GAIN = 1.2

_GIGA = 1e9
_GIGABIT_BYTES = 1e9 / 8


@dataclass(frozen=True, kw_only=True)
class PlannedSettings:
    """Settings of a daemon that its plans depend on."""

    device_arena_bytes: int | None
    fleet_network_gbps: float | None
    host_devices: int
    host_memory_limit_bytes: int | None
    host_memory_reserve_bytes: int
    nodes: tuple[str, ...]
    numa_interleave: bool


@dataclass(frozen=True, kw_only=True)
class PlannerFacts:
    """What the planner of a node is made of, so that another node can plan for it."""

    settings: PlannedSettings
    memory: HostMemory
    num_threads: int
    accelerators: tuple[Gpu, ...]
    rates: dict[str, DeviceRates]
    has_bf16: bool
    free_devices: tuple[str, ...] | None
    """None where all are free."""
    numa_nodes: tuple[int, ...]
    drives: NodeDrives | None = None


class Planner:
    """Plans jobs against the limits of a node.

    Args:
        settings: of the daemon: the limits of host memory and of the arena, and where a worker's memory lies.
        memory: returns the host memory that there is.
        num_threads: of a worker.
        accelerators: those that a worker's torch can use; a job may use any of them.
        rates: returns how fast each device is, where that is known.
        layer_memory: returns what a model's layers keep, where no formula says it.
        has_bf16: whether the CPU has instructions for bf16.
        free_devices: returns the names of the devices that no job is on; without it, all are free.
        jobs_on: returns how many resident jobs are on the base of a key.
        numa_nodes: those with memory.
        drives: those that jobs may have states on.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        memory: Callable[[], HostMemory],
        num_threads: int,
        accelerators: Sequence[Accelerator] = (),
        rates: Callable[[], RatesByDevice] = dict,
        layer_memory: Callable[[ModelFolder], LayerMemory | None] = lambda _: None,
        has_bf16: bool = True,
        free_devices: Callable[[], Collection[str]] | None = None,
        jobs_on: Callable[[str], int] = lambda _: 0,
        numa_nodes: Collection[int] = (),
        drives: NodeDrives | None = None,
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._num_threads = num_threads
        self._accelerators = tuple(sorted(accelerators, key=lambda gpu: -gpu.memory_bytes))
        self._rates = rates
        self._layer_memory = layer_memory
        self._has_bf16 = has_bf16
        self._free_devices = free_devices
        self._jobs_on = jobs_on
        self._numa_nodes = numa_nodes
        self._drives = drives
        self._arena_limit_bytes = settings.arena_limit(memory().limit_bytes)
        self.network_bytes_per_s: float | None = None
        """Of the private network of the fleet; None where nothing is known of it."""
        if settings.fleet_network_gbps is not None:
            self.network_bytes_per_s = settings.fleet_network_gbps * _GIGABIT_BYTES
        elif settings.fleet_address:
            self.network_bytes_per_s = link_speed(interface_of(settings.fleet_address))

    @classmethod
    def of_node(
        cls,
        settings: Settings,
        book: RateBook,
        accelerators: Sequence[Accelerator],
        *,
        free_devices: Callable[[], Collection[str]] | None = None,
        jobs_on: Callable[[str], int] = lambda _: 0,
        drives: NodeDrives | None = None,
    ) -> Planner:
        """Return the planner of this node; `book` holds its speed."""
        return cls(
            settings,
            memory=host_memory,
            num_threads=book.machine.num_threads,
            accelerators=accelerators,
            rates=book.read,
            layer_memory=LayerProbe(child_environment()),
            has_bf16=book.machine.has_bf16,
            free_devices=free_devices,
            jobs_on=jobs_on,
            numa_nodes=[node.index for node in numa.nodes()],
            drives=drives,
        )

    @property
    def facts(self) -> PlannerFacts:
        """What this planner is made of, as it is now. Blocking."""
        network = self.network_bytes_per_s
        settings = {field.name: getattr(self._settings, field.name) for field in dataclasses.fields(PlannedSettings)}
        # As it was found out there, where it was not set.
        settings["fleet_network_gbps"] = None if network is None else network / _GIGABIT_BYTES
        return PlannerFacts(
            settings=PlannedSettings(**settings),
            memory=self._memory(),
            num_threads=self._num_threads,
            accelerators=tuple(gpu for gpu in self._accelerators if isinstance(gpu, Gpu)),
            rates=dict(self._rates()),
            has_bf16=self._has_bf16,
            free_devices=tuple(self._free_devices()) if self._free_devices else None,
            numa_nodes=tuple(self._numa_nodes),
            drives=self._drives,
        )

    def of_facts(self, facts: PlannerFacts) -> Planner:
        """Return the planner of another node, which is of the same version."""
        return type(self)(
            self._settings.model_copy(update={"fleet_address": None, **vars(facts.settings)}),
            memory=lambda: facts.memory,
            num_threads=facts.num_threads,
            accelerators=facts.accelerators,
            rates=lambda: facts.rates,
            layer_memory=self._layer_memory,
            has_bf16=facts.has_bf16,
            free_devices=None if facts.free_devices is None else lambda: facts.free_devices or (),
            numa_nodes=facts.numa_nodes,
            drives=facts.drives,
        )

    def plan(self, spec: JobSpec, folder: Path, *, data: DataSize | None = None) -> Plan:
        """Plan a job against the node's limit, whatever else is running, and on the devices that it would start on
        now; `data` is what its pass before the first step goes over, and the steps of its epochs.

        Raises:
            InvalidModel: when the folder's config or safetensors cannot be read.
            InvalidSpec: when the spec asks for what the model or this node cannot do.
        """
        free = None if self._free_devices is None else self._free_devices()
        return self._planned_here(spec, folder, self._execution(spec, free=free), self.host_limit_bytes, data=data)

    def plan_elsewhere(
        self, spec: JobSpec, folder: Path, machine: PlannedMachine, *, data: DataSize | None = None
    ) -> Plan:
        """Plan a job on a machine that is asked about. What this node has measured on the same GPU counts.

        Raises:
            InvalidModel: as `plan`.
            InvalidSpec: as `plan`, and when the machine's GPU is unknown or a number of it cannot be.
        """
        for name in ("host_gbps", "link_gbps", "drive_read_gbps", "drive_write_gbps"):
            value: float | None = getattr(machine, name)
            if value is not None and not 0 < value < math.inf:
                raise InvalidSpec.of(
                    f"machine.{name}", f"{name} is {value:g}; it must be above 0, in GB (10^9 bytes) per second"
                )
        drives = drives_of_machine(spec, machine)
        rates = rates_of_machine(
            machine.gpu,
            host_bytes_per_s=machine.host_gbps * _GIGA,
            link_bytes_per_s=None if machine.link_gbps is None else machine.link_gbps * _GIGA,
            measured=self._rates().get("cuda"),
        )
        execution = Execution(
            device_kind="cuda",
            compute_dtype=DEFAULT_COMPUTE_DTYPE["cuda"],
            device_limit_bytes=usable_device_bytes(gpu_named(machine.gpu).memory_bytes),
            num_ranks=spec.nodes.least * spec.gpus.most,
            num_nodes=spec.nodes.least,
            num_threads=self._num_threads,
        )
        execution = with_spec(execution, spec)
        limit_bytes = MAX_PLAN_BYTES if machine.host_memory_bytes is None else machine.host_memory_bytes
        return self._planned(spec, folder, execution, limit_bytes, rates=rates, data=data, drives=drives)

    @property
    def host_limit_bytes(self) -> int:
        """Host memory that all resident jobs may have together: the limit that holds for this process, less the
        reserve."""
        machine = self._memory().limit_bytes
        limit = min(machine, self._settings.host_memory_limit_bytes or machine)
        return max(0, limit - self._settings.host_memory_reserve_bytes)

    def plan_to_start(
        self,
        spec: JobSpec,
        folder: Path,
        *,
        longest_document: int | None = None,
        data: DataSize | None = None,
        other_bytes: int = 0,
        bases: Collection[str] = (),
        num_nodes: int | None = None,
        num_devices: int | None = None,
        gpus: Sequence[Accelerator] = (),
        has_begun: bool = False,
    ) -> Plan:
        """Plan a job against what is free now.

        Args:
            longest_document: that of the data, once prepared.
            data: all its documents, which the pass before the first step goes over, and the steps that they make.
            other_bytes: planned for the other resident jobs, whether they have taken it yet or not.
            bases: keys of those that other resident jobs have in memory.
            num_nodes: that the job is to use; without, the fewest of its range.
            num_devices: that it is to use of each; without, as many as it may use of the node's.
            gpus: those, in the order of its ranks; without, the first ones.
            has_begun: whether it continues; then it does so in memory where the drives that it asks for are gone.
        """
        free = self._memory().available_bytes - self._settings.host_memory_reserve_bytes
        limit = max(0, min(self.host_limit_bytes - other_bytes, free))
        execution = self._execution(spec, num_devices, gpus, num_nodes=num_nodes)
        known = {"gpus": gpus, "data": data, "longest_document": longest_document, "bases": bases}
        is_left_by_drives = has_begun and spec.memory.tier == "drive" and self._drives is None
        asked = without_drives(spec) if is_left_by_drives else spec
        plan = self._planned_here(asked, folder, execution, limit, **known)
        if is_left_by_drives and not plan.fits:
            return dataclasses.replace(plan, message=f"{plan.message}; {NO_DRIVES}")
        return plan

    def plan_to_continue(
        self,
        spec: JobSpec,
        folder: Path,
        before: Plan,
        *,
        longest_document: int | None,
        data: DataSize | None,
        num_devices: int,
        gpus: Sequence[Accelerator],
    ) -> Plan:
        """Plan a job on another number of devices, in the memory that the plan `before` keeps for it."""
        execution = self._execution(spec, num_devices, gpus, num_nodes=before.num_nodes)
        plan = self._planned_here(
            spec, folder, execution, before.host_limit_bytes, gpus=gpus, data=data, longest_document=longest_document
        )
        assert plan.plane_bytes == before.plane_bytes, "planes are as large for every number of devices"
        plan = dataclasses.replace(plan, base=before.base)
        plan = plan if before.num_steps is None else plan.with_steps(before.num_steps)
        return plan.with_references_done(1.0)

    def plan_evaluation(self, spec: JobSpec, path: Path) -> tuple[Execution, Ledger]:
        """Return how a checkpoint of a job is evaluated besides the job, on the host, and the memory that takes: as the
        job's own evaluations on the host, without moments and gradients.

        Raises: InvalidModel, InvalidSpec as `plan`.
        """
        # By one process, in the job's lanes: sums of losses are in their order.
        lanes = lanes_of(spec)
        spec = spec.model_copy(update={"device": "host", "gpus": Span(), "nodes": Span()})
        folder = evaluated_folder(path, spec.train)
        together = micro_batch_tokens(folder.shape.hidden_size, "host")
        execution = dataclasses.replace(self._execution(spec), grad_bytes=0, micro_batch_tokens=together, lanes=lanes)
        case = Case(
            spec=spec,
            folder=folder,
            host_limit_bytes=self.host_limit_bytes,
            rates=None,
            layer=self._layer_memory(folder),
            data=None,
            longest_document=None,
        )
        return execution, case.ledger(execution)

    def _planned_here(self, spec: JobSpec, path: Path, execution: Execution, limit_bytes: int, **known: Any) -> Plan:
        check_drives(spec, self._drives)
        known |= {"num_on_node": self._num_devices(execution.device_kind), "most_nodes": self.most_nodes(spec)}
        plan = self._planned(spec, path, execution, limit_bytes, drives=self._drives, **known)
        check_wear(spec, plan.drives, self._drives)
        return plan

    def _planned(
        self,
        spec: JobSpec,
        path: Path,
        execution: Execution,
        limit_bytes: int,
        *,
        rates: DeviceRates | None = None,
        gpus: Sequence[Accelerator] = (),
        data: DataSize | None = None,
        longest_document: int | None = None,
        bases: Collection[str] = (),
        num_on_node: int = MAX_LANES,
        most_nodes: int = MAX_LANES,
        drives: NodeDrives | None = None,
    ) -> Plan:
        """`gpus` and `bases` are as in `plan_to_start`. `num_on_node` are the devices of the kind that the node has,
        `most_nodes` the nodes that the job may have; without, there are enough."""
        folder = open_for_training(path, spec.train)
        check_exact(folder, execution, spec.nodes)
        check_pages(folder, execution)
        check_chunks(folder, spec)
        longest = folder.shape.max_position_embeddings
        if spec.train.sequence_length > longest:
            what = (
                f"train.sequence_length is {spec.train.sequence_length}; the model allows at most {longest} positions"
            )
            raise InvalidSpec.of("train.sequence_length", what)
        base = shared_base(folder, spec)
        if base is not None:
            base = dataclasses.replace(base, num_jobs=self._jobs_on(base.key))
            limit_bytes += base.num_bytes if base.key in bases else 0
        # Which GPUs a job with a range continues on is not known when its memory is kept.
        differ = execution.deals_lanes and not spec.gpus.is_range
        gpus = gpus or self._accelerators[: execution.num_ranks]
        rates = rates or self._rates().get(rates_name(execution.device_kind, execution.compute_dtype))
        if rates is not None and drives is not None:
            rates = dataclasses.replace(rates, drives=drives.rates)
        case = Case(
            spec=spec,
            folder=folder,
            host_limit_bytes=limit_bytes,
            rates=rates,
            rates_of_ranks=rates_of_gpus(self._rates(), gpus) if differ else (),
            layer=self._layer_memory(folder),
            data=data,
            longest_document=longest_document,
            network_bytes_per_s=self.network_bytes_per_s,
            drives=drives,
        )
        together = micro_batch_tokens(folder.shape.hidden_size, execution.device_kind)
        asked, device_range, node_range = dataclasses.replace(execution, micro_batch_tokens=together), None, None
        if spec.gpus.is_range:
            settled, device_range = settle_range(case, asked, "gpus", spec.gpus.within(num_on_node))
        elif spec.nodes.is_range:
            settled, node_range = settle_range(case, asked, "nodes", spec.nodes.within(most_nodes))
        else:
            settled = settle(case, asked)
        execution, prediction = settled.execution, settled.prediction
        on_drives = DriveLayout(folder.layout, execution.drives)
        planes = lent_planes(folder.layout, grad_dtype_bytes=execution.grad_bytes, max_ranks=execution.lanes)
        if execution.drives.units:
            planes[INDEX_PLANE] = on_drives.index_bytes
        plan = Plan(
            **vars(settled.ledger),
            execution=execution,
            device=execution.device_kind,
            host_limit_bytes=limit_bytes,
            plane_bytes=planes,
            drives=drive_use(folder, execution, drives, case.num_steps),
            drive_file_bytes=on_drives.file_bytes,
            base=base,
            num_parameters=folder.layout.num_parameters,
            num_trained_parameters=folder.layout.num_trained_parameters,
            message=settled.message,
            device_range=device_range,
            node_range=node_range,
            warnings=tuple(self._warnings(case, execution)),
            prediction=prediction,
            ways=settled.ways,
            hint=self._hint(case, execution, prediction),
            references=case.references(execution),
        )
        if (num_steps := case.num_steps) is not None:
            plan = plan.with_steps(num_steps, estimated=case.is_estimated and num_steps != spec.most_steps)
        return plan

    def most_nodes(self, spec: JobSpec) -> int:
        """On how many nodes a job may be computed at most: of its range, this one and those of the settings."""
        return min(spec.nodes.most, 1 + len(self._settings.nodes))

    def _num_devices(self, kind: DeviceKind) -> int:
        return len(self._accelerators) if kind == "cuda" else self._settings.host_devices

    def _execution(
        self,
        spec: JobSpec,
        num_devices: int | None = None,
        gpus: Sequence[Accelerator] = (),
        *,
        num_nodes: int | None = None,
        free: Collection[str] | None = None,
    ) -> Execution:
        """On what a job of this spec computes here, and in which numbers; placement and residency depend on the
        model. Without a number of devices, on as many as it may use, of those that are `free` where that is given;
        without a number of nodes, on the fewest."""
        check_nodes(spec, num_further=len(self._settings.nodes))
        if spec.device == "cuda" and not self._accelerators:
            raise InvalidSpec(
                "device: cuda needs a CUDA device, and this node has none that a worker's torch can use; use device: "
                "host or auto"
            )
        asked = spec.train.compute_dtype
        # `auto` is the GPU where there is one, but for what only the host computes in.
        on_gpu = spec.device == "cuda" or (spec.device == "auto" and bool(self._accelerators) and asked != "float32")
        device_kind: DeviceKind = "cuda" if on_gpu else "host"
        self._check_devices(spec.gpus, device_kind)
        num_nodes = num_nodes or spec.nodes.least
        most = min(spec.gpus.most, self._num_devices(device_kind))
        num_devices = num_devices or most
        if free is not None:
            num_free = sum(name.partition(":")[0] == device_kind for name in free)
            num_devices = max(spec.gpus.least, min(most, num_free))
        limit_bytes, num_threads, differ = self._arena_limit_bytes, self._num_threads, False
        if device_kind == "cuda":
            # Of a range the largest, so that what is planned for one number of them holds for the others.
            _check_names(spec.gpus, self._accelerators[:most])
            chosen = gpus or self._accelerators[:num_devices]
            within = self._accelerators if spec.gpus.is_range else chosen
            limit_bytes = usable_device_bytes(min(gpu.memory_bytes for gpu in within))
            num_updating, num_threads = max(1, num_threads // num_devices), max(1, num_threads // most)
            differ = len({gpu.name for gpu in within}) > 1
        else:
            num_updating = num_threads = max(1, num_threads // self._settings.host_devices)
        # fp32 on the host although bf16 may be faster: a job's result must not depend on the CPU that it happens to run
        # on.
        compute_dtype: ComputeDtype = DEFAULT_COMPUTE_DTYPE[device_kind] if asked == "auto" else asked
        if device_kind == "cuda" and compute_dtype == "float32":
            what = (
                "train.compute_dtype is float32, which only the host device computes in; use bfloat16 or auto, or "
                "device: host"
            )
            raise InvalidSpec.of("train.compute_dtype", what)
        execution = Execution(
            device_kind=device_kind,
            compute_dtype=compute_dtype,
            device_limit_bytes=limit_bytes,
            gpu=gpu_uuids(gpus) if device_kind == "cuda" else "",
            num_ranks=num_nodes * num_devices,
            num_nodes=num_nodes,
            deals_lanes=differ and spec.nodes.most == 1,
            num_threads=num_threads,
            optimizer_threads=update_threads(num_updating, device_kind=device_kind),
            numa_interleave=self._settings.numa_interleave,
            numa_nodes=numa_nodes_of(gpus, self._numa_nodes)
            if self._settings.numa_interleave and num_nodes == 1
            else (),
        )
        return with_spec(execution, spec)

    def _check_devices(self, gpus: Span, kind: DeviceKind) -> None:
        """Raises InvalidSpec where a job asks for more devices of the kind than this node has."""
        if gpus.least <= (num := self._num_devices(kind)):
            return
        if kind == "cuda":
            what = f"this node has {num} GPU{'' if num == 1 else 's'} that a worker's torch can use; use gpus: {num}"
        else:
            divided = "one device" if num == 1 else f"divided into {num} devices"
            what = f"this node's processors are {divided}; use gpus: {num}, or ask an admin to set host_devices"
        raise InvalidSpec.of("gpus", f"gpus is {gpus.plain} and {what}")

    def _warnings(self, case: Case, execution: Execution) -> list[str]:
        """What is likely not meant although it fits."""
        warnings = spec_warnings(case.spec, case.folder, num_steps=case.num_steps, estimated=case.is_estimated)
        warnings += of_lanes(case.spec, execution)
        warnings += space_warnings(DriveLayout(case.folder.layout, execution.drives))
        if case.spec.nodes.is_range and execution.wire != "float32":
            warnings.append(
                f"nodes is {case.spec.nodes.plain} and train.wire is {execution.wire}, with which the result depends "
                "on the number of nodes that the job gets; use train.wire: float32 for the same result on any number"
            )
        if execution.num_nodes > 1 and case.network_bytes_per_s is None:
            warnings.append(
                "the speed of the network between the nodes is not known, so the prediction leaves it out; an admin "
                "can set fleet_network_gbps"
            )
        if (execution.device_kind, execution.compute_dtype) == ("host", "bfloat16") and not self._has_bf16:
            warnings.append(
                "this node's CPU has no bf16 instructions, so train.compute_dtype: bfloat16 is slower on it than "
                "float32"
            )
        return warnings

    def _hint(self, case: Case, execution: Execution, prediction: StepPrediction | None) -> str:
        """What would make the job faster."""
        if execution.device_kind == "cuda":
            return keeping_everything(case.folder.layout, execution)
        if prediction is None or case.spec.train.compute_dtype != "auto":
            return ""
        grad_bytes = ELEMENT_BYTES["bfloat16"] if execution.grad_bytes else 0
        in_bf16 = dataclasses.replace(execution, compute_dtype="bfloat16", grad_bytes=grad_bytes)
        rates = self._rates().get(rates_name("host", "bfloat16"))
        faster = dataclasses.replace(case, rates=rates).prediction(in_bf16)
        if faster is None or prediction.step_s < _LEAST_GAIN * faster.step_s:
            return ""
        gain = prediction.step_s / faster.step_s
        return (
            f"train.compute_dtype: bfloat16 is predicted to be {gain:.1f} times as fast on this CPU, at the "
            "precision of bf16"
        )


def _check_names(asked: Span, gpus: Sequence[Accelerator]) -> None:
    """Raises InvalidSpec where a job has several GPUs and the driver names no UUIDs for its ranks to find them by."""
    if len(gpus) > 1 and not gpu_uuids(gpus):
        what = (
            f"gpus is {asked.plain}, and the driver does not name a UUID of each of these GPUs, as with parts of a GPU "
            "(MIG): all processes would compute on the first one; use gpus: 1"
        )
        raise InvalidSpec.of("gpus", what)
