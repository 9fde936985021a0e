"""Any Hugging Face decoder, one unit at a time, without copying its code.

The model class of transformers is built without storage. Stubs take the place of its decoder layers, so that the model's own
forward computes what every layer is to be called with (masks, position embeddings, per-layer arguments), and so that the same
forward, started after the layers, is the head. A layer then runs with parameters that are views into streamed memory.

Owns the three ways to run a unit, and which parameters each unit has. Must not know slots, queues or schedules.

Shapes: T = tokens of a micro-batch, C = tokens of a head chunk, D = hidden size, V = vocabulary, R = rows of the embedding in use.
Thread: `embed`, `layer` and `head` are for one thread at a time.
Source: Horizon-LM (arXiv 2602.04816), CPU-master GPU-template execution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PretrainedConfig, PreTrainedModel

from horizon_server.engine.binding import Binding, bind, checkpoint_tensors
from horizon_server.engine.layer_stubs import LayerCall, Stub, Tape
from horizon_server.engine.meta_model import (
    build_meta_model,
    draws_random_numbers,
    find_layer_list,
    layer_signature,
    load_config,
    max_positions,
    name_of_parameter,
)
from horizon_server.engine.module_state import ModuleState
from horizon_server.engine.packing_limit import find_packing_limit
from horizon_server.engine.pieces import Piece, Strided
from horizon_server.engine.skipped_projection import find_skipped_projections
from horizon_server.engine.template_trial import try_embedding
from horizon_server.errors import InvalidModel
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.store.layout import StoreLayout, UnitLayout, build_layout

__all__ = ["LayerCall", "Place", "Template"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A parameter inside a flat buffer, under the name its module knows it by.

    A buffer that belongs to the checkpoint has a place too; it is not trained.
    """

    local_name: str
    piece: Piece
    stored_names: tuple[str, ...]
    trained: bool = True

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's view into the buffer; a copy where its tensors are not contiguous."""
        return self.piece.read(flat)

    def add(self, flat: Tensor, values: Tensor) -> None:
        """Add a gradient to the values at the parameter's place."""
        self.piece.add(flat, values)


