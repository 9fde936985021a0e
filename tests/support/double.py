"""Numbers judged against float64: ours are right where they are as near to it as plain fp32 is.

What fp32 rounds away differs from processor to processor, from kernel to kernel and from model to model, so no constant
says how far two right results may be apart. The same reference in double precision does: it says how far plain fp32
itself is from the truth.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

M = TypeVar("M", bound="Doubles")
T = TypeVar("T")

FACTOR = 3.0
"""How many times plain fp32's distance from float64 ours may be. Measured are 0.5 to 1.6 on all architectures."""
FLOOR = 2.0**-22
"""Relative to the values: a distance of two roundings to fp32's 24 bits, which plain fp32 may be spared by chance."""


class Doubles(Protocol):
    """A model, or what holds one."""

    def double(self) -> Self:
        """Widen all parameters and tables to float64."""
        ...


class InDouble(TorchFunctionMode):
    """Inside the block, what asks for fp32 gets float64: norms, tables of positions, routers, losses. For models in
    float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function with float64 in the place of fp32. The mode itself is off in here."""
        # No function takes dtypes in lists, so that nothing need be searched for them.
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        named: dict[str, Any] = {
            key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()
        }
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        elif func is torch._grouped_mm:  # which has no kernel for float64
            return _grouped_product(*args, **named)
        return func(*args, **named)


def _grouped_product(rows_TI: Tensor, weights_EIO: Tensor, *, offs: Tensor, **_: Any) -> Tensor:
    bounds = [0, *offs.tolist()]
    parts = [rows_TI[bounds[i] : bounds[i + 1]] @ weight_IO for i, weight_IO in enumerate(weights_EIO)]
    return torch.cat(parts)


def plain_and_exact(make: Callable[[], M], run: Callable[[M], T]) -> tuple[T, T]:
    """What `run` makes of a model in fp32, and of the same model in float64."""
    plain = run(make())
    # Made outside of the mode: its tables are those of fp32, widened, so that both models are the same function.
    model = make().double()
    with InDouble():
        return plain, run(model)


def check_gradients(ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """Check that each of our gradients is as near to the exact one as plain fp32's is, by its norm, and all together.

    The distances of tensors of a few numbers are a matter of luck, so plain fp32's count as twice the median of all
    tensors at least.
    """
    _check_all(ours, plain, exact, "gradients")
    mine, theirs = _distances(ours, exact), _distances(plain, exact)
    sizes = {name: float(exact[name].double().norm()) for name in exact}
    size = _together(sizes)
    median = statistics.median(theirs[name] / max(sizes[name], FLOOR * size) for name in exact) if size else 0.0
    for name in exact:
        # What is nothing but rounding, as the gradient of a bias that softmax ignores, is held to the size of all.
        floor = max(FLOOR * sizes[name], FLOOR**2 * size)
        allowed = FACTOR * max(theirs[name], 2.0 * median * sizes[name]) + floor
        assert mine[name] <= allowed, (
            f"gradient of {name} is {mine[name]:.2e} from float64, plain fp32 is {theirs[name]:.2e}, its norm "
            f"{sizes[name]:.2e}"
        )


def check_weights(ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> None:
    """Check that trained weights are as near to the exact ones as plain fp32's are, all together.

    Not each: Adam divides gradients by their size, and so an element near zero by its own rounding, which decides its
    whole tensor's.
    """
    _check_all(ours, plain, exact, "weights")


def _check_all(ours: Mapping[str, Tensor], plain: Mapping[str, Tensor], exact: Mapping[str, Tensor], what: str) -> None:
    assert ours.keys() == plain.keys() == exact.keys()
    mine, theirs = _together(_distances(ours, exact)), _together(_distances(plain, exact))
    size = _together({name: float(exact[name].double().norm()) for name in exact})
    assert mine <= FACTOR * theirs + FLOOR * size, (
        f"the {what} are {mine:.2e} from float64, plain fp32's are {theirs:.2e}, their norm {size:.2e}"
    )


def _together(norms: Mapping[str, float]) -> float:
    return math.sqrt(sum(norm**2 for norm in norms.values()))


def check_numbers(
    ours: Sequence[float] | float,
    plain: Sequence[float] | float,
    exact: Sequence[float] | float,
    what: str = "the loss",
    *,
    scale: float = 0.0,
) -> None:
    """As `check_weights`, of numbers that belong together, as the losses of the steps do.

    `scale` is the size of what they are differences of, where that is more than theirs: its rounding is in them.
    """
    vectors = [torch.tensor(numbers, dtype=torch.float64).reshape(-1) for numbers in (ours, plain, exact)]
    assert len({vector.numel() for vector in vectors}) == 1
    mine, theirs = (float((vector - vectors[2]).norm()) for vector in vectors[:2])
    size = max(float(vectors[2].norm()), scale)
    assert mine <= FACTOR * theirs + FLOOR * size, (
        f"{what}: {mine:.2e} from float64, plain fp32 is {theirs:.2e}; ours {ours}, plain {plain}, exact {exact}"
    )


def gradients_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The gradients of a plain model, by name; zeros where there is none."""
    return {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }


def values_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """The parameters of a plain model, by name."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def _distances(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name].detach().double() - exact[name].detach().double()).norm()) for name in exact}
