"""The worker of `bench.giant_real`: the real one, which rests once it has said that a step is done, until it is killed.

`rest.json` next to its request has the step. Its updates end meanwhile, so what is in memory is of that step, whole.
"""

from __future__ import annotations

import json
import time
from typing import Any

from horizon_server.children.entry import Line
from horizon_server.events import StepDone
from horizon_server.worker.__main__ import work as train
from horizon_server.worker_link.worker_end import WorkerEnd, serve_worker

REST_FILE = "rest.json"
# Longer than anybody waits to kill it.
_REST_S = 3600.0


def work(request: Any, link: WorkerEnd) -> dict[str, str]:
    """Run one attempt as the real worker does, until its step to rest after."""
    last_step = json.loads((link.request_file.parent / REST_FILE).read_text("utf-8"))
    send = link.send

    def send_and_rest(line: Line) -> None:
        send(line)
        if isinstance(line, StepDone) and line.step == last_step:
            time.sleep(_REST_S)

    link.send = send_and_rest  # type: ignore[method-assign]
    return train(request, link)


if __name__ == "__main__":
    serve_worker(work, who="the worker")
