"""Facts about the machine: memory limits along the control-group chain, the processor's name, accelerators."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import pynvml

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CPU_INFO = Path("/proc/cpuinfo")
_PROBE = "import sys, torch; sys.exit(not torch.cuda.is_available())"
_PROBE_TIMEOUT_S = 120.0
_NO_LIMIT = 2**60
"""Control group v1 writes a huge number where there is no limit."""


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


def host_memory(cgroup_root: Path = _CGROUP_ROOT) -> HostMemory:
    """Return the machine's memory, or the tightest control-group limit above this process where that is lower."""
    machine = psutil.virtual_memory()
    limit, available = int(machine.total), int(machine.available)
    for group_limit, group_used in _cgroup_limits(cgroup_root):
        limit = min(limit, group_limit)
        available = min(available, max(0, group_limit - group_used))
    return HostMemory(limit_bytes=limit, available_bytes=available)


def _cgroup_limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used without page cache) for every control group from this process's own up to the root, v1 and v2."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        folder = top / path.lstrip("/")
        while folder.is_relative_to(top):
            limit, used = (_read(folder / name).strip() for name in names)
            if limit.isdigit() and int(limit) < _NO_LIMIT:
                yield int(limit), max(0, int(used or 0) - _reclaimable_bytes(folder))
            if folder == top:
                break
            folder = folder.parent


def _reclaimable_bytes(folder: Path) -> int:
    fields = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if len(line.split()) == 2)
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""


def cpu_model() -> str:
    """Return the processor's name as the kernel has it, or the architecture's where it has none."""
    names = [line.partition(":")[2].strip() for line in _read(_CPU_INFO).splitlines() if line.startswith("model name")]
    return names[0] if names else platform.machine()


async def find_accelerators() -> tuple[Accelerator, ...]:
    """Return the GPUs that the NVIDIA driver lists; none without a driver, or when it does not answer within ten seconds."""
    # A driver that hangs would hang this thread, so the wait is bounded and the daemon starts without GPUs.
    with contextlib.suppress(TimeoutError, pynvml.NVMLError):
        return await asyncio.wait_for(asyncio.to_thread(_listed_gpus), timeout=10)
    return ()


def _listed_gpus() -> tuple[Accelerator, ...]:
    pynvml.nvmlInit()
    try:
        handles = [(index, pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Accelerator(
                index=index,
                name=pynvml.nvmlDeviceGetName(handle),
                memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for index, handle in handles
        )
    finally:
        pynvml.nvmlShutdown()


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
