"""Sums of squares of blocks of a gradient, from which its norm is made. On a GPU with Triton the order within a block
never depends on how many blocks there are, so that ranks that own different parts find the same bits.

Shapes: N = elements, B = blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_server.store.triton_kernels import runs_triton


def square_blocks(values_N: Tensor, block_elements: int, out_B: Tensor) -> None:
    """Write the sum of squares of each block of fp32 values into `out_B`, in fp64.

    CUDA: launches on the current stream.
    """
    if runs_triton(values_N.device):
        from horizon_server.engine.square_sums_triton import block_sums

        block_sums(values_N, block_elements, out_B)
        return
    # In fp32 within a block. On a GPU, torch may take another order for few blocks.
    out_B.copy_(torch.linalg.vector_norm(values_N.view(-1, block_elements), dim=1).double().square_())
