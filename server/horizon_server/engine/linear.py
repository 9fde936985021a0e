"""Linear maps as a job wants them computed, whatever the model's code looks like: one mode, with a table by weight.

A model's own code calls `torch.nn.functional.linear`, `torch.addmm` where it is GPT-2's, or `x @ weight.T` where it is
Falcon's. Inside `LinearMaps` such a call, where the weight is one of the table, is computed as its `LinearMap` says:

* With an accumulator, the value and the gradient of the input are the same, but the product that is the weight's
  gradient goes straight to the accumulator, in fp32 and without a rounded copy in between, and autograd gets none for
  the weight. Every other use of such a weight reaches autograd as it always does.
* With casts, it is multiplied in FP8.
* With an adapter, x W' + b becomes x W' + b + scale * dropout(x) A' B'. With magnitudes m and the norms n of
  W + scale * B A (DoRA) it becomes x W' + b + (m / n - 1) dropout(x) W' + m / n scale * dropout(x) A' B'.

All of it can be traced: `torch.func.vjp` under `make_fx` sees the product as one operator, `horizon::add_product`.

Shapes: T = tokens, I = inputs of a map, O = its outputs, K = rank of an adapter.
Thread: a mode belongs to the thread that enters it; the products run where autograd runs.
Sources: LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353), as in PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import functional
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from horizon_server.engine.autograd_function import with_signature
from horizon_server.engine.fp8 import Fp8Weight, weight_gradient

# Of the attribute a new object is made each time, so that it is compared by value.
TRANSPOSE = torch.Tensor.T.__get__  # type: ignore[attr-defined]
_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_ADDMM_ARGUMENTS = 3


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


def add_sum(out: Tensor, addend: Tensor, first: Tensor) -> None:
    """Add a tensor to `out`, or write it there where `first` is true, which it then no longer is."""
    torch.ops.horizon.add_sum(out, addend, first)


def _add_sum(out: Tensor, addend: Tensor, first: Tensor) -> None:
    if first:
        out.copy_(addend)
    else:
        out.add_(addend)
    first.fill_(False)


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
for _signature, _kernel in (
    ("add_product(Tensor(a!) out, Tensor a, Tensor b, Tensor(b!) first) -> ()", _add_product),
    ("add_sum(Tensor(a!) out, Tensor addend, Tensor(b!) first) -> ()", _add_sum),
):
    _name = _signature.partition("(")[0]
    _library.define(_signature, tags=torch.Tag.pt2_compliant_tag)  # type: ignore[no-untyped-call]
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"horizon::{_name}", lambda out, *given: None, lib=_library)


@dataclass(frozen=True, kw_only=True, eq=False)
class Adapter:
    """An adapter of low rank on a map; plain LoRA has no magnitude and no norms. `dropout` is the share of its inputs
    that is dropped, by torch's default generator.

    Shapes: a [K, I], b [O, K], magnitude and norms [O].
    """

    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None
    norms: Tensor | None = None
    scale: float = 1.0
    dropout: float = 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class LinearMap:
    """How the maps of one weight are computed, forward and backward; by default as the model's code does it."""

    accumulator: Accumulator | None = None
    cast: Fp8Weight | None = None
    adapter: Adapter | None = None


_PLAIN = LinearMap()


