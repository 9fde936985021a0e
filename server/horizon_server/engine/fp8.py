"""Matrix products in FP8: a layer's weights, activations and gradients rounded to 8 bits with a scale per row, summed
in fp32.

Weights and activations are e4m3, gradients e5m2, which has more range and fewer digits. Scales are per token and per
row of a weight, so that no token changes the rounding of another and packing stays exact. A weight is cast once per
visit of its layer, for all micro-batches. Weight gradients stay in the compute dtype: their sum over tokens has no
scale per row. A device without FP8 units computes the same rounding by hand, slower.

Shapes: T = tokens, I = inputs of a map, O = its outputs; R x K is any matrix with a scale for each of its R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_server.errors import InvalidSpec

"""What the products of layers are computed in. bf16 means the compute dtype's own."""

# FP8 units take blocks of 16 along both sizes of a weight.
_MULTIPLE = 16
_MIN_CAPABILITY = (8, 9)
# Routers choose experts by small differences, which 8 bits do not keep.
_SPARED_MODULES = frozenset({"gate", "router"})


def check_supported(device: torch.device) -> None:
    """Refuse devices whose matrix units cannot multiply FP8.

    Raises:
        InvalidSpec: a GPU older than that.
    """
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _MIN_CAPABILITY:
        has, needs = (".".join(map(str, version)) for version in (capability, _MIN_CAPABILITY))
        raise InvalidSpec(
            f"train.matmul: fp8 needs a GPU of compute capability {needs} or higher (Ada, Hopper or newer); "
            f"{torch.cuda.get_device_name(device)} has {has}; use train.matmul: bf16"
        )


def is_castable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter's products can be in FP8. The others stay in the compute dtype."""
    module = name.split(".")[-2] if "." in name else ""
    return len(shape) == 2 and all(size % _MULTIPLE == 0 for size in shape) and module not in _SPARED_MODULES


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """A weight in FP8: by rows for the product with inputs, by columns for the product with gradients, where that is
    wanted."""

    by_rows: tuple[Tensor, Tensor]
    by_columns: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, weight_OI: Tensor, *, for_backward: bool) -> Fp8Weight:
        """Cast a weight."""
        e4m3 = torch.float8_e4m3fn
        return cls(cast_rows(weight_OI, e4m3), cast_rows(weight_OI.t(), e4m3) if for_backward else None)

    def product(self, inputs: Tensor) -> Tensor:
        """`inputs @ weight.T`."""
        inputs_TI = inputs.reshape(-1, inputs.shape[-1])
        output_TO = scaled_product(cast_rows(inputs_TI, torch.float8_e4m3fn), self.by_rows, inputs.dtype)
        return output_TO.view(*inputs.shape[:-1], output_TO.shape[1])

    def input_gradient(self, grad_TO: Tensor) -> Tensor:
        """`grad @ weight`."""
        assert self.by_columns is not None, "cast for forward alone"
        return scaled_product(cast_rows(grad_TO, torch.float8_e5m2), self.by_columns, grad_TO.dtype)


class Fp8Visit:
    """The weights of a layer that are multiplied in FP8, by their names, while the layer is visited: cast when the
    first micro-batch comes.

    Thread: compute's, after the driver made it.
    """

    def __init__(self, names: Sequence[str], *, for_backward: bool) -> None:
        self._names, self._for_backward = names, for_backward
        self._casts: dict[str, Fp8Weight] = {}

    def of(self, parameters: Mapping[str, Tensor]) -> dict[str, Fp8Weight]:
        """The casts of a layer's weights, by name."""
        for name in self._names:
            if name not in self._casts:
                self._casts[name] = Fp8Weight.of(parameters[name].detach(), for_backward=self._for_backward)
        return self._casts


def cast_rows(values_RK: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rounded values, row by row in memory whatever their source is, and each row's scale, which maps its largest value
    to the format's largest. Shapes: [R, K], [R, 1]."""
    largest = torch.finfo(dtype).max
    highest_R1 = torch.linalg.vector_norm(values_RK, torch.inf, dim=1, keepdim=True, dtype=torch.float32)
    # A row of zeros needs some scale. Gradients are small, so the least one is far below theirs.
    scales_R1 = highest_R1.clamp(min=1e-30) / largest
    # The quotient may exceed the largest value by its own rounding, and e4m3 has no infinity to become.
    rounded_RK = (values_RK / scales_R1).clamp_(-largest, largest).to(dtype, memory_format=torch.contiguous_format)
    return rounded_RK, scales_R1


def scaled_product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """`a @ b.T` of rounded values, scaled. Both are row by row, as the matrix units want them."""
    (a_MK, a_scales_M1), (b_NK, b_scales_N1) = a, b
    if a_MK.is_cuda:
        product: Tensor = torch._scaled_mm(
            a_MK, b_NK.t(), scale_a=a_scales_M1, scale_b=b_scales_N1.t(), out_dtype=dtype
        )
        return product
    # Products of FP8 numbers are exact in fp32, so only the order of the sum differs from a GPU's.
    return (a_MK.float().mm(b_NK.float().t()) * a_scales_M1 * b_scales_N1.t()).to(dtype)
