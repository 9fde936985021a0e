"""What layers of transformers call for attention: no mask, the boundaries of the row's documents instead."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from horizon_server.engine.attention.chunked import ChunkedRow
from horizon_server.engine.attention.kept import KeptRow
from horizon_server.engine.attention.kernels import attention, attention_backward
from horizon_server.engine.autograd_function import with_signature

NAME = "horizon"
"""The attention implementation in a config. It has no entry among those that make masks, so transformers makes none."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    boundaries: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention within each document. Shapes: [1, heads, T, E] to [1, T, heads, E].

    `boundaries` are where documents start, and the end of the last one, as integers on the CPU. A query sees `window`
    keys at most, its own included. `sinks` are one score per head to which no value belongs.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # Empty where there are none: torch.compile cannot follow a missing tensor through an autograd.Function.
    sinks = query.new_empty(0) if sinks is None else sinks
    output: Tensor
    output, _ = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, boundaries, sinks, float(scale), int(window or 0), float(softcap or 0.0)
    )
    return output


def horizon_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | KeptRow | ChunkedRow,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function registered with transformers: in the mask's place the template gives every layer the boundaries, or
    what is kept of sequences that grow.

    A trial has compared what else a layer passes (`trial`), so the rest is ignored.
    """
    if isinstance(attention_mask, (KeptRow, ChunkedRow)):
        grown = attention_mask.attend(
            query, key, value, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux
        )
        return grown, None
    output = attend(
        query, key, value, attention_mask, scale=scaling, window=sliding_window, softcap=softcap, sinks=s_aux
    )
    return output, None


AttentionInterface.register(NAME, horizon_attention)


class _Attention(torch.autograd.Function):
    """Differentiates the operator. Not by `register_autograd`, which torch.func.vjp does not go through.

    Written without stars and unpacking, because torch.compile follows no others here.
    """

    @staticmethod
    @with_signature
    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        boundaries: Tensor,
        sinks: Tensor,
        scale: float,
        window: int,
        softcap: float,
    ) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = attention(query, key, value, boundaries, sinks, scale, window, softcap)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, key, value, boundaries, sinks, ctx.scale, ctx.window, ctx.softcap = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(query, key, value, boundaries, sinks, output[0], output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, boundaries, sinks, output, logsumexp = ctx.saved_tensors
        for_query, for_key, for_value, for_sinks = attention_backward(
            gradient, query, key, value, output, logsumexp, boundaries, sinks, ctx.scale, ctx.window, ctx.softcap
        )
        return for_query, for_key, for_value, None, for_sinks, None, None, None
