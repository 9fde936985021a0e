"""Linear maps whose weight gradients add up in fp32 inside the matrix product, without a rounded copy of them in
between.

A model's own code calls `torch.nn.functional.linear`. Inside `AccumulatedProducts` those calls, where the weight is one
that has an accumulator, give the same value and the same gradient of their input, but the product that is the weight's
gradient goes straight to the accumulator, and autograd gets none for the weight. Every other use of such a weight
reaches autograd as it always does.

All of it can be traced: `torch.func.vjp` under `make_fx` sees the product as one operator, `horizon::add_product`.

Shapes: T = tokens, I = inputs of a map, O = its outputs.
Thread: a mode belongs to the thread that enters it; the products run where autograd runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from horizon_server.engine.fp8 import Fp8Weight


@dataclass(frozen=True, eq=False)
class Accumulator:
    """Where the gradient of a weight adds up. `out` has the weight's shape, any strides and is fp32.

    `first` is one boolean on the CPU: while it is true, `out` holds nothing yet and is overwritten. Each write to `out`
    clears it.
    """

    out: Tensor
    first: Tensor


def add_product(out: Tensor, a: Tensor, b: Tensor, first: Tensor) -> None:
    """Add `a @ b` to `out`, or write it there where `first` is true, which it then no longer is."""
    torch.ops.horizon.add_product(out, a, b, first)


def _add_product(out: Tensor, a: Tensor, b: Tensor, first: Tensor) -> None:
    # Read here and not by the caller, so that a traced call depends on the flag's value when it runs.
    beta = 0 if first else 1
    first.fill_(False)
    if a.dtype == out.dtype:
        # With beta = 0 what is in `out` is not read, so that not even a NaN there remains.
        torch.addmm(out, a, b, beta=beta, out=out)
    elif out.is_cuda:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    elif beta:
        # CPUs have no product of bf16 with an fp32 result. Widening the factors first takes 1.3 times as long, and is
        # exact.
        out.add_(a.mm(b))
    else:
        out.copy_(a.mm(b))


# Not by `torch.library.custom_op`, which adds an autograd kernel: this operator only writes, and autograd passes
# through it.
_library = Library("horizon", "DEF")  # type: ignore[no-untyped-call]
_SIGNATURE = "add_product(Tensor(a!) out, Tensor a, Tensor b, Tensor(b!) first) -> ()"
_library.define(_SIGNATURE, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]
_library.impl("add_product", _add_product, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("add_product", torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("horizon::add_product", lambda out, a, b, first: None, lib=_library)


class AccumulatedProducts(TorchFunctionMode):
    """Inside the block, the given weights' gradients from linear maps go to their accumulators; those `in_fp8` are
    multiplied so.

    The weights are known by identity and must require gradients (or be differentiated by `torch.func.vjp`).
    """

    def __init__(
        self, accumulators: Iterable[tuple[Tensor, Accumulator]], in_fp8: Iterable[tuple[Tensor, Fp8Weight]] = ()
    ) -> None:
        super().__init__()
        # With the weight itself, so that no other tensor can get its id meanwhile.
        self._accumulators = {id(weight): (weight, accumulator) for weight, accumulator in accumulators}
        self._in_fp8 = {id(weight): (weight, cast) for weight, cast in in_fp8}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace the calls of linear maps. The mode itself is off in here."""
        kwargs = kwargs or {}
        if func is functional.linear or func is linear_without_value:
            inputs, weight, bias = (
                args[index] if index < len(args) else kwargs.get(name)
                for index, name in enumerate(("input", "weight", "bias"))
            )
            _, accumulator = self._accumulators.get(id(weight), (None, None))
            _, cast = self._in_fp8.get(id(weight), (None, None))
            if accumulator is not None or cast is not None:
                has_value = func is functional.linear
                return _AccumulatedLinear.apply(inputs, weight, bias, accumulator, cast, has_value)  # type: ignore[no-untyped-call]
        elif func is torch.addmm and len(args) == 3 and not kwargs:
            # GPT-2's projections: the weight is the second factor.
            bias, inputs, weight_IO = args
            if (found := self._accumulators.get(id(weight_IO))) is not None and bias.dim() == 1:
                return _AccumulatedAddmm.apply(bias, inputs, weight_IO, found[1])  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)


