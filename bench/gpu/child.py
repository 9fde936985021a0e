"""The process that runs stages: takes a module and a task per line of standard input and answers each on a descriptor
of its own.

What a stage raises ends the process; the parent reports the traceback and continues with a new one.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys

from bench.gpu.report import Report
from bench.gpu.task import Task


def main() -> None:
    """Run stages until the input ends."""
    from horizon_server.worker import let_launchers_run

    let_launchers_run()
    with os.fdopen(int(sys.argv[1]), "w", encoding="ascii") as answers:
        for line in sys.stdin:
            module, text = json.loads(line)
            task = Task.from_json(text)
            importlib.import_module(module).run(task, Report.of(task))
            _forget(task)
            print("done", file=answers, flush=True)


def _forget(task: Task) -> None:
    """Free what the stage has left on the device: the next one may be tests in a process of their own."""
    gc.collect()
    if task.device == "cuda" and "torch" in sys.modules:
        import torch

        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
