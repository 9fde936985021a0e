"""Any Hugging Face decoder, one unit at a time, without copying its code.

The model class of transformers is built without storage. Stubs stand in place of its decoder layers, so that the model's own
forward computes what every layer is to be called with (masks, position embeddings, per-layer arguments), and so that the same
forward, started behind the layers, is the head. A layer then runs with parameters that are views into streamed memory.

Owns the binding of names to places in a unit and the three ways to run a unit. Must not know slots, queues or schedules.

Shapes: T = tokens of a micro-batch, C = tokens of a head chunk, D = hidden size, V = vocabulary, R = rows of the embedding in use.
Thread: `embed`, `layer` and `head` are for one thread at a time.
Source: Horizon-LM (arXiv 2602.04816), CPU-master GPU-template execution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PretrainedConfig, PreTrainedModel

from horizon_server.engine.meta_model import (
    build_meta_model,
    draws_random_numbers,
    find_layer_list,
    layer_signature,
    load_config,
    name_of_parameter,
)
from horizon_server.errors import InvalidModel
from horizon_server.store.layout import StoreLayout, TensorLayout, build_layout


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """What the model's own forward calls a layer with, besides the hidden state."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments."""
        return _tensors_in((self.args, tuple(self.kwargs.values())))


@dataclass(frozen=True, kw_only=True)
class Place:
    """A parameter inside a flat buffer, under the name its module knows it by."""

    local_name: str
    tensor: TensorLayout
    offset: int

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's view into the buffer."""
        return flat[self.offset : self.offset + self.tensor.num_elements].view(self.tensor.shape)


