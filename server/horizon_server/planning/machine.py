"""Facts about the machine: memory limits along the control-group chain, the processor's name, accelerators."""

from __future__ import annotations

import asyncio
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

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


def oom_kills() -> int:
    """Return how often the kernel's out-of-memory killer struck: in this control group where it counts, else on the machine."""
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers:
            continue
        for entry in _read(_CGROUP_ROOT / path.lstrip("/") / "memory.events").splitlines():
            if entry.startswith("oom_kill "):
                return int(entry.split()[1])
    for entry in _read(Path("/proc/vmstat")).splitlines():
        if entry.startswith("oom_kill "):
            return int(entry.split()[1])
    return 0


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
    """Ask nvidia-smi where there is one; torch would tell too, but the daemon never loads it."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    process = await asyncio.create_subprocess_exec(
        tool, "--query-gpu=index,name,memory.total", "--format=csv,noheader,nounits",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout=10)
    except TimeoutError:
        process.kill()
        return ()
    rows = [[cell.strip() for cell in line.split(",")] for line in output.decode("utf-8", "replace").splitlines()]
    return tuple(
        Accelerator(index=int(row[0]), name=row[1], memory_bytes=int(row[2]) * 2**20)
        for row in rows
        if len(row) == 3 and row[0].isdigit() and row[2].isdigit()
    )


async def usable_accelerators(environment: Mapping[str, str]) -> tuple[Accelerator, ...]:
    """Return the accelerators that a worker started with `environment` can compute on: none where its torch finds no CUDA device."""
    found = await find_accelerators()
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
