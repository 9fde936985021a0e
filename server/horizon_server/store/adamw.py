"""The AdamW update of one unit of the host store, or of some rows of a table, in place; the sum of several gradients,
and the squared norm that clipping needs.

The compiled kernel and the NumPy reference give the same bits for any number of threads.

Thread: any thread; the GIL is released while the kernel works. One unit must not be updated by two threads at once.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from horizon_server.store import native, reference
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import COMPRESSED_GROUP, COMPRESSED_PLANES, TensorLayout, UnitLayout
from horizon_server.store.native import Scalars, Segment
from horizon_server.store.triton_kernels import runs_triton

STATE_PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
"""What an update changes, in the order of the kernel's arguments."""

# Of the kernel's scalars, those that the kernel for GPUs is given otherwise or has no use for.
_OF_OTHERS = ("scaled_step_size", "most_ratio")
# Of first moments to roots of second ones, where the rates of decay set no bound; in fp32, and so are its products with
# most roots.
_UNBOUNDED, _MOST_LOG = 1e30, 100.0


@dataclass(frozen=True, kw_only=True)
class AdamWStep:
    """What one optimizer step applies to every parameter.

    `step` counts from 1. `grad_scale` multiplies every gradient first: it is the clipping coefficient.
    """

    step: int
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SquaredSum:
    """Sum of squares in float64, and whether every element was finite."""

    value: float
    is_finite: bool


@dataclass(frozen=True, kw_only=True)
class RowGradient:
    """The gradient of a table that few rows are used of: `values_RD` are those of the distinct `rows_R`, all other
    rows' are zero.

    Shapes: R = rows with a gradient, D = width of the table. `values_RD` is fp32 or bf16.
    """

    rows_R: torch.Tensor
    values_RD: torch.Tensor

    def part(self, elements: slice) -> torch.Tensor:
        """The gradient of a stretch of the flat table, which may begin and end within rows, with its zeros.

        Shapes: [elements], in the values' dtype.
        """
        width = self.values_RD.shape[1]
        first, last = elements.start // width, -(-elements.stop // width)
        is_there_R = (self.rows_R >= first) & (self.rows_R < last)
        whole = self.values_RD.new_zeros(last - first, width)
        whole[self.rows_R[is_there_R] - first] = self.values_RD[is_there_R]
        return whole.view(-1)[elements.start - first * width : elements.stop - first * width]


@dataclass(frozen=True, kw_only=True)
class UnitStates:
    """What AdamW changes of a unit, or of a part of it, wherever it is. Shapes: [elements] each, contiguous."""

    hi: torch.Tensor
    lo: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """In the order of the kernel's arguments."""
        return (self.hi, self.lo, self.exp_avg, self.exp_avg_sq)


def update_unit(
    store: HostStore,
    unit_index: int,
    hyper: AdamWStep,
    *,
    num_threads: int,
    grad: torch.Tensor | None = None,
    only: Set[str] | None = None,
    part: slice | None = None,
) -> None:
    """Update weights and moments of one unit, compressed ones among them, from its gradient, which stays as it is.

    Weight decay applies where the layout says so, and the learning rate is scaled as it says; padding is not touched.
    With `only`, the unit's other tensors are not touched either: a tensor without a gradient is not decayed and keeps
    its moments, as in torch.optim.AdamW.

    With `part`, only these of its trained elements are updated, and `grad` has no others.

    Shapes: grad [unit.trained_elements] or [part], fp32 or bf16; the store's own `grad` plane where it is None.
    """
    unit = store.layout.units[unit_index]
    part = slice(0, unit.trained_elements) if part is None else part
    grads = store.unit(unit_index, "grad")[part] if grad is None else grad
    _check(grads, part)
    cut = min(max(unit.compressed_elements, part.start), part.stop)
    compressed, exact = slice(part.start, cut), slice(cut, part.stop)
    if segments := _segments(unit, hyper, compressed, only):
        planes = _views(store, unit, compressed, ("hi", *COMPRESSED_PLANES))
        _update_compressed(planes, grads[: cut - part.start], segments, hyper, num_threads)
    states = UnitStates(**dict(zip(STATE_PLANES, _views(store, unit, exact, STATE_PLANES), strict=True)))
    update_states(unit, states, grads[cut - part.start :], hyper, num_threads=num_threads, only=only, part=exact)


