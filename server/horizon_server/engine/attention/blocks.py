"""Attention within documents, a block of queries at a time: for what no fused kernel computes (windows, soft caps,
sinks).

The scores of a block of queries with the keys that they may see are in memory, never those of all pairs of tokens.
Backward computes them again.

Parameters: as the package says. Shapes: T = tokens of the row, B = queries of a block, K = keys that they see,
G = groups of heads (one key head each), R = query heads of a group, E = size of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_BLOCK = 512
_MIN_BLOCK = 32
# Scores of a block: 16 MiB in fp32 stay in the cache of a CPU; a GPU wants more work in a launch.
_SCORES = {"cpu": 1 << 22, "cuda": 1 << 26}


@dataclass(frozen=True, kw_only=True)
class Scores:
    """How a score is computed and which keys a query sees: those of its document up to itself, `window` of them at
    most.

    `window` and `softcap` are 0 where there is none.
    """

    scale: float
    window: int
    softcap: float


@dataclass(frozen=True, kw_only=True)
class _Block:
    queries: slice
    keys: slice
    hidden_BK: Tensor


def attend_in_blocks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    first_seen_T: Tensor,
    sinks: Tensor,
    rule: Scores,
    *,
    ahead: int = 0,
) -> tuple[Tensor, Tensor]:
    """The output and `logsumexp`. `first_seen_T` is the first key that each query sees, on the CPU. Keys may end before
    a query's own; each query sees one key at least."""
    num_heads, num_tokens, _ = query.shape
    groups, per_group = key.shape[0], num_heads // key.shape[0]
    output = query.new_empty(num_tokens, num_heads, value.shape[-1])
    logsumexp = query.new_empty(num_heads, num_tokens, dtype=torch.float32)
    for block in _blocks(first_seen_T, key, num_heads=num_heads, ahead=ahead):
        query_GRBE = torch.unflatten(query[:, block.queries], 0, (groups, per_group))
        key_GKE, value_GKE = key[:, block.keys], value[:, block.keys]
        scores, _ = _scores(query_GRBE, key_GKE, block, rule)
        sums = scores.logsumexp(-1)
        if sinks.numel():
            sums = torch.logaddexp(sums, sinks.float().view(groups, per_group, 1))
        weights = scores.sub_(sums[..., None]).exp_()
        mixed = torch.matmul(weights.to(value.dtype).flatten(1, 2), value_GKE)
        output[block.queries] = torch.unflatten(mixed, 1, (per_group, -1)).flatten(0, 1).transpose(0, 1)
        logsumexp[:, block.queries] = sums.flatten(0, 1)
    return output, logsumexp


def gradients_in_blocks(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    first_seen_T: Tensor,
    sinks: Tensor,
    rule: Scores,
    *,
    ahead: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and sinks; `first_seen_T` as in `attend_in_blocks`."""
    num_heads, groups = query.shape[0], key.shape[0]
    per_group = num_heads // groups
    for_query = torch.empty_like(query)
    # In fp32, because every block adds to them.
    for_key, for_value = (torch.zeros_like(tensor, dtype=torch.float32) for tensor in (key, value))
    dot_HT = (gradient.float() * output.float()).sum(-1).transpose(0, 1)
    for block in _blocks(first_seen_T, key, num_heads=num_heads, ahead=ahead):
        query_GRBE = torch.unflatten(query[:, block.queries], 0, (groups, per_group))
        key_GKE, value_GKE = key[:, block.keys], value[:, block.keys]
        scores, slope = _scores(query_GRBE, key_GKE, block, rule)
        sums, dots = (t[:, block.queries].view(groups, per_group, -1, 1) for t in (logsumexp, dot_HT.contiguous()))
        weights = scores.sub_(sums).exp_()
        gradient_GBE = gradient[block.queries].transpose(0, 1).reshape(groups, -1, gradient.shape[-1])
        for_value[:, block.keys] += weights.to(gradient.dtype).flatten(1, 2).transpose(1, 2).matmul(gradient_GBE)
        for_weights = torch.matmul(gradient_GBE, value_GKE.transpose(1, 2)).float().view_as(weights)
        for_scores = for_weights.sub_(dots).mul_(weights)
        if slope is not None:
            for_scores.mul_(slope)
        for_scores = for_scores.mul_(rule.scale).to(query.dtype).flatten(1, 2)
        for_key[:, block.keys] += for_scores.transpose(1, 2).matmul(query_GRBE.flatten(1, 2))
        for_queries = for_scores.matmul(key_GKE)
        for_query[:, block.queries] = torch.unflatten(for_queries, 1, (per_group, -1)).flatten(0, 1)
    for_sinks = torch.empty_like(sinks)
    if sinks.numel():
        # A sink is a key without a value: its weight only takes from the others.
        for_sinks = -((sinks.float()[:, None] - logsumexp).exp() * dot_HT).sum(-1).to(sinks.dtype)
    return for_query, for_key.to(key.dtype), for_value.to(value.dtype), for_sinks


def _scores(query_GRBE: Tensor, key_GKE: Tensor, block: _Block, rule: Scores) -> tuple[Tensor, Tensor | None]:
    """The scores [G, R, B, K] in fp32, -inf where a key is hidden, and the slope of the soft cap, where there is
    one."""
    products = torch.matmul(query_GRBE.flatten(1, 2), key_GKE.transpose(1, 2)).float()
    scores = products.mul_(rule.scale).view(*query_GRBE.shape[:3], -1)
    slope = None
    if rule.softcap:
        capped = scores.div_(rule.softcap).tanh_()
        slope = 1 - capped.square()
        scores = capped.mul_(rule.softcap)
    return scores.masked_fill_(block.hidden_BK, -torch.inf), slope


def _blocks(first_seen_T: Tensor, key: Tensor, *, num_heads: int, ahead: int) -> Iterator[_Block]:
    """The queries of a row in blocks, each with the keys that any of them sees."""
    num_tokens, num_keys, device = first_seen_T.numel(), key.shape[1], key.device
    places_T, places_K = torch.arange(ahead, ahead + num_tokens), torch.arange(num_keys)
    most_keys = min(num_keys, int((places_T - first_seen_T).max()) + 1)
    size = _SCORES.get(device.type, _SCORES["cpu"]) // (num_heads * most_keys)
    size = max(_MIN_BLOCK, min(_MAX_BLOCK, size))
    # The first key that a query sees never decreases along a row.
    first_keys = first_seen_T[::size].tolist()
    places_T, places_K, first_seen_T = (t.to(device, non_blocking=True) for t in (places_T, places_K, first_seen_T))
    for start, first_key in zip(range(0, num_tokens, size), first_keys, strict=True):
        queries = slice(start, min(start + size, num_tokens))
        keys = slice(first_key, min(ahead + queries.stop, num_keys))
        keys_K = places_K[keys]
        hidden_BK = (keys_K > places_T[queries, None]) | (keys_K < first_seen_T[queries, None])
        yield _Block(queries=queries, keys=keys, hidden_BK=hidden_BK)
