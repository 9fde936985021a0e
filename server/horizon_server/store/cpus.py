"""How many CPUs this process may really use: the size of thread pools."""

from __future__ import annotations

import math
import os
from pathlib import Path

from horizon_server.control_groups import CGROUP_ROOT, OWN_CGROUP, cpu_quota

_LAUNCHING_CPUS = 4
"""Left to the threads that feed a GPU: the driver, compute's, autograd's, and one for the copies."""


def update_threads(num_cpus: int, *, device_kind: str) -> int:
    """Threads of the optimizer: all where the host computes, since the update then runs while nothing else can; fewer
    on cuda.

    There it runs during forward, and a launching thread that loses its core leaves the GPU idle for a time slice. The
    update is bound by memory, which half of the cores saturate.
    """
    return num_cpus if device_kind == "host" else max(num_cpus - _LAUNCHING_CPUS, (num_cpus + 1) // 2)


def available_cpus(*, cgroup_root: Path = CGROUP_ROOT, own_cgroup: Path = OWN_CGROUP) -> int:
    """CPUs this process may run on, at least 1: the affinity mask or the control groups' quota, whichever is less."""
    # OMP_NUM_THREADS is not asked: launchers set it to 1 for other reasons.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(cgroup_root, own_cgroup)
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))
