"""Torch's fused kernels of attention, each called in one place: that of a CPU for one document, that of a GPU for all
documents of a row at once. Both also over keys that begin before the queries do.

Parameters: as the package says. Shapes: T = queries, K = keys, E = size of a head.
Source: FlashAttention 2 (arXiv 2307.08691), whose causal mask ends with the last query at the last key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from horizon_server.engine.attention.blocks import Scores
from horizon_server.engine.attention.implementation import Heads, implementation_of

_aten = torch.ops.aten
# What the fused kernel of a GPU takes.
_MAX_HEAD = 256
_HEAD_MULTIPLE = 8
_MIN_CAPABILITY = (8, 0)
# What documents in bf16 are filled up to a multiple of on a CPU: torch compiles a product for each shape, and keeps it
# per thread.
_BF16_LENGTHS = 64
# Backward of fewer tokens in bf16 runs in fp32 on a CPU: what torch's kernel does once per head takes longer than its
# products.
_MIN_BF16_BACKWARD = 384
_uses_fused = True


@contextmanager
def without_fused_kernels() -> Iterator[None]:
    """Inside, a block of queries at a time computes all attention, on every thread: other rounding, the same
    formula."""
    global _uses_fused
    before, _uses_fused = _uses_fused, False
    try:
        yield
    finally:
        _uses_fused = before


def kernel_of(query: Tensor) -> Literal["", "cpu", "gpu"]:
    """Which fused kernel takes these heads, where there is nothing but scores; empty where none does."""
    if query.is_cuda:
        is_half = query.dtype in (torch.bfloat16, torch.float16)
        is_new = torch.cuda.get_device_capability(query.device) >= _MIN_CAPABILITY
        return "gpu" if _uses_fused and is_half and is_new and query.shape[-1] <= _MAX_HEAD else ""
    return "cpu" if _uses_fused and query.device.type == "cpu" else ""


def needs_no_copy(query: Tensor, value: Tensor) -> bool:
    """Whether the kernel of a GPU reads keys and values of these heads where they are."""
    return query.shape[-1] == value.shape[-1] and query.shape[-1] % _HEAD_MULTIPLE == 0


def attend_on_gpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    rule: Scores,
    *,
    key_boundaries: Tensor | None = None,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """The output and `logsumexp` of all documents at once. Windows are causal."""
    rows, longest = _rows(query, boundaries, key_boundaries), _longest(boundaries, key_boundaries)
    with implementation_of(Heads.of(query, key, value), has_window=0 < rule.window < longest):
        output, logsumexp, *_ = _aten._flash_attention_forward(
            *(tensor[0].transpose(0, 1) for tensor in _of_one_size(query, key, value)),
            *rows,
            0.0,
            is_causal,
            return_debug_mask=False,
            scale=rule.scale,
            **_window(rule.window, longest),
        )
    return _as_promised(output, value.shape[-1]), logsumexp


def gradients_on_gpu(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    boundaries: Tensor,
    rule: Scores,
    *,
    key_boundaries: Tensor | None = None,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value of all documents at once."""
    sizes = [tensor.shape[-1] for tensor in (query, key, value)]
    rows, longest = _rows(query, boundaries, key_boundaries), _longest(boundaries, key_boundaries)
    heads = Heads.of(query, key, value)
    query, key, value, gradient, output = _of_one_size(query, key, value, gradient, output)
    # Of dropout, which there is none of; the kernel's signature asks for them.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    with implementation_of(heads, has_window=0 < rule.window < longest):
        found = _aten._flash_attention_backward(
            gradient[0].contiguous(),
            *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
            output[0].contiguous(),
            logsumexp.contiguous(),
            *rows,
            0.0,
            is_causal,
            state,
            state,
            scale=rule.scale,
            **_window(rule.window, longest),
        )
    for_query, for_key, for_value = (
        _as_promised(tensor, size).transpose(1, 2) for tensor, size in zip(found, sizes, strict=True)
    )
    return for_query, for_key, for_value


def attend_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, rule: Scores, *, is_causal: bool = True
) -> tuple[Tensor, Tensor]:
    """The output and `logsumexp` of one document."""
    num_tokens, size, dtype = query.shape[2], value.shape[-1], query.dtype
    with implementation_of(Heads.of(query, key, value), has_window=False):
        grouped = _grouped(*_of_one_size(query, key, value))
        given = (_filled(tensor, dtype, fills=is_causal) for tensor in grouped)
        mixed, sums = _aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, is_causal, scale=rule.scale)
    output = mixed.flatten(0, 1).transpose(0, 1)[None, :num_tokens, :, :size]
    return output, sums.flatten(0, 1)[:, :num_tokens]


