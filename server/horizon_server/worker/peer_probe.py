"""What several devices of this node do at once: copies up every link together, and what the devices get from each
other. Each device has a process, as in a job of several; what is timed is what the engine does."""

from __future__ import annotations

import multiprocessing
import tempfile
from contextlib import closing
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from horizon_server.children.entry import end_with_parent
from horizon_server.codec import from_plain, to_plain
from horizon_server.engine.device import device_for
from horizon_server.engine.ranks import Meeting, Ranks
from horizon_server.planning.rates import PeerRates
from horizon_server.records.execution import DeviceKind, Execution

_ELEMENTS = 1 << 24
"""Of a unit, of which each device has its part."""
_NUM_RUNS = 4


def measure_peers(kind: DeviceKind, gpus: list[str], num_devices: int, *, num_elements: int = _ELEMENTS) -> PeerRates:
    """Measure `num_devices` devices at once; `gpus` are the UUIDs of those that cuda means, in torch's order.

    Raises:
        ProcessRaisedException, ProcessExitedException: one of their processes failed; the others are ended.
    """
    results: SimpleQueue[dict[str, Any]] = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"{folder}/ranks"
        arguments = (kind, gpus, num_devices, num_elements, meeting, results)
        spawn(_measure, arguments, nprocs=num_devices)  # type: ignore[no-untyped-call]
        return from_plain(PeerRates, results.get())


def _measure(
    rank: int,
    kind: DeviceKind,
    gpus: list[str],
    num_devices: int,
    num_elements: int,
    meeting: str,
    results: SimpleQueue[dict[str, Any]],
) -> None:
    """One rank; the first one puts the result into the queue."""
    end_with_parent()
    execution = Execution(device_kind=kind, num_ranks=num_devices, lanes=num_devices)
    with closing(device_for(kind, num_threads=1, gpu=gpus[rank] if gpus else "")) as device:
        ranks = Ranks.join(rank, Meeting(file=Path(meeting)), execution, shared_fd=-1)
        part = num_elements // num_devices
        host = device.allocate_host("staging", part * num_devices, device.compute_dtype)
        whole = device.allocate("weights", part * num_devices, device.compute_dtype)
        sent, received = (device.allocate("gradients", part * num_devices, torch.float32) for _ in range(2))
        for tensor in (host, whole, sent, received):
            tensor.zero_()
        parts, sizes = [slice(at * part, (at + 1) * part) for at in range(num_devices)], [part] * num_devices
        others = part * (num_devices - 1)

        def together() -> None:
            device.upload(host, whole)

        def gather() -> None:
            work = partial(ranks.complete, whole, parts, "h2d")
            device.h2d.submit(work, num_bytes=others * whole.itemsize)

        def exchange() -> None:
            work = partial(ranks.exchange, received, sent, sizes, sizes, "h2d")
            device.h2d.submit(work, num_bytes=others * sent.itemsize)

        def rate(submit: Any) -> float:
            best = 0.0
            # The first run makes connections and finds its memory.
            for number in range(1 + _NUM_RUNS):
                ranks.meet()
                submit()
                device.h2d.record().wait()
                device.raise_failure()
                use = device.take_use().h2d
                # The slowest device's: a job waits for it.
                slowest = ranks.meet([use.bytes / use.busy_s]).amin().item()
                best = max(best, slowest if number else 0.0)
            return best

        found = PeerRates(
            num_devices=num_devices,
            together_bytes_per_s=rate(together),
            gather_bytes_per_s=rate(gather),
            exchange_bytes_per_s=rate(exchange),
        )
        device.free_host(host)
        if ranks.leads:
            results.put(to_plain(found))
        ranks.meet()
