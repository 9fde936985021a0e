"""What the machine of a GPU bench can do: the link's GB/s, and how much memory there is on host and device."""

from __future__ import annotations

import importlib.util
import statistics
import time
from pathlib import Path

import torch

from horizon_server.planning.ledger import DeviceKind

LINK_BYTES = 1 << 30
_DEVICE_SHARE = 0.92
"""Of the device's memory: the rest is the context's, and lost between the allocator's blocks."""


def device_limit_bytes(kind: DeviceKind) -> float:
    """What a plan may take on the device."""
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


def link_line() -> str:
    """GB/s of the link in each direction alone and in both at once, between pinned host memory and the device."""
    host = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    device = [torch.empty(LINK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]

    def seconds(*, up: bool, down: bool) -> float:
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            if up:
                with torch.cuda.stream(streams[0]):
                    device[0].copy_(host[0], non_blocking=True)
            if down:
                with torch.cuda.stream(streams[1]):
                    host[1].copy_(device[1], non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start_s)
        return statistics.median(times[1:])

    gigabytes = LINK_BYTES / 1e9
    alone_up, alone_down = gigabytes / seconds(up=True, down=False), gigabytes / seconds(up=False, down=True)
    both = 2 * gigabytes / seconds(up=True, down=True)
    return f"link: h2d {alone_up:.1f} GB/s, d2h {alone_down:.1f} GB/s, both at once {both:.1f} GB/s together"


def deepspeed_line() -> str:
    """What is known of DeepSpeed here; its ZeRO-3 offload is not part of this bench yet."""
    found = importlib.util.find_spec("deepspeed") is not None
    return f"DeepSpeed ZeRO-3 offload: not measured ({'installed, but this script does not run it' if found else 'not installed'})"


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
