"""Frozen weights in 8 or 4 bits: how they are packed, and how they become numbers again on the device.

int8: one scale for each row (output channel), bf16, so that the largest element of a row is 127; a weight is `code *
scale`. nf4: codes of 4 bits for the levels of NormalFloat, two in a byte, the first in the high half, as bitsandbytes
packs them. A block of 64 has a scale of 8 bits, and 256 blocks share one in fp32: a weight is `level * block scale /
255 * group scale`.

The values that a model is trained with are those that `unpack` returns: both formats lose something, once, when the
model is loaded.

Units: bytes of a unit's part of the `packed` plane, elements elsewhere.
Shapes: R = rows, W = elements of a row, N = elements, B = blocks of 64, G = groups of 256 blocks.
Thread: any; two threads must not pack the same tensor.
Sources: LLM.int8 (arXiv 2208.07339) for scales by row; QLoRA (arXiv 2305.14314), appendix E, for the levels and the
scales of scales.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from horizon_server.store.layout import (
    BLOCKS_PER_GROUP,
    NF4_BLOCK,
    PACKED_PIECE_ELEMENTS,
    PackedPart,
    Packing,
    TensorLayout,
    UnitLayout,
)
from horizon_server.store.triton_kernels import runs_triton

NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution, the outermost at 1, with an exact 0."""

_MOST_CODE = 127