class LinearMaps(TorchFunctionMode):
    """Inside the block, linear maps with the given weights are computed as their `LinearMap` says.

    The weights are known by identity; those with accumulators must require gradients (or be differentiated by
    `torch.func.vjp`). With `is_traced` a graph is made of the block.
    """

    def __init__(self, maps: Iterable[tuple[Tensor, LinearMap]] = (), *, is_traced: bool = False) -> None:
        super().__init__()
        # With the weight itself, so that no other tensor can get its id meanwhile.
        self._maps = {id(weight): (weight, found) for weight, found in maps}
        self._is_traced = is_traced
        self._transposes = Transposes()

    def with_adapters(self, adapters: Iterable[tuple[Tensor, Adapter]]) -> LinearMaps:
        """The same maps, with adapters on those of some weights."""
        maps = dict(self._maps)
        for weight, adapter in adapters:
            maps[id(weight)] = weight, replace(self._of(weight), adapter=adapter)
        return LinearMaps(maps.values(), is_traced=self._is_traced)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Replace the calls of linear maps. The mode itself is off in here."""
        kwargs = kwargs or {}
        if func == TRANSPOSE and self._of(args[0]).adapter is not None:
            return self._transposes.made_of(args[0])
        used = map_of(func, args, kwargs, self._transposes)
        if used is None:
            return func(*args, **kwargs)
        inputs, weight = used
        found = self._of(weight)
        if found.adapter is None:
            return self._without_adapter(found, func, args, kwargs)
        # As in PEFT: what is computed in fp32 next to adapters in bf16, such as a router, is cast for them.
        adapter, inputs = found.adapter, inputs.to(found.adapter.a.dtype)
        dropped = functional.dropout(inputs, adapter.dropout) if adapter.dropout else inputs
        # Scaled where it is narrow. Before the map itself, so that the last product of a layer, which a recompute
        # leaves out, stays the last.
        change = self._linear(self._linear(dropped, adapter.a) * adapter.scale, adapter.b)
        if adapter.magnitude is None or adapter.norms is None:
            output = self._without_adapter(found, func, args, kwargs)
            return output + change.to(output.dtype)
        gain_O = adapter.magnitude / adapter.norms
        # Less 1 before it is rounded to the dtype: that difference is small, and keeps its digits.
        more_O, gain_O = (gain_O - 1).to(change.dtype), gain_O.to(change.dtype)
        base = self._without_bias(func, args, kwargs, dropped) if adapter.dropout else None
        output = self._without_adapter(found, func, args, kwargs)
        if base is None:
            bias = _bias_of(func, args, kwargs)
            base = output if bias is None else output - bias
        return output + (more_O * base + gain_O * change).to(output.dtype)

    def _of(self, weight: object) -> LinearMap:
        return self._maps.get(id(weight), (None, _PLAIN))[1]

    def _without_adapter(
        self, found: LinearMap, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """A call of a map, but for its adapter."""
        if func is functional.linear or func is linear_without_value:
            given: Iterable[Any] = (
                args[index] if index < len(args) else kwargs.get(name)
                for index, name in enumerate(("input", "weight", "bias"))
            )
            inputs, weight_OI, bias_O = given
            has_value = func is functional.linear
            if found.accumulator is not None or found.cast is not None:
                return _MappedLinear.apply(inputs, weight_OI, bias_O, found, has_value)  # type: ignore[no-untyped-call]
            is_folded = bias_O is not None and inputs.dim() > weight_OI.dim()
            if self._is_traced and has_value and is_folded and torch.is_grad_enabled():
                # torch takes a frozen map with a bias apart in C++, which fixes the number of tokens of a graph. The
                # same product of the same matrices, asked for in Python.
                output_TO = torch.addmm(bias_O, inputs.reshape(-1, inputs.shape[-1]), weight_OI.t())
                return output_TO.view(*inputs.shape[:-1], weight_OI.shape[0])
        elif func is torch.addmm and found.accumulator is not None and args[0].dim() == 1:
            return _AccumulatedAddmm.apply(*args, found)  # type: ignore[no-untyped-call]
        return func(*args, **kwargs)

    def _linear(self, inputs: Tensor, weight_OI: Tensor) -> Tensor:
        product: Tensor = self._without_adapter(self._of(weight_OI), functional.linear, (inputs, weight_OI), {})
        return product

    def _without_bias(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], inputs: Tensor
    ) -> Tensor:
        """The product of a map for other inputs, which may be in the adapter's dtype where the map is in fp32."""
        if func is torch.addmm:
            product: Tensor = inputs.to(args[2].dtype) @ args[2]
            return product
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        inputs = inputs.to(weight.dtype)
        # The transpose itself is the second factor there.
        return inputs @ weight if func in _PRODUCTS else self._linear(inputs, weight)


class Transposes:
    """The transposes that a model's code has made of some weights, by identity: `x @ weight.T` is a linear map too."""

    def __init__(self) -> None:
        # With the transpose itself, so that no other tensor can get its id meanwhile.
        self._found: dict[int, tuple[Tensor, Tensor]] = {}

    def made_of(self, weight: Tensor) -> Tensor:
        """The transpose of a weight, which is known as that from now on."""
        transposed = weight.T
        self._found[id(transposed)] = transposed, weight
        return transposed

    def weight_of(self, tensor: Tensor) -> Tensor:
        """The weight that a tensor is the transpose of; the tensor itself where it is none."""
        return found[1] if (found := self._found.get(id(tensor))) is not None else tensor


