"""Attention within the documents of a row, as two operators that torch can trace: forward and backward.

The boundaries of the documents are a tensor on the CPU whatever the device: their values are read inside the operators,
where that waits for nothing, and a traced graph holds for any number of documents. Fused kernels are used where they
compute the same: per document on a CPU, all documents at once on a GPU.

Parameters: as the package says; operators take no records, so `scale`, `window` and `softcap` come one by one.
Shapes: T = tokens of the row, E = size of a head.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from horizon_server.engine.attention import fused, host_kernel
from horizon_server.engine.attention.blocks import Scores, attend_in_blocks, gradients_in_blocks


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
    """The output and `logsumexp`."""
    rule = Scores(scale=scale, window=window, softcap=softcap)
    ends = boundaries.tolist()
    if not _has_kernel(query, ends, sinks, rule):
        output, logsumexp = attend_in_blocks(query[0], key[0], value[0], _first_seen(ends, window), sinks, rule)
        return output[None], logsumexp
    if query.is_cuda:
        return fused.attend_on_gpu(query, key, value, boundaries, rule)
    on_host = _by_own_kernel if host_kernel.runs(query, value) else _by_document
    return on_host(query, key, value, boundaries, rule)


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
    """The gradients of query, key, value and sinks, from that of the output."""
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
    on_host = _gradients_by_own_kernel if host_kernel.runs(query, value) else _gradients_by_document
    gradients = fused.gradients_on_gpu if query.is_cuda else on_host
    return *gradients(gradient, query, key, value, output, logsumexp, boundaries, rule), for_sinks


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
    output = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    logsumexp = query.new_empty(query.shape[1:3], dtype=torch.float32)
    for start, stop in pairwise(boundaries.tolist()):
        span = slice(start, stop)
        found = fused.attend_on_cpu(query[:, :, span], key[:, :, span], value[:, :, span], rule)
        output[:, span], logsumexp[:, span] = found
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
    for start, stop in pairwise(boundaries.tolist()):
        span = slice(start, stop)
        given = (gradient[:, span], query[:, :, span], key[:, :, span], value[:, :, span], output[:, span])
        found = fused.gradients_on_cpu(*given, logsumexp[:, span], rule)
        for result, tensor in zip(results, found, strict=True):
            result[:, :, span] = tensor
    return results[0], results[1], results[2]


def _has_kernel(query: Tensor, ends: list[int], sinks: Tensor, rule: Scores) -> bool:
    """Whether a fused kernel computes this: causal attention within documents, and windows on a GPU."""
    if sinks.numel() or rule.softcap:
        return False
    kernel = fused.kernel_of(query)
    return kernel == "gpu" or (kernel == "cpu" and not 0 < rule.window < fused.longest_of(ends))


def _first_seen(ends: list[int], window: int) -> Tensor:
    """The first key that each token of a row sees."""
    boundaries = torch.tensor(ends)
    first_T = boundaries[:-1].repeat_interleave(boundaries.diff())
    return first_T if not window else torch.maximum(first_T, torch.arange(ends[-1]) - window + 1)


def _like(tensor: Tensor) -> Tensor:
    """Empty, of a tensor's shape [1, heads, T, E], with a token's heads next to each other as its projection wants
    them."""
    _, heads, tokens, size = tensor.shape
    return tensor.new_empty(1, tokens, heads, size).transpose(1, 2)