def update_states(
    unit: UnitLayout,
    states: UnitStates,
    grads: torch.Tensor,
    hyper: AdamWStep,
    *,
    num_threads: int,
    only: Set[str] | None = None,
    part: slice | None = None,
) -> None:
    """As `update_unit`, on exact states and gradients that are given, all in one memory: this process's or a GPU's.

    CUDA: launches on the current stream, and reads nothing back.
    """
    part = slice(0, unit.trained_elements) if part is None else part
    _check(grads, part)
    found, scalars = _segments(unit, hyper, part, only), scalars_of(hyper)
    if not found:
        return
    if runs_triton(grads.device):
        _update_on_gpu(states, grads, found, scalars)
        return
    assert grads.device.type == "cpu", "a GPU's memory is updated by Triton's kernel"
    segments = (Segment * len(found))(*found)
    if (kernel := native.library()) is None:
        _update_by_reference(list(states.tensors), grads, segments, scalars)
        return
    pointers = [view.data_ptr() for view in (*states.tensors, grads)]
    kernel.hz_adamw(*pointers, grads.dtype == torch.bfloat16, segments, len(segments), scalars, num_threads)


def _check(grads: torch.Tensor, part: slice) -> None:
    assert grads.shape == (part.stop - part.start,) and grads.is_contiguous()
    assert grads.dtype in (torch.float32, torch.bfloat16), f"gradients are fp32 or bf16, not {grads.dtype}"


def _segments(unit: UnitLayout, hyper: AdamWStep, stretch: slice, only: Set[str] | None) -> list[Segment]:
    """The tensors of a stretch of a unit that are updated, counted from its beginning."""
    found = []
    for tensor in unit.tensors:
        begin, end = max(tensor.offset, stretch.start), min(tensor.offset + tensor.num_elements, stretch.stop)
        if tensor.trained and begin < end and (only is None or tensor.name in only):
            found.append(Segment(begin - stretch.start, end - begin, _decay_factor(tensor, hyper), tensor.lr_scale))
    return found


def _views(store: HostStore, unit: UnitLayout, stretch: slice, planes: Sequence[str]) -> list[torch.Tensor]:
    return [store.part(unit.index, plane, stretch) for plane in planes]