def linear_without_value(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """A linear map that returns uninitialised memory of the right shape; its gradients are those of the map, bit for
    bit."""
    arguments = (inputs, weight_OI, bias_O)
    output: Tensor
    if has_torch_function((inputs, weight_OI)):
        output = handle_torch_function(linear_without_value, (inputs, weight_OI), *arguments)
    else:
        output = _AccumulatedLinear.apply(*arguments, None, None, False)  # type: ignore[no-untyped-call]
    return output


class _AccumulatedLinear(torch.autograd.Function):
    """Its gradients are the very products that autograd would call, so the bits of those that it returns are equal."""

    @staticmethod
    def forward(
        inputs: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        accumulator: Accumulator | None,
        cast: Fp8Weight | None,
        has_value: bool,
    ) -> Tensor:
        if not has_value:
            return any_values(inputs, weight_OI.shape[0])
        if cast is not None:
            product = cast.product(inputs)
            return product if bias_O is None else product + bias_O
        output = functional.linear(inputs, weight_OI, bias_O)
        # With a bias it is a view, and autograd refuses to change a view made in here in place, as some models do to
        # scale it.
        unviewed: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
        return unviewed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, weight_OI, _, accumulator, cast, _ = inputs
        ctx.save_for_backward(values, weight_OI)
        # Not saved by autograd, which would refuse a tensor that has changed since; this one is only written to.
        ctx.accumulator = accumulator
        ctx.cast = cast

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight_OI = ctx.saved_tensors
        for_inputs, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_TO, inputs_TI = grad.reshape(-1, grad.shape[-1]), inputs.reshape(-1, inputs.shape[-1])
        weight_grad = _weight_gradient(ctx.accumulator, grad_TO.t(), inputs_TI, wanted=for_weight)
        input_grad = None
        if for_inputs:
            grad_TI = grad_TO.mm(weight_OI) if ctx.cast is None else ctx.cast.input_gradient(grad_TO)
            input_grad = grad_TI.view(inputs.shape)
        return input_grad, weight_grad, grad_TO.sum(0) if for_bias else None, None, None, None


class _AccumulatedAddmm(torch.autograd.Function):
    """`bias + inputs @ weight`, its weight's gradient accumulated."""

    @staticmethod
    def forward(bias_O: Tensor, inputs_TI: Tensor, weight_IO: Tensor, accumulator: Accumulator) -> Tensor:
        return torch.addmm(bias_O, inputs_TI, weight_IO)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, inputs_TI, weight_IO, accumulator = inputs
        ctx.save_for_backward(inputs_TI, weight_IO)
        ctx.accumulator = accumulator

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        inputs_TI, weight_IO = ctx.saved_tensors
        for_bias, for_inputs, for_weight = ctx.needs_input_grad[:3]
        weight_grad = _weight_gradient(ctx.accumulator, inputs_TI.t(), grad_TO, wanted=for_weight)
        return (
            grad_TO.sum(0) if for_bias else None,
            grad_TO.mm(weight_IO.t()) if for_inputs else None,
            weight_grad,
            None,
        )


def _weight_gradient(accumulator: Accumulator | None, a: Tensor, b: Tensor, *, wanted: bool) -> Tensor | None:
    if accumulator is not None:
        add_product(accumulator.out, a, b, accumulator.first)
        return None
    return a.mm(b) if wanted else None


def any_values(like: Tensor, num_outputs: int) -> Tensor:
    """Uninitialised memory for the outputs of a map."""
    return like.new_empty((*like.shape[:-1], num_outputs))
