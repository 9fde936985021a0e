"""A first run of what precedes a model's layers, on a few tokens of zeros, before anything is allocated for the model.

Finds out how the model's layers answer it, and refuses models that the layer-by-layer schedule would compute wrongly: whose first
hidden state depends on tensors other than the embedding, whose layers get more from the embedding than the hidden state, or whose
forward does more between layers than pass it on. Must not know streaming.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from horizon_server.engine.layer_stubs import ANSWERS, LayerCall, Tape
from horizon_server.errors import InvalidModel

Embed = Callable[[Mapping[str, Tensor], Tensor, Tensor], tuple[Tensor, list[LayerCall]]]

NUM_TRIAL_TOKENS = 4

RUN_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError)
"""What a model's code raises where it cannot be run on a trial's tensors."""


def try_embedding(
    model: PreTrainedModel,
    tape: Tape,
    embed: Embed,
    shapes: Mapping[str, tuple[int, ...]],
    layers: Sequence[nn.Module],
) -> list[LayerCall]:
    """Find `tape.answer` for the model and return its layers' calls for a few tokens. `shapes` are the parameters of `embed`.

    Raises:
        InvalidModel: the schedule would compute this model wrongly, or not at all; the message says why.
    """
    refusal: InvalidModel | None = None
    run = partial(_try, model, tape, embed, shapes)
    for answer in ANSWERS:
        tape.answer = answer
        try:
            calls = run()
        except InvalidModel as error:
            # Of several, the first that says why: with the wrong answer, a model's code fails in ways that say nothing.
            refusal = error if refusal is None or isinstance(refusal, _CodeFailed) else refusal
            continue
        if isinstance(answer(torch.empty(0)), tuple):
            _refuse_second_results(model, tape, run, layers)
            tape.answer = answer
        return calls
    assert refusal is not None
    raise InvalidModel(f"model_type {model.config.model_type!r}: {refusal.message}") from refusal


class _CodeFailed(InvalidModel):
    """The model's own code failed, which says nothing to a user; the error is the cause."""


def _try(model: PreTrainedModel, tape: Tape, embed: Embed, shapes: Mapping[str, tuple[int, ...]]) -> list[LayerCall]:
    """The layers' calls.

    Raises:
        InvalidModel: there are none, or they are not what the schedule expects.
    """
    # One element, seen in every shape: real enough to compute with, and without memory.
    zero = torch.zeros((), requires_grad=True)
    parameters = {name: zero.expand(shape) for name, shape in shapes.items()}
    ids_T, positions_T = torch.zeros(NUM_TRIAL_TOKENS, dtype=torch.int64), torch.arange(NUM_TRIAL_TOKENS)
    foreign = _ForeignParameters(model, tape)
    try:
        with foreign:
            _, calls = embed(parameters, ids_T, positions_T)
    except RUN_ERRORS as error:
        if isinstance(error, InvalidModel):
            raise
        if foreign.names:
            raise InvalidModel(
                f"tensor {foreign.names[0]} is used before the layers in addition to the token embedding, which is not supported"
            ) from error
        where = "passes more than the hidden state from layer to layer" if tape.has_calls else "needs more than tokens"
        raise _CodeFailed(f"its layers cannot be run one at a time, because its code {where}") from error
    # Backward gives the embedding the gradient of the hidden state alone; what comes another way would be lost.
    for index, call in enumerate(calls):
        if any(tensor.requires_grad for tensor in call.tensors()):
            raise InvalidModel(
                f"layer {index} gets more from the embedding than the hidden state, which is not supported"
            )
    return calls


def _refuse_second_results(
    model: PreTrainedModel, tape: Tape, run: Callable[[], list[LayerCall]], layers: Sequence[nn.Module]
) -> None:
    """Refuse a model whose layers use what another layer answers besides the hidden state: between layers only that one is kept."""
    second = _SecondResult()
    tape.answer = lambda hidden: (hidden, second)
    try:
        calls = run()
    except (_SecondResultUsed, InvalidModel):
        return  # The model itself does something with it; with None in its place it has just run.
    for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        if not any(value is second for value in (*call.args, *call.kwargs.values())):
            continue
        hidden_1TD = torch.empty(1, NUM_TRIAL_TOKENS, model.config.get_text_config().hidden_size, device="meta")
        args, kwargs = call.without_storage().with_hidden(hidden_1TD)
        try:
            # On a copy: some layers move what they hold to where they find the hidden state.
            with torch.no_grad():
                copy.deepcopy(layer)(*args, **kwargs)
        except _SecondResultUsed:
            raise InvalidModel(
                f"model_type {model.config.model_type!r}: layer {index} uses a result of the layer before it besides the hidden "
                "state, which is not supported"
            ) from None
        except RUN_ERRORS:
            pass  # Without storage, some layers run only so far (experts are chosen by values).


class _SecondResultUsed(Exception):
    """Something was done with a second result."""


class _SecondResult:
    """Takes the place of what a layer answers besides the hidden state, and raises when it is used."""

    def __getattr__(self, name: str) -> Any:
        raise _SecondResultUsed

    @classmethod
    def __torch_function__(cls, *_: object) -> Any:
        raise _SecondResultUsed


class _ForeignParameters(TorchFunctionMode):
    """Names the parameters that are used before the last layer though nothing was bound to them."""

    def __init__(self, model: nn.Module, tape: Tape) -> None:
        super().__init__()
        self._names = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
        self._tape = tape
        self.names: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if not self._tape.is_past_the_layers:
            for value in (*args, *(kwargs or {}).values()):
                if isinstance(value, Tensor) and value.is_meta and id(value) in self._names:
                    self.names.append(self._names[id(value)])
        return func(*args, **(kwargs or {}))
