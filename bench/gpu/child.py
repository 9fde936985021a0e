"""The process of one stage: `python -m bench.gpu.child MODULE TASK`. What it raises ends it; the parent reports the traceback.

A process of its own, because an error of the driver, a crash or an endless wait must not take the other stages along.
"""

from __future__ import annotations

import importlib
import sys

from bench.gpu.report import Report
from bench.gpu.task import Task


def main() -> None:
    """Run the stage."""
    module, text = sys.argv[1:]
    task = Task.from_json(text)
    importlib.import_module(module).run(task, Report.of(task))


if __name__ == "__main__":
    main()
