"""The kernels of `packing.unpack` for GPUs: each byte is read once, and each weight written once.

They give the bits of the CPU's code. Shapes: as in `packing`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from horizon_server.store.layout import BLOCKS_PER_GROUP, NF4_BLOCK

_TILE = 2048
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_bytes", "num_elements", "first_block"])  # type: ignore[untyped-decorator]
def _unpack_nf4(  # type: ignore[no-untyped-def]
    codes, scales, group_scales, levels, out, num_bytes, num_elements, first_block, BLOCK: tl.constexpr,
    GROUP: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # 64 bits, because a table may have more than 2^31 elements.
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < num_bytes
    both = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
    block = 2 * at // BLOCK
    share = tl.div_rn(tl.load(scales + block, mask=inside, other=0).to(tl.float32), 255.0)
    scale = tl.load(group_scales + (first_block + block) // GROUP, mask=inside, other=0.0) * share
    first = tl.load(levels + (both >> 4)) * scale
    second = tl.load(levels + (both & 15)) * scale
    start = 2 * tl.program_id(0).to(tl.int64) * TILE
    places = start + tl.arange(0, 2 * TILE)
    tl.store(out + places, tl.interleave(first, second).to(out.dtype.element_ty), mask=places < num_elements)


@triton.jit(do_not_specialize=["num_elements"])  # type: ignore[untyped-decorator]
def _unpack_int8(  # type: ignore[no-untyped-def]
    codes, scales, out, width, num_elements, TILE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < num_elements
    code = tl.load(codes + at, mask=inside, other=0).to(tl.float32)
    scale = tl.load(scales + at // width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (code * scale).to(out.dtype.element_ty), mask=inside)


def unpack_nf4(
    codes: Tensor, scales_B: Tensor, group_scales_G: Tensor, levels: Tensor, out_N: Tensor, *, first_block: int = 0
) -> None:
    """Write values of 4 bits, of which the first block is that one of its group. CUDA: launches on the current
    stream."""
    grid = (triton.cdiv(codes.numel(), _TILE),)
    _unpack_nf4[grid](
        codes, scales_B, group_scales_G, levels, out_N, codes.numel(), out_N.numel(), first_block,
        BLOCK=NF4_BLOCK, GROUP=BLOCKS_PER_GROUP, TILE=_TILE, num_warps=_NUM_WARPS,
    )  # fmt: skip


def unpack_int8(codes_RW: Tensor, scales_R: Tensor, out_N: Tensor) -> None:
    """Write values of 8 bits. CUDA: launches on the current stream."""
    grid = (triton.cdiv(out_N.numel(), _TILE),)
    width = codes_RW.shape[-1]
    _unpack_int8[grid](codes_RW, scales_R, out_N, width, out_N.numel(), TILE=_TILE, num_warps=_NUM_WARPS)
