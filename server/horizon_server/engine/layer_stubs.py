"""Stubs for decoder layers: they record what the model's own forward calls its layers with, or answer in the layers' place.

Owns the recording and the checks that a model is what the schedule expects: every layer called once, in order, each with what
the one before gave. Must not know parameters or buffers.

Shapes: T = tokens of a micro-batch, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from horizon_server.errors import InvalidModel

Answer = Callable[[Tensor], Any]

ANSWERS: tuple[Answer, ...] = (lambda hidden: hidden, lambda hidden: (hidden,), lambda hidden: (hidden, None))
"""How layers answer their model, by architecture: with a tensor, or with a tuple that begins with it."""

_HIDDEN_KEYWORDS = ("hidden_states", "hidden_state", "x")


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """What the model's own forward calls a layer with, besides the hidden state, which comes first or by `keyword`."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    keyword: str | None = None

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments."""
        return _tensors_in((self.args, tuple(self.kwargs.values())))

    def with_hidden(self, hidden: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call with a hidden state."""
        if self.keyword is None:
            return (hidden, *self.args), dict(self.kwargs)
        return self.args, {**self.kwargs, self.keyword: hidden}

    def without_storage(self) -> LayerCall:
        """The same call on the meta device."""
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (self.args, dict(self.kwargs)))
        return LayerCall(args=args, kwargs=kwargs, keyword=self.keyword)


class Tape:
    """What the stubs do at the moment: record calls, or replace the layers by a given hidden state."""

    def __init__(self, *, num_layers: int) -> None:
        self._num_layers = num_layers
        self._calls: list[LayerCall] = []
        self._first_hidden: Tensor | None = None
        self._last_hidden: Tensor | None = None
        self._injected: Tensor | None = None
        self.answer: Answer = ANSWERS[0]

    @property
    def has_calls(self) -> bool:
        """Whether a capture has seen any layer's call."""
        return bool(self._calls)

    @property
    def is_past_the_layers(self) -> bool:
        """Whether a capture has seen every layer's call."""
        return len(self._calls) == self._num_layers

    def on_call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A stub was called."""
        hidden, call = _split(index, args, kwargs)
        if self._injected is not None:
            return self.answer(self._injected if index == 0 else hidden)
        if index != len(self._calls):
            raise InvalidModel(f"layer {index} is called out of order or twice; such models are not supported")
        if index == 0:
            self._first_hidden = hidden
        elif hidden is not self._last_hidden:
            raise InvalidModel(
                f"the model changes the hidden state between layers {index - 1} and {index}, which is not supported"
            )
        self._calls.append(call)
        # The head has no weights during a capture; on the meta device it costs nothing and its result is not used.
        is_last = index == self._num_layers - 1
        self._last_hidden = hidden.detach().to("meta") if is_last else hidden.detach()
        return self.answer(self._last_hidden)

    def start_capture(self) -> None:
        """Forget what was recorded."""
        self._calls, self._first_hidden, self._last_hidden = [], None, None

    def finish_capture(self) -> tuple[Tensor, list[LayerCall]]:
        """The input of the first layer, and the call of every layer."""
        hidden, calls = self._first_hidden, self._calls
        self.start_capture()
        if hidden is None or len(calls) != self._num_layers:
            raise InvalidModel(f"the model calls {len(calls)} of its {self._num_layers} layers, which is not supported")
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
        tape: Tape = self.__dict__["_tape"]
        return tape.on_call(self.__dict__["_index"], args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)


def _split(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, LayerCall]:
    if args and isinstance(args[0], Tensor):
        return args[0], LayerCall(args=args[1:], kwargs=kwargs)
    for keyword in _HIDDEN_KEYWORDS:
        if isinstance(kwargs.get(keyword), Tensor):
            others = {name: value for name, value in kwargs.items() if name != keyword}
            return kwargs[keyword], LayerCall(args=args, kwargs=others, keyword=keyword)
    raise InvalidModel(f"layer {index} is called without a hidden state, which is not supported")


def _tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors_in(item)]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors_in(item)]
    return []
