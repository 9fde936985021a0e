"""Stubs for decoder layers, and a first run of a model with them, before anything is allocated for it.

Stubs record what the model's own forward calls its layers with, or answer in the layers' place. The first run, on a few
tokens of zeros, finds out how the layers answer their model, and refuses models that the layer-by-layer schedule would
compute wrongly: those whose first hidden state depends on tensors other than the embedding, whose layers get more from
the embedding than the hidden state, or whose forward does more between layers than pass it on.

Shapes: T = tokens of a micro-batch, D = hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel

from horizon_server.errors import InvalidModel

Answer = Callable[[Tensor], Any]
Embed = Callable[[Mapping[str, Tensor], Tensor, Tensor], tuple[Tensor, list["LayerCall"]]]

ANSWERS: tuple[Answer, ...] = (lambda hidden: hidden, lambda hidden: (hidden,), lambda hidden: (hidden, None))
"""How layers answer their model, by architecture: with a tensor, or with a tuple that begins with it."""

NUM_TRIAL_TOKENS = 4
RUN_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, NotImplementedError)
"""What a model's code raises where it cannot be run on a trial's tensors."""
_PRODUCTS = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}


class EqualFactors(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises where matrices of two dtypes are multiplied, which only some kernels without storage refuse, and all with
    it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _PRODUCTS and args[-1].dtype is not args[-2].dtype:
            raise RuntimeError(f"a product of {args[-2].dtype} and {args[-1].dtype}")
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """What the model's own forward calls a layer with, besides the hidden state, which comes first or by `keyword`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    keyword: str | None = None

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Tensor)]

    def with_hidden(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with a hidden state."""
        if self.keyword is None:
            return (hidden, *self.args), dict(self.kwargs)
        return self.args, {**self.kwargs, self.keyword: hidden}

    def without_storage(
        self, *, hidden_size: int, num_tokens: int = NUM_TRIAL_TOKENS, dtype: torch.dtype = torch.float32
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the same call on the meta device, with a hidden state of a few tokens."""
        hidden_1TD = torch.empty(1, num_tokens, hidden_size, dtype=dtype, device="meta", requires_grad=True)
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs).with_hidden(hidden_1TD)


class CaptureEnded(Exception):
    """The last layer of a capture was called: what the model computes after it, nothing reads."""


class Tape:
    """What the stubs do at the moment: record `calls`, in a capture, or replace the layers by a given hidden state.

    With `ends_captures`, the call of the last layer raises `CaptureEnded`. A model's first runs go to its end, which
    shows whether it calls its layers again.
    """

    def __init__(self, *, num_layers: int) -> None:
        self.num_layers = num_layers
        self.calls: list[LayerCall] = []
        self._first_hidden: Tensor | None = None
        self._last_hidden: Tensor | None = None
        self._injected: Tensor | None = None
        self.answer: Answer = ANSWERS[0]
        self.ends_captures = False

    def on_call(self, index: int, hidden: Tensor, call: LayerCall) -> Any:
        """A stub was called. Each layer must be called once, in order, with what the one before gave."""
        if self._injected is not None:
            return self.answer(self._injected if index == 0 else hidden)
        if index != len(self.calls):
            raise InvalidModel(f"layer {index} is called out of order or twice; such models are not supported")
        if index == 0:
            self._first_hidden = hidden
        elif hidden is not self._last_hidden:
            raise InvalidModel(
                f"the model changes the hidden state between layers {index - 1} and {index}, which is not supported"
            )
        self.calls.append(call)
        is_last = index == self.num_layers - 1
        if is_last and self.ends_captures:
            raise CaptureEnded
        # The head has no weights during a capture; on the meta device it costs nothing and its result is not used.
        self._last_hidden = hidden.detach().to("meta") if is_last else hidden.detach()
        return self.answer(self._last_hidden)

    def start_capture(self) -> None:
        """Forget what was recorded."""
        self.calls, self._first_hidden, self._last_hidden = [], None, None

    def finish_capture(self) -> tuple[Tensor, list[LayerCall]]:
        """The input of the first layer, and the call of every layer."""
        hidden, calls = self._first_hidden, self.calls
        self.start_capture()
        if hidden is None or len(calls) != self.num_layers:
            raise InvalidModel(f"the model calls {len(calls)} of its {self.num_layers} layers, which is not supported")
        return hidden, calls

    @contextmanager
    def injecting(self, hidden: Tensor) -> Iterator[None]:
        """Inside the block, the stubs answer as if the layers had produced `hidden`."""
        self._injected = hidden
        try:
            yield
        finally:
            self._injected = None


class Stub(nn.Module):
    """Takes a decoder layer's place: answers attribute look-ups like the layer, and passes its call to the tape."""

    def __init__(self, layer: nn.Module, index: int, tape: Tape) -> None:
        super().__init__()
        # Past nn.Module's registration, or the layer's parameters would be the stub's.
        self.__dict__.update(_layer=layer, _index=index, _tape=tape)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the call to the tape, which answers."""
        tape, index = self.__dict__["_tape"], self.__dict__["_index"]
        if args and isinstance(args[0], Tensor):
            return tape.on_call(index, args[0], LayerCall(args=args[1:], kwargs=kwargs))
        for keyword in ("hidden_states", "hidden_state", "x"):
            if isinstance(hidden := kwargs.get(keyword), Tensor):
                del kwargs[keyword]
                return tape.on_call(index, hidden, LayerCall(args=args, kwargs=kwargs, keyword=keyword))
        raise InvalidModel(f"layer {index} is called without a hidden state, which is not supported")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)


def try_embedding(
    model: PreTrainedModel,
    tape: Tape,
    embed: Embed,
    shapes: Mapping[str, tuple[int, ...]],
    layers: Sequence[nn.Module],
) -> list[LayerCall]:
    """Find `tape.answer` for the model and return its layers' calls for a few tokens. `shapes` are the parameters of
    `embed`.

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
                f"tensor {foreign.names[0]} is used before the layers in addition to the token embedding, which is not "
                "supported"
            ) from error
        where = "passes more than the hidden state from layer to layer" if tape.calls else "needs more than tokens"
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
    """Refuse a model whose layers use what another layer answers besides the hidden state: between layers only that one
    is kept."""
    second = _SecondResult()
    tape.answer = lambda hidden: (hidden, second)
    try:
        calls = run()
    except (_SecondResultUsed, InvalidModel):
        return  # The model itself does something with it; with None in its place it has just run.
    for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        if not any(value is second for value in (*call.args, *call.kwargs.values())):
            continue
        args, kwargs = call.without_storage(hidden_size=model.config.get_text_config().hidden_size)
        try:
            # On a copy: some layers move what they hold to where they find the hidden state.
            with torch.no_grad():
                copy.deepcopy(layer)(*args, **kwargs)
        except _SecondResultUsed:
            raise InvalidModel(
                f"model_type {model.config.model_type!r}: layer {index} uses a result of the layer before it besides "
                "the hidden "
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

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(self._tape.calls) < self._tape.num_layers:
            for value in (*args, *(kwargs or {}).values()):
                if isinstance(value, Tensor) and value.is_meta and id(value) in self._names:
                    self.names.append(self._names[id(value)])
        return func(*args, **(kwargs or {}))


def call_bytes(calls: Sequence[LayerCall], *, but: Tensor | None = None) -> int:
    """Of what all layers are called with: those of a kind get the same masks and tables, which count once. `but` is one
    that does not count."""
    storages = [tensor.untyped_storage() for call in calls for tensor in call.tensors()]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    if but is not None:
        sizes.pop(but.untyped_storage().data_ptr(), None)
    return sum(sizes.values())
