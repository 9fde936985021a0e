"""Forward and backward of layers whose experts come in pages, so that no more than a few pages are on the device.

Weights cross the link once for all micro-batches of a step, as those of whole layers. Forward runs a layer up to its
experts for each micro-batch, then the experts page by page over the tokens of all, and then the layer as a whole, where
what the experts have put out stands in their place. Backward begins with the gradient of what the experts put out, goes
through the pages from the last to the first, and ends with the rest of the layer, to which the gradients of what the
experts read are given. So what comes before the experts is computed twice in forward, and twice in backward.

Where a step has few tokens, the driver waits until it is known which experts they visit, and only these are copied.

Shapes: N = tokens of the step, T = tokens of a micro-batch, D = hidden size, K = experts of a token.
Source: MoE-Lightning (arXiv 2411.11217).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from horizon_server.engine.activations import Activations
from horizon_server.engine.binding import Exact
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.fp8 import Fp8Visit
from horizon_server.engine.gradient_sink import GradientSink
from horizon_server.engine.layer_stream import LayerStream
from horizon_server.engine.leaves import unit_leaves
from horizon_server.engine.linear import LinearMap, LinearMaps
from horizon_server.engine.paged_experts import (
    Answer,
    PagedLayer,
    Routing,
    Stopped,
    expert_output,
    given_result,
    visiting,
)
from horizon_server.engine.step_pass import StepPass
from horizon_server.engine.template import Template, VisitNorms
from horizon_server.engine.unit_gradients import UnitGradients
from horizon_server.recipe import Recipe

# Planes of the activations for experts: what goes into them, what comes out, or its gradient, and that of what goes in.
_INPUTS, _RESULT, _INPUT_GRADIENT = range(3)


class PagedLayers:
    """Enqueues the passes of paged layers.

    Thread: the driver's.
    """

    def __init__(
        self,
        template: Template,
        device: Device,
        stream: LayerStream,
        sink: GradientSink,
        recipe: Recipe,
        activations: Activations,
    ) -> None:
        self._template, self._device, self._stream, self._sink = template, device, stream, sink
        self._recipe, self._paging, self._activations = recipe, stream.paging, activations

    def has(self, layer: int) -> bool:
        """Whether a layer is one of them."""
        return layer + 1 in self._paging.layers

    def enqueue_forward(self, current: StepPass, layer: int, flat: Tensor) -> None:
        """A layer's forward; `flat` are the weights of its rest."""
        visit = self._visit(current, layer, flat, for_backward=False)
        compute, activations, label = self._device.compute, self._activations, f"forward {layer + 1}"
        for index in range(len(visit.spans)):
            activations.before_forward(layer, index)
            compute.submit(partial(visit.find_inputs, index), label=label)
        visited = self._visited(visit)
        for number in range(len(visit.paged.page_places)):
            if not visit.paged.is_visited(number, visited):
                continue
            with self._stream.page(layer + 1, number, visited) as page:
                for index in range(len(visit.spans)):
                    compute.submit(partial(visit.add_experts, number, index, page), label=label)
        for index in range(len(visit.spans)):
            compute.submit(partial(visit.finish, index), label=label)
            activations.after_forward(layer, index)
        compute.submit(visit.close, label=label)

    def enqueue_backward(self, current: StepPass, layer: int, flat: Tensor, *, is_last: bool) -> None:
        """A layer's backward. Of the last one, nobody wants the gradient of its input."""
        visit = self._visit(current, layer, flat, for_backward=True)
        compute, activations, label = self._device.compute, self._activations, f"backward {layer + 1}"
        unit = self._sink.open(layer + 1)
        gradients = None if unit is None else unit.lanes[0]
        squares_L = current.first_squares_L
        wants_rest = not is_last or (gradients is not None and visit.paged.trains_rest)
        for index in range(len(visit.spans)):
            activations.before_backward(layer, index)
            compute.submit(partial(visit.find_result_gradient, index), label=label)
        visited = self._visited(visit)
        for number in reversed(range(len(visit.paged.page_places))):
            own = self._sink.open_page(layer + 1, number)
            if visit.paged.is_visited(number, visited):
                with self._stream.page(layer + 1, number, visited) as page:
                    for index in range(len(visit.spans)):
                        work = partial(visit.differentiate_experts, number, index, page, own, wants_inputs=wants_rest)
                        compute.submit(work, label=label)
                        if index == 0 and squares_L is not None and own is not None:
                            compute.submit(partial(_add_square, squares_L, layer, own), label=label)
            if own is not None:
                self._sink.send_page(layer + 1, number)
        if visit.paged.are_trained and unit is not None:
            # As of whole layers, where every expert has a gradient, if only of zeros.
            self._sink.reached.update(n for place in visit.paged.page_places[0] for n in place.stored_names)
        for index in range(len(visit.spans)):
            if wants_rest:
                compute.submit(partial(visit.differentiate_rest, index, gradients, is_last=is_last), label=label)
            if index == 0 and squares_L is not None and gradients is not None:
                compute.submit(partial(_add_square_of_rest, squares_L, layer, gradients), label=label)
            activations.after_backward(layer, index)
        compute.submit(visit.close, label=label)
        if unit is not None:
            unit.close(0)
        self._sink.send(layer + 1)

    def _visit(self, current: StepPass, layer: int, flat: Tensor, *, for_backward: bool) -> _Visit:
        paged = self._paging.layers[layer + 1]
        casts = Fp8Visit(paged.rest_places, self._recipe.matmul, for_backward=for_backward)
        return _Visit(self._template, self._device, self._activations, paged, casts, current, layer, flat)

    def _visited(self, visit: _Visit) -> set[int] | None:
        """The experts that the step's tokens visit; None where they are likely to be all."""
        if visit.paged.is_likely_whole(sum(span.stop - span.start for span in visit.spans)):
            return None
        self._device.compute.record().wait()
        # After a failure, some are not known; nothing is done with what is copied then.
        return {expert for routing in visit.routings.values() for expert in routing.visited()}


