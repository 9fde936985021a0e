"""The norms that DoRA divides by: of each output's weights, with the adapter in them.

Shapes: O = outputs of a map, I = its inputs, K = rank.
Source: DoRA (arXiv 2402.09353), equation 5; as in PEFT, no gradient passes through the norms (section 4.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_server.store.adapters import NORM_PIECE_ELEMENTS


def rows_at_once(num_inputs: int) -> int:
    """How many outputs of a map `adapted_norms` looks at together."""
    return max(1, NORM_PIECE_ELEMENTS // num_inputs)


def adapted_norms(weight: Tensor, a_KI: Tensor | None, b_OK: Tensor | None, *, scale: float, norm_dim: int) -> Tensor:
    """|W + scale * B A| of each output; without an adapter, |W|. A weight whose `norm_dim` is 0 is [I, O]. Shapes: [O],
    fp32.

    The same bits for the same values, whatever calls it: a magnitude that begins as a norm is divided by just that.
    CUDA: launches on the current stream; a piece of the weight at a time is in memory in fp32.
    """
    weight_OI = weight.detach() if norm_dim else weight.detach().t()
    num_outputs, num_inputs = weight_OI.shape
    norms_O = weight_OI.new_empty(num_outputs, dtype=torch.float32)
    num_rows = rows_at_once(num_inputs)
    with torch.no_grad():
        for start in range(0, num_outputs, num_rows):
            rows = slice(start, start + num_rows)
            piece = weight_OI[rows].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
            if a_KI is not None and b_OK is not None:
                piece.addmm_(b_OK[rows].float(), a_KI.float(), alpha=scale)
            norms_O[rows] = torch.linalg.vector_norm(piece, dim=1)
    # A row of zeros has no direction, and nothing may be divided by its length.
    return norms_O.clamp_min_(torch.finfo(torch.float32).tiny)
