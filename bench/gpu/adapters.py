"""Stage: adapters next to a frozen base, in bf16 and in 4 bits. Its store takes the place of the whole model's, so it
comes late."""

from __future__ import annotations

import os

from bench.gpu.curve import run_points
from bench.gpu.report import Report
from bench.gpu.shapes import SIZES
from bench.gpu.steps import choose_base
from bench.gpu.task import Task


def run(task: Task, report: Report) -> None:
    """The curve's tables, for adapters; useful operations are 4 per frozen parameter and token."""
    for fd in task.plane_fds.values():
        os.ftruncate(fd, 0)
    run_points(
        task, report, SIZES[task.device].adapter_points, lambda base: choose_base(task, base), "The curve, adapters"
    )