class _Visit:
    """One pass over one layer.

    Thread: compute's, after the driver made it.
    """

    def __init__(
        self,
        template: Template,
        device: Device,
        activations: Activations,
        paged: PagedLayer,
        casts: Fp8Visit,
        current: StepPass,
        layer: int,
        flat: Tensor,
    ) -> None:
        self._template, self._device, self._activations, self.paged = template, device, activations, paged
        self._casts, self._current, self._layer, self._flat = casts, current, layer, flat
        self._norms = VisitNorms(template, layer)
        self.spans: Sequence[slice] = current.layers.tokens.spans
        self.routings: dict[int, Routing] = {}
        self._weights: dict[int, Tensor] = {}
        self._weight_gradients: dict[int, Tensor] = {}
        self._charged_bytes = 0

    def find_inputs(self, index: int) -> None:
        """Run a micro-batch up to the experts."""

        def stop(hidden_TD: Tensor, choice_TK: Tensor, weights_TK: Tensor) -> Tensor:
            self._note(index, hidden_TD, choice_TK, weights_TK)
            raise Stopped

        try:
            with torch.no_grad():
                self._run(index, self._input(index), stop)
        except Stopped:
            self._plane(_RESULT, index).zero_()

    def add_experts(self, number: int, index: int, page: Tensor) -> None:
        """Add what the experts of a page put out for a micro-batch."""
        hidden_TD, result_TD = self._plane(_INPUTS, index), self._plane(_RESULT, index)
        self.paged.add_page(number, page, self.routings[index], hidden_TD, self._weights[index], result_TD)

    def finish(self, index: int) -> None:
        """Run a micro-batch through the layer, with the result of its experts."""

        def give(*_: Tensor) -> Tensor:
            return self._plane(_RESULT, index)

        with torch.no_grad():
            output_1TD = self._run(index, self._input(index), give)
        self._activations.output(self._layer)[self.spans[index]].copy_(output_1TD[0])

    def find_result_gradient(self, index: int) -> None:
        """Find the gradient of what the experts put out for a micro-batch."""
        leaves: list[Tensor] = []

        def give(hidden_TD: Tensor, choice_TK: Tensor, weights_TK: Tensor) -> Tensor:
            self._note(index, hidden_TD, choice_TK, weights_TK)
            leaves.append(torch.zeros_like(hidden_TD).requires_grad_())
            # Some classes go on in place.
            return leaves[0].clone()

        output_1TD = self._run(index, self._input(index), give)
        (found,) = torch.autograd.grad(output_1TD, leaves, self._gradient(index)[None])
        self._plane(_RESULT, index).copy_(found)
        self._plane(_INPUT_GRADIENT, index).zero_()

    def differentiate_experts(
        self, number: int, index: int, page: Tensor, gradient: Tensor | None, *, wants_inputs: bool
    ) -> None:
        """Compute the experts of a page for a micro-batch again, and their backward. `gradient` is the page's."""
        hidden_TD, result_TD = self._plane(_INPUTS, index), self._plane(_RESULT, index)
        input_gradient_TD = self._plane(_INPUT_GRADIENT, index)
        parameters = self.paged.page_parameters(number, page)
        places = {place.name: place for place in self.paged.page_places[number]}
        # From the last to the first, as autograd adds up the gradients of what all of them read.
        for expert, tokens_R, places_R in reversed(list(self.paged.rows(number, self.routings[index]))):
            own = {name: values[expert].detach() for name, values in parameters.items()}
            for name, place in places.items():
                own[name].requires_grad_(gradient is not None and place.trained)
            x_RD = hidden_TD[tokens_R].requires_grad_(wants_inputs)
            weights_R1 = self._weights[index][tokens_R, places_R, None].requires_grad_(wants_inputs)
            with self._device.workspace(("expert", self._template.layer_kinds[self._layer], tokens_R.numel())):
                output_RD = expert_output(self.paged.experts, own, x_RD, weights_R1).to(result_TD.dtype)
                torch.autograd.backward(output_RD, result_TD[tokens_R])
            del output_RD
            for name, place in places.items():
                found = own[name].grad
                if found is not None and gradient is not None:
                    assert not isinstance(place.piece, Exact), "of experts, no parameter is"
                    place.piece.narrowed(0, expert, 1).add(gradient, found[None])
            if x_RD.grad is not None and weights_R1.grad is not None:
                input_gradient_TD.index_add_(0, tokens_R, x_RD.grad)
                self._weight_gradients[index][tokens_R, places_R] = weights_R1.grad[:, 0]

    def differentiate_rest(self, index: int, gradients: UnitGradients | None, *, is_last: bool) -> None:
        """Compute the rest of the layer for a micro-batch again, and its backward."""
        template, layer = self._template, self._layer
        hidden_1TD = self._input(index).requires_grad_(not is_last)
        leaves, maps = unit_leaves(self.paged.rest_places, self._flat, gradients, self._casts)
        gradient_TD = self._gradient(index)

        def give(hidden_TD: Tensor, _: Tensor, weights_TK: Tensor) -> Tensor:
            given = self._plane(_INPUT_GRADIENT, index), self._weight_gradients[index]
            return given_result(hidden_TD, weights_TK, *given)

        self._current.seed(layer + 1, self._current.layers.name_of(index))
        num_tokens = hidden_1TD.shape[1]
        with self._device.workspace(("paged layer", template.layer_kinds[layer], is_last, num_tokens)):
            with visiting(self.paged.experts, give):
                call = self._current.calls[index][layer]
                output_1TD = template.layer_for_gradients(layer, self._norms.beside(leaves), hidden_1TD, call, maps)
            torch.autograd.backward(output_1TD, gradient_TD[None])
        if hidden_1TD.grad is not None:
            gradient_TD.copy_(hidden_1TD.grad[0])

    def close(self) -> None:
        """Forget what was noted of the tokens."""
        self.routings.clear()
        self._weights.clear()
        self._weight_gradients.clear()
        self._device.charge("workspace", -self._charged_bytes)

    def _run(self, index: int, hidden_1TD: Tensor, answer: Answer) -> Tensor:
        """The layer's forward, as that of whole layers but for its experts."""
        read: Mapping[str, Tensor] = {place.name: place.piece.read(self._flat) for place in self.paged.rest_places}
        parameters = self._norms.beside(read)
        self._current.seed(self._layer + 1, self._current.layers.name_of(index))
        casted = [(parameters[name], LinearMap(cast=cast)) for name, cast in self._casts.of(parameters).items()]
        maps = LinearMaps(casted) if casted else None
        with visiting(self.paged.experts, answer):
            return self._template.layer(
                self._layer, parameters, hidden_1TD, self._current.calls[index][self._layer], maps
            )

    def _note(self, index: int, hidden_TD: Tensor, choice_TK: Tensor, weights_TK: Tensor) -> None:
        self._plane(_INPUTS, index).copy_(hidden_TD)
        routing = Routing.of(choice_TK, self.paged.unit.num_experts)
        self.routings[index], self._weights[index] = routing, weights_TK.detach()
        self._weight_gradients[index] = torch.zeros_like(self._weights[index])
        kept = (routing.tokens, routing.places, self._weights[index], self._weight_gradients[index])
        num_bytes = sum(tensor.nbytes for tensor in kept)
        self._device.charge("workspace", num_bytes)
        self._charged_bytes += num_bytes

    def _input(self, index: int) -> Tensor:
        # `data`, not `detach`: other tokens of the same block may be on their way in, which autograd would take for a
        # change here.
        return self._activations.input(self._layer)[self.spans[index]][None].data

    def _gradient(self, index: int) -> Tensor:
        return self._activations.gradient[self.spans[index]]

    def _plane(self, number: int, index: int) -> Tensor:
        return self._activations.expert_plane(number)[self.spans[index]].data


def _add_square(squares_L: Tensor, layer: int, gradient: Tensor) -> None:
    squares_L[layer] += torch.linalg.vector_norm(gradient).double().square()


def _add_square_of_rest(squares_L: Tensor, layer: int, gradients: UnitGradients) -> None:
    squares_L[layer] += gradients.square_sum()