def _update_compressed(
    planes: Sequence[torch.Tensor], grads: torch.Tensor, found: list[Segment], hyper: AdamWStep, num_threads: int
) -> None:
    """The planes are `hi` and `COMPRESSED_PLANES`, in this order."""
    scalars, dither = scalars_of(hyper), reference.dither_of(hyper.step)
    if (kernel := native.library()) is None:
        hi, lo, first, root, scales = planes
        for segment in found:
            part = slice(segment.offset, segment.offset + segment.num_elements)
            groups = slice(part.start // COMPRESSED_GROUP * 2, -(-part.stop // COMPRESSED_GROUP) * 2)
            reference.adamw_compressed(
                hi[part].view(torch.uint16).numpy(),
                lo[part].numpy(),
                first[part].numpy(),
                root[part].numpy(),
                scales[groups].view(torch.uint16).numpy(),
                _raw(grads[part]),
                segment.decay_factor,
                segment.step_scale,
                scalars,
                dither,
            )
        return
    segments = (Segment * len(found))(*found)
    pointers = [view.data_ptr() for view in (*planes, grads)]
    is_bf16 = grads.dtype == torch.bfloat16
    kernel.hz_adamw_compressed(*pointers, is_bf16, segments, len(segments), scalars, dither.ctypes.data, num_threads)


def update_rows(
    store: HostStore, name: str, hyper: AdamWStep, gradient: RowGradient, rows_U: torch.Tensor, *, num_threads: int
) -> None:
    """Update the distinct rows `rows_U` of one 2-D parameter, with the bits that `update_unit` gives them.

    A row without a gradient has its moments and weights decayed, as an element whose gradient is zero.

    Shapes: U = rows to update.
    """
    _, place = store.layout.find(name)
    num_rows, width = place.shape
    values = gradient.values_RD
    assert values.is_contiguous() and values.shape == (gradient.rows_R.numel(), width), "one row of values for each row"
    assert values.dtype in (torch.float32, torch.bfloat16), f"gradients are fp32 or bf16, not {values.dtype}"
    source_of = torch.full((num_rows,), -1)
    source_of[gradient.rows_R] = torch.arange(gradient.rows_R.numel())
    # The kernel reads and writes by these numbers: indexing checks them, and makes a contiguous copy.
    sources_U, rows_U = source_of[rows_U], torch.arange(num_rows)[rows_U]
    decay_factor, scalars = _decay_factor(place, hyper), scalars_of(hyper)
    views = [store.tensor(name, plane) for plane in STATE_PLANES]
    if (kernel := native.library()) is None:
        _update_rows_by_reference(views, values, rows_U, sources_U, decay_factor, place.lr_scale, scalars)
        return
    is_bf16, pointers = values.dtype == torch.bfloat16, [tensor.data_ptr() for tensor in (*views, values)]
    kernel.hz_adamw_rows(
        *pointers,
        is_bf16,
        rows_U.data_ptr(),
        sources_U.data_ptr(),
        rows_U.numel(),
        width,
        decay_factor,
        place.lr_scale,
        scalars,
        num_threads,
    )


def sum_squares(values: torch.Tensor, *, num_threads: int = 1) -> SquaredSum:
    """Squared norm in a fixed order, so that neither threads nor the machine change its bits.

    Shapes: values [N], fp32 or bf16, contiguous, on the CPU.
    """
    assert values.dim() == 1 and values.is_contiguous() and values.device.type == "cpu"
    assert values.dtype in (torch.float32, torch.bfloat16), f"sum_squares takes fp32 or bf16, not {values.dtype}"
    kernel = native.library()
    if kernel is None:
        total = reference.sum_squares(_raw(values))
    else:
        # One sum for each block, which the kernel adds in order when all threads are done.
        partials = np.empty(-(-values.numel() // reference.NORM_BLOCK_ELEMENTS))
        is_bf16 = values.dtype == torch.bfloat16
        total = kernel.hz_sum_squares(values.data_ptr(), is_bf16, values.numel(), partials.ctypes.data, num_threads)
    # No fp32 square overflows float64, so the sum is finite exactly when every element is.
    return SquaredSum(value=total, is_finite=math.isfinite(total))


def add_gradient(total: torch.Tensor, values: torch.Tensor, *, num_threads: int = 1) -> SquaredSum:
    """Add `values` to `total`, in place; returns what `sum_squares` says of the result.

    Shapes: both [N], fp32, contiguous, on the CPU.
    """
    assert total.shape == values.shape and total.dim() == 1, "a gradient and the sum that it is added to are alike"
    assert total.is_contiguous() and values.is_contiguous() and total.device.type == values.device.type == "cpu"
    assert total.dtype == values.dtype == torch.float32, "gradients add up in fp32"
    kernel = native.library()
    if kernel is None:
        result = reference.add(total.numpy(), values.numpy())
    else:
        partials = np.empty(-(-total.numel() // reference.NORM_BLOCK_ELEMENTS))
        result = kernel.hz_add(total.data_ptr(), values.data_ptr(), total.numel(), partials.ctypes.data, num_threads)
    return SquaredSum(value=result, is_finite=math.isfinite(result))


def square_blocks(values: torch.Tensor, block_elements: int, *, num_threads: int = 1) -> torch.Tensor:
    """The sum of squares of each started block, in an order of its own that neither threads nor the machine change.

    Shapes: values [N], fp32 or bf16, contiguous, on the CPU; returns [ceil(N / block_elements)], float64.
    """
    assert values.dim() == 1 and values.is_contiguous() and values.device.type == "cpu"
    assert values.dtype in (torch.float32, torch.bfloat16), f"square_blocks takes fp32 or bf16, not {values.dtype}"
    kernel = native.library()
    if kernel is None:
        return torch.from_numpy(reference.square_blocks(_raw(values), block_elements))
    sums = torch.empty(-(-values.numel() // block_elements), dtype=torch.float64)
    is_bf16 = values.dtype == torch.bfloat16
    kernel.hz_square_blocks(values.data_ptr(), is_bf16, values.numel(), block_elements, sums.data_ptr(), num_threads)
    return sums


def _decay_factor(place: TensorLayout, hyper: AdamWStep) -> float:
    return 1 - hyper.learning_rate * place.lr_scale * hyper.weight_decay if place.decay else 1.0


def scalars_of(hyper: AdamWStep) -> Scalars:
    """What of a step the kernel and the reference apply to every element."""
    assert hyper.step >= 1 and 0 <= hyper.beta1 < 1 and 0 <= hyper.beta2 < 1, hyper
    # In float64 here, and rounded to fp32 once: 1 - beta**step loses its digits in fp32 in the first steps.
    factor = math.sqrt(1 - hyper.beta2**hyper.step)
    return Scalars(
        grad_scale=hyper.grad_scale,
        beta1=hyper.beta1,
        one_minus_beta1=1 - hyper.beta1,
        beta2=hyper.beta2,
        one_minus_beta2=1 - hyper.beta2,
        scaled_eps=factor * hyper.eps,
        scaled_step_size=factor * hyper.learning_rate / (1 - hyper.beta1**hyper.step),
        most_ratio=_most_ratio(hyper),
    )


def _update_on_gpu(states: UnitStates, grads: torch.Tensor, segments: list[Segment], scalars: Scalars) -> None:
    # Only where it is used: a machine without a GPU may have no Triton.
    from horizon_server.store.adamw_triton import adamw

    are_bf16 = grads.dtype == torch.bfloat16
    numbers = {name: getattr(scalars, name) for name, *_ in Scalars._fields_ if name not in _OF_OTHERS}
    grads = grads.view(torch.int16) if are_bf16 else grads
    for segment in _joined(segments):
        stretch = slice(segment.offset, segment.offset + segment.num_elements)
        hi, lo, exp_avg, exp_avg_sq = (tensor[stretch] for tensor in states.tensors)
        adamw(
            hi.view(torch.int16),
            lo,
            exp_avg,
            exp_avg_sq,
            grads[stretch],
            grads_are_bf16=are_bf16,
            # Rounded to fp32, as the kernel for CPUs multiplies them.
            step_size=float(np.float32(scalars.scaled_step_size) * np.float32(segment.step_scale)),
            decay_factor=segment.decay_factor,
            **numbers,
        )


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """The same stretches, with those in one that follow each other and are updated alike: a launch for each of many
    experts would take longer than their update."""
    joined: list[Segment] = []
    for segment in segments:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.offset + last.num_elements == segment.offset
            and (last.decay_factor, last.step_scale) == (segment.decay_factor, segment.step_scale)
        ):
            joined[-1] = Segment(
                last.offset, last.num_elements + segment.num_elements, last.decay_factor, last.step_scale
            )
        else:
            joined.append(segment)
    return joined


def _most_ratio(hyper: AdamWStep) -> float:
    """How often a first moment can be the root of the second, whatever the gradients were: the inequality of Cauchy and
    Schwarz on the two sums (1 - beta1) * beta1^i * g_i and (1 - beta2) * beta2^i * g_i^2."""
    ratio, steps = hyper.beta1**2 / hyper.beta2 if hyper.beta2 else math.inf, hyper.step
    if not hyper.beta1:
        total = 1.0
    elif ratio == 1:
        total = float(steps)
    # A power that no float holds bounds nothing.
    elif ratio > 1 and steps * math.log(ratio) > _MOST_LOG:
        return _UNBOUNDED
    else:
        total = (1 - ratio**steps) / (1 - ratio)
    return min(_UNBOUNDED, (1 - hyper.beta1) * math.sqrt(total / (1 - hyper.beta2)))


def _update_by_reference(
    views: list[torch.Tensor], grads: torch.Tensor, segments: ctypes.Array[Segment], scalars: Scalars
) -> None:
    hi, lo, exp_avg, exp_avg_sq = views
    for segment in segments:
        part = slice(segment.offset, segment.offset + segment.num_elements)
        reference.adamw(
            hi[part].view(torch.uint16).numpy(),
            lo[part].numpy(),
            exp_avg[part].numpy(),
            exp_avg_sq[part].numpy(),
            _raw(grads[part]),
            segment.decay_factor,
            segment.step_scale,
            scalars,
        )


def _update_rows_by_reference(
    views: list[torch.Tensor],
    values_RD: torch.Tensor,
    rows_U: torch.Tensor,
    sources_U: torch.Tensor,
    decay_factor: float,
    step_scale: float,
    scalars: Scalars,
) -> None:
    size = max(1, reference.CHUNK_ELEMENTS // values_RD.shape[1])
    for rows, sources in zip(torch.split(rows_U, size), torch.split(sources_U, size), strict=True):
        # Copies: the rows of a list are not one stretch.
        hi, lo, exp_avg, exp_avg_sq = parts = [view[rows].view(-1) for view in views]
        grads = values_RD.new_zeros(rows.numel(), values_RD.shape[1])
        grads[sources >= 0] = values_RD[sources[sources >= 0]]
        reference.adamw(
            hi.view(torch.uint16).numpy(),
            lo.numpy(),
            exp_avg.numpy(),
            exp_avg_sq.numpy(),
            _raw(grads.view(-1)),
            decay_factor,
            step_scale,
            scalars,
        )
        for view, part in zip(views, parts, strict=True):
            view[rows] = part.view(rows.numel(), -1)


def _raw(values: torch.Tensor) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16]:
    return values.view(torch.uint16).numpy() if values.dtype == torch.bfloat16 else values.numpy()