class Template:
    """The structure of a model, bound to a store layout."""

    def __init__(self, config: PretrainedConfig, *, layout: StoreLayout | None = None) -> None:
        """Use `from_folder` or `from_config`."""
        model = build_meta_model(config)
        self.config = model.config
        table, projection = _ends(model)
        self.tied = projection.weight is table.weight
        self.shapes = _parameter_shapes(model, tied=self.tied)
        layer_list_name, layer_list = find_layer_list(model)
        self.num_layers = len(layer_list)
        self.layout = layout or build_layout(self.shapes, num_layers=self.num_layers, tied=self.tied)
        check_layout(self.layout, self.shapes, tied=self.tied)

        self.embedding_name = name_of_parameter(model, table.weight)
        self.projection_name = f"{_name_of_module(model, projection)}.weight"
        self.vocab_size, self.hidden_size = table.weight.shape
        self.draws_random_numbers = draws_random_numbers(model.config)
        self.padding_id = _take_padding_id(table)
        self._model = model
        self._tape = _Tape(num_layers=self.num_layers)
        self._layers, self.layer_groups = _share(list(layer_list))
        for index, layer in enumerate(layer_list):
            layer_list[index] = _Stub(layer, index, self._tape)
        self._layer_prefix = layer_list_name + "."
        self._places = [self._unit_places(index) for index in range(len(self.layout.units))]

    @classmethod
    def from_folder(cls, folder: Path, *, layout: StoreLayout | None = None) -> Template:
        """The template of a model folder; without a layout it makes its own.

        Raises:
            InvalidModel: the folder's model is not supported, or layout and model differ; the message names the tensor.
        """
        return cls(load_config(folder), layout=layout)

    @classmethod
    def from_config(cls, config: PretrainedConfig, *, layout: StoreLayout | None = None) -> Template:
        """The template of a transformers config. Raises like `from_folder`."""
        return cls(config, layout=layout)

    @property
    def head_elements(self) -> int:
        """Elements of the buffer the head runs from: its own unit, then the embedding's where that is the projection."""
        embedding, head = self.layout.units[0], self.layout.units[-1]
        return head.num_elements + (embedding.num_elements if self.tied else 0)

    def train(self, mode: bool) -> None:
        """Switch dropout and router noise on or off, where the config asks for any. The queues must be idle."""
        if self.draws_random_numbers:
            for module in (self._model, *self._layers):
                module.train(mode)

    def place_buffers(self, place: Callable[[Tensor], Tensor]) -> None:
        """Move what the modules hold besides parameters (rotary tables) to where compute reads it; a template serves one device."""
        for module in (*self._model.modules(), *(m for layer in self._layers for m in layer.modules())):
            for name, buffer in module.named_buffers(recurse=False):
                module._buffers[name] = place(buffer)

    @property
    def table_place(self) -> Place:
        """The embedding table in the embedding unit's buffer."""
        return self._places[0][0]

    def places(self, unit_index: int) -> list[Place]:
        """The parameters in a unit's buffer (the head's buffer is `head_elements` long)."""
        return self._places[unit_index]

    def embed(self, rows_RD: Tensor, row_ids_T: Tensor, position_ids_T: Tensor) -> tuple[Tensor, list[LayerCall]]:
        """The input of the first layer, and the call of every layer. `row_ids_T` index `rows_RD`. Shapes: [1, T, D]."""
        self._tape.start_capture()
        functional_call(
            self._base_model,
            {self.embedding_name.removeprefix(f"{self._model.base_model_prefix}."): rows_RD},
            kwargs={"input_ids": row_ids_T[None], "position_ids": position_ids_T[None], "use_cache": False},
        )
        hidden_1TD, calls = self._tape.finish_capture()
        if hidden_1TD.shape != (1, row_ids_T.numel(), self.hidden_size):
            raise InvalidModel(f"layers that take hidden states of shape {tuple(hidden_1TD.shape)} are not supported")
        return hidden_1TD, calls

    def layer(self, index: int, parameters: Mapping[str, Tensor], hidden_1TD: Tensor, call: LayerCall) -> Tensor:
        """One decoder layer. Shapes: [1, T, D] to [1, T, D]."""
        output = functional_call(self._layers[index], dict(parameters), (hidden_1TD, *call.args), dict(call.kwargs))
        hidden = output[0] if isinstance(output, tuple) else output
        assert isinstance(hidden, Tensor)
        return hidden

    def head(self, parameters: Mapping[str, Tensor], hidden_1CD: Tensor) -> Tensor:
        """Final norm, projection and whatever scaling follows, for tokens that need not be neighbours. Shapes: [C, V]."""
        positions_1C = torch.arange(hidden_1CD.shape[1], device=hidden_1CD.device)[None]
        with self._tape.injecting(hidden_1CD):
            output = functional_call(
                self._model,
                dict(parameters),
                kwargs={"inputs_embeds": hidden_1CD.detach(), "position_ids": positions_1C, "use_cache": False},
            )
        logits_CV: Tensor = output.logits[0]
        return logits_CV

    @property
    def _base_model(self) -> nn.Module:
        base_model = self._model.base_model
        assert isinstance(base_model, nn.Module)
        return base_model

    def _unit_places(self, index: int) -> list[Place]:
        unit = self.layout.units[index]
        prefix = f"{self._layer_prefix}{index - 1}." if unit.kind == "layer" else ""
        places = [Place(local_name=t.name.removeprefix(prefix), tensor=t, offset=t.offset) for t in unit.tensors]
        if unit.kind == "head" and self.tied:
            _, table = self.layout.find(self.embedding_name)
            places.append(Place(local_name=self.projection_name, tensor=table, offset=unit.num_elements + table.offset))
        return places