def gradients_on_cpu(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    rule: Scores,
    *,
    is_causal: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value of one document."""
    shapes = [tensor.shape for tensor in (query, key, value)]
    dtype = query.dtype if min(shape[2] for shape in shapes) >= _MIN_BF16_BACKWARD else torch.float32
    with implementation_of(Heads.of(query, key, value), has_window=False):
        groups = key.shape[1]
        query, key, value, gradient, output = _of_one_size(query, key, value, gradient, output)
        gradient, output = (torch.unflatten(t.transpose(1, 2)[0], 0, (groups, -1)) for t in (gradient, output))
        given = (gradient, *_grouped(query, key, value), output, torch.unflatten(logsumexp, 0, (groups, -1)))
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_filled(tensor, dtype, fills=is_causal) for tensor in given), 0.0, is_causal, scale=rule.scale
        )
    # Heads that share a key add to its gradient.
    parts = (found[0].flatten(0, 1), found[1].sum(1), found[2].sum(1))
    for_query, for_key, for_value = (
        tensor[None, :, : shape[2], : shape[3]] for tensor, shape in zip(parts, shapes, strict=True)
    )
    return for_query, for_key, for_value


def longest_of(ends: list[int]) -> int:
    """Tokens of the longest document."""
    return max(stop - start for start, stop in pairwise(ends))


def _longest(boundaries: Tensor, key_boundaries: Tensor | None) -> int:
    return longest_of((boundaries if key_boundaries is None else key_boundaries).tolist())


def _rows(query: Tensor, boundaries: Tensor, key_boundaries: Tensor | None) -> tuple[Tensor, Tensor, int, int]:
    """Where documents are among queries and keys, and the longest of both, as the kernel of a GPU wants them."""
    placed, longest = _placed(boundaries, query.device), longest_of(boundaries.tolist())
    if key_boundaries is None:
        return placed, placed, longest, longest
    return placed, _placed(key_boundaries, query.device), longest, longest_of(key_boundaries.tolist())


def _placed(boundaries: Tensor, device: torch.device) -> Tensor:
    """CUDA: the driver has read pageable memory when it returns, and waits for no stream."""
    return boundaries.to(torch.int32).to(device, non_blocking=True)


def _window(window: int, longest: int) -> dict[str, int | None]:
    """The arguments of the kernel of a GPU, which counts the keys before the query's own."""
    return {"window_size_left": window - 1, "window_size_right": 0} if 0 < window < longest else {}


def _as_promised(found_THE: Tensor, size: int) -> Tensor:
    """What a kernel made, as [1, T, heads, E] with a token's heads next to each other, which the operators promise: the
    kernel's own memory where it is so laid out and no head was filled up."""
    return found_THE[None, ..., :size].contiguous()


def _of_one_size(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """With zeros after the shorter heads, because kernels want queries, keys and values of one size: they change no
    product."""
    size = max(query.shape[-1], value.shape[-1])
    if query.is_cuda:
        size += -size % _HEAD_MULTIPLE
    tensors = (query, key, value, *others)
    return tuple(
        functional.pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size or t.stride(-1) != 1 else t for t in tensors
    )


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[groups, heads of a group, T, E], where keys and values are seen by every head of their group without a copy."""
    groups, per_group = key.shape[1], query.shape[1] // key.shape[1]
    key, value = (tensor[0][:, None].expand(-1, per_group, -1, -1) for tensor in (key, value))
    return torch.unflatten(query[0], 0, (groups, per_group)), key, value


def _filled(document: Tensor, dtype: torch.dtype, *, fills: bool) -> Tensor:
    """[groups, heads, T, ...] in fp32 where `dtype` is, and for kernels in bf16 that are causal with zeros after it,
    which no earlier query sees and which have no gradient."""
    if dtype is torch.float32:
        return document.float()
    groups, heads, num_tokens, *rest = document.shape
    if not fills or num_tokens % _BF16_LENGTHS == 0:
        return document
    filled = document.new_zeros(groups, heads, num_tokens + -num_tokens % _BF16_LENGTHS, *rest)
    filled[:, :, :num_tokens] = document
    return filled
