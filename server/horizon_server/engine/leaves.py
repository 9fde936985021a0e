"""The parameters of a unit as leaves of autograd, whose gradients go to the unit's accumulators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from horizon_server.engine.binding import Place
from horizon_server.engine.fp8 import Fp8Visit
from horizon_server.engine.linear import LinearMap, LinearMaps
from horizon_server.engine.unit_gradients import UnitGradients


def unit_leaves(
    places: Sequence[Place], flat: Tensor, gradients: UnitGradients | None, visit: Fp8Visit | None = None
) -> tuple[dict[str, Tensor], LinearMaps]:
    """The parameters of a unit, in its flat weights, and how their linear maps are computed; autograd adds the
    gradients of the trained ones to `gradients`, if there are any.
    """
    leaves = {}
    for place in places:
        weight = place.piece.read(flat)
        leaves[place.name] = _leaf(weight, partial(gradients.add, place)) if gradients and place.trained else weight
    accumulators = {} if gradients is None else gradients.accumulators
    casts = visit.of(leaves) if visit else {}
    maps = (
        (weight, LinearMap(accumulator=accumulators.get(name), cast=casts.get(name))) for name, weight in leaves.items()
    )
    return leaves, LinearMaps(maps)


def _leaf(weight: Tensor, accumulate: Callable[[Tensor], None]) -> Tensor:
    """A view that autograd differentiates; its gradient goes to `accumulate` and is dropped as soon as it is
    complete."""
    leaf = weight.detach().requires_grad_()

    def take(finished: Tensor) -> None:
        # None where all of it went to an accumulator.
        if finished.grad is None:
            return
        # At once and not after backward, so that the gradients of a layer's parameters are never in memory together.
        accumulate(finished.grad)
        finished.grad = None

    leaf.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    return leaf
