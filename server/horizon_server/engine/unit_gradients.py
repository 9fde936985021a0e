"""A unit's gradients while they add up over the micro-batches and chunks of a step, in memory that is not zeroed
beforehand.

What comes first into a place overwrites it, what comes later is added. At the end, what nothing was written to is
zeroed: places that the step did not reach, and the gaps between tensors.

Units: elements. Thread: compute's, after the driver made it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from horizon_server.engine.binding import Place, Strided
from horizon_server.engine.linear import Accumulator
from horizon_server.store.layout import UnitLayout


class UnitGradients:
    """The gradients of those of `places` that have one, in `flat`. `reached` receives the stored tensors that got one,
    at the latest in `finish`.
    """

    def __init__(self, places: Sequence[Place], flat: Tensor, unit: UnitLayout, *, reached: set[str]) -> None:
        places = [place for place in places if place.has_gradient]
        self.flat, self._places, self._unit, self._reached = flat, places, unit, reached
        # A tensor, because operators that are traced look at it when they run.
        flags = torch.ones(len(places), dtype=torch.bool)
        self._first = {place.name: flags[index] for index, place in enumerate(places)}
        self.accumulators = {
            place.name: Accumulator(out=place.piece.read(flat), first=self._first[place.name])
            for place in places
            if place.is_matrix
        }
        """Of the places that a matrix product can write to, by name."""

    def add(self, place: Place, values: Tensor) -> None:
        """Add a gradient of a place that autograd has calculated."""
        first = self._first[place.name]
        if first:
            place.piece.write(self.flat, values)
        else:
            place.piece.add(self.flat, values)
        first.fill_(False)

    def start_from_zero(self, place: Place) -> None:
        """Zero a place whose memory its user adds to directly."""
        if isinstance(place.piece, Strided):
            place.piece.read(self.flat).zero_()
        else:
            place.piece.write(self.flat, self.flat.new_zeros(()).expand(place.piece.shape))
        self._first[place.name].fill_(False)

    def square_sum(self) -> Tensor:
        """Of what was written until now, in fp64."""
        total = self.flat.new_zeros((), dtype=torch.float64)
        for place in self._places:
            if not self._first[place.name]:
                total += torch.linalg.vector_norm(place.piece.read(self.flat)).double().square()
        return total

    def finish(self) -> None:
        """Zero what nothing was written to. After it, every trained element of the unit has its value."""
        for place in self._places:
            if self._first[place.name]:
                self.start_from_zero(place)
            else:
                self._reached.update(place.stored_names)
        for start, stop in _gaps(self._unit):
            self.flat[start:stop].zero_()


def _gaps(unit: UnitLayout) -> Iterator[tuple[int, int]]:
    """Where a unit's buffer has no tensor: every tensor is covered by places, but tensors begin at multiples of a
    size."""
    end = 0
    for tensor in unit.tensors:
        if not tensor.trained:
            break
        if tensor.offset > end:
            yield end, tensor.offset
        end = tensor.offset + tensor.num_elements
    if unit.trained_elements > end:
        yield end, unit.trained_elements