def piece_elements(place: TensorLayout, most: int) -> int:
    """How many elements of a tensor can be packed at once, at most `most` if that is enough: whole rows, or whole
    groups of blocks."""
    grain = place.shape[-1] if place.packing == "int8" else NF4_BLOCK * BLOCKS_PER_GROUP
    return max(grain, most // grain * grain)


def pack(values_N: Tensor, place: TensorLayout, block: Tensor, part: PackedPart, *, start: int = 0) -> None:
    """Pack elements of a tensor from `start` on, which is a multiple of `piece_elements`, into its unit's block of the
    plane.

    Shapes: `values_N` is fp32, flat and on the CPU, and is a multiple of `piece_elements` long or ends with the tensor;
    `block` is flat.
    """
    codes, scales = block[part.codes], block[part.scales]
    step = piece_elements(place, PACKED_PIECE_ELEMENTS)
    for offset in range(0, len(values_N), step):
        piece, first = values_N[offset : offset + step], start + offset
        if place.packing == "int8":
            rows = slice(first // place.shape[-1], (first + len(piece)) // place.shape[-1])
            codes_RW = codes.view(torch.int8).view(-1, place.shape[-1])
            _pack_int8(piece.view(-1, place.shape[-1]), codes_RW[rows], scales.view(torch.bfloat16)[rows])
        else:
            blocks = slice(first // NF4_BLOCK, -(-(first + len(piece)) // NF4_BLOCK))
            groups = slice(blocks.start // BLOCKS_PER_GROUP, -(-blocks.stop // BLOCKS_PER_GROUP))
            in_bytes = slice(first // 2, -(-(first + len(piece)) // 2))
            group_scales = block[part.group_scales].view(torch.float32)[groups]
            _pack_nf4(piece, codes[in_bytes], scales[blocks], group_scales)


def unpack(place: TensorLayout, block: Tensor, part: PackedPart, out_N: Tensor, *, first_block: int = 0) -> None:
    """Write the values of a packed tensor, or of a piece of it. Shapes: `block` has the part's bytes, uint8; `out_N` is
    flat, on the same device, fp32 or bf16. Of nf4, `first_block` counts from the first block of its group.

    In bf16 they are the fp32 values, rounded. CUDA: launches on the current stream and does not wait.
    """
    codes, scales = block[part.codes], block[part.scales]
    if runs_triton(block.device):
        from horizon_server.store import packing_triton

        if place.packing == "int8":
            codes_RW = codes.view(torch.int8).view(-1, place.shape[-1])
            packing_triton.unpack_int8(codes_RW, scales.view(torch.bfloat16), out_N)
        else:
            group_scales = block[part.group_scales].view(torch.float32)
            levels = _levels_on(block.device)
            packing_triton.unpack_nf4(codes, scales, group_scales, levels, out_N, first_block=first_block)
        return
    if place.packing == "int8":
        # A code has 7 bits and a scale 8: fp32 holds the product exactly.
        rows_RW = codes.view(torch.int8).view(-1, place.shape[-1])
        num_rows = piece_elements(place, PACKED_PIECE_ELEMENTS) // place.shape[-1]
        for start in range(0, len(rows_RW), num_rows):
            rows = slice(start, start + num_rows)
            scale_R1 = scales.view(torch.bfloat16)[rows].float()[:, None]
            out_N.view(rows_RW.shape)[rows].copy_(rows_RW[rows] * scale_R1)
        return
    group_scales = block[part.group_scales].view(torch.float32)
    # Both weights of a byte at once.
    levels = _levels_on(block.device)
    pairs_256x2 = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], dim=1)
    of_groups = group_scales.repeat_interleave(BLOCKS_PER_GROUP)[first_block : first_block + len(scales)]
    scales_B = of_groups * (scales.float() / 255)
    for start in range(0, len(out_N), PACKED_PIECE_ELEMENTS):
        out = out_N[start : start + PACKED_PIECE_ELEMENTS]
        in_bytes = codes[start // 2 : start // 2 + -(-len(out) // 2)]
        values = pairs_256x2.index_select(0, in_bytes.int()).view(-1)[: len(out)]
        of_blocks = scales_B[start // NF4_BLOCK : start // NF4_BLOCK + -(-len(out) // NF4_BLOCK)]
        out.copy_(values * of_blocks.repeat_interleave(NF4_BLOCK)[: len(out)])


def round_rows(values_RW: Tensor, packing: Packing) -> None:
    """Replace rows of a matrix by what they are once they were packed and unpacked.

    Shapes: fp32, contiguous and on the CPU; the first element begins a piece of the matrix, whose length
    `piece_elements` says.
    """
    shape = tuple(values_RW.shape)
    place = TensorLayout(
        name="", shape=shape, offset=0, num_elements=values_RW.numel(), decay=False, trained=False, packing=packing
    )
    unit = UnitLayout(name="", kind="layer", index=0, offset=0, num_elements=place.num_elements, tensors=(place,))
    block, part = torch.empty(unit.packed_bytes, dtype=torch.uint8), unit.packed_parts[place.name]
    values_N = values_RW.view(-1)
    pack(values_N, place, block, part)
    unpack(place, block, part, values_N)


@cache
def _levels_on(device: torch.device) -> Tensor:
    """Once: copying them waits for the device."""
    return torch.tensor(NF4_LEVELS, device=device)


def _pack_int8(rows_RW: Tensor, codes_RW: Tensor, scales_R: Tensor) -> None:
    most_R = rows_RW.abs().amax(dim=1)
    scales_R.copy_(most_R / _MOST_CODE)
    # By the scale that is kept, which is rounded; a row of zeros has none.
    kept_R1 = scales_R.float()[:, None]
    codes_RW.copy_((rows_RW / torch.where(kept_R1 == 0, 1.0, kept_R1)).round_().clamp_(-_MOST_CODE, _MOST_CODE))


def _pack_nf4(values_N: Tensor, codes: Tensor, scales_B: Tensor, group_scales_G: Tensor) -> None:
    num_blocks, num_groups = len(scales_B), len(group_scales_G)
    padded = torch.zeros(num_groups * BLOCKS_PER_GROUP * NF4_BLOCK)
    padded[: len(values_N)] = values_N
    most_GB = padded.view(num_groups, BLOCKS_PER_GROUP, NF4_BLOCK).abs().amax(dim=2)
    group_scales_G.copy_(most_GB.amax(dim=1))
    group_G1 = group_scales_G[:, None]
    # Rounded up, so that no element is beyond the outermost level.
    in_bytes_GB = (most_GB / torch.where(group_G1 == 0, 1.0, group_G1) * 255).ceil_().clamp_(max=255)
    scales_B.copy_(in_bytes_GB.view(-1)[:num_blocks])
    kept_B1 = (in_bytes_GB / 255 * group_G1).view(-1, 1)
    shares = padded.view(-1, NF4_BLOCK) / torch.where(kept_B1 == 0, 1.0, kept_B1)
    levels = torch.tensor(NF4_LEVELS)
    nearest = torch.bucketize(shares.view(-1), (levels[1:] + levels[:-1]) / 2)
    nearest = nearest[: 2 * len(codes)].to(torch.uint8)
    codes.copy_(nearest[0::2] << 4 | nearest[1::2])
