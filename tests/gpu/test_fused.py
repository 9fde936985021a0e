"""Triton's kernels on a CUDA device: the numbers of the formula within the dtype's rounding, the same bits every
time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from horizon_server.engine.fused import rms_norm, rotary, swiglu
from horizon_server.engine.square_sums import square_blocks
from horizon_server.store.layout import Packing, TensorLayout, UnitLayout
from horizon_server.store.packing import pack, unpack
from horizon_server.store.triton_kernels import runs_triton

pytestmark = pytest.mark.gpu
# Of the result's norm.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 6e-3}
DTYPES = [torch.float32, torch.bfloat16]
Operator = Callable[..., Tensor | tuple[Tensor, ...]]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda().to(dtype)


def check(operator: Operator, arguments: Sequence[object], wanted: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Twice with the same bits, and within rounding of what is wanted."""
    runs = [operator(*arguments) for _ in range(2)]
    one, other = (run if isinstance(run, tuple) else (run,) for run in runs)
    for got, again, want in zip(one, other, wanted, strict=True):
        assert torch.equal(got, again) and got.dtype == dtype
        assert float((got.double() - want.double()).norm() / want.double().norm()) <= TOLERANCE[dtype]


def with_gradients(output: Tensor, gradient: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return (output.detach(), *torch.autograd.grad(output, inputs, gradient.to(output.dtype)))


@pytest.fixture(autouse=True)
def triton_is_there() -> None:
    if not runs_triton(torch.device("cuda")):
        pytest.skip("needs triton: pip install triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [(1e-6, 0.0, True), (1e-5, 0.0, False), (1e-6, 1.0, False)], ids=str)
@pytest.mark.parametrize("shape", [(1, 4099, 3584), (1, 1, 33), (1, 700, 28, 128), (1, 300, 8192)], ids=str)
def test_norms(shape: tuple[int, ...], rule: tuple[float, float, bool], dtype: torch.dtype) -> None:
    eps, offset, _ = rule
    values, gradient, added = (random(*shape, dtype=dtype, seed=seed) for seed in (0, 1, 2))
    if len(shape) == 4:  # heads before tokens, as some models have them
        values = values.transpose(1, 2)
        gradient, added = (tensor.reshape(values.shape) for tensor in (gradient, added))
    weight = random(shape[-1], dtype=dtype, seed=3)
    leaves = [tensor.double().requires_grad_() for tensor in (values, weight)]
    normed = leaves[0] * torch.rsqrt(leaves[0].pow(2).mean(-1, keepdim=True) + eps) * (leaves[1] + offset)
    output, for_values, for_weight = with_gradients(normed, gradient, *leaves)
    check(rms_norm.rms_norm, (values, weight, *rule), (output,), dtype)
    check(rms_norm.rms_norm_backward, (gradient, values, weight, *rule), (for_values, for_weight), dtype)
    arguments = (added, gradient, values, weight, *rule)
    check(rms_norm.rms_norm_backward_added, arguments, (for_values + added.double(), for_weight), dtype)
    total = values + added
    expected = (total, rms_norm.rms_norm(total, weight, *rule))
    check(rms_norm.rms_norm_of_sum, (values, added, weight, *rule), expected, dtype)


@pytest.mark.parametrize(("dtype", "tables"), [*zip(DTYPES, DTYPES, strict=True), (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize(("heads", "size", "turned"), [(28, 128, 128), (4, 80, 32), (1, 6, 6)])
def test_rotations(heads: int, size: int, turned: int, dtype: torch.dtype, tables: torch.dtype) -> None:
    values, gradient = (random(1, 700, heads, size, dtype=dtype, seed=seed).transpose(1, 2) for seed in (0, 1))
    cos, sin = (random(1, 700, turned, dtype=tables, seed=seed) for seed in (2, 3))
    leaf = values.double().requires_grad_()
    first, second = leaf[..., :turned].chunk(2, -1)
    other = torch.cat([-second, first], -1) * sin.double()[:, None]
    output = torch.cat([leaf[..., :turned] * cos.double()[:, None] + other, leaf[..., turned:]], -1)
    wanted, for_values = with_gradients(output, gradient, leaf)
    for x, g in ((values, gradient), (values.contiguous(), gradient.contiguous())):
        check(rotary.rotary, (x, cos, sin), (wanted,), dtype)
        check(rotary.rotary_backward, (g, cos, sin), (for_values,), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [18944, 33])
def test_gated_products(size: int, dtype: torch.dtype) -> None:
    gate, up = (4 * random(1, 700, 2 * size, dtype=dtype)).chunk(2, -1)
    gate[0, 0, 0], gate[0, 1, 0] = 200.0, -200.0
    gradient = random(1, 700, size, dtype=dtype, seed=1)
    leaves = [tensor.double().requires_grad_() for tensor in (gate, up)]
    output, for_gate, for_up = with_gradients(functional.silu(leaves[0]) * leaves[1], gradient, *leaves)
    check(swiglu.swiglu, (gate, up), (output,), dtype)
    check(swiglu.swiglu_backward, (gradient, gate, up), (for_gate, for_up), dtype)


def test_more_elements_than_32_bits_count() -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    size = 16384
    gate = torch.ones((1, (1 << 31) // size + 2, size), dtype=torch.bfloat16, device="cuda")
    product = swiglu.swiglu(gate, gate)
    assert torch.equal(product[0, -1], product[0, 0])
    del product
    normed = rms_norm.rms_norm(gate, torch.ones(size, dtype=torch.bfloat16, device="cuda"), 1e-6, 0.0, True)
    assert torch.equal(normed[0, -1], normed[0, 0])


@pytest.mark.parametrize("size", [2048, 3584, 100])
def test_a_block_s_sum_of_squares_does_not_depend_on_how_many_there_are(size: int) -> None:
    values = random(64 * size, dtype=torch.float32)
    sums = torch.zeros(64, dtype=torch.float64, device="cuda")
    square_blocks(values, size, sums)
    torch.testing.assert_close(sums, values.double().square().view(64, -1).sum(1), rtol=1e-14, atol=0)
    for number in (1, 2, 5, 16, 63):
        fewer = torch.zeros(number, dtype=torch.float64, device="cuda")
        square_blocks(values[-number * size :], size, fewer)
        assert torch.equal(fewer, sums[-number:])


@pytest.mark.parametrize("packing", ["int8", "nf4"])
def test_packed_weights_have_the_bits_of_the_cpu(packing: Packing) -> None:
    shape = (300, 1000)
    place = TensorLayout(
        name="w", shape=shape, offset=0, num_elements=300_000, decay=False, trained=False, packing=packing
    )
    unit = UnitLayout(name="", kind="layer", index=0, offset=0, num_elements=300_000, tensors=(place,))
    block, part = torch.zeros(unit.packed_bytes, dtype=torch.uint8), unit.packed_parts["w"]
    pack(random(*shape, dtype=torch.float32).cpu().view(-1), place, block, part)
    for dtype in DTYPES:
        expected = torch.zeros(place.num_elements, dtype=dtype)
        found = torch.zeros(place.num_elements, dtype=dtype, device="cuda")
        unpack(place, block, part, expected)
        unpack(place, block.cuda(), part, found)
        assert torch.equal(found.cpu(), expected)
