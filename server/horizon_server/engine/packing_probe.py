"""Whether a model keeps packed documents independent of each other, found by running it.

Owns that trial. Must not know what is done about its result.

Most architectures of transformers see where documents end from `position_ids` alone; some (attention sinks, linear attention)
silently mix them, without any error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_server.engine.forward_backward import ForwardBackward
from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch

_DOCUMENT_LENGTHS = (13, 19)
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


def supports_packing(forward_backward: ForwardBackward, *, vocab_size: int, compute_dtype: torch.dtype) -> bool:
    """Run two short documents packed and apart through the real layers, in one pass over the weights, and compare.

    The error counts relative to what the layers add to the hidden state, so that a large residual cannot hide it.
    """
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(vocab_size, (n,), generator=generator) for n in _DOCUMENT_LENGTHS]
    inputs_ND, outputs_ND = forward_backward.hidden_states([_row(documents), *(_row([d]) for d in documents)])
    added_ND = (outputs_ND - inputs_ND).float()
    # The first half is the packed row, the second the same documents in rows of their own.
    packed_ND, apart_ND = added_ND.chunk(2)
    return float((packed_ND - apart_ND).norm()) <= _TOLERANCE[compute_dtype] * float(apart_ND.norm())


def split_row(micro_batch: MicroBatch, *, max_tokens: int | None) -> list[MicroBatch]:
    """The documents of a packed row in rows of at most `max_tokens`; a longer document is a row of its own."""
    if max_tokens is None or micro_batch.num_tokens <= max_tokens or len(micro_batch.document_lengths) == 1:
        return [micro_batch]
    rows: list[list[int]] = []
    room = 0
    for length in micro_batch.document_lengths:
        if length > room:
            rows.append([])
            room = max_tokens
        rows[-1].append(length)
        room -= length
    tokens = [sum(lengths) for lengths in rows]
    parts = zip(
        torch.split(micro_batch.input_ids_T, tokens),
        torch.split(micro_batch.position_ids_T, tokens),
        torch.split(micro_batch.labels_T, tokens),
        rows,
        strict=True,
    )
    return [
        MicroBatch(input_ids_T=ids, position_ids_T=positions, labels_T=labels, document_lengths=tuple(lengths))
        for ids, positions, labels, lengths in parts
    ]


def _row(documents: list[Tensor]) -> MicroBatch:
    lengths = tuple(d.numel() for d in documents)
    return MicroBatch(
        input_ids_T=torch.cat(documents),
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]),
        labels_T=torch.full((sum(lengths),), IGNORED_LABEL),
        document_lengths=lengths,
    )
