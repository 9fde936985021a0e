"""Attention within the documents of a row, as two operators that torch can trace: forward and backward.

The boundaries of the documents are a tensor on the CPU whatever the device: their values are read inside the operators,
where that waits for nothing, and a traced graph holds for any number of documents. Fused kernels are used where they
compute the same: per document on a CPU, all documents at once on a GPU.

Shapes: T = tokens of the row, E = size of a head, of queries and keys or of values. Heads may share keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from horizon_server.engine.attention import host_kernel
from horizon_server.engine.attention.blocks import Scores, attend_in_blocks, gradients_in_blocks
from horizon_server.engine.attention.implementation import Heads, implementation_of

_aten = torch.ops.aten
# What the fused kernel of a GPU takes.
_MAX_HEAD = 256
_HEAD_MULTIPLE = 8
_MIN_CAPABILITY = (8, 0)
# What documents in bf16 are filled up to a multiple of on a CPU: torch compiles a product for each shape, and keeps it
# per thread.
_BF16_LENGTHS = 64
# Backward of a shorter document in bf16 runs in fp32 on a CPU: what torch's kernel does once per head takes longer than
# its products.
MIN_BF16_BACKWARD = 384
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


@torch.library.custom_op("horizon::attention", mutates_args=())
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    sinks: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """The output [1, T, heads, E] and the logarithm of each query's sum of exponentials [heads, T], for [1, heads, T,
    E].

    `sinks` are empty where there are none.
    """
    rule = Scores(scale=scale, window=window, softcap=softcap)
    ends = boundaries.tolist()
    if not _has_kernel(query, ends, sinks, rule):
        output, logsumexp = attend_in_blocks(query[0], key[0], value[0], _first_seen(ends, window), sinks, rule)
        return output[None], logsumexp
    with implementation_of(Heads.of(query, key, value), has_window=0 < window < _longest(ends)):
        on_host = _by_own_kernel if host_kernel.runs(query, value) else _by_document
        fused = _all_at_once if query.is_cuda else on_host
        return fused(query, key, value, boundaries, rule)


@attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    sinks: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    _, num_heads, num_tokens, _ = query.shape
    output = query.new_empty(1, num_tokens, num_heads, value.shape[-1])
    return output, query.new_empty(num_heads, num_tokens, dtype=torch.float32)


@torch.library.custom_op("horizon::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    boundaries: Tensor,
    sinks: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and sinks (empty without), from that of the output."""
    rule = Scores(scale=scale, window=window, softcap=softcap)
    ends = boundaries.tolist()
    for_sinks = torch.empty_like(sinks)
    if not _has_kernel(query, ends, sinks, rule):
        *found, for_sinks = gradients_in_blocks(
            gradient[0], query[0], key[0], value[0], output[0], logsumexp, _first_seen(ends, window), sinks, rule
        )
        results = [_like(tensor) for tensor in (query, key, value)]
        for result, tensor in zip(results, found, strict=True):
            result[0] = tensor
        return results[0], results[1], results[2], for_sinks
    with implementation_of(Heads.of(query, key, value), has_window=0 < window < _longest(ends)):
        on_host = _gradients_by_own_kernel if host_kernel.runs(query, value) else _gradients_by_document
        fused = _gradients_at_once if query.is_cuda else on_host
        return *fused(gradient, query, key, value, output, logsumexp, boundaries, rule), for_sinks


@attention_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    boundaries: Tensor,
    sinks: Tensor,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _like(query), _like(key), _like(value), torch.empty_like(sinks)


def _all_at_once(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, rule: Scores) -> tuple[Tensor, Tensor]:
    """`attention` by the fused kernel of a GPU."""
    size = value.shape[-1]
    placed, longest = _placed(boundaries, query.device), _longest(boundaries.tolist())
    output, logsumexp, *_ = _aten._flash_attention_forward(
        *(tensor[0].transpose(0, 1) for tensor in of_one_size(query, key, value)),
        placed,
        placed,
        longest,
        longest,
        0.0,
        True,
        return_debug_mask=False,
        scale=rule.scale,
        **_window(rule.window, longest),
    )
    return as_promised(output, size), logsumexp


