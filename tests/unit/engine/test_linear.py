"""Linear maps with accumulated weight gradients, against plain autograd: eagerly and traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from horizon_server.engine.linear import Accumulator, LinearMap, LinearMaps, add_product, linear_without_value

Tensors = dict[str, Tensor]


class Block(nn.Module):
    """Uses `up` twice, `down` once by a linear map and once otherwise, and `conv` as GPT-2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.down = nn.Linear(12, 8, bias=False)
        self.conv = nn.Parameter(torch.randn(8, 8))
        self.conv_bias = nn.Parameter(torch.randn(8))

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.down(functional.silu(self.norm(self.up(hidden)))) + self.up(hidden)[..., :8]
        rows = torch.addmm(self.conv_bias, inner.view(-1, 8), self.conv)
        return hidden + rows.view(hidden.shape) * self.down.weight.mean()


ACCUMULATED = ("up.weight", "down.weight", "conv")


def accumulators_of(parameters: Tensors) -> dict[str, Accumulator]:
    """Old NaN in each, every second one seen transposed."""
    made = {}
    for index, name in enumerate(ACCUMULATED):
        rows, columns = parameters[name].shape
        out = torch.full((rows, columns), torch.nan) if index % 2 else torch.full((columns, rows), torch.nan).t()
        made[name] = Accumulator(out=out, first=torch.tensor(True))
    return made


def plain(block: nn.Module, parameters: Tensors, batches: list[tuple[Tensor, Tensor]]) -> tuple[Tensors, list[Tensor]]:
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    inputs = [hidden.clone().requires_grad_() for hidden, _ in batches]
    for hidden, (_, grad) in zip(inputs, batches, strict=True):
        torch.autograd.backward(functional_call(block, leaves, (hidden,)), grad)
    gradients = {}
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        gradients[name] = leaf.grad
    return gradients, [hidden.grad for hidden in inputs if hidden.grad is not None]


def close(got: Tensor, wanted: Tensor, limit: float = 1e-6) -> bool:
    return float((got - wanted).norm()) <= limit * float(wanted.norm())


