"""This machine: its memory and accelerators, and how fast it is. Speed is measured in a child process, because that
loads torch; it is kept in the state folder and used by every plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml
import structlog

from horizon_server.children.child import ChildTask, Limits
from horizon_server.codec import from_json, from_plain, to_json
from horizon_server.control_groups import CGROUP_ROOT, OWN_CGROUP, memory_limits
from horizon_server.durable import replace_file
from horizon_server.errors import BadSetting, FieldViolation, HorizonError, OutOfMemory, WorkerDied, WorkerFailed
from horizon_server.planning.rates import DeviceRates
from horizon_server.records.execution import DEFAULT_COMPUTE_DTYPE, ComputeDtype, DeviceKind
from horizon_server.store import numa
from horizon_server.store.cpus import available_cpus
from horizon_server.version import VERSION

log = structlog.get_logger(__name__)

RATES_FILE = "rates.json"
# A child that takes longer is killed; on two slow processors it took 15 s.
MEASURE_TIMEOUT_S = 120.0

IDLE_S = 30.0
"""How long the queue must have been empty before the daemon measures by itself."""

# More than the child takes at its peak.
MEASURE_BYTES: Mapping[DeviceKind, int] = {"host": 3 << 30, "cuda": 5 << 30}
# Of each GPU's process, where several are measured at once.
_PEER_BYTES = 2 << 30

_CPU_INFO = Path("/proc/cpuinfo")
# As the kernel names them: Intel's and AMD's, and Arm's.
_BF16_INSTRUCTIONS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})
_MEASURE_MODULE = "horizon_server.worker.measure"
_SEARCH_TIMEOUT_S = 120.0

RatesByDevice = Mapping[str, DeviceRates]
"""By `rates_name`."""


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU."""

    index: int
    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class Gpu(Accelerator):
    """A GPU as the driver names it, for this node alone: what a worker is given to find it by, and where it is in the
    machine."""

    uuid: str = ""
    numa_node: int | None = None
    """That it is next to; None where the kernel does not say."""


def gpu_uuids(gpus: Sequence[Accelerator]) -> str:
    """Return the UUIDs of GPUs with commas between; nothing where one has none."""
    uuids = [gpu.uuid if isinstance(gpu, Gpu) else "" for gpu in gpus]
    return ",".join(uuids) if all(uuids) else ""


def numa_nodes_of(gpus: Sequence[Accelerator], with_memory: Collection[int]) -> tuple[int, ...]:
    """Return the node of each GPU, where they are next to all nodes together; else nothing: memory next to some alone
    would be slower than memory spread over all."""
    nodes = [gpu.numa_node for gpu in gpus if isinstance(gpu, Gpu) and gpu.numa_node is not None]
    return tuple(nodes) if len(nodes) == len(gpus) and len(set(nodes)) > 1 and set(nodes) == {*with_memory} else ()


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of host memory: the limit that holds for this process, and what is free below it."""

    limit_bytes: int
    available_bytes: int


def host_memory(cgroup_root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP) -> HostMemory:
    """Return the machine's memory, or the tightest control-group limit above this process where that is lower."""
    machine = psutil.virtual_memory()
    limit, available = int(machine.total), int(machine.available)
    for group_limit, group_used in memory_limits(cgroup_root, own_cgroup):
        limit = min(limit, group_limit)
        available = min(available, max(0, group_limit - group_used))
    return HostMemory(limit_bytes=limit, available_bytes=available)


def cpu_model() -> str:
    """Return the processor's name as the kernel has it, or the architecture's where it has none."""
    return _cpu_info("model name") or platform.machine()


def cpu_has_bf16() -> bool:
    """Return whether the processor multiplies bf16 matrices by itself; without that, bf16 is slower than fp32."""
    words = f"{_cpu_info('flags')} {_cpu_info('Features')}".split()
    return not _BF16_INSTRUCTIONS.isdisjoint(words)


def rates_name(kind: DeviceKind, dtype: ComputeDtype, gpu: str = "") -> str:
    """Return what the rates of a device that computes in a dtype are kept under: `host`, `host_bfloat16` or `cuda`; of
    a `gpu` that is of another kind than the node's first, `cuda` and its name."""
    name = kind if dtype == DEFAULT_COMPUTE_DTYPE[kind] else f"{kind}_{dtype}"
    return f"{name} {gpu}".rstrip()


def rates_of_gpus(rates: RatesByDevice, gpus: Sequence[Accelerator]) -> tuple[DeviceRates, ...]:
    """Return how fast each of these GPUs is; nothing where that is not known."""
    dtype = DEFAULT_COMPUTE_DTYPE["cuda"]
    first = rates.get(rates_name("cuda", dtype))
    return () if first is None else tuple(rates.get(rates_name("cuda", dtype, gpu.name), first) for gpu in gpus)


