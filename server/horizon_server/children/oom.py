"""How often the kernel has killed a process for lack of memory."""

from __future__ import annotations

from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")


def oom_kills() -> int:
    """Return how often the out-of-memory killer struck: in this control group where it counts, else on the machine."""
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers:
            continue
        for entry in _lines(_CGROUP_ROOT / path.lstrip("/") / "memory.events"):
            if entry.startswith("oom_kill "):
                return int(entry.split()[1])
    for entry in _lines(Path("/proc/vmstat")):
        if entry.startswith("oom_kill "):
            return int(entry.split()[1])
    return 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8").splitlines()
    except OSError:
        return []
