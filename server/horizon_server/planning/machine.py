"""Facts about the machine: memory limits along the control-group chain, the processor's name, accelerators."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pynvml

from horizon_server.control_groups import CGROUP_ROOT, OWN_CGROUP, memory_limits

_CPU_INFO = Path("/proc/cpuinfo")
_PROBE = "import sys, torch; sys.exit(not torch.cuda.is_available())"
_PROBE_TIMEOUT_S = 120.0


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