def _cpu_info(name: str) -> str:
    with contextlib.suppress(OSError):
        for line in _CPU_INFO.read_text("utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == name:
                return value.strip()
    return ""


async def find_accelerators() -> tuple[Gpu, ...]:
    """Return the GPUs that the NVIDIA driver lists; none without a driver, or when it does not answer within ten
    seconds."""

    def listed() -> tuple[Gpu, ...]:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return tuple(
                Gpu(
                    index=index,
                    name=pynvml.nvmlDeviceGetName(handle),
                    memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    uuid=pynvml.nvmlDeviceGetUUID(handle),
                    numa_node=numa.node_of_pci_device(pynvml.nvmlDeviceGetPciInfo(handle).busId),
                )
                for index, handle in enumerate(handles)
            )
        finally:
            pynvml.nvmlShutdown()

    # A driver that hangs would hang this thread, so the wait is bounded and the daemon starts without GPUs.
    with contextlib.suppress(TimeoutError, pynvml.NVMLError):
        return await asyncio.wait_for(asyncio.to_thread(listed), timeout=10)
    return ()


async def usable_accelerators(
    found: Sequence[Gpu], environment: Mapping[str, str], *, wanted: str | None = None
) -> tuple[Gpu, ...]:
    """Return those of `found` that a worker started with `environment` can compute on, in the order in which its torch
    finds them: none if it finds no CUDA device. With `wanted`, an index or a UUID, that one only.

    Raises:
        BadSetting: when the wanted one is not among them.
    """
    usable = await _in_the_order_of_torch(found, environment) if found else ()
    if wanted is None:
        return usable
    chosen = tuple(gpu for gpu in usable if wanted == str(gpu.index) or (gpu.uuid and gpu.uuid.startswith(wanted)))
    if len(chosen) != 1:
        known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in usable) or "none"
        what = f"setting gpu: {wanted!r} names {len(chosen)} of the GPUs that a worker's torch can use ({known})"
        violation = FieldViolation(field="gpu", description=what)
        raise BadSetting(f"{what}; give one index or UUID, or leave the setting out", violations=[violation])
    return chosen


async def _in_the_order_of_torch(found: Sequence[Gpu], environment: Mapping[str, str]) -> tuple[Gpu, ...]:
    task = ChildTask(
        module=_MEASURE_MODULE,
        who="the search for GPUs",
        environment=environment,
        limits=Limits(wall_s=_SEARCH_TIMEOUT_S),
    )
    try:
        uuids: list[str] = await task.run({"gpus": True})
    except HorizonError as error:
        log.warning("torch could not be asked for its GPUs; jobs run on the host", why=str(error)[:200])
        return ()
    # torch leaves the driver's prefix out.
    by_uuid = {gpu.uuid.removeprefix("GPU-"): gpu for gpu in found}
    ordered = tuple(by_uuid[uuid] for uuid in uuids if uuid in by_uuid)
    # Parts of a GPU (MIG) have UUIDs of their own, which the driver's list does not hold.
    return ordered or tuple(found if uuids else ())


async def why_broken(gpu: Accelerator, environment: Mapping[str, str]) -> str:
    """Return why a child cannot compute on a GPU; nothing where it can."""
    task = ChildTask(
        module=_MEASURE_MODULE,
        who="the trial of a GPU",
        environment=worker_environment(environment, "cuda", (gpu,)),
        limits=Limits(wall_s=_SEARCH_TIMEOUT_S),
    )
    try:
        return "" if await task.run({"computes": True}) else "its matrix product was wrong"
    except HorizonError as error:
        # A GPU whose memory other jobs have answers; and a child that was killed says nothing of the GPU.
        says_nothing = isinstance(error, OutOfMemory | WorkerDied) or "out of memory" in error.message
        return "" if says_nothing else error.message.strip().splitlines()[0][:200]


