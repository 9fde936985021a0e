"""Any Hugging Face decoder, one unit at a time, without copying its code.

The model class of transformers is built without storage. Stubs take the place of its decoder layers, so that the
model's own forward computes what every layer is to be called with (masks, position embeddings, per-layer arguments),
and so that the same forward, started after the layers, is the head. A layer then runs with parameters that are views
into streamed memory.

Shapes: T = tokens of a micro-batch, C = tokens of a head chunk, D = hidden size, V = vocabulary, R = rows of the
embedding in use. Thread: `embed`, `layer` and `head` are for one thread at a time.
Source: Horizon-LM (arXiv 2602.04816), CPU-master GPU-template execution.
"""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache, PretrainedConfig, PreTrainedModel

from horizon_server.engine.adapters import adapter_places, adapters_among, check_uses, take_adapters
from horizon_server.engine.attention.trial import OwnAttention, find_own_attention
from horizon_server.engine.binding import Exact, Joined, Place, Strided, bind
from horizon_server.engine.bound_module import BoundModule
from horizon_server.engine.layer_stubs import (
    NUM_TRIAL_TOKENS,
    RUN_ERRORS,
    CaptureEnded,
    EqualFactors,
    LayerCall,
    Stub,
    Tape,
    try_embedding,
)
from horizon_server.engine.linear import LinearMaps
from horizon_server.engine.logits import keeps_logits
from horizon_server.engine.meta_model import (
    ModuleState,
    build_meta_model,
    draws_random_numbers,
    ends_of,
    find_layer_list,
    layer_signature,
    load_config,
    max_positions,
    stored_shapes,
)
from horizon_server.engine.own_forward import check_own_forward
from horizon_server.engine.packing_limit import find_packing_limit
from horizon_server.engine.skipped_projection import SkippedProjection, find_skipped_projection
from horizon_server.errors import InvalidModel
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.recipe import Recipe
from horizon_server.store.adapter_norms import adapted_norms
from horizon_server.store.adapters import MAGNITUDE
from horizon_server.store.layout import TENSOR_ALIGN_ELEMENTS, StoreLayout, UnitLayout, build_layout

# More than recurrent layers compute at once: shorter rows take another way through their code.
_DTYPE_TRIAL_TOKENS = 512


