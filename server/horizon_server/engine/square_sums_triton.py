"""The kernel of `square_sums` for GPUs: one program per block, which adds up in fp64.

Shapes: N = elements, B = blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
_NUM_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def _block_kernel(values, out, size, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    # 64 bits, because a unit may have more than 2^31 elements.
    block = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([TILE], dtype=tl.float64)
    for start in range(0, size, TILE):
        columns = start + tl.arange(0, TILE)
        x = tl.load(values + block * size + columns, mask=columns < size, other=0.0).to(tl.float64)
        sums += x * x
    tl.store(out + block, tl.sum(sums, 0))


def block_sums(values_N: Tensor, block_elements: int, out_B: Tensor) -> None:
    """As `square_sums.square_blocks`."""
    _block_kernel[(out_B.numel(),)](values_N, out_B, block_elements, TILE=_TILE, num_warps=_NUM_WARPS)
