"""The real worker, in a process that may take no more memory from a certain step on: `python -m
tests.support.limited_worker REQUEST`.

A job named `limited-2-5` meets the limit at its step 5, in its first two attempts. One named `held-2-5` waits there to
be killed.
"""

from __future__ import annotations

import ctypes
import re
import resource
import time
from pathlib import Path
from typing import Any

from horizon_server.worker import __main__ as worker
from horizon_server.worker_link.worker_end import WorkerEnd, serve_worker

_M_MMAP_THRESHOLD = -3
# So small that not all tensors of a step fit, and enough for what Python and threads allocate on the way to the error.
_LEFT_BYTES = 256 * 1024
_HELD_AT_MOST_S = 600.0


def _take_no_more() -> None:
    """Refuse this process more private memory than it has. Set in the process itself: nothing can be allocated before
    it holds."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"))
    assert found is not None
    limit = int(found[1]) * 1024 + _LEFT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def work(request: Any, link: WorkerEnd) -> dict[str, str]:
    """Run one attempt."""
    named = re.fullmatch(r"(limited|held)-(\d+)-(\d+)", request["spec"]["name"])
    if named is not None and request["attempt"] <= int(named[2]):
        # Else the C library would serve a step's tensors from what the step before it has freed.
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 * 1024)
        from horizon_server.engine.trainer import Trainer

        train_step = Trainer.train_step

        def disturbed(trainer: Trainer, *step: Any) -> Any:
            if trainer.step == int(named[3]) - 1 and named[1] == "limited":
                _take_no_more()
            elif trainer.step == int(named[3]) - 1:
                time.sleep(_HELD_AT_MOST_S)
            return train_step(trainer, *step)

        Trainer.train_step = disturbed  # type: ignore[method-assign, assignment]
    return worker.work(request, link)


if __name__ == "__main__":
    serve_worker(work, who="the worker")
