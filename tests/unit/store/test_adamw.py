"""The kernel against NumPy bit by bit, and against torch.optim.AdamW."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from horizon_server.store import native, reference
from horizon_server.store.adamw import AdamWStep, RowGradient, square_blocks, sum_squares, update_rows, update_unit
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import build_layout, with_lr_scales

PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
SHAPES = {
    "model.embed_tokens.weight": (97, 33),
    "model.layers.0.proj.weight": (311, 257),
    "model.layers.0.norm.weight": (37,),
    "model.layers.0.out.weight": (1, 1),
    "model.norm.weight": (33,),
}
OPTIONS = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.37}
SCALES = {
    "model.embed_tokens.weight": 0.1,
    "model.layers.0.proj.weight": 3.0,
    "model.layers.0.norm.weight": 1 / 3,
    "model.layers.0.out.weight": 1000.0,
}
needs_kernel = pytest.mark.skipif(
    not native.kernel_info().available, reason=f"no compiled kernel: {native.kernel_info().reason}"
)


def filled_store(
    grad_dtype: torch.dtype,
    *,
    seed: int = 0,
    table: tuple[int, ...] = SHAPES["model.embed_tokens.weight"],
    scales: Mapping[str, float] | None = None,
) -> HostStore:
    shapes = {**SHAPES, "model.embed_tokens.weight": table}
    layout = with_lr_scales(build_layout(shapes, num_layers=1, tied=True), scales or {})
    store = HostStore.allocate(layout, grad_dtype=grad_dtype, num_threads=1)
    generator = torch.Generator().manual_seed(seed)
    for _, tensor in store.layout.tensors():
        store.write_master(tensor.name, torch.randn(tensor.shape, generator=generator) * 0.02)
    fill_grads(store, generator)
    return store


def fill_grads(store: HostStore, generator: torch.Generator) -> None:
    for _, tensor in store.layout.tensors():
        # Magnitudes from subnormal to large, so that every branch of the arithmetic sees work.
        exponents = torch.empty(tensor.shape).uniform_(-140, 20, generator=generator)
        store.tensor(tensor.name, "grad").copy_(torch.randn(tensor.shape, generator=generator) * torch.exp2(exponents))


def run(
    store: HostStore, *, num_steps: int, num_threads: int = 1, changes: dict[str, float] | None = None
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    for step in range(1, num_steps + 1):
        for unit in store.layout.units:
            update_unit(store, unit.index, AdamWStep(step=step, **OPTIONS | (changes or {})), num_threads=num_threads)
        fill_grads(store, generator)
    return {plane: store.plane(plane).view(torch.uint8).clone() for plane in PLANES}


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for plane in PLANES:
        assert torch.equal(left[plane], right[plane]), f"{plane} differs"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_stretch_of_a_gradient_of_rows_has_the_zeros_between_them(dtype: torch.dtype) -> None:
    rows_R = torch.tensor([5, 0, 96, 31])
    gradient = RowGradient(rows_R=rows_R, values_RD=torch.randn(4, 33).to(dtype))
    whole = torch.zeros(97, 33, dtype=dtype)
    whole[rows_R] = gradient.values_RD
    for start in range(0, 97 * 33, 224):
        part = slice(start, min(start + 224, 97 * 33))
        assert torch.equal(gradient.part(part), whole.view(-1)[part])
    # A unit ends with padding.
    assert torch.equal(
        gradient.part(slice(96 * 33, 97 * 33 + 40)), torch.cat([whole[96], torch.zeros(40, dtype=dtype)])
    )


@needs_kernel
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.0}, {"beta1": 0.0, "eps": 0.0}, {"learning_rate": 0.0}])
@pytest.mark.parametrize("scales", [{}, SCALES])
def test_kernel_gives_the_bits_of_numpy(
    grad_dtype: torch.dtype, changes: dict[str, float], scales: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_kernel = run(filled_store(grad_dtype, scales=scales), num_steps=4, changes=changes)
    monkeypatch.setattr(native, "library", lambda: None)
    assert_same_bits(by_kernel, run(filled_store(grad_dtype, scales=scales), num_steps=4, changes=changes))


def test_one_scale_for_all_tensors_is_another_learning_rate() -> None:
    """A power of two, so that nothing is rounded otherwise."""
    scaled = filled_store(torch.float32, scales=dict.fromkeys(SHAPES, 0.25))
    plain = filled_store(torch.float32)
    changes = {"learning_rate": OPTIONS["learning_rate"] / 4}

    assert_same_bits(run(scaled, num_steps=3), run(plain, num_steps=3, changes=changes))


@needs_kernel
@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads(num_threads: int, grad_dtype: torch.dtype) -> None:
    assert_same_bits(
        run(filled_store(grad_dtype), num_steps=3),
        run(filled_store(grad_dtype), num_steps=3, num_threads=num_threads),
    )


@needs_kernel
def test_bits_do_not_depend_on_the_callers_float_mode() -> None:
    store, flushed = filled_store(torch.float32), filled_store(torch.float32)
    torch.set_flush_denormal(True)
    try:
        update_unit(flushed, 1, AdamWStep(step=1, **OPTIONS), num_threads=1)
    finally:
        torch.set_flush_denormal(False)
    update_unit(store, 1, AdamWStep(step=1, **OPTIONS), num_threads=2)
    subnormal = store.unit(1, "exp_avg_sq").abs() < torch.finfo(torch.float32).tiny
    assert int((subnormal & (store.unit(1, "exp_avg_sq") != 0)).sum()) > 100, "the data must reach the subnormals"
    assert torch.equal(store.unit(1, "exp_avg_sq"), flushed.unit(1, "exp_avg_sq"))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("scales", [{}, {**SCALES, "model.layers.0.out.weight": 2.5}])
def test_follows_torch_adamw(weight_decay: float, scales: dict[str, float]) -> None:
    store = filled_store(torch.float32, scales=scales)
    generator = torch.Generator().manual_seed(1)
    expected = {name: master_of(store, name).clone().requires_grad_() for name in SHAPES}
    groups = [
        {
            "params": [weight],
            "weight_decay": weight_decay if store.layout.find(name)[1].decay else 0.0,
            "lr": 1e-3 * scales.get(name, 1.0),
        }
        for name, weight in expected.items()
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for step in range(1, 51):
        for name, weight in expected.items():
            weight.grad = torch.randn(weight.shape, generator=generator) * 0.1
            store.tensor(name, "grad").copy_(weight.grad * 2)
        optimizer.step()
        hyper = AdamWStep(
            step=step, learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=weight_decay, grad_scale=0.5
        )
        for unit in store.layout.units:
            update_unit(store, unit.index, hyper, num_threads=2)
    for name, weight in expected.items():
        # Relative to the tensor's scale: single weights pass through zero on the way.
        error = (master_of(store, name) - weight.detach()).abs().max() / weight.detach().abs().max()
        assert error < 1e-6, f"{name}: {error}"


def test_decays_projections_and_embeddings_but_no_norms() -> None:
    store = filled_store(torch.float32)
    store.plane("grad").zero_()
    before = {name: master_of(store, name) for name in SHAPES}
    for unit in store.layout.units:
        update_unit(store, unit.index, AdamWStep(step=1, **OPTIONS), num_threads=1)
    shrunk = {name for name in SHAPES if not torch.equal(master_of(store, name), before[name])}
    assert shrunk == {name for name in SHAPES if "norm" not in name}


def test_takes_a_gradient_from_elsewhere_and_leaves_it_and_the_padding_alone() -> None:
    store, other = filled_store(torch.float32), filled_store(torch.float32)
    grad = store.unit(1, "grad").clone()
    kept = grad.clone()
    store.plane("grad").fill_(math.nan)
    update_unit(store, 1, AdamWStep(step=1, **OPTIONS | {"eps": 0.0}), num_threads=1, grad=grad)
    update_unit(other, 1, AdamWStep(step=1, **OPTIONS | {"eps": 0.0}), num_threads=1)
    assert torch.equal(grad, kept)
    for plane in PLANES:
        assert torch.equal(store.plane(plane).view(torch.uint8), other.plane(plane).view(torch.uint8)), plane
    last = store.layout.units[1].tensors[-1]
    assert store.unit(1, "hi")[last.offset + last.num_elements :].abs().sum() == 0


@pytest.mark.parametrize("width", [33, 40_000])
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("by_kernel", [pytest.param(True, marks=needs_kernel), False])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_rows_get_the_bits_of_the_whole_table(
    grad_dtype: torch.dtype, by_kernel: bool, num_threads: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = "model.embed_tokens.weight"
    dense, by_rows = (filled_store(grad_dtype, table=(97, width), scales=SCALES) for _ in range(2))
    generator = torch.Generator().manual_seed(11)
    if not by_kernel:
        monkeypatch.setattr(native, "library", lambda: None)
    for step in range(1, 4):
        hyper, grad = AdamWStep(step=step, **OPTIONS), dense.tensor(table, "grad")
        rows = torch.randperm(97, generator=generator)[:20]
        values = torch.randn(20, width, generator=generator).to(grad_dtype)
        grad.zero_()
        grad[rows] = values
        update_unit(dense, 0, hyper, num_threads=num_threads)

        first = torch.randperm(97, generator=generator)[:30]
        others = torch.tensor(sorted(set(range(97)) - set(first.tolist())))
        for part in (first, others):
            gradient = RowGradient(rows_R=rows, values_RD=values)
            update_rows(by_rows, table, hyper, gradient, part, num_threads=num_threads)

    for plane in PLANES:
        one, other = (store.unit(0, plane).view(torch.uint8) for store in (dense, by_rows))
        assert torch.equal(one, other), plane


def test_a_table_whose_gradient_is_of_no_row_is_decayed() -> None:
    store, other = filled_store(torch.float32), filled_store(torch.float32)
    table, hyper = "model.embed_tokens.weight", AdamWStep(step=1, **OPTIONS)
    store.plane("grad").zero_()
    nothing = RowGradient(rows_R=torch.arange(0), values_RD=torch.empty(0, 33))

    update_unit(store, 0, hyper, num_threads=1)
    update_rows(other, table, hyper, nothing, torch.arange(97), num_threads=2)

    assert torch.equal(store.unit(0, "hi"), other.unit(0, "hi"))
    assert torch.equal(store.unit(0, "lo"), other.unit(0, "lo"))


def test_units_update_at_the_same_time_from_several_threads() -> None:
    expected = run(filled_store(torch.float32), num_steps=1)
    store = filled_store(torch.float32)
    with ThreadPoolExecutor(max_workers=3) as pool:
        hyper = AdamWStep(step=1, **OPTIONS)
        list(pool.map(lambda unit: update_unit(store, unit.index, hyper, num_threads=3), store.layout.units))
    assert_same_bits(expected, {plane: store.plane(plane).view(torch.uint8) for plane in PLANES})


@needs_kernel
def test_a_forked_child_has_threads_of_its_own() -> None:
    script = """
