"""The worker of `bench.sharing`: the real one, on a host device whose link, and the speed of whose optimizer, can be
emulated. What its compute queue did is kept.

`bench-worker.json` in the state folder has the options; the intervals are written next to the job's checkpoints when it
ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from horizon_server.engine import optimizer
from horizon_server.engine.device import TORCH_DTYPE
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.device.timeline import Trace
from horizon_server.planning.bandwidth import adamw_bytes_per_parameter
from horizon_server.store.host_store import HostStore
from horizon_server.worker import training
from horizon_server.worker.__main__ import work as train
from horizon_server.worker_link.worker_end import WorkerEnd, serve_worker

OPTIONS_FILE, WORK_FILE = "bench-worker.json", "compute-{attempt}.json"
_MOST_SPANS = 2_000_000


def host_device(
    kind: str,
    *,
    compute_dtype: str,
    link_bytes_per_s: float | None,
    own: Trace,
    trace: object,
    gpu: str,
    **options: Any,
) -> HostDevice:
    """Make a worker's device: what `device_for` makes, with a link and a trace of this bench."""
    assert kind == "host" and trace is None and not gpu
    dtype = TORCH_DTYPE[compute_dtype]  # type: ignore[index]
    return HostDevice(compute_dtype=dtype, link_bytes_per_s=link_bytes_per_s, trace=own, **options)


def slow_update(
    store: HostStore, unit_index: int, *arguments: Any, update: Callable[..., None], bytes_per_s: float, **more: Any
) -> None:
    """Update a unit no faster than host memory of that speed would let it."""
    # On a processor that computes too, the optimizer is never what a step waits for; next to a GPU it is.
    started_s = time.perf_counter()
    update(store, unit_index, *arguments, **more)
    wanted_s = adamw_bytes_per_parameter(4) * store.layout.units[unit_index].num_elements / bytes_per_s
    time.sleep(max(0.0, wanted_s - (time.perf_counter() - started_s)))


def work(request: Any, link: WorkerEnd) -> dict[str, str]:
    """Run one attempt as the real worker does, then write down when it computed."""
    job = Path(request["checkpoints"]).parent
    options = json.loads((job.parents[1] / OPTIONS_FILE).read_text("utf-8"))
    trace = Trace(max_spans=_MOST_SPANS)
    training.device_for = partial(  # type: ignore[attr-defined]
        host_device, own=trace, link_bytes_per_s=options["link_bytes_per_s"]
    )
    if rate := options["update_bytes_per_s"]:
        optimizer.update_unit = partial(slow_update, update=optimizer.update_unit, bytes_per_s=rate)  # type: ignore[attr-defined]
    try:
        return train(request, link)
    finally:
        spans = [span for span in trace.spans() if span.queue == "compute" and span.waits_for is None]
        intervals = [(span.start_s, span.end_s, span.label) for span in spans]
        (job / WORK_FILE.format(attempt=request["attempt"])).write_text(json.dumps(intervals), "utf-8")


if __name__ == "__main__":
    serve_worker(work, who="the worker")
