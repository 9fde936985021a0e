"""Attention of a chunk's queries over keys before it: what a chunk of a long row needs besides attention within itself.

Where a kernel takes all keys up to the chunk's last token at once, outputs come from that one call. Else those over
earlier keys are merged with those over the chunk's own. Backward is given the merged output and sums, from which every
part of the keys gives its part of the gradients.

Parameters: as the package says. Shapes: T = queries, K = keys, E = size of a head.
Source: the online softmax (arXiv 1805.02867), as FlashAttention and ring attention (arXiv 2310.01889) use it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_server.engine.attention import fused
from horizon_server.engine.attention.blocks import Scores, attend_in_blocks, gradients_in_blocks


def takes_all_keys(query: Tensor, sinks: Tensor, rule: Scores) -> bool:
    """Whether one call of a kernel attends to all keys up to the chunk's last token, those of several documents too: a
    GPU's, whose causal mask ends at the last key."""
    return fused.kernel_of(query) == "gpu" and not sinks.numel() and not rule.softcap


def attend_to_past(query: Tensor, key: Tensor, value: Tensor, rule: Scores, *, ahead: int) -> tuple[Tensor, Tensor]:
    """The output and `logsumexp` over these keys alone, all of one document and before the first query. With a window,
    every query sees one key at least."""
    kernel = _kernel_of(query, rule)
    if kernel == "gpu":
        return fused.attend_on_gpu(query, key, value, _whole(query), rule, key_boundaries=_whole(key), is_causal=False)
    if kernel == "cpu":
        return fused.attend_on_cpu(query, key, value, rule, is_causal=False)
    output, sums = attend_in_blocks(
        query[0], key[0], value[0], _first_seen(query, ahead, rule), query.new_empty(0), rule, ahead=ahead
    )
    return output[None], sums


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
    """What these keys give to the gradient of the queries, and the gradients of keys and values from these queries;
    `output` and what belongs to it are over all keys that the queries see."""
    kernel = _kernel_of(query, rule)
    given = (gradient, query, key, value, output, logsumexp)
    if kernel == "gpu":
        return fused.gradients_on_gpu(*given, _whole(query), rule, key_boundaries=_whole(key), is_causal=False)
    if kernel == "cpu":
        return fused.gradients_on_cpu(*given, rule, is_causal=False)
    first_seen, sinks = _first_seen(query, ahead, rule), query.new_empty(0)
    found = gradients_in_blocks(
        gradient[0], query[0], key[0], value[0], output[0], logsumexp, first_seen, sinks, rule, ahead=ahead
    )
    return found[0][None], found[1][None], found[2][None]


def _kernel_of(query: Tensor, rule: Scores) -> str:
    """The fused kernel that computes this. With a window, few queries see keys before their chunk: those are computed
    in blocks."""
    return "" if rule.window or rule.softcap else fused.kernel_of(query)


def _first_seen(query: Tensor, ahead: int, rule: Scores) -> Tensor:
    """The first key that each query sees."""
    places_T = torch.arange(ahead, ahead + query.shape[2])
    return torch.zeros_like(places_T) if not rule.window else (places_T - rule.window + 1).clamp_min_(0)


def _whole(tensor: Tensor) -> Tensor:
    """The boundaries where all tokens are of one document."""
    return torch.tensor([0, tensor.shape[2]])