class Template:
    """The structure of a model, bound to a store layout. Use `from_folder` or `from_config`."""

    def __init__(self, config: PretrainedConfig, *, layout: StoreLayout | None = None) -> None:
        model = build_meta_model(config)
        self.config = model.config
        table, projection = _ends(model)
        self.tied = projection.weight is table.weight
        self.shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=self.tied)}
        layer_list_name, layer_list = find_layer_list(model)
        self.num_layers = len(layer_list)
        base_name = layer_list_name.partition(".")[0]
        self._base_model = model.get_submodule(base_name)
        self._prefixes = {"embedding": f"{base_name}.", "layer": f"{layer_list_name}.", "head": ""}
        layout = layout or build_layout(_stored_shapes(model), num_layers=self.num_layers, tied=self.tied)
        # The head's buffer is laid out by `tied`, so both must mean the same.
        if layout.tied != self.tied:
            raise InvalidModel("config and checkpoint disagree on whether embedding and output projection are tied")
        self.layout, bindings = layout, bind(model, layout)
        self.embedding_parameter = name_of_parameter(model, table.weight)
        self.projection_name = f"{next(n for n, m in model.named_modules() if m is projection)}.weight"
        self.vocab_size, self.hidden_size = table.weight.shape
        self.max_document_tokens = max_positions(model.config)
        self.draws_random_numbers = draws_random_numbers(model.config)
        # Ids are renumbered, so the module must not know a padding id; who backpropagates zeroes that row's gradient instead.
        self.padding_id, table.padding_idx = table.padding_idx, None
        self._model, self._tape = model, Tape(num_layers=self.num_layers)
        self._layers, self.layer_groups = _share(list(layer_list))
        for index, layer in enumerate(layer_list):
            layer_list[index] = Stub(layer, index, self._tape)
        self._places = [self._unit_places(unit, bindings) for unit in self.layout.units]
        self._state = ModuleState(module for module in model.modules() if not isinstance(module, Stub))
        shapes = {place.local_name: place.piece.shape for place in self._places[0]}
        calls = try_embedding(model, self._tape, self.embed, shapes, self._layers)
        # Dropout after a layer's last projection saves its mask, so the search runs in training mode.
        self.train(True)
        self._skipped_projections = find_skipped_projections(
            {group: (self._layers[group], calls[group]) for group in self.layer_groups}, hidden_size=self.hidden_size
        )
        self.train(False)
        # After the search above, which replaces a projection's forward for good.
        self._layer_states = {group: ModuleState(self._layers[group].modules()) for group in set(self.layer_groups)}
        self.packing_limit = self._find_packing_limit(shapes, calls)

    @classmethod
    def from_folder(cls, folder: Path, *, layout: StoreLayout | None = None) -> Template:
        """The template of a model folder; without a layout, bound to the one that memory is planned by.

        Raises:
            InvalidModel: the folder's model is not supported, or layout and model differ; the message names the tensor.
        """
        config = load_config(folder)
        return cls(config, layout=layout or open_model_folder(folder).layout)

    @classmethod
    def from_config(cls, config: PretrainedConfig, *, layout: StoreLayout | None = None) -> Template:
        """The template of a transformers config. Raises like `from_folder`."""
        return cls(config, layout=layout)

    @property
    def num_skipped_parameters(self) -> int:
        """Parameters of all layers whose product the recompute of a layer skips."""
        return sum(
            self._skipped_projections[g].num_parameters for g in self.layer_groups if g in self._skipped_projections
        )

    @property
    def head_elements(self) -> int:
        """Elements of the buffer the head runs from: its own unit, then the embedding's where that is the projection."""
        embedding, head = self.layout.units[0], self.layout.units[-1]
        return head.num_elements + (embedding.num_elements if self.tied else 0)

    def train(self, mode: bool) -> None:
        """Switch dropout and router noise on or off, where the config asks for any. The queues must be idle."""
        if self.draws_random_numbers:
            # The layers too: the model has only stubs in their place.
            for module in (self._model, *self._layers):
                module.train(mode)

    def place_buffers(self, place: Callable[[Tensor], Tensor]) -> None:
        """Move the modules' buffers (rotary tables) to where compute reads them; a template is for one device."""
        for state in (self._state, *self._layer_states.values()):
            state.place(place)

    @cached_property
    def table_place(self) -> Place:
        """The embedding table in the embedding unit's buffer."""
        local_name = self.embedding_parameter.removeprefix(self._prefixes["embedding"])
        return next(place for place in self._places[0] if place.local_name == local_name)

    @cached_property
    def places_beside_the_table(self) -> list[Place]:
        """What else the first layer's input is made of (learned positions, a norm), in the embedding unit's buffer."""
        return [place for place in self._places[0] if place is not self.table_place]

    @cached_property
    def embedding_name(self) -> str:
        """The embedding table's name in the layout."""
        piece = self.table_place.piece
        assert isinstance(piece, Strided), "a table is one tensor"
        return next(t.name for t in self.layout.units[0].tensors if t.offset == piece.offset)

    @property
    def embeds_by_rows(self) -> bool:
        """Whether the table's rows are all that the first layer's input is made of; otherwise `embed` needs the whole unit."""
        return not self.places_beside_the_table

    def places(self, unit_index: int) -> list[Place]:
        """The parameters in a unit's buffer (the head's buffer is `head_elements` long)."""
        return self._places[unit_index]

    def embed(
        self, parameters: Mapping[str, Tensor], row_ids_T: Tensor, position_ids_T: Tensor
    ) -> tuple[Tensor, list[LayerCall]]:
        """The input of the first layer, and the call of every layer. Shapes: [1, T, D].

        `row_ids_T` index the table among `parameters`, which may have fewer rows than the vocabulary.
        """
        inputs = {"input_ids": row_ids_T[None], "position_ids": position_ids_T[None]}
        self._tape.start_capture()
        with self._state.restored():
            functional_call(self._base_model, dict(parameters), kwargs=_accepted(self._base_model, inputs))
        hidden_1TD, calls = self._tape.finish_capture()
        shape, expected = tuple(hidden_1TD.shape), (1, row_ids_T.numel(), self.hidden_size)
        if shape[:-1] != expected[:-1]:
            what = f"its layers take hidden states of shape {list(shape)} instead of {list(expected)}, which is"
            raise InvalidModel(f"{what} not supported")
        if shape != expected:
            what = f"its token embedding is {expected[-1]} wide and its layers {shape[-1]}"
            raise InvalidModel(f"{what}; a projection between them is not supported")
        return hidden_1TD, calls

    def layer(self, index: int, parameters: Mapping[str, Tensor], hidden_1TD: Tensor, call: LayerCall) -> Tensor:
        """One decoder layer. Shapes: [1, T, D] to [1, T, D]."""
        args, kwargs = call.with_hidden(hidden_1TD)
        with self._layer_states[self.layer_groups[index]].restored():
            output = functional_call(self._layers[index], dict(parameters), args, kwargs)
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        if not isinstance(hidden, Tensor) or hidden.shape != hidden_1TD.shape:
            name = f"{self._prefixes['layer']}{index}"
            raise InvalidModel(f"layer {name} does not answer with a hidden state alone, which is not supported")
        return hidden

    def layer_for_gradients(
        self, index: int, parameters: Mapping[str, Tensor], hidden_1TD: Tensor, call: LayerCall
    ) -> Tensor:
        """Like `layer`, for backward alone: the values of what it returns are undefined, every gradient through it is exact."""
        unseen = self._skipped_projections.get(self.layer_groups[index])
        with unseen.skipped() if unseen else nullcontext():
            return self.layer(index, parameters, hidden_1TD, call)

    def head(self, parameters: Mapping[str, Tensor], hidden_1CD: Tensor) -> Tensor:
        """Final norm, projection and the scaling after it, for tokens that need not be neighbours. Shapes: [C, V]."""
        # Any positions do: what the model makes of them is for its layers, which do not run here.
        positions_1C = torch.arange(hidden_1CD.shape[1], device=hidden_1CD.device)[None]
        inputs = {"inputs_embeds": hidden_1CD.detach(), "position_ids": positions_1C}
        bound = {**self._stand_ins(hidden_1CD), **parameters}
        with self._state.restored(), self._tape.injecting(hidden_1CD):
            output = functional_call(self._model, bound, kwargs=_accepted(self._model, inputs))
        logits_CV: Tensor = output.logits[0]
        if logits_CV.shape != (hidden_1CD.shape[1], self.vocab_size):
            raise InvalidModel(f"logits of shape {tuple(output.logits.shape)} are not supported")
        return logits_CV

    def _stand_ins(self, like_1CD: Tensor) -> dict[str, Tensor]:
        """The head does not use what precedes the layers, but its code runs: zeros of the right shape, without memory.

        Tables of positions get rows enough for a chunk, whose tokens are counted as if they were neighbours.
        """
        zero, stand_ins = like_1CD.new_zeros(()), {}
        for place in self.places_beside_the_table:
            num_rows, *rest = place.piece.shape
            module = self._base_model.get_submodule(place.local_name.rpartition(".")[0])
            num_rows += like_1CD.shape[1] if isinstance(module, nn.Embedding) else 0
            stand_ins[self._prefixes["embedding"] + place.local_name] = zero.expand(num_rows, *rest)
        return stand_ins

    def _find_packing_limit(self, shapes: Mapping[str, tuple[int, ...]], calls: Sequence[LayerCall]) -> int | None:
        parameters = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}

        def calls_of(position_ids_T: Tensor) -> list[LayerCall]:
            with torch.no_grad():
                return self.embed(parameters, torch.zeros_like(position_ids_T), position_ids_T)[1]

        return find_packing_limit(
            calls_of,
            [(self._layers[group], calls[group]) for group in self._layer_states],
            hidden_size=self.hidden_size,
            max_document_tokens=self.max_document_tokens,
        )

    def _unit_places(self, unit: UnitLayout, bindings: list[Binding]) -> list[Place]:
        layers = self._prefixes["layer"]
        prefix = f"{layers}{unit.index - 1}." if unit.kind == "layer" else self._prefixes[unit.kind]
        places = []
        for binding in bindings:
            if binding.unit_index != unit.index:
                continue
            in_a_layer = binding.name.startswith(layers)
            if not binding.name.startswith(prefix) or in_a_layer != (unit.kind == "layer"):
                raise InvalidModel(
                    f"tensor {binding.name} is stored with {unit.name}, where the model does not have it"
                )
            places.append(
                Place(
                    local_name=binding.name.removeprefix(prefix),
                    piece=binding.piece,
                    stored_names=binding.stored_names,
                    trained=not binding.is_buffer,
                )
            )
        if unit.kind == "head" and self.tied:
            table = next(binding for binding in bindings if binding.name == self.embedding_parameter)
            piece = table.piece.shifted(unit.num_elements)
            places.append(Place(local_name=self.projection_name, piece=piece, stored_names=table.stored_names))
        return places


def _share(layers: list[nn.Module]) -> tuple[list[nn.Module], list[int]]:
    representatives: dict[tuple[object, ...], int] = {}
    groups = [representatives.setdefault(layer_signature(layer), index) for index, layer in enumerate(layers)]
    return [layers[group] for group in groups], groups


def _stored_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """What a checkpoint in the form of the model's class would hold; shared tensors once, by their first name."""
    first_names: dict[int, str] = {}
    tensors = checkpoint_tensors(model)
    for name, tensor in tensors.items():
        first_names.setdefault(id(tensor), name)
    return {name: tuple(tensors[name].shape) for name in first_names.values()}


def _accepted(module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """The arguments that a forward has, by name, and no cache."""
    known = inspect.signature(module.forward).parameters
    return {name: value for name, value in {**inputs, "use_cache": False}.items() if name in known}


def _ends(model: PreTrainedModel) -> tuple[nn.Embedding, nn.Linear]:
    table: object = model.get_input_embeddings()
    projection: object = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(table, nn.Embedding) or not isinstance(projection, nn.Linear):
        kinds = f"{type(table).__name__} and {type(projection).__name__}"
        raise InvalidModel(f"a model whose ends are {kinds}, not an embedding table and a projection, is not supported")
    return table, projection