import os, torch
from horizon_server.store.adamw import sum_squares
values = torch.ones(1 << 20)
sum_squares(values, num_threads=2)
child = os.fork()
if child == 0:
    os._exit(0 if sum_squares(values, num_threads=2).value == 1 << 20 else 3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=240)


@pytest.mark.parametrize("num_elements", [1, 15, 16, 17, 65535, 65536, 65537, 200_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_of_squares_is_exact_to_float64_and_the_same_everywhere(num_elements: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(num_elements)
    values = (torch.randn(num_elements, generator=generator) * 1e3).to(dtype)
    raw = values.view(torch.uint16).numpy() if dtype == torch.bfloat16 else values.numpy()
    results = {sum_squares(values, num_threads=threads).value for threads in (1, 2, 3)}
    assert results == {reference.sum_squares(raw)}
    for block_elements in (7, 2048):
        wanted = reference.square_blocks(raw, block_elements).tolist()
        for threads in (1, 3):
            assert square_blocks(values, block_elements, num_threads=threads).tolist() == wanted
    assert math.isclose(results.pop(), math.fsum((values.double() ** 2).tolist()), rel_tol=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_of_squares_tells_non_finite_from_huge(bad: float, dtype: torch.dtype) -> None:
    values = torch.full((70_000,), 3e38).to(dtype)
    assert sum_squares(values, num_threads=2).is_finite
    values[69_999] = bad
    assert not sum_squares(values, num_threads=2).is_finite


def master_of(store: HostStore, name: str) -> torch.Tensor:
    unit, tensor = store.layout.find(name)
    master = torch.empty(unit.num_elements)
    store.merge_master(unit.index, master)
    return master.narrow(0, tensor.offset, tensor.num_elements).view(tensor.shape)
