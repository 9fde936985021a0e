"""The entry of the further ranks of a worker: `python -m horizon_server.worker.rank REQUEST --rank N`, started by the
first rank (`worker.rank_processes`). A rank has a device and a trainer that follows the first one's; orders, turns,
data and checkpoints are the first one's alone."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from horizon_server.children.entry import Answer, Failure, encode_line, end_of, end_with_parent
from horizon_server.codec import from_plain
from horizon_server.errors import OutOfMemory
from horizon_server.imports import seldom_collecting
from horizon_server.network import parse_address
from horizon_server.store import numa
from horizon_server.store.host_store import HostStore
from horizon_server.worker import let_launchers_run
from horizon_server.worker_link.request import WorkerRequest

# The modules that load torch and transformers.
with seldom_collecting():
    import torch

    from horizon_server.engine.compiled.layers import CompiledLayers
    from horizon_server.engine.compiled.library import CodeLibrary
    from horizon_server.engine.device import device_for
    from horizon_server.engine.divided_store import DividedStore
    from horizon_server.engine.ranks import Call, Meeting, Ranks
    from horizon_server.engine.trainer import Trainer
    from horizon_server.worker.compilation import compile_request, target_of
    from horizon_server.worker.set_up import Homes, attached_store, gpu_of_rank, template_of


def work(plain: Any, meeting: Meeting, rank: int, shared_fd: int) -> None:
    """Follow the first rank until it closes its trainer."""
    let_launchers_run()
    request = from_plain(WorkerRequest, plain)
    execution = request.plan.execution
    place = rank % execution.ranks_per_node
    _, template = template_of(request)
    homes = Homes(execution, template.layout)
    # What it pins by itself comes from its own node, where that is known.
    if execution.numa_interleave and not homes.nodes:
        numa.interleave()
    homes.run_rank(place)
    device = device_for(
        execution.device_kind,
        compute_dtype=execution.compute_dtype,
        limit_bytes=execution.device_limit_bytes,
        num_threads=execution.num_threads,
        gpu=gpu_of_rank(execution, place),
    )
    store: HostStore = attached_store(request, template, rank=rank)
    try:
        ranks = Ranks.join(rank, meeting, execution, shared_fd=shared_fd)
        handlers: Mapping[str, Callable[[Call], object]] = {}
        if isinstance(store, DividedStore):
            store.connect(ranks)
            handlers = store.handlers
        # Once the weights are there, and the first rank has its turn on the devices.
        while (begin := ranks.receive()).name != "begin":
            handlers[begin.name](begin)
        compiled = CompiledLayers(template)
        if keys := begin.values["compiled"]:
            assert request.compiled is not None, "the first rank has compiled layers of the library"
            library = CodeLibrary(request.compiled)
            asked = compile_request(request)
            compiled = CompiledLayers.load(
                template, library, target_of(asked), keys=keys, product_layers=asked.product_layers
            )
        trainer = Trainer(
            template,
            store,
            device,
            request.spec.train.recipe,
            execution,
            num_steps=begin.values["num_steps"],
            compiled=compiled,
            ranks=ranks,
        )
        trainer.follow(handlers)
    finally:
        device.close()
        store.close()


def main() -> None:
    """Run one rank, and say through the pipe how it ended."""
    parser = argparse.ArgumentParser(description="Entry of a rank; started by a worker of horizond.")
    parser.add_argument("request", type=Path, help="JSON file with the worker's request")
    parser.add_argument("--rank", type=int, required=True, help="number of this rank, from 1")
    parser.add_argument("--end-fd", type=int, required=True, help="descriptor that is told how it ended")
    parser.add_argument("--shared-fd", type=int, required=True, help="descriptor of the memory that all ranks map")
    meetings = parser.add_mutually_exclusive_group(required=True)
    meetings.add_argument("--meeting-file", type=Path, help="file through which the ranks of one node meet")
    meetings.add_argument("--meeting-at", metavar="HOST:PORT", help="where the first rank waits, on another node")
    arguments = parser.parse_args()
    # The first rank hears what ends the attempt, and ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    os.set_inheritable(arguments.end_fd, False)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {arguments.rank}: %(message)s")
    request = json.loads(arguments.request.read_bytes())
    who, meeting = f"rank {arguments.rank}", Meeting(file=arguments.meeting_file)
    if arguments.meeting_at:
        at = parse_address("--meeting-at", arguments.meeting_at)
        meeting = Meeting(host=at.host, port=at.port)
    end = end_of(lambda: work(request, meeting, arguments.rank, arguments.shared_fd), who)
    os.write(arguments.end_fd, encode_line(end or Failure(OutOfMemory(f"{who} ran out of memory"))))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's end, as the worker's.
    os._exit(0 if isinstance(end, Answer) else 1)


if __name__ == "__main__":
    # Before any thread of torch's is there, its count is the rank's own.
    torch.set_num_threads(1)
    main()