def check_layout(layout: StoreLayout, shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
    """Compare a layout, made from a checkpoint's names, with what the model class has.

    Raises:
        InvalidModel: a tensor is missing, unknown to the model, or misshapen; the message names it.
    """
    stored = {tensor.name: tensor.shape for unit in layout.units for tensor in unit.tensors}
    for name, shape in shapes.items():
        if name not in stored:
            raise InvalidModel(f"tensor {name} is missing: the model's config asks for it with shape {list(shape)}")
        if stored[name] != shape:
            raise InvalidModel(
                f"tensor {name} has shape {list(stored[name])}, the model's config asks for {list(shape)}"
            )
    for name in stored:
        if name not in shapes:
            raise InvalidModel(
                f"tensor {name} is in the checkpoint, but the model of this config has no such parameter"
            )
    if layout.tied != tied:
        raise InvalidModel("config and checkpoint disagree on whether embedding and output projection are tied")
    if len(layout.units[0].tensors) != 1:
        extra = layout.units[0].tensors[1].name
        raise InvalidModel(
            f"tensor {extra}: models with a second table beside the token embedding are not supported yet"
        )


class _Tape:
    """What the stubs do at the moment: record calls, or replace the layers by a given hidden state."""

    def __init__(self, *, num_layers: int) -> None:
        self._num_layers = num_layers
        self._calls: list[LayerCall] = []
        self._first_hidden: Tensor | None = None
        self._injected: Tensor | None = None

    def on_call(self, index: int, hidden: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        if self._injected is not None:
            return self._injected if index == 0 else hidden
        if index == 0:
            self._first_hidden = hidden
        self._calls.append(LayerCall(args=args, kwargs=kwargs))
        # What follows the layers has no weights now; on the meta device it costs nothing and goes nowhere.
        return hidden.detach().to("meta") if index == self._num_layers - 1 else hidden.detach()

    def start_capture(self) -> None:
        self._calls, self._first_hidden = [], None

    def finish_capture(self) -> tuple[Tensor, list[LayerCall]]:
        hidden, calls = self._first_hidden, self._calls
        self.start_capture()
        assert hidden is not None
        assert len(calls) == self._num_layers, "the model's forward calls every layer once, in order"
        return hidden, calls

    def injecting(self, hidden: Tensor) -> _Injection:
        return _Injection(self, hidden)

    def set_injected(self, hidden: Tensor | None) -> None:
        self._injected = hidden


class _Injection:
    """Context in which the stubs stand for 'the layers have produced this'."""

    def __init__(self, tape: _Tape, hidden: Tensor) -> None:
        self._tape, self._hidden = tape, hidden

    def __enter__(self) -> None:
        self._tape.set_injected(self._hidden)

    def __exit__(self, *_: object) -> None:
        self._tape.set_injected(None)


class _Stub(nn.Module):
    """Stands where a decoder layer stood, answers like it to attribute look-ups, and hands its call to the tape."""

    def __init__(self, layer: nn.Module, index: int, tape: _Tape) -> None:
        super().__init__()
        # Past nn.Module's registration, or the layer's parameters would be the stub's.
        self.__dict__.update(_layer=layer, _index=index, _tape=tape)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Hand over; see `_Tape`."""
        tape: _Tape = self.__dict__["_tape"]
        return tape.on_call(self.__dict__["_index"], hidden, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_layer"], name)


def _share(layers: list[nn.Module]) -> tuple[list[nn.Module], list[int]]:
    representatives: dict[tuple[object, ...], int] = {}
    groups = [representatives.setdefault(layer_signature(layer), index) for index, layer in enumerate(layers)]
    return [layers[group] for group in groups], groups


def _parameter_shapes(model: nn.Module, *, tied: bool) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=tied)}


def _ends(model: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    table: object = model.get_input_embeddings()
    projection: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(table, nn.Embedding) or not isinstance(projection, nn.Linear):
        kinds = f"{type(table).__name__} and {type(projection).__name__}"
        raise InvalidModel(f"a model whose ends are {kinds}, not an embedding table and a projection, is not supported")
    return table, projection


def _name_of_module(model: nn.Module, wanted: nn.Module) -> str:
    for name, module in model.named_modules():
        if module is wanted:
            return str(name)
    raise AssertionError("the module belongs to the model")


def _take_padding_id(embedding: nn.Embedding) -> int | None:
    # Ids are renumbered, so the module must not know a padding id; who backpropagates zeroes that row's gradient instead.
    padding_id = embedding.padding_idx
    embedding.padding_idx = None
    return padding_id


def _tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors_in(item)]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors_in(item)]
    return []