def map_of(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], transposes: Transposes
) -> tuple[Tensor, Tensor] | None:
    """The inputs and the weight of a call of a linear map, or None where it is none."""
    if func is functional.linear or func is linear_without_value:
        inputs, weight = (args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(("input", "weight")))
        return (inputs, weight) if isinstance(inputs, Tensor) and isinstance(weight, Tensor) else None
    # GPT-2's projections: the weight is the second factor.
    if func is torch.addmm and len(args) == _ADDMM_ARGUMENTS and not kwargs:
        return args[1], args[2]
    if func in _PRODUCTS and len(args) == 2 and isinstance(args[1], Tensor):
        weight = transposes.weight_of(args[1])
        return (args[0], weight) if weight is not args[1] else None
    return None


def _bias_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What a linear map adds to its product."""
    bias: Tensor | None = args[0] if func is torch.addmm else args[2] if len(args) > 2 else kwargs.get("bias")
    return bias


def linear_without_value(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """A linear map that returns uninitialised memory of the right shape; its gradients are those of the map, bit for
    bit."""
    arguments = (inputs, weight_OI, bias_O)
    output: Tensor
    if has_torch_function((inputs, weight_OI)):
        output = handle_torch_function(linear_without_value, (inputs, weight_OI), *arguments)
    else:
        output = _MappedLinear.apply(*arguments, _PLAIN, False)  # type: ignore[no-untyped-call]
    return output


class _MappedLinear(torch.autograd.Function):
    """Its gradients are the very products that autograd would call, so the bits of those that it returns are equal."""

    @staticmethod
    @with_signature
    def forward(
        inputs: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        found: LinearMap,
        has_value: bool,
    ) -> Tensor:
        if not has_value:
            return any_values(inputs, weight_OI.shape[0])
        if found.cast is not None:
            product = found.cast.product(inputs)
            return product if bias_O is None else product + bias_O
        output = functional.linear(inputs, weight_OI, bias_O)
        # With a bias it is a view, and autograd refuses to change a view made in here in place, as some models do to
        # scale it.
        unviewed: Tensor = torch.ops.aten._unsafe_view(output, output.shape)
        return unviewed

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        values, weight_OI, _, found, _ = inputs
        ctx.save_for_backward(values, weight_OI)
        # Not saved by autograd, which would refuse a tensor that has changed since; the accumulator's is only written
        # to.
        ctx.found = found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight_OI = ctx.saved_tensors
        for_inputs, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_TO, inputs_TI = grad.reshape(-1, grad.shape[-1]), inputs.reshape(-1, inputs.shape[-1])
        cast, input_grad = ctx.found.cast, None
        weight_grad = _weight_gradient(ctx.found, grad_TO.t(), inputs_TI, wanted=for_weight)
        if for_inputs:
            grad_TI = grad_TO.mm(weight_OI) if cast is None else cast.input_gradient(grad_TO)
            input_grad = grad_TI.view(inputs.shape)
        return input_grad, weight_grad, grad_TO.sum(0) if for_bias else None, None, None


class _AccumulatedAddmm(torch.autograd.Function):
    """`bias + inputs @ weight`, its weight's gradient accumulated."""

    @staticmethod
    @with_signature
    def forward(bias_O: Tensor, inputs_TI: Tensor, weight_IO: Tensor, found: LinearMap) -> Tensor:
        return torch.addmm(bias_O, inputs_TI, weight_IO)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, inputs_TI, weight_IO, found = inputs
        ctx.save_for_backward(inputs_TI, weight_IO)
        ctx.found = found

    @staticmethod
    def backward(ctx: Any, grad_TO: Tensor) -> tuple[Tensor | None, ...]:
        inputs_TI, weight_IO = ctx.saved_tensors
        for_bias, for_inputs, for_weight = ctx.needs_input_grad[:3]
        weight_grad = _weight_gradient(ctx.found, inputs_TI.t(), grad_TO, wanted=for_weight)
        return (
            grad_TO.sum(0) if for_bias else None,
            grad_TO.mm(weight_IO.t()) if for_inputs else None,
            weight_grad,
            None,
        )


def _weight_gradient(found: LinearMap, a: Tensor, b: Tensor, *, wanted: bool) -> Tensor | None:
    """`a @ b`, both by tokens within; None where an accumulator took it, or nothing wants it."""
    accumulator = found.accumulator
    in_fp8 = found.cast is not None and found.cast.is_full and (accumulator is not None or wanted)
    product = weight_gradient(a, b) if in_fp8 else None
    if accumulator is None:
        return a.mm(b) if wanted and product is None else product
    if product is None:
        add_product(accumulator.out, a, b, accumulator.first)
    else:
        add_sum(accumulator.out, product, accumulator.first)
    return None


def any_values(like: Tensor, num_outputs: int) -> Tensor:
    """Uninitialised memory for the outputs of a map."""
    return like.new_empty((*like.shape[:-1], num_outputs))
