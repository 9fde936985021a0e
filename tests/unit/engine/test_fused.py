"""Triton's kernels for RMSNorm, rotary positions and SwiGLU, in its interpreter, and the operators on a CPU: both are
the plain formula."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from horizon_server.engine.fused import rms_norm, rotary, swiglu
from horizon_server.engine.fused.rms_norm import NormRule, normalise
from horizon_server.engine.fused.rotary import turn
from horizon_server.engine.fused.swiglu import gated

Load = Callable[[str], Any]
DTYPES = [torch.float32, torch.bfloat16]
# Of the result's norm; the interpreter cuts bits off where a GPU rounds to bf16, after each of up to three operations.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.5e-2}
RULES = {
    "llama": NormRule(eps=1e-6, offset=0.0, rounds_first=True),
    "olmo2": NormRule(eps=1e-5, offset=0.0, rounds_first=False),
    "gemma": NormRule(eps=1e-6, offset=1.0, rounds_first=False),
}


@pytest.fixture
def kernels(triton_interpreter: Load) -> Load:
    return lambda name: triton_interpreter(f"horizon_server.engine.fused.{name}_triton")


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(got: Tensor, wanted: Tensor) -> float:
    got, wanted = got.detach().double(), wanted.detach().double()
    return float((got - wanted).norm() / wanted.norm())


def gradients(output: Tensor, gradient: Tensor, *inputs: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(output, inputs, gradient.to(output.dtype)))


def exact_norm(values: Tensor, weight: Tensor, rule: NormRule) -> Tensor:
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + rule.eps) * (weight + rule.offset)


def exact_rotation(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = values[..., : cos.shape[-1]], values[..., cos.shape[-1] :]
    first, second = turned.chunk(2, -1)
    turned = turned * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]
    return torch.cat([turned, rest], -1)


NORM_INPUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "hidden state": lambda dtype: random(1, 7, 33, dtype=dtype),
    "one wide row": lambda dtype: random(1, 4099, dtype=dtype),
    "heads of many tokens": lambda dtype: random(1, 1500, 3, 8, dtype=dtype),
    "heads before tokens": lambda dtype: random(1, 9, 3, 20, dtype=dtype).transpose(1, 2),
    "every other element": lambda dtype: random(1, 7, 66, dtype=dtype)[..., ::2],
    "two rows": lambda dtype: random(2, 9, 3, 20, dtype=dtype).transpose(1, 2),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("shape", NORM_INPUTS)
def test_norms_and_their_gradients(kernels: Load, shape: str, rule: NormRule, dtype: torch.dtype) -> None:
    values = NORM_INPUTS[shape](dtype)
    weight, gradient = random(values.shape[-1], dtype=dtype, seed=1), random(*values.shape, dtype=dtype, seed=2)
    leaves = [tensor.double().requires_grad_() for tensor in (values, weight)]
    wanted = exact_norm(leaves[0], leaves[1], rule)
    expected = [wanted, *gradients(wanted, gradient, *leaves)]
    arguments = (values, weight, rule.eps, rule.offset, rule.rounds_first)
    for module in (kernels("rms_norm"), None):
        forward, backward = (
            (module.forward, module.backward) if module else (rms_norm.rms_norm, rms_norm.rms_norm_backward)
        )
        found = [forward(*arguments), *backward(gradient, *arguments)]
        assert all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in found)
        for got, want in zip(found, expected, strict=True):
            assert error(got, want) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", NORM_INPUTS)
def test_norms_that_add(kernels: Load, shape: str, dtype: torch.dtype) -> None:
    one, rule = NORM_INPUTS[shape](dtype), RULES["llama"]
    other, gradient, added = (random(*one.shape, dtype=dtype, seed=seed) for seed in (1, 2, 3))
    weight, arguments = random(one.shape[-1], dtype=dtype, seed=4), (rule.eps, rule.offset, rule.rounds_first)
    total = (one + other).contiguous()
    module = kernels("rms_norm")
    for plain, forward in ((rms_norm.rms_norm, rms_norm.rms_norm_of_sum), (module.forward, module.forward_of_sum)):
        found = forward(one, other, weight, *arguments)
        for got, want in zip(found, (total, plain(found[0], weight, *arguments)), strict=True):
            assert error(got, want) <= TOLERANCE[dtype]
    wanted = rms_norm.rms_norm_backward(gradient, total, weight, *arguments)
    expected = (wanted[0].double() + added.double(), wanted[1])
    by_kernel = module.backward(gradient, total, weight, *arguments, added=added)
    for found in (rms_norm.rms_norm_backward_added(added, gradient, total, weight, *arguments), by_kernel):
        for got, want in zip(found, expected, strict=True):
            assert got.dtype == dtype and got.is_contiguous() and error(got, want) <= TOLERANCE[dtype]


def test_partial_sums_of_a_weight_are_added_in_one_order(kernels: Load) -> None:
    module = kernels("rms_norm")
    values, gradient = random(1, 3000, 16, dtype=torch.float32), random(1, 3000, 16, dtype=torch.float32, seed=2)
    one, other = (module.backward(gradient, values, torch.ones(16), 1e-6, 0.0, True) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_operator_has_the_bits_of_the_code_it_replaces(rule: NormRule, dtype: torch.dtype) -> None:
    values, weight = random(1, 7, 33, dtype=dtype), random(33, dtype=dtype, seed=1)
    normed = values.float() * torch.rsqrt(values.float().pow(2).mean(-1, keepdim=True) + rule.eps)
    late, early = (normed * (rule.offset + weight.float())).to(dtype), weight * normed.to(dtype)
    assert torch.equal(normalise(values, weight, rule), early if rule.rounds_first else late)


@pytest.mark.parametrize(("dtype", "tables"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize(("heads", "size", "turned"), [(3, 12, 12), (4, 13, 8), (1, 6, 6)])
@pytest.mark.parametrize("rows", [1, 2])
def test_rotations_and_their_gradients(
    kernels: Load, rows: int, heads: int, size: int, turned: int, dtype: torch.dtype, tables: torch.dtype
) -> None:
    # As projections give them; and in another order, as a norm of heads does.
    values, gradient = (random(rows, 7, heads, size, dtype=dtype, seed=seed).transpose(1, 2) for seed in (0, 3))
    cos, sin = (random(rows, 7, 2 * turned, dtype=tables, seed=seed)[..., ::2] for seed in (1, 2))
    leaf = values.double().requires_grad_()
    wanted = exact_rotation(leaf, cos.double(), sin.double())
    expected = [wanted, *gradients(wanted, gradient, leaf)]
    for x, g in ((values, gradient), (values.contiguous(), gradient[..., : size + 1].contiguous())):
        outputs = [torch.full((rows, 7, heads, size), torch.nan, dtype=dtype).transpose(1, 2) for _ in range(2)]
        module = kernels("rotary")
        module.turn_into(outputs[0], x, cos, sin, is_backward=False)
        module.turn_into(outputs[1], g, cos, sin, is_backward=True)
        outputs += [rotary.rotary(x, cos, sin), rotary.rotary_backward(g, cos, sin)]
        for got, want in zip(outputs, 2 * expected, strict=True):
            assert got.stride() == outputs[0].stride() and error(got, want) <= TOLERANCE[dtype]


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 33, 4099])
def test_gated_products_and_their_gradients(kernels: Load, size: int, dtype: torch.dtype) -> None:
    # Halves of one projection, as in Phi-3; and values that overflow a careless exponential.
    gate, up = (4 * random(1, 5, 2 * size, dtype=dtype)).chunk(2, -1)
    gate[0, 0, 0], gate[0, 1, 0] = 200.0, -200.0
    gradient = random(1, 5, size, dtype=dtype, seed=1)
    leaves = [tensor.double().requires_grad_() for tensor in (gate, up)]
    wanted = functional.silu(leaves[0]) * leaves[1]
    expected = [wanted, *gradients(wanted, gradient, *leaves)]
    module = kernels("swiglu")
    for forward, backward in ((module.forward, module.backward), (swiglu.swiglu, swiglu.swiglu_backward)):
        found = [forward(gate, up), *backward(gradient, gate, up)]
        for got, want in zip(found, expected, strict=True):
            assert got.is_contiguous() and got.dtype == dtype and error(got, want) <= TOLERANCE[dtype]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton, which is for Linux only")
def test_the_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_for_gpu"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert len(kernels) == 13 and all(size > 0 for _, size in kernels), kernels


def test_the_operators_are_differentiated_and_traced() -> None:
    hidden, weight = random(1, 5, 12, dtype=torch.float32), random(12, dtype=torch.float32, seed=1)
    cos, sin = (random(1, 5, 12, dtype=torch.float32, seed=seed) for seed in (2, 3))
    rule = RULES["gemma"]

    def layer(hidden: Tensor, weight: Tensor, *, fused: bool) -> Tensor:
        if fused:
            normed = normalise(hidden, weight, rule)
            return turn(gated(normed, hidden)[:, None], cos, sin)
        normed = exact_norm(hidden, weight, rule)
        return exact_rotation((functional.silu(normed) * hidden)[:, None], cos, sin)

    gradient = random(1, 1, 5, 12, dtype=torch.float32, seed=4)
    by_autograd = []
    for fused in (True, False):
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        by_autograd.append(gradients(layer(*leaves, fused=fused), gradient, *leaves))
    by_vjp = torch.func.vjp(lambda *of: layer(*of, fused=True), hidden, weight)[1](gradient)
    for one, other, wanted in zip(by_autograd[0], by_vjp, by_autograd[1], strict=True):
        assert torch.equal(one, other) and error(one, wanted) <= 2e-6
    operators = [
        (rms_norm.rms_norm, (hidden, weight, 1e-6, 1.0, False)),
        (rms_norm.rms_norm_backward, (hidden, hidden, weight, 1e-6, 1.0, False)),
        (rms_norm.rms_norm_of_sum, (hidden, hidden, weight, 1e-6, 1.0, False)),
        (rms_norm.rms_norm_backward_added, (hidden, hidden, hidden, weight, 1e-6, 1.0, False)),
        (rotary.rotary, (hidden[:, None], cos, sin)),
        (rotary.rotary_backward, (hidden[:, None], cos, sin)),
        (swiglu.swiglu, (hidden, hidden)),
        (swiglu.swiglu_backward, (hidden, hidden, hidden)),
    ]
    for operator, arguments in operators:
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))
