"""What the machine is: its processor, and how much memory there is on host and device. Without torch until a device is
asked for."""

from __future__ import annotations

import platform
from pathlib import Path

from horizon_server.records.execution import DeviceKind
from horizon_server.store.cpus import available_cpus

_DEVICE_SHARE = 0.92
"""Of the device's memory: the rest is the context's, and lost between the allocator's blocks."""


def device_limit_bytes(kind: DeviceKind) -> float:
    """What a plan may take on the device."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory * _DEVICE_SHARE if kind == "cuda" else 1 << 30


def free_host_bytes(*, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Host memory a process may still take: what the kernel calls available, below the control group's limit."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text("utf-8").splitlines())
    free_bytes = int(fields["MemAvailable"].split()[0]) << 10
    for folder, limit_name, used_name in (
        (cgroup, "memory.max", "memory.current"),
        (cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None:
            free_bytes = min(free_bytes, limit - max(0, used - _page_cache_bytes(folder)))
    return max(0, free_bytes)


def processor_line() -> str:
    """Processor, usable cores and memory in one line."""
    models = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory_kib = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return f"{models[0] if models else platform.machine()}, {available_cpus()} cores, {memory_kib / 2**20:.0f} GiB"


def first_line(path: str) -> str:
    """The first line of a file of the system, empty where there is none."""
    return next(iter(_lines(path)), "").strip()


def status_bytes(field: str) -> int:
    """A size of this process as the kernel counts it, such as VmRSS."""
    found = next(line for line in _lines("/proc/self/status") if line.startswith(f"{field}:"))
    return int(found.split()[1]) << 10


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _page_cache_bytes(folder: Path) -> int:
    """What a group holds of files, which it gives up when memory is wanted."""
    try:
        lines = (folder / "memory.stat").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("active_file ", "inactive_file ")))


def _number(file: Path) -> int | None:
    try:
        text = file.read_text("utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