class Template:
    """The structure of a model, bound to a store layout. Use `from_folder` or `from_config`.

    `places` are the parameters in each unit's buffer, by unit index; the head's buffer is `head_elements` long: its own
    unit, then the embedding's where that is the projection. `table_place` is the embedding table among the embedding
    unit's places, `embedding_name` its name in the layout, and `places_besides_table` what else the first layer's input
    is made of (learned positions, a norm). Where there is nothing else, the model `embeds_by_rows`: the rows in use are
    all it needs. `num_skipped_parameters` are those of all layers whose product the recompute of a layer skips.
    `head_keeps_logits` says whether the head's backward reads the logits, so that their memory must not become that of
    their gradient.

    Weights that have adapters in the layout are computed with them; `adapter_scale` is what their output is multiplied
    by, and `adapter_dropout` the share of their inputs that is dropped in training. `draws_random_numbers` says whether
    training draws any.

    Without `own_attention` the layers attend as transformers lets them, with masks: that is what a cache of keys and
    values needs, whose queries are fewer than its keys.
    """

    def __init__(
        self, config: PretrainedConfig, *, layout: StoreLayout | None = None, own_attention: bool = True
    ) -> None:
        model = build_meta_model(config)
        self.config = model.config
        table, projection = ends_of(model)
        self.tied = projection.weight is table.weight
        self.shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=self.tied)}
        layer_list_name, layer_list = find_layer_list(model)
        self.num_layers = len(layer_list)
        base_name = layer_list_name.partition(".")[0]
        self._base_model = model.get_submodule(base_name)
        self._prefixes = {"embedding": f"{base_name}.", "layer": f"{layer_list_name}.", "head": ""}
        self.layout = layout or build_layout(stored_shapes(model), num_layers=self.num_layers, tied=self.tied)
        # The head's buffer is laid out by `tied`, so both must mean the same.
        if self.layout.tied != self.tied:
            raise InvalidModel("config and checkpoint disagree on whether embedding and output projection are tied")
        # As in transformers: names or parts of them, where a star stands for anything; of the other list only fp16 is
        # raised.
        kept = sorted(model._keep_in_fp32_modules_strict or ())
        self._kept_names = re.compile("|".join(name.replace("*", ".*") for name in kept)) if kept else None
        self._bind(model, table, projection)
        self.vocab_size, self.hidden_size = table.weight.shape
        self.max_document_tokens = max_positions(model.config)
        self._has_dropout = draws_random_numbers(model.config)
        self.adapter_scale, self.adapter_dropout = 1.0, 0.0
        # Ids are renumbered, so the module must not know a padding id; who backpropagates zeroes that row's gradient
        # instead.
        self.padding_id, table.padding_idx = table.padding_idx, None
        self._noise_1TD: Tensor | None = None
        table.register_forward_hook(self._with_noise)
        self._model, self._tape = model, Tape(num_layers=self.num_layers)
        # Equal layers run as the first of them, so that trials, buffers and workspace are counted once per kind.
        first_equal: dict[tuple[object, ...], int] = {}
        self.layer_groups = [first_equal.setdefault(layer_signature(layer), i) for i, layer in enumerate(layer_list)]
        # Of them, those whose parameters are stored and trained alike, so that compiled code of one serves all.
        first_alike: dict[tuple[object, ...], int] = {}
        self.layer_kinds = [
            first_alike.setdefault((group, *_forms(places)), i)
            for i, (group, places) in enumerate(zip(self.layer_groups, self.places[1:-1], strict=True))
        ]
        self._layers = [layer_list[group] for group in self.layer_groups]
        for index, layer in enumerate(layer_list):
            layer_list[index] = Stub(layer, index, self._tape)
        self._bound_model, self._bound_base = BoundModule(model), BoundModule(self._base_model)
        self._bound_layers = {group: BoundModule(layer) for group, layer in self.groups.items()}
        self._try(own_attention=own_attention)
        self._tape.ends_captures = True

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        *,
        layout: StoreLayout | None = None,
        recipe: Recipe | None = None,
        own_attention: bool = True,
    ) -> Template:
        """The template of a model folder; without a layout, bound to the one that memory is planned by. Its adapters
        are those of `recipe`.

        Raises:
            InvalidModel: the folder's model is not supported, or layout and model differ; the message names the tensor.
        """
        config = load_config(folder)
        template = cls(config, layout=layout or open_model_folder(folder).layout, own_attention=own_attention)
        if recipe is not None:
            template.adapter_scale, template.adapter_dropout = recipe.adapter_scale, recipe.adapter_dropout
        return template

    @classmethod
    def from_config(
        cls, config: PretrainedConfig, *, layout: StoreLayout | None = None, own_attention: bool = True
    ) -> Template:
        """The template of a transformers config. Raises like `from_folder`."""
        return cls(config, layout=layout, own_attention=own_attention)

    def _bind(self, model: PreTrainedModel, table: nn.Embedding, projection: nn.Linear) -> None:
        bound, units = bind(model, self.layout), self.layout.units
        bound += adapter_places(self.layout, bound)
        # By the module: where the two are tied, the projection may come first among the parameters.
        self.embedding_parameter = f"{next(name for name, module in model.named_modules() if module is table)}.weight"
        self.projection_name = f"{next(n for n, m in model.named_modules() if m is projection)}.weight"
        self.places = [self._unit_places(unit, bound) for unit in units]
        self._adapters = [adapters_among(places, self.layout) for places in self.places[1:-1]]
        local_name = self.embedding_parameter.removeprefix(self._prefixes["embedding"])
        found = next((place for place in self.places[0] if place.name == local_name), None)
        if found is None:
            raise InvalidModel(
                f"model_type {self.config.model_type!r}: its token embedding {self.embedding_parameter} is not stored "
                "with what precedes "
                "the layers, which is not supported"
            )
        self.table_place = found
        self.places_besides_table = [place for place in self.places[0] if place is not self.table_place]
        self.embeds_by_rows = not self.places_besides_table
        piece = self.table_place.piece
        assert isinstance(piece, Strided), "a table is one tensor"
        self.embedding_name = next(tensor.name for tensor in units[0].tensors if tensor.offset == piece.offset)
        self.head_elements = units[-1].num_elements
        if self.tied:
            # The projection has the table's values, which are in the head's buffer after the head's own.
            piece, index = piece.shifted(self.head_elements), units[-1].index
            self.places[-1].append(replace(self.table_place, name=self.projection_name, unit_index=index, piece=piece))
            self.head_elements += units[0].num_elements

    def _unit_places(self, unit: UnitLayout, bound: Sequence[Place]) -> list[Place]:
        layers = self._prefixes["layer"]
        prefix = f"{layers}{unit.index - 1}." if unit.kind == "layer" else self._prefixes[unit.kind]
        places = self._kept_exact([place for place in bound if place.unit_index == unit.index])
        for place in places:
            in_a_layer = place.name.startswith(layers)
            if not place.name.startswith(prefix) or in_a_layer != (unit.kind == "layer"):
                raise InvalidModel(f"tensor {place.name} is stored with {unit.name}, where the model does not have it")
        return [replace(place, name=place.name.removeprefix(prefix)) for place in places]

    def _kept_exact(self, places: list[Place]) -> list[Place]:
        """With magnitudes of adapters as exact, and what transformers keeps in fp32 where it loads a model in bf16 (a
        router's correction bias).
        """
        found, before_end = [], 0
        for place in places:
            # Of the table only some rows are on the device.
            is_table = place.name == self.embedding_parameter
            # A magnitude moves by far less in a step than bf16 has digits.
            is_kept = bool(place.adapts) and place.name.endswith(MAGNITUDE)
            if self._kept_names is not None and not is_table:
                is_kept = is_kept or self._kept_names.search(place.name) is not None
            if isinstance(place.piece, (Strided, Joined)) and is_kept:
                before_end += -(-math.prod(place.piece.shape) // TENSOR_ALIGN_ELEMENTS) * TENSOR_ALIGN_ELEMENTS
                place = replace(place, piece=Exact(piece=place.piece, before_end=before_end))
            found.append(place)
        return found

    def exact_pieces(self, unit_index: int) -> list[Exact]:
        """The pieces of a unit that are computed with in fp32."""
        return [place.piece for place in self.places[unit_index] if isinstance(place.piece, Exact)]

    def trained_exact_pieces(self, unit_index: int) -> list[Exact]:
        """Those of them that are trained."""
        places = [place for place in self.places[unit_index] if place.has_gradient]
        return [place.piece for place in places if isinstance(place.piece, Exact)]

    def exact_elements(self, *, in_layers: bool) -> int:
        """Elements of bf16 that exact pieces take at the end of a buffer for layers, or of one for embedding and
        head."""
        units = [unit for unit in self.layout.units if (unit.kind == "layer") == in_layers]
        return max((2 * piece.before_end for unit in units for piece in self.exact_pieces(unit.index)), default=0)

    def _try(self, *, own_attention: bool) -> None:
        """Run the model on trials without storage: can it run layer by layer, what can backward skip, how far can rows
        be packed."""
        self._state = ModuleState(module for module in self._model.modules() if not isinstance(module, Stub))
        self.own_attention: OwnAttention | None = None
        self.keeps_masks = ""
        self._buffer_device = torch.device("cpu")
        shapes = {place.name: place.piece.shape for place in self.places[0]}
        calls = try_embedding(self._model, self._tape, self.embed, shapes, self._layers)
        check_own_forward(
            self._model,
            self._tape,
            self.embed,
            shapes,
            prefix=self._prefixes["embedding"],
            max_document_tokens=self.max_document_tokens,
        )
        groups = sorted(set(self.layer_groups))

        def calls_of(position_ids_T: Tensor) -> list[LayerCall]:
            return self.calls_of(position_ids_T, None)

        # Dropout in attention shows in training mode alone, and after a layer's last projection it saves its mask.
        self.train(True)
        if own_attention:
            found = find_own_attention(
                self._model, self._layers, self.layer_groups, calls_of, hidden_size=self.hidden_size
            )
            if isinstance(found, OwnAttention):
                self.own_attention = found
            else:
                self.keeps_masks = found
        if self.own_attention:
            calls = calls_of(torch.arange(NUM_TRIAL_TOKENS))
        self._skipped_projections = {
            group: find_skipped_projection(self._layers[group], calls[group], hidden_size=self.hidden_size)
            for group in groups
        }
        self.train(False)
        skipped = [projection for layer in range(self.num_layers) if (projection := self._skipped_by(layer))]
        self.num_skipped_parameters = sum(projection.num_parameters for projection in skipped)
        self._is_training = False
        # After the search above, which replaces a projection's forward for good.
        self._layer_states = {group: ModuleState(self._layers[group].modules()) for group in groups}
        parameters = {place.name: torch.zeros(()).expand(place.piece.shape) for place in self.places[-1]}
        self.head_keeps_logits = keeps_logits(self.head, parameters, self.projection_name, hidden_size=self.hidden_size)
        with ExitStack() as stack:
            # Without storage, layers move their tables there.
            for state in self._layer_states.values():
                stack.enter_context(state.restored())
            self.packing_limit = find_packing_limit(
                calls_of,
                [(self._layers[group], calls[group]) for group in groups],
                hidden_size=self.hidden_size,
                max_document_tokens=self.max_document_tokens,
            )
        self._check_adapters(torch.float32)

    @property
    def needs_masks(self) -> bool:
        """Whether the model's attention takes a mask over all pairs of a packed row's tokens, because ours is not what
        it means.

        `keeps_masks` says why, where that was tried.
        """
        return self.own_attention is None

    @property
    def groups(self) -> dict[int, nn.Module]:
        """The module that runs each group of equal layers, by the first of them. It has no storage."""
        return {group: self._layers[group] for group in self.layer_groups}

    @property
    def has_adapters(self) -> bool:
        """Whether any weight has an adapter."""
        return any(self._adapters)

    @property
    def draws_random_numbers(self) -> bool:
        """Whether training drops or adds anything at random, by the model's config or in its adapters."""
        return self._has_dropout or (self.has_adapters and self.adapter_dropout > 0)

    def train(self, mode: bool) -> None:
        """Switch dropout and router noise on or off, where the config or the job asks for any. The queues must be
        idle."""
        self._is_training = mode
        if self._has_dropout:
            # The layers too: the model has only stubs in their place.
            for module in (self._model, *self._layers):
                module.train(mode)

    def check_dtype(self, dtype: torch.dtype) -> None:
        """Refuse a dtype that the code of the model's layers does not run in: some mixes what it is given with fp32 of
        its own.

        Raises:
            InvalidModel: it runs in fp32 and fails in `dtype`, or uses an adapted weight otherwise than as a linear
                map.
        """
        self._check_adapters(dtype)
        for index, error in enumerate(self._layer_errors(dtype)):
            if error is not None and self._layer_errors(torch.float32)[index] is None:
                raise InvalidModel(
                    f"model_type {self.config.model_type!r} cannot be computed in {str(dtype).removeprefix('torch.')}, "
                    f"as its code in transformers fails ({str(error).splitlines()[0]}); use device: host and "
                    "train.compute_dtype: float32"
                ) from error

    def _layer_errors(self, dtype: torch.dtype) -> list[Exception | None]:
        """What running each kind of layer without storage raises."""
        zeros = {place.name: torch.zeros((), dtype=dtype).expand(place.piece.shape) for place in self.places[0]}
        positions_T = torch.arange(min(_DTYPE_TRIAL_TOKENS, self.max_document_tokens or _DTYPE_TRIAL_TOKENS))
        with torch.no_grad():
            calls = self.embed(zeros, torch.zeros_like(positions_T), positions_T)[1]
        errors: list[Exception | None] = []
        for group in sorted(set(self.layer_groups)):
            args, kwargs = calls[group].without_storage(
                hidden_size=self.hidden_size, num_tokens=positions_T.numel(), dtype=dtype
            )
            meta = {
                place.name: torch.empty(place.piece.shape, dtype=place.dtype_in(dtype), device="meta")
                for place in self.places[group + 1]
            }
            try:
                # On a copy: some layers move what they hold to where they find the hidden state.
                with EqualFactors():  # type: ignore[no-untyped-call]
                    functional_call(copy.deepcopy(self._layers[group]), meta, args, kwargs)
                errors.append(None)
            except RUN_ERRORS as error:
                errors.append(error)
        return errors

    def _check_adapters(self, dtype: torch.dtype) -> None:
        """Run a layer of each kind that has adapters, to see that their weights are used as linear maps.

        Raises:
            InvalidModel: a weight is not; it is named.
        """
        if not self.has_adapters:
            return
        calls = self.calls_of(torch.arange(NUM_TRIAL_TOKENS, device=self._buffer_device), None, dtype)
        for index in sorted(set(self.layer_kinds)):
            check_uses(
                self._layers[index],
                self.places[index + 1],
                [adapter.weight for adapter in self._adapters[index]],
                calls[index],
                hidden_size=self.hidden_size,
                dtype=dtype,
            )

    def place_buffers(self, place: Callable[[Tensor], Tensor]) -> None:
        """Move the modules' buffers (rotary tables) to where compute reads them; a template is for one device."""
        self._buffer_device = place(torch.empty(0)).device
        for state in (self._state, *self._layer_states.values()):
            state.place(place)

    def embed(
        self,
        parameters: Mapping[str, Tensor],
        row_ids_T: Tensor,
        position_ids_T: Tensor,
        boundaries: Tensor | None = None,
        noise_1TD: Tensor | None = None,
        cache: Cache | None = None,
    ) -> tuple[Tensor, list[LayerCall]]:
        """The input of the first layer, and the call of every layer. Shapes: [1, T, D].

        `noise_1TD` is added to what the module of the table puts out, before positions, norms or dropout, as
        transformers' hook for NEFTune does.

        `row_ids_T` index the table among `parameters`, which may have fewer rows than the vocabulary. `boundaries` are
        where documents start and the last one ends, on the CPU; without them the row is one document. With a `cache`
        the tokens follow those that it holds, and it is among the arguments of the calls; the template must be one
        without own attention.
        """
        inputs = {"input_ids": row_ids_T[None], "position_ids": position_ids_T[None]}
        self._tape.start_capture()
        self._noise_1TD = noise_1TD
        try:
            with self._state.restored(), suppress(CaptureEnded):
                self._bound_base(parameters, **_accepted(self._bound_base, inputs, cache))
        finally:
            self._noise_1TD = None
        hidden_1TD, calls = self._tape.finish_capture()
        shape, expected = tuple(hidden_1TD.shape), (1, row_ids_T.numel(), self.hidden_size)
        if shape[:-1] != expected[:-1]:
            what = f"its layers take hidden states of shape {list(shape)} instead of {list(expected)}, which is"
            raise InvalidModel(f"{what} not supported")
        if shape != expected:
            what = f"its token embedding is {expected[-1]} wide and its layers {shape[-1]}"
            raise InvalidModel(f"{what}; a projection between them is not supported")
        if self.own_attention:
            if boundaries is None:
                boundaries = torch.tensor([0, row_ids_T.numel()])
            calls = self.own_attention.with_boundaries(calls, boundaries)
        return hidden_1TD, calls

    def _with_noise(self, table: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        return output if self._noise_1TD is None else output + self._noise_1TD

    def probe_calls(self, document_lengths: Sequence[int], dtype: torch.dtype) -> list[LayerCall]:
        """The calls of all layers for a row of such documents, in a model computed in `dtype`, which their tables have
        too."""
        positions_T = torch.cat([torch.arange(length) for length in document_lengths])
        boundaries = torch.tensor([0, *itertools.accumulate(document_lengths)])
        return self.calls_of(positions_T.to(self._buffer_device), boundaries, dtype)

    def calls_of(
        self,
        position_ids_T: Tensor,
        boundaries: Tensor | None,
        dtype: torch.dtype = torch.float32,
        cache: Cache | None = None,
    ) -> list[LayerCall]:
        """The calls of all layers for a row of these positions, which are where the buffers are, without an
        embedding."""
        # One element, seen in every shape: real enough to compute with, and without memory.
        device = position_ids_T.device
        zeros = {
            place.name: torch.zeros((), dtype=place.dtype_in(dtype), device=device).expand(place.piece.shape)
            for place in self.places[0]
        }
        with torch.no_grad():
            return self.embed(zeros, torch.zeros_like(position_ids_T), position_ids_T, boundaries, cache=cache)[1]

    def norm_sizes(self, index: int) -> dict[str, int]:
        """The length of each of a layer's `norms`, by name."""
        places = {place.name: place for place in self.places[index + 1]}
        return {
            names.norms: places[names.magnitude].piece.shape[0] for names in self._adapters[index] if names.magnitude
        }

    def norms(self, index: int, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a layer's magnitudes (DoRA) are divided by, for `layer`, by name; none where it has no magnitudes, or
        `parameters` has them.

        They are those of the weights alone, so one visit of a layer needs them once, for all micro-batches. Shapes: [O]
        each, fp32.
        """
        return {
            names.norms: adapted_norms(
                parameters[names.weight],
                parameters[names.a].detach(),
                parameters[names.b].detach(),
                scale=self.adapter_scale,
                norm_dim=names.norm_dim,
            )
            for names in self._adapters[index]
            if names.magnitude and names.norms not in parameters
        }

    def layer(
        self,
        index: int,
        parameters: Mapping[str, Tensor],
        hidden_1TD: Tensor,
        call: LayerCall,
        maps: LinearMaps | None = None,
    ) -> Tensor:
        """One decoder layer. Shapes: [1, T, D] to [1, T, D].

        `parameters` may have the `norms` of these values, which are computed if they are not there. `maps` says how
        linear maps with their weights are computed; adapters are added to it.
        """
        args, kwargs = call.with_hidden(hidden_1TD)
        own = {**self.norms(index, parameters), **parameters}
        dropout = self.adapter_dropout if self._is_training else 0.0
        adapters = take_adapters(self._adapters[index], own, scale=self.adapter_scale, dropout=dropout)
        if adapters:
            maps = (maps or LinearMaps()).with_adapters(adapters)
        with self._layer_states[self.layer_groups[index]].restored(), maps or nullcontext():
            output = self._bound_layers[self.layer_groups[index]](own, *args, **kwargs)
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        if not isinstance(hidden, Tensor) or hidden.shape != hidden_1TD.shape:
            name = f"{self._prefixes['layer']}{index}"
            raise InvalidModel(f"layer {name} does not answer with a hidden state alone, which is not supported")
        return hidden

    def layer_for_gradients(
        self,
        index: int,
        parameters: Mapping[str, Tensor],
        hidden_1TD: Tensor,
        call: LayerCall,
        maps: LinearMaps | None = None,
    ) -> Tensor:
        """Like `layer`, for backward alone: the values of what it returns are undefined, every gradient through it is
        exact."""
        projection = self._skipped_by(index)
        with projection.skipped() if projection else nullcontext():
            return self.layer(index, parameters, hidden_1TD, call, maps)

    def _skipped_by(self, index: int) -> SkippedProjection | None:
        """The projection whose value a layer's backward does not need. A magnitude's gradient is made of what it
        multiplies."""
        found = self._skipped_projections.get(self.layer_groups[index])
        scaled = {names.weight for names in self._adapters[index] if names.magnitude}
        return None if found is not None and found.weight in scaled else found

    def head(self, parameters: Mapping[str, Tensor], hidden_1CD: Tensor) -> Tensor:
        """Final norm, projection and the scaling after it, for tokens that need not be neighbours. Shapes: [C, V]."""
        num_tokens = hidden_1CD.shape[1]
        # What precedes the layers is not used, but its code runs: zeros of the right shape stand in, without memory.
        zero, bound = hidden_1CD.new_zeros(()), {}
        for place in self.places_besides_table:
            num_rows, *rest = place.piece.shape
            # Tables of positions get rows enough for a chunk, whose tokens are counted as if they were neighbours.
            if isinstance(self._base_model.get_submodule(place.name.rpartition(".")[0]), nn.Embedding):
                num_rows += num_tokens
            bound[self._prefixes["embedding"] + place.name] = zero.expand(num_rows, *rest)
        # Any positions do: what the model makes of them is for its layers, which do not run here.
        positions_1C = torch.arange(num_tokens, device=hidden_1CD.device)[None]
        inputs = {"inputs_embeds": hidden_1CD.detach(), "position_ids": positions_1C}
        with self._state.restored(), self._tape.injecting(hidden_1CD):
            output = self._bound_model({**bound, **parameters}, **_accepted(self._bound_model, inputs))
        # Not `[0]`, whose backward copies the gradient into zeros of the whole.
        logits_CV: Tensor = output.logits.squeeze(0)
        if logits_CV.shape != (num_tokens, self.vocab_size):
            raise InvalidModel(f"logits of shape {tuple(output.logits.shape)} are not supported")
        return logits_CV


class VisitNorms:
    """The `Template.norms` of a layer while it is visited, computed when the first micro-batch comes.

    Thread: compute's, after the driver made it.
    """

    def __init__(self, template: Template, layer: int) -> None:
        self._template, self._layer = template, layer
        self._norms: dict[str, Tensor] | None = None

    def beside(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A layer's parameters, and their norms."""
        if self._norms is None:
            self._norms = self._template.norms(self._layer, parameters)
        return {**parameters, **self._norms}


def _forms(places: Sequence[Place]) -> list[object]:
    """How parameters are stored. In order, and without the offsets, which differ from layer to layer."""
    return [
        (
            place.name,
            place.piece.shape,
            place.piece.strides if isinstance(place.piece, Strided) else None,
            place.trained,
        )
        for place in places
    ]


def _accepted(module: BoundModule, inputs: Mapping[str, Tensor], cache: Cache | None = None) -> dict[str, Any]:
    """The arguments that a forward has, by name, and no cache unless one is given."""
    # State space models have another name for it.
    caches = dict.fromkeys(("past_key_values", "cache_params"), cache) if cache is not None else {}
    return module.accepted({**inputs, **caches, "use_cache": bool(caches)})
