"""How many CPUs this process may really use: the size of thread pools."""

from __future__ import annotations

import math
import os
from pathlib import Path

from horizon_server.control_groups import CGROUP_ROOT, OWN_CGROUP, cpu_quota


def available_cpus(*, cgroup_root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP) -> int:
    """CPUs this process may run on, at least 1: the affinity mask or the control groups' quota, whichever is less."""
    # OMP_NUM_THREADS is not asked: launchers set it to 1 for other reasons.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(cgroup_root, own_cgroup)
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))
