"""This machine: its memory and accelerators, and how fast it is. Speed is measured in a child process, because that loads torch; it is
kept in the state folder and used by every plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml
import structlog

from horizon_server.children.child import Limits, run_child
from horizon_server.control_groups import CGROUP_ROOT, OWN_CGROUP, memory_limits
from horizon_server.durable import replace_file
from horizon_server.errors import HorizonError, WorkerFailed
from horizon_server.planning.ledger import DeviceKind
from horizon_server.planning.rates import DeviceRates
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

_FILE_VERSION = 2
_CPU_INFO = Path("/proc/cpuinfo")
_PROBE = "import sys, torch; sys.exit(not torch.cuda.is_available())"
_PROBE_TIMEOUT_S = 120.0

RatesByDevice = Mapping[DeviceKind, DeviceRates]


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU."""

    index: int
    name: str
    memory_bytes: int


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
    with contextlib.suppress(OSError):
        for line in _CPU_INFO.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


async def find_accelerators() -> tuple[Accelerator, ...]:
    """Return the GPUs that the NVIDIA driver lists; none without a driver, or when it does not answer within ten seconds."""

    def listed() -> tuple[Accelerator, ...]:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return tuple(
                Accelerator(
                    index=index,
                    name=pynvml.nvmlDeviceGetName(handle),
                    memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
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
    found: tuple[Accelerator, ...], environment: Mapping[str, str]
) -> tuple[Accelerator, ...]:
    """Return those of `found` that a worker started with `environment` can compute on: none if its torch finds no CUDA device."""
    if not found:
        return ()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _PROBE, env=dict(environment), stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        code = await asyncio.wait_for(process.wait(), timeout=_PROBE_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        return ()
    return found if code == 0 else ()


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What rates depend on; where any of it has changed, they are measured again."""

    cpu: str
    num_cpus: int
    num_threads: int
    accelerators: tuple[str, ...]
    version: str = VERSION

    @classmethod
    def of(cls, accelerators: Sequence[Accelerator], *, num_threads: int) -> Machine:
        """This machine, with the accelerators that a worker's torch can use and a worker's threads."""
        names = tuple(accelerator.name for accelerator in accelerators)
        return cls(cpu=cpu_model(), num_cpus=available_cpus(), num_threads=num_threads, accelerators=names)

    @property
    def device_kinds(self) -> tuple[DeviceKind, ...]:
        """What a job can be computed on here."""
        return ("host", "cuda") if self.accelerators else ("host",)


class RateBook:
    """The rates of one machine, in one file. Thread: any; a reader sees the old file or the new one, whole."""

    def __init__(self, state_dir: Path, machine: Machine) -> None:
        self.path = state_dir / RATES_FILE
        self.machine = machine

    def read(self) -> RatesByDevice:
        """Return what was measured on this very machine; nothing where that is missing, stale or unreadable."""
        try:
            plain = json.loads(self.path.read_bytes())
            if plain["version"] != _FILE_VERSION or plain["machine"] != self._machine():
                return {}
            return {kind: DeviceRates.from_mapping(plain["devices"][kind]) for kind in self.machine.device_kinds}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def write(self, rates: RatesByDevice) -> None:
        """Keep the rates, in place of what was there.

        Raises:
            OSError: the folder cannot be written.
        """
        devices = {kind: dataclasses.asdict(found) for kind, found in rates.items()}
        document = {"version": _FILE_VERSION, "machine": self._machine(), "devices": devices}
        replace_file(self.path, json.dumps(document, indent=1) + "\n")

    def _machine(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self.machine)))
        return plain


class IdleMeasurement:
    """Measures a machine whose rates are unknown, once its queue has been empty for a while. Cancelling it ends the child.

    Thread: belongs to one event loop.
    """

    def __init__(self, book: RateBook, *, environment: Mapping[str, str], idle_s: float = IDLE_S) -> None:
        self._book = book
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
        needed_bytes = max(MEASURE_BYTES[kind] for kind in machine.device_kinds)
        if host_memory().available_bytes < needed_bytes:
            log.info("too little memory is free to measure the machine's speed", needed_bytes=needed_bytes)
            return
        try:
            rates = await measure_rates(machine, environment=self._environment)
            await asyncio.to_thread(self._book.write, rates)
        except (HorizonError, OSError) as error:
            self._failed = True
            log.warning("the machine's speed could not be measured; plans carry no prediction", why=str(error))
            return
        log.info("measured the machine's speed", file=str(self._book.path))


async def measure_rates(machine: Machine, *, environment: Mapping[str, str]) -> RatesByDevice:
    """Measure every kind of device of this machine, one after the other, each in a child process of its own.

    Raises:
        WorkerFailed, Stalled, IoFailed, OutOfMemory: when a child fails or takes too long.
    """
    limits = Limits(wall_s=MEASURE_TIMEOUT_S)
    rates: dict[DeviceKind, DeviceRates] = {}
    for kind in machine.device_kinds:
        request = {"device": kind, "num_threads": machine.num_threads}
        who = f"the measurement of {kind}"
        answer = await run_child(
            "horizon_server.worker.measure", request, who=who, environment=environment, limits=limits
        )
        try:
            rates[kind] = DeviceRates.from_mapping(answer)
        except (ValueError, KeyError, TypeError) as error:
            raise WorkerFailed(f"{who} answered with something that is not a rate: {error!r}") from error
    return rates
