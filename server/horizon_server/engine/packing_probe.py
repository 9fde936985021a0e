"""Whether a model keeps packed documents apart, found out by trying.

Owns the experiment. Must not know what is done about its result.

Most architectures of transformers see where documents end from `position_ids` alone; some (attention sinks, linear attention)
silently mix them, which no error would ever tell.
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
    packed_ND, apart_ND = added_ND.chunk(2)
    return float((packed_ND - apart_ND).norm()) <= _TOLERANCE[compute_dtype] * float(apart_ND.norm())


def one_document_each(micro_batch: MicroBatch) -> list[MicroBatch]:
    """The documents of a packed row as rows of their own."""
    if len(micro_batch.document_lengths) == 1:
        return [micro_batch]
    lengths = list(micro_batch.document_lengths)
    parts = zip(
        torch.split(micro_batch.input_ids_T, lengths),
        torch.split(micro_batch.position_ids_T, lengths),
        torch.split(micro_batch.labels_T, lengths),
        lengths,
        strict=True,
    )
    return [
        MicroBatch(input_ids_T=ids, position_ids_T=positions, labels_T=labels, document_lengths=(length,))
        for ids, positions, labels, length in parts
    ]


def _row(documents: list[Tensor]) -> MicroBatch:
    lengths = tuple(d.numel() for d in documents)
    return MicroBatch(
        input_ids_T=torch.cat(documents),
        position_ids_T=torch.cat([torch.arange(n) for n in lengths]),
        labels_T=torch.full((sum(lengths),), IGNORED_LABEL),
        document_lengths=lengths,
    )
