"""Matrix products in FP8: a layer's weights, activations and gradients rounded to 8 bits with a scale per row, summed
in fp32.

Weights and activations are e4m3, gradients e5m2, which has more range and fewer digits. Scales are per token and per
row of a weight, so that no token changes the rounding of another and packing stays exact. A weight is cast once per
visit of its layer, for all micro-batches. A device without FP8 units computes the same rounding by hand, slower.

Weight gradients stay in the compute dtype with `fp8`. With `fp8_full` they are sums over tokens of 8-bit numbers too:
the scales are then per output and per input of a map, for all tokens of a micro-batch, so which tokens are in it
together changes their rounding.

Casts are traced as the operations that they are made of, so that a compiler makes them part of the kernels before
them. A product is one operator: torch's own for CUDA, `horizon::scaled_product` for the CPU.

Shapes: T = tokens, I = inputs of a map, O = its outputs; R x K is any matrix with a scale for each of its R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import functional

from horizon_server.engine.binding import Place, Strided
from horizon_server.errors import InvalidSpec
from horizon_server.recipe import Matmul

# FP8 units take blocks of 16 along both sizes of a weight, and of what a product adds up over.
_MULTIPLE = 16
_MIN_CAPABILITY = (8, 9)
# Routers choose experts by small differences, which 8 bits do not keep.
_SPARED_MODULES = frozenset({"gate", "router"})


def check_supported(device: torch.device, matmul: Matmul) -> None:
    """Refuse devices whose matrix units cannot multiply FP8.

    Raises:
        InvalidSpec: a GPU older than that.
    """
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _MIN_CAPABILITY:
        has, needs = (".".join(map(str, version)) for version in (capability, _MIN_CAPABILITY))
        raise InvalidSpec(
            f"train.matmul: {matmul} needs a GPU of compute capability {needs} or higher (Ada, Hopper or newer); "
            f"{torch.cuda.get_device_name(device)} has {has}; use train.matmul: bf16"
        )


def is_castable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter's products can be in FP8. The others stay in the compute dtype."""
    module = name.split(".")[-2] if "." in name else ""
    return len(shape) == 2 and all(size % _MULTIPLE == 0 for size in shape) and module not in _SPARED_MODULES


def cast_names(places: Sequence[Place], matmul: Matmul) -> list[str]:
    """The names of a layer's weights whose products are in FP8; none where that is off."""
    if matmul == "bf16":
        return []
    views = [place for place in places if place.is_parameter and isinstance(place.piece, Strided) and not place.adapts]
    return [place.name for place in views if is_castable(place.name, place.piece.shape)]


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """A weight in FP8: by rows for the product with inputs, by columns for the product with gradients, where that is
    wanted. `is_full` says whether its own gradient is a product in FP8 too."""

    by_rows: tuple[Tensor, Tensor]
    by_columns: tuple[Tensor, Tensor] | None
    is_full: bool = False

    @classmethod
    def of(cls, weight_OI: Tensor, *, for_backward: bool, is_full: bool = False) -> Fp8Weight:
        """Cast a weight."""
        e4m3 = torch.float8_e4m3fn
        columns = cast_rows(weight_OI.t(), e4m3) if for_backward else None
        return cls(cast_rows(weight_OI, e4m3), columns, is_full)

    def product(self, inputs: Tensor) -> Tensor:
        """`inputs @ weight.T`."""
        inputs_TI = inputs.reshape(-1, inputs.shape[-1])
        rounded = cast_rows(inputs_TI, torch.float8_e4m3fn)
        # Faster sums with fewer digits than fp32, which inference uses too; gradients have more range than those.
        output_TO = scaled_product(rounded, self.by_rows, inputs.dtype, sums_fast=True)
        return output_TO.view(*inputs.shape[:-1], output_TO.shape[1])

    def input_gradient(self, grad_TO: Tensor) -> Tensor:
        """`grad @ weight`."""
        assert self.by_columns is not None, "cast for forward alone"
        return scaled_product(cast_rows(grad_TO, torch.float8_e5m2), self.by_columns, grad_TO.dtype)


def by_rows(casts: Mapping[str, Fp8Weight]) -> list[Tensor]:
    """The tensors of a layer's casts that its compiled forward takes: values and scales of each weight."""
    return [tensor for cast in casts.values() for tensor in cast.by_rows]