def _gradients_at_once(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    boundaries: Tensor,
    rule: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_backward` by the fused kernel of a GPU."""
    sizes = [tensor.shape[-1] for tensor in (query, key, value)]
    query, key, value, gradient, output = of_one_size(query, key, value, gradient, output)
    placed, longest = _placed(boundaries, query.device), _longest(boundaries.tolist())
    # Of dropout, which there is none of; the kernel's signature asks for them.
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    found = _aten._flash_attention_backward(
        gradient[0].contiguous(),
        *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
        output[0].contiguous(),
        logsumexp,
        placed,
        placed,
        longest,
        longest,
        0.0,
        True,
        state,
        state,
        scale=rule.scale,
        **_window(rule.window, longest),
    )
    for_query, for_key, for_value = (
        as_promised(tensor, size).transpose(1, 2) for tensor, size in zip(found, sizes, strict=True)
    )
    return for_query, for_key, for_value


def as_promised(found_THE: Tensor, size: int) -> Tensor:
    """What a kernel made, as [1, T, heads, E] with a token's heads next to each other, which the operators promise: the
    kernel's own memory where it is so laid out and no head was filled up."""
    return found_THE[None, ..., :size].contiguous()


def _by_own_kernel(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, rule: Scores
) -> tuple[Tensor, Tensor]:
    """`attention` by the engine's own kernel for a CPU, all documents at once."""
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    logsumexp = query.new_empty(query.shape[1:3], dtype=torch.float32)
    mixed = output[0].transpose(0, 1)
    host_kernel.attend(query[0], key[0], value[0], boundaries.tolist(), rule.scale, mixed, logsumexp)
    return output, logsumexp


def _gradients_by_own_kernel(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    boundaries: Tensor,
    rule: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_backward` by the engine's own kernel for a CPU."""
    for_query, for_key, for_value = (_like(tensor) for tensor in (query, key, value))
    changed, mixed = (tensor[0].transpose(0, 1) for tensor in (gradient, output))
    host_kernel.gradients(
        changed,
        query[0],
        key[0],
        value[0],
        mixed,
        logsumexp,
        boundaries.tolist(),
        rule.scale,
        [for_query[0], for_key[0], for_value[0]],
    )
    return for_query, for_key, for_value


def _by_document(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, rule: Scores) -> tuple[Tensor, Tensor]:
    """`attention` by the fused kernel of a CPU."""
    size = value.shape[-1]
    query, key, value = of_one_size(query, key, value)
    shape = (1, query.shape[2], query.shape[1], size)
    output, logsumexp = query.new_empty(shape), query.new_empty(shape[2], shape[1], dtype=torch.float32)
    query, key, value = grouped_heads(query, key, value)
    for start, stop in pairwise(boundaries.tolist()):
        document = (_filled(tensor, start, stop, query.dtype) for tensor in (query, key, value))
        mixed, sums = _aten._scaled_dot_product_flash_attention_for_cpu(*document, 0.0, True, scale=rule.scale)
        output[0, start:stop] = mixed.flatten(0, 1).transpose(0, 1)[: stop - start, :, :size]
        logsumexp[:, start:stop] = sums.flatten(0, 1)[:, : stop - start]
    return output, logsumexp


def _gradients_by_document(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    boundaries: Tensor,
    rule: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attention_backward` by the fused kernel of a CPU."""
    results = [_like(tensor) for tensor in (query, key, value)]
    query, key, value, gradient, output = of_one_size(query, key, value, gradient, output)
    groups, per_group = key.shape[1], query.shape[1] // key.shape[1]
    gradient, output = (
        torch.unflatten(tensor.transpose(1, 2)[0], 0, (groups, per_group)) for tensor in (gradient, output)
    )
    query, key, value = grouped_heads(query, key, value)
    sums = torch.unflatten(logsumexp, 0, (groups, per_group))
    for start, stop in pairwise(boundaries.tolist()):
        given = (gradient, query, key, value, output, sums)
        dtype = query.dtype if stop - start >= MIN_BF16_BACKWARD else torch.float32
        document = (_filled(tensor, start, stop, dtype) for tensor in given)
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*document, 0.0, True, scale=rule.scale)
        # Heads that share a key add to its gradient.
        for_query, for_key, for_value = found[0].flatten(0, 1), found[1].sum(1), found[2].sum(1)
        for result, tensor in zip(results, (for_query, for_key, for_value), strict=True):
            result[0, :, start:stop] = tensor[:, : stop - start, : result.shape[-1]]
    return results[0], results[1], results[2]


def _has_kernel(query: Tensor, ends: list[int], sinks: Tensor, rule: Scores) -> bool:
    """Whether a fused kernel computes this: causal attention within documents, and windows on a GPU."""
    if sinks.numel() or rule.softcap or not runs_fused(query):
        return False
    return query.is_cuda or not 0 < rule.window < _longest(ends)


def runs_fused(query: Tensor) -> bool:
    """Whether a fused kernel takes these heads, where there is nothing but scores."""
    if query.is_cuda:
        is_half = query.dtype in (torch.bfloat16, torch.float16)
        is_new = torch.cuda.get_device_capability(query.device) >= _MIN_CAPABILITY
        return _uses_fused and is_half and is_new and query.shape[-1] <= _MAX_HEAD
    return _uses_fused and query.device.type == "cpu"


def _first_seen(ends: list[int], window: int) -> Tensor:
    """The first key that each token of a row sees."""
    boundaries = torch.tensor(ends)
    first_T = boundaries[:-1].repeat_interleave(boundaries.diff())
    return first_T if not window else torch.maximum(first_T, torch.arange(ends[-1]) - window + 1)


def _placed(boundaries: Tensor, device: torch.device) -> Tensor:
    """As the fused kernel wants them. CUDA: the driver has read pageable memory when it returns, and waits for no
    stream."""
    return boundaries.to(torch.int32).to(device, non_blocking=True)


def _longest(ends: list[int]) -> int:
    return max(stop - start for start, stop in pairwise(ends))


def _window(window: int, longest: int) -> dict[str, int | None]:
    """The arguments of a fused kernel, which counts the keys before the query's own."""
    return {"window_size_left": window - 1, "window_size_right": 0} if 0 < window < longest else {}


def of_one_size(query: Tensor, key: Tensor, value: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """With zeros after the shorter heads, because kernels want queries, keys and values of one size: they change no
    product."""
    size = max(query.shape[-1], value.shape[-1])
    if query.is_cuda:
        size += -size % _HEAD_MULTIPLE
    tensors = (query, key, value, *others)
    return tuple(
        functional.pad(t, (0, size - t.shape[-1])) if t.shape[-1] < size or t.stride(-1) != 1 else t for t in tensors
    )


def grouped_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[groups, heads of a group, T, E], where keys and values are seen by every head of their group without a copy."""
    groups, per_group = key.shape[1], query.shape[1] // key.shape[1]
    key, value = (tensor[0][:, None].expand(-1, per_group, -1, -1) for tensor in (key, value))
    return torch.unflatten(query[0], 0, (groups, per_group)), key, value


def _filled(tensor: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """A document's part of [groups, heads, T, ...]: in fp32 where `dtype` is, and for kernels in bf16 with zeros after
    it, which no earlier query sees and which have no gradient."""
    document = tensor[:, :, start:stop]
    if dtype is torch.float32:
        return document.float()
    if (stop - start) % _BF16_LENGTHS == 0:
        return document
    groups, heads, num_tokens, *rest = document.shape
    filled = document.new_zeros(groups, heads, num_tokens + -num_tokens % _BF16_LENGTHS, *rest)
    filled[:, :, :num_tokens] = document
    return filled


def _like(tensor: Tensor) -> Tensor:
    """Empty, of a tensor's shape [1, heads, T, E], with a token's heads next to each other as its projection wants
    them."""
    _, heads, tokens, size = tensor.shape
    return tensor.new_empty(1, tokens, heads, size).transpose(1, 2)