def worker_environment(
    environment: Mapping[str, str], kind: DeviceKind, gpus: Sequence[Accelerator] = ()
) -> dict[str, str]:
    """Return what a child that computes on `kind` is started with: for cuda, it sees only the GPUs that it is to use,
    in that order."""
    more: dict[str, str] = {}
    if kind == "cuda":
        # Rows of varying length would leave gaps in the allocator's blocks, which count against the limit but fit no
        # tensor. A choice of the administrator's wins, under torch's old name too.
        if not environment.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
            more["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        if uuids := gpu_uuids(gpus):
            more["CUDA_VISIBLE_DEVICES"] = uuids
    return {**environment, **more}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What rates depend on; where any of it has changed, they are measured again."""

    cpu: str
    num_cpus: int
    num_threads: int
    accelerators: tuple[str, ...]
    has_bf16: bool = False
    version: str = VERSION

    @classmethod
    def of(cls, accelerators: Sequence[Accelerator], *, num_threads: int) -> Machine:
        """This machine, with the accelerators that a worker's torch can use and a worker's threads."""
        names = tuple(accelerator.name for accelerator in accelerators)
        return cls(
            cpu=cpu_model(),
            num_cpus=available_cpus(),
            num_threads=num_threads,
            accelerators=names,
            has_bf16=cpu_has_bf16(),
        )

    @property
    def device_kinds(self) -> tuple[DeviceKind, ...]:
        """What a job can be computed on here."""
        return ("host", "cuda") if self.accelerators else ("host",)

    @property
    def measured(self) -> Mapping[str, tuple[DeviceKind, ComputeDtype]]:
        """What is measured here, by `rates_name`: every kind of device in its default dtype, bf16 where the CPU has it,
        and a GPU of each further name."""
        pairs = [(kind, DEFAULT_COMPUTE_DTYPE[kind]) for kind in self.device_kinds]
        pairs += [("host", "bfloat16")] if self.has_bf16 else []
        found = {rates_name(kind, dtype): (kind, dtype) for kind, dtype in pairs}
        for gpu in self.accelerators:
            if gpu != self.accelerators[0]:
                dtype = DEFAULT_COMPUTE_DTYPE["cuda"]
                found[rates_name("cuda", dtype, gpu)] = ("cuda", dtype)
        return found


@dataclass(frozen=True, kw_only=True)
class _Stored:
    """What the file has."""

    machine: Machine
    devices: RatesByDevice


class RateBook:
    """The rates of one machine, in one file. Thread: any; a reader sees the old file or the new one, whole."""

    def __init__(self, state_dir: Path, machine: Machine) -> None:
        self.path = state_dir / RATES_FILE
        self.machine = machine

    def read(self) -> RatesByDevice:
        """Return what was measured on this very machine; nothing where that is missing, stale or unreadable."""
        try:
            stored = from_json(_Stored, self.path.read_bytes())
            if stored.machine != self.machine:
                return {}
            return {name: stored.devices[name].checked() for name in self.machine.measured}
        except (OSError, ValueError, KeyError):
            return {}

    def write(self, rates: RatesByDevice) -> None:
        """Keep the rates, in place of what was there.

        Raises:
            OSError: the folder cannot be written.
        """
        replace_file(self.path, to_json(_Stored(machine=self.machine, devices=rates), indent=1) + "\n")


class IdleMeasurement:
    """Measures a machine whose rates are unknown, once its queue has been empty for a while. Cancelling it ends the
    child.

    Thread: belongs to one event loop.
    """

    def __init__(
        self,
        book: RateBook,
        *,
        environment: Mapping[str, str],
        gpus: Sequence[Accelerator] = (),
        idle_s: float = IDLE_S,
    ) -> None:
        self._book = book
        self._gpus = gpus
        self._environment = dict(environment)
        self._idle_s = idle_s
        self._failed = False

    async def __call__(self) -> None:
        """Wait, measure, keep. A failed measurement is logged once and not tried again by this daemon."""
        known = await asyncio.to_thread(self._book.read)
        if known or self._failed:
            return
        await asyncio.sleep(self._idle_s)
        machine = self._book.machine
        needed_bytes = max(
            *(MEASURE_BYTES[kind] for kind in machine.device_kinds), _PEER_BYTES * len(machine.accelerators)
        )
        if host_memory().available_bytes < needed_bytes:
            log.info("too little memory is free to measure the machine's speed", needed_bytes=needed_bytes)
            return
        try:
            rates = await measure_rates(machine, environment=self._environment, gpus=self._gpus)
            await asyncio.to_thread(self._book.write, rates)
        except (HorizonError, OSError) as error:
            self._failed = True
            log.warning("the machine's speed could not be measured; plans carry no prediction", why=str(error))
            return
        log.info("measured the machine's speed", file=str(self._book.path))


async def measure_rates(
    machine: Machine, *, environment: Mapping[str, str], gpus: Sequence[Accelerator] = ()
) -> RatesByDevice:
    """Measure every kind of device of this machine, one after the other, each in a child process of its own; `gpus` are
    what cuda means. Of several the first of each name is measured, and then what all do at once, in one more.

    Raises:
        WorkerFailed, Stalled, IoFailed, OutOfMemory: when a child fails or takes too long.
    """
    rates: dict[str, DeviceRates] = {}
    for name, (kind, dtype) in machine.measured.items():
        named = [gpu for gpu in gpus if name == rates_name(kind, dtype, gpu.name)]
        who, one = f"the measurement of {name}", worker_environment(environment, kind, (named or gpus)[:1])
        request = {"device": kind, "compute_dtype": dtype, "num_threads": machine.num_threads}
        answer = await _ask_child(request, who=who, environment=one)
        if name == "cuda" and len(gpus) > 1:
            peers = {"peers": kind, "num_devices": len(gpus)}
            several = worker_environment(environment, kind, gpus)
            try:
                answer["peers"] = await _ask_child(peers, who=f"{who} between devices", environment=several)
            except HorizonError as error:
                # Jobs of one device have their prediction all the same.
                log.warning("what the GPUs do at once could not be measured", why=str(error))
        try:
            rates[name] = from_plain(DeviceRates, answer).checked()
        except ValueError as error:
            raise WorkerFailed(f"{who} answered with something that is not a rate: {error!r}") from error
    return rates


async def _ask_child(request: Mapping[str, Any], *, who: str, environment: Mapping[str, str]) -> Any:
    limits = Limits(wall_s=MEASURE_TIMEOUT_S)
    return await ChildTask(module=_MEASURE_MODULE, who=who, environment=environment, limits=limits).run(request)
