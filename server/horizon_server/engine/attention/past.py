"""Attention of a chunk's queries over keys before it, all of one document: what a chunk of a long row needs besides
attention within itself.

Its outputs and sums are merged with those of the chunk's own keys. Backward is given the merged output and sums, from
which every part of the keys gives its part of the gradients.

Shapes: T = queries, K = keys, E = size of a head, of queries and keys or of values. Heads may share keys.
Source: the online softmax (arXiv 1805.02867), as FlashAttention and ring attention (arXiv 2310.01889) use it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_server.engine.attention.blocks import Scores, attend_in_blocks, gradients_in_blocks
from horizon_server.engine.attention.kernels import (
    MIN_BF16_BACKWARD,
    as_promised,
    grouped_heads,
    of_one_size,
    runs_fused,
)

_aten = torch.ops.aten


def attend_to_past(query: Tensor, key: Tensor, value: Tensor, rule: Scores, *, ahead: int) -> tuple[Tensor, Tensor]:
    """The output [1, T, heads, E] over these keys alone, and the logarithm of each query's sum of exponentials
    [heads, T], for [1, heads, T or K, E].

    The first query is `ahead` tokens after the first key, and no key is after it. With a window, every query sees one
    key at least.
    """
    if not _has_kernel(query, rule):
        output, sums = attend_in_blocks(
            query[0], key[0], value[0], _first_seen(query, ahead, rule), query.new_empty(0), rule, ahead=ahead
        )
        return output[None], sums
    size = value.shape[-1]
    query, key, value = of_one_size(query, key, value)
    if query.is_cuda:
        ends, tokens = _ends(query, key), (query.shape[2], key.shape[2])
        rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        found, sums, *_ = _aten._flash_attention_forward(
            *rows, *ends, *tokens, 0.0, False, return_debug_mask=False, scale=rule.scale
        )
        return as_promised(found, size), sums
    mixed, sums = _aten._scaled_dot_product_flash_attention_for_cpu(
        *grouped_heads(query, key, value), 0.0, False, scale=rule.scale
    )
    return mixed.flatten(0, 1).transpose(0, 1)[None, ..., :size], sums.flatten(0, 1)


def gradients_of_past(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    rule: Scores,
    *,
    ahead: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys give to the gradient of the queries, and the gradients of keys and values from these queries.

    `gradient` and `output` [1, T, heads, E] and `logsumexp` are those over all keys that the queries see.
    """
    if not _has_kernel(query, rule):
        first_seen, sinks = _first_seen(query, ahead, rule), query.new_empty(0)
        found = gradients_in_blocks(
            gradient[0], query[0], key[0], value[0], output[0], logsumexp, first_seen, sinks, rule, ahead=ahead
        )
        return found[0][None], found[1][None], found[2][None]
    sizes = [tensor.shape[-1] for tensor in (query, key, value)]
    query, key, value, gradient, output = of_one_size(query, key, value, gradient, output)
    if query.is_cuda:
        ends, tokens = _ends(query, key), (query.shape[2], key.shape[2])
        # Of dropout, which there is none of; the kernel's signature asks for them.
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        of_rows = _aten._flash_attention_backward(
            gradient[0].contiguous(),
            *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),
            output[0].contiguous(),
            logsumexp.contiguous(),
            *ends,
            *tokens,
            0.0,
            False,
            state,
            state,
            scale=rule.scale,
        )
        of_query, of_key, of_value = (t.transpose(0, 1)[None, ..., :n] for t, n in zip(of_rows, sizes, strict=True))
        return of_query, of_key, of_value
    groups = key.shape[1]
    gradient, output = (torch.unflatten(tensor.transpose(1, 2)[0], 0, (groups, -1)) for tensor in (gradient, output))
    given, sums = (gradient, *grouped_heads(query, key, value), output), torch.unflatten(logsumexp, 0, (groups, -1))
    dtype = query.dtype if min(query.shape[2], key.shape[2]) >= MIN_BF16_BACKWARD else torch.float32
    found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *(tensor.to(dtype) for tensor in given), sums, 0.0, False, scale=rule.scale
    )
    # Heads that share a key add to its gradient.
    parts = (found[0].flatten(0, 1), found[1].sum(1), found[2].sum(1))
    for_query, for_key, for_value = (t[None, ..., :n] for t, n in zip(parts, sizes, strict=True))
    return for_query, for_key, for_value


def _has_kernel(query: Tensor, rule: Scores) -> bool:
    """Whether a fused kernel computes this. With a window, few queries see keys before their chunk: those are computed
    in blocks."""
    return not rule.window and not rule.softcap and runs_fused(query)


def _first_seen(query: Tensor, ahead: int, rule: Scores) -> Tensor:
    """The first key that each query sees."""
    places_T = torch.arange(ahead, ahead + query.shape[2])
    return torch.zeros_like(places_T) if not rule.window else (places_T - rule.window + 1).clamp_min_(0)


def _ends(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Where the one document of queries and of keys starts and ends, as the fused kernel of a GPU wants it. CUDA: the
    driver has read pageable memory when it returns, and waits for no stream."""
    queries, keys = (torch.tensor([0, t.shape[2]], dtype=torch.int32) for t in (query, key))
    return queries.to(query.device, non_blocking=True), keys.to(query.device, non_blocking=True)
