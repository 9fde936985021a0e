"""The AdamW update of one unit of the host store, or of some rows of a table, in place; the sum of several gradients,
and the squared norm that clipping needs.

The compiled kernel and the NumPy reference give the same bits for any number of threads.

Thread: any thread; the GIL is released while the kernel works. One unit must not be updated by two threads at once.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from horizon_server.store import native, reference
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import COMPRESSED_GROUP, COMPRESSED_PLANES, TensorLayout, UnitLayout
from horizon_server.store.native import Scalars, Segment

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
    num_elements = part.stop - part.start
    grads = store.unit(unit_index, "grad")[part] if grad is None else grad
    assert grads.shape == (num_elements,) and grads.is_contiguous() and grads.device.type == "cpu"
    assert grads.dtype in (torch.float32, torch.bfloat16), f"gradients are fp32 or bf16, not {grads.dtype}"
    cut = min(max(unit.compressed_elements, part.start), part.stop)
    for stretch, update in ((slice(part.start, cut), _update_compressed), (slice(cut, part.stop), _update_exact)):
        if segments := _segments(unit, hyper, stretch, only):
            views = partial(_views, store, unit, stretch)
            update(views, grads[stretch.start - part.start : stretch.stop - part.start], segments, hyper, num_threads)


_Segments = ctypes.Array[Segment]
_Views = Callable[[Sequence[str]], list[torch.Tensor]]


def _segments(unit: UnitLayout, hyper: AdamWStep, stretch: slice, only: Set[str] | None) -> _Segments | None:
    """The tensors of a stretch of a unit, counted from its beginning; None where none is updated."""
    found = []
    for tensor in unit.tensors:
        begin, end = max(tensor.offset, stretch.start), min(tensor.offset + tensor.num_elements, stretch.stop)
        if tensor.trained and begin < end and (only is None or tensor.name in only):
            found.append(Segment(begin - stretch.start, end - begin, _decay_factor(tensor, hyper), tensor.lr_scale))
    return (Segment * len(found))(*found) if found else None


def _views(store: HostStore, unit: UnitLayout, stretch: slice, planes: Sequence[str]) -> list[torch.Tensor]:
    return [store.plane(plane)[store.layout.part_in(plane, unit, stretch)] for plane in planes]


def _update_exact(views: _Views, grads: torch.Tensor, segments: _Segments, hyper: AdamWStep, num_threads: int) -> None:
    planes, scalars = views(("hi", "lo", "exp_avg", "exp_avg_sq")), scalars_of(hyper)
    if (kernel := native.library()) is None:
        _update_by_reference(planes, grads, segments, scalars)
        return
    pointers = [view.data_ptr() for view in (*planes, grads)]
    kernel.hz_adamw(*pointers, grads.dtype == torch.bfloat16, segments, len(segments), scalars, num_threads)


def _update_compressed(
    views: _Views, grads: torch.Tensor, segments: _Segments, hyper: AdamWStep, num_threads: int
) -> None:
    planes, scalars, dither = views(("hi", *COMPRESSED_PLANES)), scalars_of(hyper), reference.dither_of(hyper.step)
    if (kernel := native.library()) is None:
        hi, lo, first, root, scales = planes
        for segment in segments:
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
    views = [store.tensor(name, plane) for plane in ("hi", "lo", "exp_avg", "exp_avg_sq")]
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
