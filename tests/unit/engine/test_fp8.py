"""Products in FP8: how far they are from those in full, and whose products they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

from horizon_server.engine.binding import Place, Strided
from horizon_server.engine.fp8 import Fp8Visit, Fp8Weight, cast_rows, check_supported, is_castable, weight_gradient
from horizon_server.engine.linear import Accumulator, LinearMap, LinearMaps, linear_without_value
from horizon_server.errors import InvalidSpec


def error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float8_e4m3fn, 2**-4), (torch.float8_e5m2, 2**-3)])
def test_a_value_is_rounded_to_the_formats_digits(dtype: torch.dtype, limit: float) -> None:
    values = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 50)[:, None]
    rounded, scales = cast_rows(values, dtype)

    back = rounded.float() * scales
    largest = values.abs().amax(1, keepdim=True)
    assert bool(((back - values).abs() <= limit * values.abs() + largest * 2**-10).all())
    assert torch.allclose(back.abs().amax(1, keepdim=True), largest)


def test_zeros_stay_zero_and_what_is_not_finite_shows() -> None:
    values = torch.zeros(3, 16)
    values[1, 2], values[2, 3] = torch.nan, torch.inf
    rounded, scales = cast_rows(values, torch.float8_e4m3fn)

    back = rounded.float() * scales
    assert torch.equal(back[0], values[0])
    assert not bool(torch.isfinite(back[1:]).all(1).any())


def test_a_gpu_gets_every_operand_row_by_row() -> None:
    """cuBLASLt takes no other layout, which torch checks without a GPU too."""
    with FakeTensorMode():
        inputs, weight, gradient = (
            torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((48, 64), (96, 64), (48, 96))
        )
        cast = Fp8Weight.of(weight, for_backward=True)
        assert cast.product(inputs).shape == (48, 96)
        assert cast.input_gradient(gradient).shape == (48, 64)


def test_a_gpu_adds_up_gradients_over_whole_blocks_of_tokens() -> None:
    with FakeTensorMode():
        grad, inputs = (torch.empty(37, size, dtype=torch.bfloat16, device="cuda") for size in (96, 64))
        assert weight_gradient(grad.t(), inputs).shape == (96, 64)


@pytest.mark.parametrize("num_tokens", [1, 37, 48])
@pytest.mark.parametrize("accumulates", [True, False])
def test_gradients_of_weights_can_be_products_in_fp8(accumulates: bool, num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, grad = (torch.randn(num_tokens, size, generator=generator) for size in (64, 96))
    weight = torch.randn(96, 64, generator=generator, requires_grad=True)
    accumulator = Accumulator(out=torch.full((96, 64), torch.nan), first=torch.tensor(True))
    cast = Fp8Weight.of(weight.detach(), for_backward=True, is_full=True)
    for _ in range(2):
        with LinearMaps([(weight, LinearMap(accumulator=accumulator if accumulates else None, cast=cast))]):
            functional.linear(inputs, weight).backward(grad)  # type: ignore[no-untyped-call]

    found = accumulator.out if accumulates else weight.grad
    assert found is not None
    assert not accumulates or weight.grad is None
    assert error(found, 2 * grad.t() @ inputs) <= 8e-2
    assert torch.equal(found, 2 * weight_gradient(grad.t(), inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulates", [True, False])
def test_value_and_gradients_are_near_those_in_full(dtype: torch.dtype, accumulates: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in ((2, 40, 64), (96, 64), (96,))
    )
    grad = torch.randn(2, 40, 96, generator=generator).to(dtype)
    wanted = functional.linear(inputs, weight, bias)
    wanted_gradients = torch.autograd.grad(wanted, (inputs, weight, bias), grad)
    accumulator = Accumulator(out=torch.full((96, 64), torch.nan), first=torch.tensor(True))
    cast = Fp8Weight.of(weight.detach(), for_backward=True)

    with LinearMaps([(weight, LinearMap(accumulator=accumulator if accumulates else None, cast=cast))]):
        output = functional.linear(inputs, weight, bias)
        skipped = linear_without_value(inputs, weight, bias)
    gradients = torch.autograd.grad(output, (inputs, weight, bias), grad, allow_unused=True)
    accumulator.first.fill_(True)
    of_skipped = torch.autograd.grad(skipped, inputs, grad)

    assert output.dtype == dtype
    assert 1e-3 < error(output, wanted) <= 5e-2
    weight_gradient = accumulator.out if accumulates else gradients[1]
    assert gradients[0] is not None
    assert gradients[2] is not None
    assert weight_gradient is not None
    assert 1e-3 < error(gradients[0], wanted_gradients[0]) <= 8e-2
    assert torch.equal(of_skipped[0], gradients[0])
    # Weight gradients are not rounded to 8 bits.
    assert error(weight_gradient, wanted_gradients[1]) <= (1e-6 if dtype == torch.float32 else 4e-3)
    assert torch.equal(gradients[2], wanted_gradients[2])


def test_a_token_does_not_change_the_rounding_of_another() -> None:
    inputs, weight = torch.randn(8, 32), torch.randn(16, 32)
    cast = Fp8Weight.of(weight, for_backward=False)
    alone = cast.product(inputs[:4])
    inputs[4:] *= 1e6

    assert torch.equal(cast.product(inputs)[:4], alone)


def place_of(name: str, shape: tuple[int, ...]) -> Place:
    piece = Strided.contiguous(0, shape)
    return Place(name=name, unit_index=1, piece=piece, stored_names=(name,), is_parameter=True, has_gradient=True)


def test_a_weight_is_cast_once_per_visit() -> None:
    parameters = {"up.weight": torch.randn(16, 32), "norm.weight": torch.randn(32)}
    places = [place_of("up.weight", (16, 32)), place_of("norm.weight", (32,))]
    visit = Fp8Visit(places, "fp8", for_backward=True)
    cast = visit.of(parameters)["up.weight"]

    again = {name: value.clone() for name, value in parameters.items()}

    assert visit.of(again) == {"up.weight": cast}


def test_traced_for_a_gpu_products_are_torchs_own_and_sums_are_fast_in_forward_alone() -> None:
    def run(rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor], inputs: Tensor, grad: Tensor) -> list[Tensor]:
        cast = Fp8Weight(rows, columns, is_full=True)
        return [cast.product(inputs), weight_gradient(grad.t(), inputs), cast.input_gradient(grad)]

    with FakeTensorMode():
        weight, inputs = (torch.empty(size, 32, dtype=torch.bfloat16, device="cuda") for size in (64, 37))
        cast = Fp8Weight.of(weight, for_backward=True)
        traced = make_fx(run)(
            cast.by_rows, cast.by_columns, inputs, torch.empty(37, 64, dtype=torch.bfloat16, device="cuda")
        )

    products = list(traced.graph.find_nodes(op="call_function", target=torch.ops.aten._scaled_mm.default))
    forms = [(tuple(node.meta["val"].shape), node.args[6:]) for node in products]
    assert forms == [((37, 64), (torch.bfloat16, True)), ((64, 32), (torch.bfloat16,)), ((37, 32), (torch.bfloat16,))]
    # Of 37 tokens, which are no whole block.
    assert products[1].args[0].meta["val"].shape == (64, 48)


def test_it_can_be_traced() -> None:
    layer, inputs = torch.nn.Linear(32, 16), torch.randn(5, 32)
    weight, bias = layer.weight.detach(), layer.bias.detach()

    def run(weight: Tensor, bias: Tensor, inputs: Tensor) -> Tensor:
        def forward(inputs: Tensor) -> Tensor:
            with LinearMaps([(weight, LinearMap(cast=Fp8Weight.of(weight, for_backward=True)))]):
                output: Tensor = functional_call(layer, {"weight": weight, "bias": bias}, (inputs,))
            return output

        output, pull_back = torch.func.vjp(forward, inputs)  # type: ignore[misc]
        gradient: Tensor = pull_back(output)[0]
        return gradient

    traced = make_fx(run, tracing_mode="symbolic")(weight, bias, inputs)

    assert torch.equal(traced(weight, bias, inputs[:3]), run(weight, bias, inputs[:3]))


@pytest.mark.parametrize(
    ("name", "shape", "castable"),
    [
        ("mlp.gate_proj.weight", (48, 32), True),
        ("mlp.gate.weight", (16, 32), False),
        ("mlp.up_proj.weight", (40, 32), False),
        ("mlp.up_proj.bias", (48,), False),
        ("mlp.experts.gate_up_proj", (4, 32, 32), False),
    ],
)
def test_only_projections_of_whole_blocks_are_cast(name: str, shape: tuple[int, ...], castable: bool) -> None:
    assert is_castable(name, shape) == castable


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")

    with pytest.raises(InvalidSpec, match=r"needs a GPU of compute capability 8.9 or higher .* A100 has 8.0"):
        check_supported(torch.device("cuda"), "fp8")
    check_supported(torch.device("cpu"), "fp8_full")
