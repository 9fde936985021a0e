"""Experts of a layer apart from the rest of it: where a layer's forward stops at them and continues after them, and
how some of them are computed by themselves.

The classes of transformers 5 call their experts through `ExpertsInterface`. Inside `visiting` they call this module's
function, with the tokens, the experts of each and their weights. It records them and ends the forward there, or answers
with a result that was computed elsewhere. No code is for one architecture.

Experts are computed one at a time, in their order, each with its tokens in the order in which the classes' own loops
take them. So the bits are those of these loops (`experts_implementation` eager), whatever the pages.

Shapes: T = tokens of a micro-batch, D = hidden size, K = experts of a token, R = tokens of one expert.
Thread: one at a time, which is compute's.
Source: MoE-Lightning (arXiv 2411.11217).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from horizon_server.engine.autograd_function import with_signature
from horizon_server.engine.binding import Exact, Joined, Piece, Place
from horizon_server.engine.layer_stubs import NUM_TRIAL_TOKENS, RUN_ERRORS
from horizon_server.engine.template import Template
from horizon_server.errors import InvalidModel
from horizon_server.store.pages import PagedUnit, UnitPart, paged_unit, reaches_all

_NAME = "horizon_pages"
Answer = Callable[[Tensor, Tensor, Tensor], Tensor]
"""What is done instead of computing experts: takes tokens [T, D], their experts [T, K] and the weights of these."""


class Stopped(Exception):
    """A forward has reached its experts, and ends there."""


_answers: list[Answer] = []


def _answered(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return _answers[-1](hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(_NAME, _answered)


@contextmanager
def visiting(experts: nn.Module, answer: Answer) -> Iterator[None]:
    """Inside the block, `experts` does not compute, but answers so."""
    config: Any = experts.config
    before = config._experts_implementation
    config._experts_implementation = _NAME
    _answers.append(answer)
    try:
        yield
    finally:
        _answers.pop()
        config._experts_implementation = before


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Which tokens of a micro-batch each expert has, sorted by expert. `starts` are where each one's tokens begin."""

    tokens: Tensor
    places: Tensor
    starts: Sequence[int]

    @classmethod
    def of(cls, top_k_index: Tensor, num_experts: int) -> Routing:
        """CUDA: waits for compute, because what is launched for an expert depends on its number of tokens.

        Shapes: [T, K].
        """
        num_tokens = top_k_index.shape[0]
        # As the classes' loops find them: those that chose the expert first come first.
        experts, order = torch.sort(top_k_index.t().reshape(-1), stable=True)
        starts = torch.searchsorted(experts, torch.arange(num_experts + 1, device=experts.device, dtype=experts.dtype))
        return cls(tokens=order % num_tokens, places=order // num_tokens, starts=starts.tolist())

    def of_expert(self, expert: int) -> tuple[Tensor, Tensor] | None:
        """An expert's tokens, and at which place of their choice it is; None where it has none."""
        part = slice(self.starts[expert], self.starts[expert + 1])
        return (self.tokens[part], self.places[part]) if part.stop > part.start else None

    def visited(self) -> set[int]:
        """The experts that have tokens."""
        return {e for e in range(len(self.starts) - 1) if self.starts[e + 1] > self.starts[e]}


class _GivenResult(torch.autograd.Function):
    """Stands for the experts where their gradients are known already: those of the tokens and of the weights."""

    @staticmethod
    @with_signature
    def forward(hidden_TD: Tensor, weights_TK: Tensor, hidden_gradient_TD: Tensor, weights_gradient: Tensor) -> Tensor:
        """What it answers with is zeros, because no gradient depends on it."""
        return torch.zeros_like(hidden_TD)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the gradients."""
        ctx.gradients = inputs[2:]  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Give them."""
        hidden_gradient_TD, weights_gradient = ctx.gradients
        return hidden_gradient_TD, weights_gradient, None, None


def given_result(
    hidden_TD: Tensor, weights_TK: Tensor, hidden_gradient_TD: Tensor, weights_gradient_TK: Tensor
) -> Tensor:
    """What stands for the result of the experts where the gradients of what they read are known. Shapes: [T, D]."""
    result = _GivenResult.apply(  # type: ignore[no-untyped-call]
        hidden_TD, weights_TK, hidden_gradient_TD, weights_gradient_TK
    )
    assert isinstance(result, Tensor)
    return result


def expert_output(module: nn.Module, parameters: Mapping[str, Tensor], x_RD: Tensor, weights_R1: Tensor) -> Tensor:
    """One expert's part of the result, as the interface of transformers describes its class. Shapes: [R, D]."""
    experts: Any = module
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    inner = _product(experts, parameters, first, x_RD)
    inner = experts._apply_gate(inner) if experts.has_gate else experts.act_fn(inner)
    output: Tensor = _product(experts, parameters, "down_proj", inner) * weights_R1
    return output


def _product(experts: Any, parameters: Mapping[str, Tensor], name: str, x_RI: Tensor) -> Tensor:
    weight, bias = parameters[name], parameters[f"{name}_bias"] if experts.has_bias else None
    if not experts.is_transposed:
        return functional.linear(x_RI, weight, bias)
    product = x_RI @ weight
    return product if bias is None else product + bias


@dataclass(frozen=True, kw_only=True)
class PagedLayer:
    """A layer whose experts come in pages. `unit` says where they are in its unit, `rest_places` and `page_places` are
    its parameters in memory that holds the rest or a page. The names of `page_places` are those in the module of the
    experts."""

    unit: PagedUnit
    experts: nn.Module
    num_chosen: int
    """Experts of a token."""
    rest_places: list[Place]
    page_places: list[list[Place]]

    @property
    def are_trained(self) -> bool:
        """Whether any parameter of the experts is."""
        return any(place.trained for place in self.page_places[0])

    @property
    def trains_rest(self) -> bool:
        """Whether any other parameter is."""
        return any(place.trained for place in self.rest_places)

    def is_likely_whole(self, num_tokens: int) -> bool:
        """Whether a pass has enough tokens to be likely to visit all experts."""
        return reaches_all(self.unit.num_experts, num_tokens * self.num_chosen)

    def is_visited(self, number: int, visited: set[int] | None) -> bool:
        """Whether a page has any of the experts that are visited; None is all of them."""
        return visited is None or not visited.isdisjoint(self.unit.pages[number].experts)

    def page_parameters(self, number: int, flat: Tensor) -> dict[str, Tensor]:
        """The parameters of a page's experts, by their names in the module of the experts."""
        return {place.name: place.piece.read(flat) for place in self.page_places[number]}

    def rows(self, number: int, routing: Routing) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each expert of a page that a micro-batch visits, counted from the page's first, with its tokens."""
        for position, expert in enumerate(self.unit.pages[number].experts):
            if (rows := routing.of_expert(expert)) is not None:
                yield position, *rows

    def add_page(
        self, number: int, flat: Tensor, routing: Routing, hidden_TD: Tensor, weights_TK: Tensor, result_TD: Tensor
    ) -> None:
        """Add what the experts of a page put out for the tokens of a micro-batch."""
        parameters = self.page_parameters(number, flat)
        with torch.no_grad():
            for expert, tokens_R, places_R in self.rows(number, routing):
                own = {name: values[expert] for name, values in parameters.items()}
                weights_R1 = weights_TK[tokens_R, places_R, None]
                output_RD = expert_output(self.experts, own, hidden_TD[tokens_R], weights_R1)
                result_TD.index_add_(0, tokens_R, output_RD.to(result_TD.dtype))


class Paging:
    """Which layers of a template have their experts in pages, by the index of the unit."""

    def __init__(self, layers: Mapping[int, PagedLayer]) -> None:
        self.layers = layers

    @classmethod
    def of(cls, template: Template, page_elements: int) -> Paging:
        """Pages of at most this many elements; none for 0.

        Raises:
            InvalidModel: the model's layers cannot be computed so.
        """
        if not page_elements:
            return NO_PAGES
        layers: dict[int, PagedLayer] = {}
        num_chosen: dict[int, int] = {}
        why, cause = "it has no experts", None
        for index, group in enumerate(template.layer_groups):
            unit = template.layout.units[index + 1]
            paged = paged_unit(unit, page_elements)
            if paged is None:
                if unit.packed_bytes:
                    why = "its experts cannot be cut out of packed weights (train.lora.base)"
                continue
            layer = template.groups[group]
            try:
                if group not in num_chosen:
                    num_chosen[group] = _find_num_chosen(template, index, layer)
                layers[unit.index] = _paged_layer(template, paged, unit.index, layer, num_chosen[group])
            except _CannotPage as error:
                why, cause = str(error), error
                layers.clear()
                break
        if not layers:
            raise InvalidModel(
                f"memory.experts is paged, which is not possible for this {template.config.model_type} model: {why}; "
                "use memory.experts: whole"
            ) from cause
        return cls(layers)

    def places(self, template: Template, unit_index: int) -> list[Place]:
        """Where the parameters of a unit are in its slot, but for those of experts that come in pages."""
        layer = self.layers.get(unit_index)
        return template.places[unit_index] if layer is None else layer.rest_places

    @contextmanager
    def without_experts(self, unit_index: int) -> Iterator[None]:
        """Inside the block, experts that come in pages put out zeros."""
        layer = self.layers.get(unit_index)
        if layer is None:
            yield
            return
        with visiting(layer.experts, lambda hidden_TD, *_: torch.zeros_like(hidden_TD)):
            yield

    def rest(self, unit_index: int) -> UnitPart | None:
        """What a unit has besides pages; None where it has no pages."""
        layer = self.layers.get(unit_index)
        return None if layer is None else layer.unit.rest

    @property
    def page_elements(self) -> int:
        """Of the largest page's weights."""
        return max((page.num_elements for layer in self.layers.values() for page in layer.unit.pages), default=0)

    @property
    def page_trained_elements(self) -> int:
        """Of the largest page's gradient."""
        return max((page.trained_elements for layer in self.layers.values() for page in layer.unit.pages), default=0)


NO_PAGES = Paging({})


class _CannotPage(Exception):
    pass


def _experts_of(layer: nn.Module) -> tuple[str, nn.Module]:
    found = [(name, module) for name, module in layer.named_modules() if hasattr(module, "_is_expert_parallel")]
    if len(found) != 1:
        raise _CannotPage("its class does not call its experts by transformers' ExpertsInterface")
    return found[0]


def _paged_layer(
    template: Template, paged: PagedUnit, unit_index: int, layer: nn.Module, num_chosen: int
) -> PagedLayer:
    name, experts = _experts_of(layer)
    if getattr(experts, "has_post_expert_norm", False):
        raise _CannotPage("its experts have a norm of their own")
    own = [place for place in template.places[unit_index] if set(place.stored_names) <= paged.names]
    names = {place.name.removeprefix(f"{name}.") for place in own}
    if names != set(dict(experts.named_parameters())) or any(isinstance(place.piece, Exact) for place in own):
        raise _CannotPage("its experts have parameters of other kinds")
    rest = [
        replace(place, piece=_moved(place.piece, paged.rest))
        for place in template.places[unit_index]
        if not set(place.stored_names) & paged.names
    ]
    if len(rest) + len(own) != len(template.places[unit_index]):
        raise _CannotPage("a parameter is of experts in part")
    pages = []
    for part in paged.pages:
        pieces = []
        for place in own:
            assert not isinstance(place.piece, Exact)
            narrowed = place.piece.narrowed(0, part.experts.start, len(part.experts))
            pieces.append(replace(place, name=place.name.removeprefix(f"{name}."), piece=_moved(narrowed, part)))
        pages.append(pieces)
    return PagedLayer(unit=paged, experts=experts, num_chosen=num_chosen, rest_places=rest, page_places=pages)


def _moved(piece: Piece | Exact, part: UnitPart) -> Any:
    """The piece where memory holds a part of its unit."""
    if isinstance(piece, Exact):
        return replace(piece, piece=_moved(piece.piece, part))
    if isinstance(piece, Joined):
        return replace(piece, parts=tuple(_moved(one, part) for one in piece.parts))
    return piece.shifted(part.local(piece.offset) - piece.offset)


def _find_num_chosen(template: Template, index: int, layer: nn.Module) -> int:
    """How many experts a token has, from a run without storage.

    Raises:
        _CannotPage: the layer's backward needs the value of what its experts put out, which is not there before the
            pages are; or it cannot be run so.
    """
    call = template.probe_calls([NUM_TRIAL_TOKENS], torch.float32)[index]
    args, kwargs = call.without_storage(hidden_size=template.hidden_size)
    trial = copy.deepcopy(layer).to("meta").requires_grad_()
    copied = _experts_of(trial)[1]
    made_of = _MadeOf()
    found: list[int] = []

    def answer(hidden_TD: Tensor, choice_TK: Tensor, weights_TK: Tensor) -> Tensor:
        found.append(choice_TK.shape[-1])
        result = given_result(hidden_TD, weights_TK, hidden_TD, weights_TK)
        made_of.add(result)
        return result

    needed = False

    def on_save(tensor: Tensor) -> Tensor:
        nonlocal needed
        needed = needed or made_of.has(tensor)
        return tensor

    try:
        saved = torch.autograd.graph.saved_tensors_hooks(on_save, lambda tensor: tensor)
        with torch.enable_grad(), saved, made_of, visiting(copied, answer):
            trial(*args, **kwargs)
    except RUN_ERRORS as error:
        raise _CannotPage("its layers cannot be tried out without weights") from error
    if len(found) != 1:
        raise _CannotPage("a layer calls its experts more than once")
    if needed:
        raise _CannotPage("its layers compute more with the result of their experts than they add it up")
    return found[0]


class _MadeOf(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows a tensor: which others are made of it, by their storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # With the storages themselves, so that no other can get the address of one that is gone.
        self._storages: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: Tensor) -> None:
        """Follow this one."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = storage

    def has(self, tensor: Tensor) -> bool:
        """Whether it is made of what is followed."""
        return tensor.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(self.has(tensor) for tensor in given):
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.add(leaf)
        return result
