"""A pass over all sequences, unit by unit: as one row, or one sequence after the other.

Shapes: N = new tokens of all sequences, T = those of one, R = rows of the embedding in use, D = hidden size, C = tokens
that are chosen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from horizon_server.engine.attention.kept import Growing, KeptKeys, KeptPass
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.generation.paged import PagedAnswers, PagedRun
from horizon_server.engine.generation.sequences import Sequence
from horizon_server.engine.layer_stubs import LayerCall
from horizon_server.engine.template import Template, VisitNorms

_HOST = torch.device("cpu")


class RowPass:
    """The new tokens of all sequences are one row. With a `place`, what is kept is there only while a layer runs."""

    def __init__(
        self,
        template: Template,
        device: Device,
        sequences: SequenceOf[Sequence],
        kept: KeptKeys,
        paged: PagedAnswers,
        *,
        place: torch.device | None,
    ) -> None:
        self._template, self._device, self._kept, self._place = template, device, kept, place
        self._paged = paged
        ends = [0, *itertools.accumulate(sequence.num_new for sequence in sequences)]
        self._boundaries = torch.tensor(ends)
        self._spans = [slice(start, end) for start, end in itertools.pairwise(ends)]
        growing = [
            Growing(place=one.place, num_kept=one.num_computed, span=span)
            for one, span in zip(sequences, self._spans, strict=True)
        ]
        self._pass = KeptPass(kept, growing, place=device.place)
        self._positions_N = torch.cat(
            [torch.arange(one.num_computed, one.num_computed + one.num_new) for one in sequences]
        )
        self._hidden_1ND = torch.empty(0)
        self._calls: list[LayerCall] = []

    def enqueue_embed(self, flat: Tensor, rows_R: Tensor | None, row_ids_N: Tensor) -> None:
        """Submit the input of the first layer."""
        template, device = self._template, self._device
        placed_N, positions_N = device.place(row_ids_N), device.place(self._positions_N)

        def embed() -> None:
            with torch.no_grad():
                parameters = _embedding(template, flat, rows_R)
                hidden_1ND, self._calls = template.embed(parameters, placed_N, positions_N, self._boundaries)
            # Not a view into the slot, which has other weights soon.
            self._hidden_1ND = hidden_1ND.clone()

        device.compute.submit(embed, label="generate 0")

    def enqueue_layer(self, layer: int, flat: Tensor) -> None:
        """Submit a layer, in which every sequence attends to its own tokens."""
        work = partial(self._forward, layer, VisitNorms(self._template, layer), flat)
        if self._paged.has(layer):
            # What a first run up to the experts keeps, the second one keeps in the same places.
            self._paged.enqueue(layer, [PagedRun(work, work, int(self._boundaries[-1]))])
        else:
            self._device.compute.submit(work, label=f"generate {layer + 1}")

    def _forward(self, layer: int, norms: VisitNorms, flat: Tensor) -> None:
        template = self._template
        parameters = norms.beside(self._paged.read(layer, flat))
        if self._place is not None:
            self._kept.to(layer, self._place)
        assert template.own_attention is not None, "sequences of one row"
        call = template.own_attention.with_kept(layer, self._calls[layer], self._pass.row(layer))
        try:
            with torch.no_grad():
                self._hidden_1ND = template.layer(layer, parameters, self._hidden_1ND, call)
        finally:
            if self._place is not None:
                self._kept.to(layer, _HOST)

    def last_hidden(self, indices: SequenceOf[int]) -> Tensor:
        """The last layer's output at the last token of some sequences. Shapes: [1, C, D]. Thread: compute's."""
        ends = torch.tensor([self._spans[index].stop - 1 for index in indices])
        return self._hidden_1ND[:, ends.to(self._hidden_1ND.device)]

    def hidden(self, index: int) -> Tensor:
        """The last layer's output at all tokens of a sequence. Shapes: [1, T, D]. Thread: compute's."""
        return self._hidden_1ND[:, self._spans[index]]


class SequencePass:
    """Each layer runs on one sequence after the other. With a `place`, what is kept is there only while its layer
    runs."""

    def __init__(
        self,
        template: Template,
        device: Device,
        sequences: SequenceOf[Sequence],
        paged: PagedAnswers,
        *,
        place: torch.device | None,
    ) -> None:
        self._template, self._device, self._sequences, self._place = template, device, sequences, place
        self._paged = paged

    def enqueue_embed(self, flat: Tensor, rows_R: Tensor | None, row_ids_N: Tensor) -> None:
        """Submit the input of the first layer."""
        template, device = self._template, self._device

        def embed(sequence: Sequence, row_ids_T: Tensor, position_ids_T: Tensor) -> None:
            assert sequence.cache is not None, "sequences that run one after the other"
            with torch.no_grad():
                hidden_1TD, sequence.calls = template.embed(
                    _embedding(template, flat, rows_R), row_ids_T, position_ids_T, cache=sequence.cache.cache
                )
            # Not a view into the slot, which has other weights soon.
            sequence.hidden_1TD = hidden_1TD.clone()

        start = 0
        for sequence in self._sequences:
            end = start + sequence.num_new
            positions_T = torch.arange(sequence.num_computed, sequence.num_computed + sequence.num_new)
            row_ids_T = device.place(row_ids_N[start:end].contiguous())
            work = partial(embed, sequence, row_ids_T, device.place(positions_T))
            device.compute.submit(work, label="generate 0")
            start = end

    def enqueue_layer(self, layer: int, flat: Tensor) -> None:
        """Submit a layer, for each sequence."""
        norms = VisitNorms(self._template, layer)
        works = [partial(self._forward, layer, norms, flat, sequence) for sequence in self._sequences]
        if self._paged.has(layer):
            runs = [
                PagedRun(partial(self._try, layer, sequence, work), work, sequence.num_new)
                for sequence, work in zip(self._sequences, works, strict=True)
            ]
            self._paged.enqueue(layer, runs)
            return
        for work in works:
            self._device.compute.submit(work, label=f"generate {layer + 1}")

    def _forward(self, layer: int, norms: VisitNorms, flat: Tensor, sequence: Sequence) -> None:
        cache = sequence.cache
        assert sequence.hidden_1TD is not None and cache is not None, "sequences that run one after the other"
        parameters = norms.beside(self._paged.read(layer, flat))
        if self._place is not None:
            cache.to(layer, self._place)
        try:
            with torch.no_grad():
                call = cache.call(layer, sequence.calls[layer])
                sequence.hidden_1TD = self._template.layer(layer, parameters, sequence.hidden_1TD, call)
            cache.compact(layer)
        finally:
            if self._place is not None:
                cache.to(layer, _HOST)

    def _try(self, layer: int, sequence: Sequence, work: Callable[[], None]) -> None:
        """Run up to the experts, on a copy of what is kept: a cache of transformers grows with each run."""
        assert sequence.cache is not None, "sequences that run one after the other"
        num_bytes = sequence.cache.num_bytes(layer)
        self._device.charge("workspace", num_bytes)
        try:
            with sequence.cache.unchanged(layer):
                work()
        finally:
            self._device.charge("workspace", -num_bytes)

    def last_hidden(self, indices: SequenceOf[int]) -> Tensor:
        """As `RowPass.last_hidden`."""
        return torch.cat([self.hidden(index)[:, -1:] for index in indices], 1)

    def hidden(self, index: int) -> Tensor:
        """As `RowPass.hidden`."""
        hidden_1TD = self._sequences[index].hidden_1TD
        assert hidden_1TD is not None, "all layers have run"
        return hidden_1TD


Pass: TypeAlias = RowPass | SequencePass


def _embedding(template: Template, flat: Tensor, rows_R: Tensor | None) -> dict[str, Tensor]:
    """The parameters of the embedding, whose table has the rows in use alone where these are given."""
    parameters = {place.name: place.piece.read(flat) for place in template.places_besides_table}
    if rows_R is None:
        table = template.table_place.piece.read(flat)
    else:
        table = flat[: rows_R.numel() * template.hidden_size].view(-1, template.hidden_size)
    parameters[template.table_place.name] = table
    return parameters
