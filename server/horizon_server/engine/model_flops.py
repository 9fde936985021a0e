"""Floating-point operations a step is worth: the model's own, whatever the engine really spends on recomputing.

Owns the count behind model FLOP/s. Must not know time or hardware.

Per token, forward and backward: 6 per parameter in a matrix product (an untied input table is looked up, so it does not count; of
routed experts only the share that a token visits counts), plus attention: 12 x layers x heads x head size per pair of tokens that
may see each other (causal, inside the document, inside the window of sliding layers).

Source: PaLM (arXiv 2204.02311), appendix B, with the causal half and the window left out as never computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from horizon_server.engine.micro_batch import MicroBatch

_FLOPS_PER_PARAMETER = 6
_FLOPS_PER_PAIR_ELEMENT = 12
_EXPERT_DIMENSIONS = 3


class FlopsCount:
    """Counts one model's operations from its parameter shapes and its transformers config."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], config: Any, *, tied: bool, embedding_name: str) -> None:
        num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
        visited = (getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts
        self._active_parameters: float = sum(
            math.prod(shape) * (visited if len(shape) == _EXPERT_DIMENSIONS else 1.0)
            for name, shape in shapes.items()
            if len(shape) > 1 and (tied or name != embedding_name)
        )
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._width: int = config.num_attention_heads * head_size
        layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        window = getattr(config, "sliding_window", None)
        self._windows = [window if kind == "sliding_attention" else None for kind in layer_types]

    def of(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Operations of one step over these micro-batches, forward and backward."""
        num_tokens = sum(m.num_tokens for m in micro_batches)
        lengths = [length for m in micro_batches for length in m.document_lengths]
        pairs = sum(
            sum(_visible_pairs(length, window) for length in lengths) * self._windows.count(window)
            for window in set(self._windows)
        )
        return (
            _FLOPS_PER_PARAMETER * self._active_parameters * num_tokens + _FLOPS_PER_PAIR_ELEMENT * self._width * pairs
        )


def _visible_pairs(length: int, window: int | None) -> int:
    full = length * (length + 1) // 2
    if window is None or window >= length:
        return full
    beyond = length - window
    return full - beyond * (beyond + 1) // 2