def by_columns(casts: Mapping[str, Fp8Weight]) -> list[Tensor]:
    """Those that its compiled backward takes as well."""
    return [tensor for cast in casts.values() for tensor in cast.by_columns or ()]


def weight_gradient(grad_OT: Tensor, inputs_TI: Tensor) -> Tensor:
    """`grad @ inputs`, which adds up over tokens: in fp32 on the CPU, rounded to the dtype of the inputs on a GPU."""
    grad = cast_rows(_in_blocks(grad_OT), torch.float8_e5m2)
    inputs = cast_rows(_in_blocks(inputs_TI.t()), torch.float8_e4m3fn)
    # torch has no FP8 product with scales per row and an fp32 result on all GPUs.
    return scaled_product(grad, inputs, inputs_TI.dtype if inputs_TI.is_cuda else torch.float32)


class Fp8Visit:
    """The weights of a layer that are multiplied in FP8, by their names, while the layer is visited: cast when the
    first micro-batch comes.

    Thread: compute's, after the driver made it.
    """

    def __init__(self, places: Sequence[Place], matmul: Matmul, *, for_backward: bool) -> None:
        self._names, self._is_full = cast_names(places, matmul), matmul == "fp8_full"
        self._for_backward = for_backward
        self._casts: dict[str, Fp8Weight] = {}

    def of(self, parameters: Mapping[str, Tensor]) -> dict[str, Fp8Weight]:
        """The casts of a layer's weights, by name."""
        for name in self._names:
            if name not in self._casts:
                self._casts[name] = Fp8Weight.of(
                    parameters[name].detach(), for_backward=self._for_backward, is_full=self._is_full
                )
        return self._casts


def cast_rows(values_RK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rounded values, row by row in memory whatever their source is, and each row's scale, which maps its largest value
    to the format's largest. Shapes: [R, K], [R, 1]."""
    largest = torch.finfo(dtype).max
    highest_R1 = torch.linalg.vector_norm(values_RK, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
    # A row of zeros needs some scale. Gradients are small, so the least one is far below theirs.
    scales_R1 = highest_R1.clamp(min=1e-30) / largest
    # The quotient may exceed the largest value by its own rounding, and e4m3 has no infinity to become.
    # Not in place, which would keep a compiler from making one cast of equal ones.
    rounded_RK = (values_RK / scales_R1).clamp(-largest, largest).to(dtype, memory_format=torch.contiguous_format)
    return rounded_RK, scales_R1


def _in_blocks(values_RK: Tensor) -> Tensor:
    """With zeros up to a whole block of what a product adds up over."""
    return functional.pad(values_RK, (0, -values_RK.shape[1] % _MULTIPLE))


def scaled_product(
    a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, *, sums_fast: bool = False
) -> Tensor:
    """`a @ b.T` of rounded values, scaled. Both are row by row, as the matrix units want them."""
    (a_MK, a_scales_M1), (b_NK, b_scales_N1) = a, b
    product: Tensor
    if a_MK.is_cuda:
        scales = {"scale_a": a_scales_M1, "scale_b": b_scales_N1.t()}
        product = torch._scaled_mm(a_MK, b_NK.t(), **scales, out_dtype=dtype, use_fast_accum=sums_fast)
    else:
        product = torch.ops.horizon.scaled_product(a_MK, a_scales_M1, b_NK, b_scales_N1, dtype)
    return product


def _scaled_product(a_MK: Tensor, a_scales_M1: Tensor, b_NK: Tensor, b_scales_N1: Tensor, dtype: torch.dtype) -> Tensor:
    # Products of FP8 numbers are exact in fp32, so only the order of the sum differs from a GPU's.
    return (a_MK.float().mm(b_NK.float().t()) * a_scales_M1 * b_scales_N1.t()).to(dtype)


# One operator, so that a traced graph has the product as it has torch's own on a GPU. It is never differentiated.
_library = Library("horizon", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "scaled_product(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, ScalarType dtype) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("scaled_product", _scaled_product, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake(
    "horizon::scaled_product",
    lambda a, a_scales, b, b_scales, dtype: a_scales.new_empty((a.shape[0], b.shape[0]), dtype=dtype),
    lib=_library,
)
