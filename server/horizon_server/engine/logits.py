"""Whether a model's head needs its logits again in backward.

Most heads end in a projection, a scaling or a soft cap whose backward does not read the result; there the memory of the
logits can become that of their gradient. It is found out on a few tokens, by doing it: autograd refuses where a tensor
it kept has changed.

Shapes: C = tokens, D = hidden size, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from horizon_server.engine.layer_stubs import NUM_TRIAL_TOKENS, RUN_ERRORS

Head = Callable[[Mapping[str, Tensor], Tensor], Tensor]


def keeps_logits(head: Head, parameters: Mapping[str, Tensor], projection_name: str, *, hidden_size: int) -> bool:
    """Whether the backward of a head reads its logits. True as well where the head cannot be tried."""
    hidden_1CD = torch.ones(1, NUM_TRIAL_TOKENS, hidden_size, requires_grad=True)
    try:
        with torch.enable_grad(), _CheapProjection(parameters[projection_name]):
            logits_CV = head(parameters, hidden_1CD)
        logits_CV.detach().zero_()
        torch.autograd.backward(logits_CV, torch.zeros_like(logits_CV))
    except RUN_ERRORS:
        return True
    return False


class _CheapProjection(TorchFunctionMode):
    """Answers for the projection onto the vocabulary, whose weight would take its memory for a trial."""

    def __init__(self, weight_VD: Tensor) -> None:
        super().__init__()
        self._weight_VD = weight_VD

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear and len(args) > 1 and args[1] is self._weight_VD:
            inputs = args[0]
            return inputs.sum(-1, keepdim=True) * inputs.new_ones(self._weight_VD.shape[0])
        return func(*args, **(kwargs or {}))
