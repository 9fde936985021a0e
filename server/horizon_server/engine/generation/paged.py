"""Answers of layers whose experts come in pages: a layer runs up to its experts, the pages that are visited come, and
the layer runs again with what they put out.

Where a pass has few tokens, as where one token of each answer is computed, the driver waits until it is known which
experts they visit, and only these are copied.

Shapes: T = new tokens of a run, D = hidden size, K = experts of a token.
Source: MoE-Lightning (arXiv 2411.11217).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Device
from horizon_server.engine.layer_stream import LayerStream
from horizon_server.engine.paged_experts import PagedLayer, Routing, Stopped, visiting
from horizon_server.engine.template import Template


@dataclass(frozen=True)
class PagedRun:
    """A run of a layer over `num_tokens` new tokens: `begin` may be ended at the experts, and leaves what is kept of
    sequences as it was or as `work` writes it again."""

    begin: Callable[[], None]
    work: Callable[[], None]
    num_tokens: int


class PagedAnswers:
    """Enqueues paged layers of a pass over sequences.

    Thread: the driver's; `read` is compute's.
    """

    def __init__(self, template: Template, device: Device, stream: LayerStream) -> None:
        self._template, self._device, self._stream = template, device, stream

    def has(self, layer: int) -> bool:
        """Whether a layer's experts come in pages."""
        return layer + 1 in self._stream.paging.layers

    def read(self, layer: int, flat: Tensor) -> dict[str, Tensor]:
        """A layer's parameters in its slot, without experts that come in pages."""
        places = self._stream.paging.places(self._template, layer + 1)
        return {place.name: place.piece.read(flat) for place in places}

    def enqueue(self, layer: int, runs: Sequence[PagedRun]) -> None:
        """Submit a layer; while it is the item of the stream's walk that was asked for last."""
        paged, compute, label = self._stream.paging.layers[layer + 1], self._device.compute, f"generate {layer + 1}"
        visits = [_Visit(self._device, paged, run) for run in runs]
        for visit in visits:
            compute.submit(visit.find_inputs, label=label)
        visited = None
        if not paged.is_likely_whole(sum(run.num_tokens for run in runs)):
            compute.record().wait()
            # After a failure, some are not known; nothing is done with what is copied then.
            visited = {expert for visit in visits for expert in visit.visited}
        for number in range(len(paged.page_places)):
            if paged.is_visited(number, visited):
                with self._stream.page(layer + 1, number, visited) as page:
                    for visit in visits:
                        compute.submit(partial(visit.add_experts, number, page), label=label)
        for visit in visits:
            compute.submit(visit.finish, label=label)


class _Visit:
    """One run of one layer. Thread: compute's, after the driver made it."""

    def __init__(self, device: Device, paged: PagedLayer, run: PagedRun) -> None:
        self._device, self._paged, self._run = device, paged, run
        self._noted: tuple[Routing, Tensor, Tensor, Tensor] | None = None
        self._charged_bytes = 0

    @property
    def visited(self) -> set[int]:
        """The experts that the tokens visit, once `find_inputs` has run."""
        return set() if self._noted is None else self._noted[0].visited()

    def find_inputs(self) -> None:
        """Run up to the experts."""

        def stop(hidden_TD: Tensor, choice_TK: Tensor, weights_TK: Tensor) -> Tensor:
            routing = Routing.of(choice_TK, self._paged.unit.num_experts)
            self._noted = routing, hidden_TD, weights_TK, torch.zeros_like(hidden_TD)
            kept = (routing.tokens, routing.places, *self._noted[1:])
            self._charged_bytes = sum(tensor.nbytes for tensor in kept)
            self._device.charge("workspace", self._charged_bytes)
            raise Stopped

        with suppress(Stopped), visiting(self._paged.experts, stop):
            self._run.begin()

    def add_experts(self, number: int, page: Tensor) -> None:
        """Add what the experts of a page put out."""
        assert self._noted is not None, "the inputs are found"
        routing, hidden_TD, weights_TK, result_TD = self._noted
        self._paged.add_page(number, page, routing, hidden_TD, weights_TK, result_TD)

    def finish(self) -> None:
        """Run the layer, with the result of its experts."""
        assert self._noted is not None, "the inputs are found"
        result_TD = self._noted[3]
        with visiting(self._paged.experts, lambda *_: result_TD):
            self._run.work()
        self._noted = None
        self._device.charge("workspace", -self._charged_bytes)
