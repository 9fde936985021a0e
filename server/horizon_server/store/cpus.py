"""How many CPUs this process may really use: the affinity mask and the cgroup quota, whichever is less.

Owns the size of the store's thread pools. Must not look at OMP_NUM_THREADS, which launchers set to 1 for other
reasons.
"""

from __future__ import annotations

import math
import os
from pathlib import Path


def available_cpus(*, cgroup_root: Path = Path("/sys/fs/cgroup"), own_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """CPUs this process may run on, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(cgroup_root, own_cgroup)
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def _cgroup_quota(root: Path, own_cgroup: Path) -> float | None:
    quotas = [quota for folder in _cgroup_folders(root, own_cgroup) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _cgroup_folders(root: Path, own_cgroup: Path) -> list[Path]:
    """The process's cgroup and all above it, for v2 and for the cpu controller of v1; a limit on any of them binds."""
    folders = [root, root / "cpu"]
    for line in _read(own_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        base = root if not controllers else root / "cpu"
        if controllers and "cpu" not in controllers.split(","):
            continue
        parts = [part for part in path.split("/") if part]
        folders += [base.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]
    return folders


def _quota_of(folder: Path) -> float | None:
    v2 = _read(folder / "cpu.max").split()
    if len(v2) == 2 and v2[0].isdigit():
        return int(v2[0]) / int(v2[1])
    quota_us, period_us = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
    return int(quota_us) / int(period_us) if quota_us.isdigit() and period_us.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii")
    except OSError:
        return ""
