"""What the kernel's control groups, v1 and v2, say about this process: memory limits, CPU quotas, out-of-memory kills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP = Path("/proc/self/cgroup")

_NO_LIMIT = 2**60
"""Control group v1 writes a huge number where there is no limit."""


def memory_limits(root: Path, own_cgroup: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used without page cache) for every group with a limit, from this process's own up to the root."""
    for folder in _groups("memory", root, own_cgroup):
        limit = (_read(folder / "memory.max") or _read(folder / "memory.limit_in_bytes")).strip()
        if limit.isdigit() and int(limit) < _NO_LIMIT:
            used = (_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")).strip()
            fields = dict(line.split() for line in _read(folder / "memory.stat").splitlines() if len(line.split()) == 2)
            # The kernel drops page cache before it refuses memory, so it counts as free.
            page_cache = int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0))
            yield int(limit), max(0, int(used or 0) - page_cache)


def cpu_quota(root: Path, own_cgroup: Path) -> float | None:
    """CPUs that the tightest group allows, None without a quota."""
    quotas = []
    for folder in (root, root / "cpu", *_groups("cpu", root, own_cgroup)):
        v1 = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        quota = _read(folder / "cpu.max").split() or v1
        if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
            quotas.append(int(quota[0]) / int(quota[1]))
    return min(quotas, default=None)


def oom_kills() -> int:
    """Return how often the out-of-memory killer struck: in this control group where it counts, else on the machine."""
    # Version 2 is the line without controllers; version 1 counts no kills.
    paths = [line.split(":", 2)[2] for line in _read(OWN_CGROUP).splitlines() if not line.split(":", 2)[1]]
    for file in (*(CGROUP_ROOT / path.lstrip("/") / "memory.events" for path in paths), Path("/proc/vmstat")):
        for entry in _read(file).splitlines():
            if entry.startswith("oom_kill "):
                return int(entry.split()[1])
    return 0


def _groups(controller: str, root: Path, own_cgroup: Path) -> Iterator[Path]:
    """Yield the folders of the process's own group and of all above it: a limit on any of them holds."""
    for line in _read(own_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        folder = top / path.lstrip("/")
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError:
        return ""