@pytest.fixture
def case() -> tuple[Block, Tensors, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    block = Block()
    parameters = {name: value.detach() for name, value in block.named_parameters()}
    return block, parameters, [(torch.randn(1, tokens, 8), torch.randn(1, tokens, 8)) for tokens in (5, 9, 2)]


def test_gradients_over_several_micro_batches_are_those_of_autograd(
    case: tuple[Block, Tensors, list[tuple[Tensor, Tensor]]],
) -> None:
    block, parameters, batches = case
    wanted, wanted_inputs = plain(block, parameters, batches)
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    made = accumulators_of(parameters)

    for (hidden, grad), wanted_input in zip(batches, wanted_inputs, strict=True):
        leaf = hidden.clone().requires_grad_()
        with LinearMaps((leaves[name], LinearMap(accumulator=found)) for name, found in made.items()):
            output = functional_call(block, leaves, (leaf,))
        assert torch.equal(output, functional_call(block, parameters, (hidden,)))
        torch.autograd.backward(output, grad)
        assert leaf.grad is not None
        assert close(leaf.grad, wanted_input)

    assert leaves["up.weight"].grad is None
    assert leaves["conv"].grad is None
    for name, gradient in wanted.items():
        got = made[name].out if name in made else torch.zeros_like(gradient)
        if (rest := leaves[name].grad) is not None:
            got = got + rest
        assert close(got, gradient), name
    assert not any(accumulator.first for accumulator in made.values())


@pytest.mark.parametrize("tracing_mode", ["fake", "symbolic"])
def test_a_traced_vjp_has_the_product_as_one_operator_and_the_same_numbers(
    tracing_mode: Literal["fake", "symbolic"], case: tuple[Block, Tensors, list[tuple[Tensor, Tensor]]]
) -> None:
    block, parameters, batches = case
    wanted, wanted_inputs = plain(block, parameters, batches)

    def backward(
        parameters: Tensors, hidden: Tensor, grad: Tensor, outs: Tensors, firsts: Tensors
    ) -> tuple[Tensors, Tensor]:
        def forward(parameters: Tensors, hidden: Tensor) -> Tensor:
            made = {name: Accumulator(out=outs[name], first=firsts[name]) for name in outs}
            with LinearMaps((parameters[name], LinearMap(accumulator=found)) for name, found in made.items()):
                output: Tensor = functional_call(block, parameters, (hidden,))
            return output

        _, pull_back = torch.func.vjp(forward, parameters, hidden)  # type: ignore[misc]
        gradients: tuple[Tensors, Tensor] = pull_back(grad)
        return gradients

    def arguments(made: dict[str, Accumulator], batch: tuple[Tensor, Tensor]) -> tuple[object, ...]:
        outs, firsts = ({name: getattr(a, field) for name, a in made.items()} for field in ("out", "first"))
        return parameters, *batch, outs, firsts

    traced = make_fx(backward, tracing_mode=tracing_mode)(*arguments(accumulators_of(parameters), batches[0]))
    # Where tokens are a symbol, the graph that was traced on the first batch serves the others.
    batches = batches if tracing_mode == "symbolic" else [batches[0]] * 3
    wanted, wanted_inputs = plain(block, parameters, batches)
    made, sums = accumulators_of(parameters), {name: torch.zeros_like(value) for name, value in parameters.items()}
    for batch, wanted_input in zip(batches, wanted_inputs, strict=True):
        gradients, hidden_gradient = traced(*arguments(made, batch))
        assert close(hidden_gradient, wanted_input)
        for name, gradient in gradients.items():
            sums[name] += gradient

    assert sum(node.target is torch.ops.horizon.add_product.default for node in traced.graph.nodes) == 4
    for name, gradient in wanted.items():
        got = sums[name] + made[name].out if name in made else sums[name]
        assert close(got, gradient), name


def test_the_first_product_overwrites_whatever_is_there() -> None:
    out, first = torch.full((3, 4), torch.nan), torch.tensor(True)
    a, b = torch.randn(3, 5), torch.randn(5, 4)

    add_product(out, a, b, first)
    add_product(out, a, b, first)

    assert not first
    assert torch.allclose(out, 2 * (a @ b))


def test_products_of_bf16_add_up_in_fp32() -> None:
    torch.manual_seed(0)
    out, first = torch.full((16, 24), torch.nan), torch.tensor(True)
    in_bf16 = torch.zeros(16, 24, dtype=torch.bfloat16)
    exact = torch.zeros(16, 24, dtype=torch.float64)
    for _ in range(50):
        a, b = torch.randn(16, 32, dtype=torch.bfloat16), torch.randn(32, 24, dtype=torch.bfloat16)
        add_product(out, a, b, first)
        in_bf16 += a @ b
        exact += a.double() @ b.double()

    assert out.dtype == torch.float32
    assert close(out.double(), exact, 2e-3)
    assert float((in_bf16 - exact).norm()) > 5 * float((out - exact).norm())


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_map_without_its_value_has_all_its_gradients(accumulates: bool) -> None:
    torch.manual_seed(0)
    inputs, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((2, 5, 8), (6, 8), (6,)))
    grad = torch.randn(2, 5, 6)
    wanted = torch.autograd.grad(functional.linear(inputs, weight, bias), (inputs, weight, bias), grad)
    accumulator = Accumulator(out=torch.full((6, 8), torch.nan), first=torch.tensor(True))
    maps = [(weight, LinearMap(accumulator=accumulator))] if accumulates else []

    with LinearMaps(maps):
        output = linear_without_value(inputs, weight, bias)
    got = torch.autograd.grad(output, (inputs, weight, bias), grad, allow_unused=True)

    weight_gradient: Callable[[], Tensor | None] = lambda: accumulator.out if accumulates else got[1]  # noqa: E731
    for one, other in ((got[0], wanted[0]), (weight_gradient(), wanted[1]), (got[2], wanted[2])):
        assert one is not None
        assert torch.equal(one, other)
