"""The child that merges an adapter into its base: `python -m horizon_server.services.merge_child`.

It loads torch only for a base that was trained on in fewer bits, to round it with the function that training used.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

from horizon_server.children.entry import EventWriter, serve
from horizon_server.codec import from_plain
from horizon_server.durable import durable_folder
from horizon_server.errors import naming
from horizon_server.events import MergeProgress
from horizon_server.planning.lora import packed_base
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.services.merge_request import MergeRequest
from horizon_server.store.adapter_files import read_adapter_folder
from horizon_server.store.base_digest import DigestBook, check_base
from horizon_server.store.generation_config import listed_ends, text_with_ends
from horizon_server.store.merging import MergeOrigin, base_format, merged_bytes, write_merged
from horizon_server.store.model_card import read_facts, write_card
from horizon_server.store.safetensors_files import read_safetensors_headers

# Training on the same node has the processors first.
_NICENESS = 10
_REPORT_EVERY_S = 0.5


def work(plain: Any, events: EventWriter) -> dict[str, Any]:
    """Write the merged model to `target`, complete or not at all, and return its files with sizes and sha256.

    Raises:
        InvalidModel: the base is not the one that the adapter was trained on, or a value is not finite.
        DiskFull: there is not enough space; nothing is left there.
    """
    request = from_plain(MergeRequest, plain)
    checkpoint = "the checkpoint"
    with naming({request.target.parent: checkpoint, request.adapter: checkpoint, request.base: "the base model"}):
        return _merged(request, events)


def _merged(request: MergeRequest, events: EventWriter) -> dict[str, Any]:
    base, of_base = request.base, request.base_model
    found = DigestBook(request.digests).digest(base)
    check_base("the checkpoint's adapter", of_base.sha256, found, model=of_base.model)
    total_bytes = sum(header.end - header.start for header in read_safetensors_headers(base).values())
    done_bytes, reported_s = 0, float("-inf")

    def advance(num_bytes: int) -> None:
        nonlocal done_bytes, reported_s
        done_bytes += num_bytes
        if (now_s := time.monotonic()) - reported_s >= _REPORT_EVERY_S or done_bytes == total_bytes:
            events.send(MergeProgress(done_bytes=done_bytes, total_bytes=total_bytes))
            reported_s = now_s

    needed_bytes = merged_bytes(base, request.dtype)
    packing_of = packed_base(open_model_folder(base), request.kept_as)
    rounding = None
    if request.merge_base == "trained" and packing_of:
        # The numbers of packed weights are torch's, which takes seconds to load.
        from horizon_server.store.adapter_load import rounding_of

        rounding = rounding_of(packing_of)
    origin = MergeOrigin(
        base_model=of_base.model,
        base_sha256=of_base.sha256,
        base=request.merge_base,
        base_format=base_format(request.merge_base, packing_of),
    )
    with durable_folder(request.target, needed_bytes=needed_bytes, min_free_bytes=request.min_free_bytes) as folder:
        files = write_merged(
            folder,
            base=base,
            adapter=read_adapter_folder(request.adapter),
            dtype=request.dtype,
            advance=advance,
            rounding=rounding,
            origin=origin,
            # The job that trained the adapter has found where its answers end.
            generation_config=text_with_ends(base, listed_ends(request.adapter)),
        )
        if (facts := read_facts(request.target.parent)) is not None:
            files |= write_card(folder, facts, "merged")
    return {name: dataclasses.asdict(record) for name, record in files.items()}


if __name__ == "__main__":
    sys.exit(serve(work, who="the child that merges an adapter", niceness=_NICENESS))
