"""AdamW on compressed states: the kernel against NumPy bit by bit, beside exact tensors; what bounds its updates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from horizon_server.store import native, reference
from horizon_server.store.adamw import AdamWStep, scalars_of, update_unit
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import (
    COMPRESSED_PLANES,
    StoreLayout,
    build_layout,
    with_compressed_states,
    with_lr_scales,
)
from horizon_server.store.ownership import Ownership

SHAPES = {
    "model.embed_tokens.weight": (97, 60),
    # Neither a multiple of a group nor of a chunk of the kernel.
    "model.layers.0.proj.weight": (311, 257),
    "model.layers.0.norm.weight": (5000,),
    "model.layers.0.small.weight": (63, 65),
    "model.layers.0.wide.weight": (64, 64),
    "model.norm.weight": (33,),
}
COMPRESSED = {"model.layers.0.proj.weight", "model.layers.0.wide.weight"}
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq", *COMPRESSED_PLANES)
OPTIONS = {"learning_rate": 3e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "grad_scale": 0.37}
needs_kernel = pytest.mark.skipif(
    not native.kernel_info().available, reason=f"no compiled kernel: {native.kernel_info().reason}"
)
F32 = np.float32


def layout_of(*, compressed: bool = True) -> StoreLayout:
    layout = with_lr_scales(build_layout(SHAPES, num_layers=1, tied=True), {"model.layers.0.wide.weight": 0.25})
    return with_compressed_states(layout) if compressed else layout


def filled_store(grad_dtype: torch.dtype, *, compressed: bool = True) -> HostStore:
    store = HostStore.allocate(layout_of(compressed=compressed), grad_dtype=grad_dtype, num_threads=1)
    generator = torch.Generator().manual_seed(0)
    for name, shape in SHAPES.items():
        store.write_master(name, torch.randn(shape, generator=generator) * 0.02)
    fill_grads(store, generator)
    return store


def fill_grads(store: HostStore, generator: torch.Generator) -> None:
    for name, shape in SHAPES.items():
        # Groups of zeros, and magnitudes from subnormal numbers to such that their squares are none.
        exponents = torch.empty(shape).uniform_(-140, 70, generator=generator)
        grad = torch.randn(shape, generator=generator) * torch.exp2(exponents)
        grad.view(-1)[64:160] = 0
        store.tensor(name, "grad").copy_(grad)


def run(
    store: HostStore, *, num_threads: int = 1, num_ranks: int = 1, changes: dict[str, float] | None = None
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    ownership = Ownership(layout=store.layout, num_ranks=num_ranks)
    for step in range(1, 5):
        hyper = AdamWStep(step=step, **OPTIONS | (changes or {}))
        for unit in store.layout.units:
            for part in ownership.trained(unit.index):
                update_unit(store, unit.index, hyper, num_threads=num_threads, part=part)
        fill_grads(store, generator)
    return {plane: store.plane(plane).view(torch.uint8).clone() for plane in PLANES if plane in store.fds}


def assert_same_bits(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    for plane in PLANES:
        assert torch.equal(left[plane], right[plane]), f"{plane} differs"


def test_matrices_of_layers_are_compressed_and_nothing_else_is() -> None:
    layout = layout_of()
    assert {place.name for _, place in layout.tensors() if place.compressed} == COMPRESSED
    layer = layout.units[1]
    assert layer.held_in("exp_avg8") == slice(0, layer.compressed_elements)
    assert layer.held_in("lo").start == layer.held_in("exp_avg").start == layer.compressed_elements
    assert layer.held_in("grad") == slice(0, layer.trained_elements)
    named = with_compressed_states(layout, is_exact=lambda name: "proj" in name)
    assert {place.name for _, place in named.tensors() if place.compressed} == {"model.layers.0.wide.weight"}


@needs_kernel
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes", [{}, {"beta1": 0.0}, {"beta2": 0.5, "beta1": 0.99}, {"learning_rate": 0.0}, {"beta2": 0.0, "eps": 1e-30}]
)
def test_kernel_gives_the_bits_of_numpy(
    grad_dtype: torch.dtype, changes: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    by_kernel = run(filled_store(grad_dtype), changes=changes)
    monkeypatch.setattr(native, "library", lambda: None)
    assert_same_bits(by_kernel, run(filled_store(grad_dtype), changes=changes))


@needs_kernel
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_kernel_gives_the_bits_of_numpy_at_the_end_of_fp32(
    weight_decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, shape = "model.layers.0.proj.weight", SHAPES["model.layers.0.proj.weight"]
    ends = torch.tensor([3.3895e38, 3.39e38, 3.4028e38, math.inf, -3.3895e38, -3.4e38, -math.inf, 1e-45])
    generator = torch.Generator().manual_seed(1)

    def found() -> dict[str, torch.Tensor]:
        store = filled_store(torch.float32)
        store.write_master(name, ends[torch.randint(len(ends), shape, generator=generator.manual_seed(1))])
        store.tensor(name, "grad").view(-1)[::37] = math.inf
        update_unit(store, 1, AdamWStep(step=1, **OPTIONS | {"weight_decay": weight_decay}), num_threads=1)
        return {plane: store.plane(plane).view(torch.uint8).clone() for plane in PLANES}

    by_kernel = found()
    monkeypatch.setattr(native, "library", lambda: None)
    assert_same_bits(by_kernel, found())


@needs_kernel
@pytest.mark.parametrize("num_threads", [2, 3, 7])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_threads(num_threads: int, grad_dtype: torch.dtype) -> None:
    assert_same_bits(run(filled_store(grad_dtype)), run(filled_store(grad_dtype), num_threads=num_threads))


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_bits_do_not_depend_on_who_owns_what(num_ranks: int) -> None:
    assert_same_bits(run(filled_store(torch.float32)), run(filled_store(torch.float32), num_ranks=num_ranks))


def test_exact_tensors_have_the_bits_that_they_have_without_compressed_ones() -> None:
    stores = [filled_store(torch.float32, compressed=compressed) for compressed in (True, False)]
    for store in stores:
        run(store)
    for name in set(SHAPES) - COMPRESSED:
        for plane in ("hi", "lo", "exp_avg", "exp_avg_sq"):
            assert torch.equal(*(store.tensor(name, plane) for store in stores)), (name, plane)


def test_a_tensor_that_is_not_reached_and_what_is_behind_a_tensor_stay() -> None:
    store = filled_store(torch.float32)
    before = {plane: store.unit(1, plane).clone() for plane in COMPRESSED_PLANES}
    update_unit(store, 1, AdamWStep(step=1, **OPTIONS), num_threads=2, only={"model.layers.0.wide.weight"})
    kept = store.layout.find("model.layers.0.proj.weight")[1]
    for plane in COMPRESSED_PLANES:
        unit, found = store.layout.units[1], store.unit(1, plane)
        own = store.layout.part_in(plane, unit, slice(kept.offset, kept.offset + kept.num_elements))
        start = store.layout.offset_in(plane, unit)
        assert torch.equal(
            found[own.start - start : own.stop - start], before[plane][own.start - start : own.stop - start]
        )
    assert not torch.equal(store.unit(1, "root8"), before["root8"])
    update_unit(store, 1, AdamWStep(step=2, **OPTIONS), num_threads=2)
    end = kept.offset + kept.num_elements
    padding = store.unit(1, "root8")[end : -(-end // 32) * 32]
    assert len(padding) and not padding.any()


def test_masters_keep_24_bits_to_the_nearest() -> None:
    store = filled_store(torch.float32)
    name = "model.layers.0.wide.weight"
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int64).int()
    values = bits.view(torch.float32)
    values = torch.where(values.isfinite() & (values.abs() < 3.38e38), values, torch.ones(()))
    store.write_master(name, values.view(64, 64))

    unit, place = store.layout.find(name)
    master = torch.empty(unit.num_elements)
    store.merge_master(unit.index, master)
    found = master[place.offset : place.offset + place.num_elements]
    wanted = ((values.view(torch.int32) + 128) & ~255).view(torch.float32)
    assert torch.equal(found, wanted)
    part = torch.empty(64)
    store.merge_part(unit.index, slice(place.offset + 64, place.offset + 128), part)
    assert torch.equal(part, wanted[64:128])
    for largest in (3.4028234e38, -3.4028234e38, math.inf, math.nan):
        store.write_master(name, torch.full((64, 64), largest))
        hi = store.tensor(name, "hi")
        assert bool(hi.isfinite().all()) == math.isfinite(largest)


class Group:
    """One group of elements that is updated for many steps, beside the exact moments of the same gradients."""

    def __init__(self, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8) -> None:
        self.betas, self.eps, self.step = (beta1, beta2), eps, 0
        self.hi, self.lo = np.zeros(32, np.uint16), np.zeros(32, np.int8)
        self.first, self.root = np.zeros(32, np.int8), np.zeros(32, np.uint8)
        self.scales = np.zeros(2, np.uint16)
        self.exact_first, self.exact_second = np.zeros(32), np.zeros(32)

    def update(self, grads: np.ndarray) -> np.ndarray:
        """Returns by how much of the learning rate each weight moved, which is -1 for the first step."""
        self.step += 1
        beta1, beta2 = self.betas
        hyper = AdamWStep(step=self.step, learning_rate=1.0, beta1=beta1, beta2=beta2, eps=self.eps, weight_decay=0.0)
        self.hi[:] = 0
        self.lo[:] = 0
        reference.adamw_compressed(
            self.hi,
            self.lo,
            self.first,
            self.root,
            self.scales,
            grads.astype(F32),
            1.0,
            1.0,
            scalars_of(hyper),
            reference.dither_of(self.step),
        )
        self.exact_first = beta1 * self.exact_first + (1 - beta1) * grads
        self.exact_second = beta2 * self.exact_second + (1 - beta2) * grads**2
        moved = np.empty(32, F32)
        reference.merge(self.hi, self.lo, moved)
        return moved

    @property
    def decoded_first(self) -> np.ndarray:
        return reference.decode_first(self.first, self.scales[:1])

    @property
    def decoded_root(self) -> np.ndarray:
        return reference.decode_root(self.root, self.scales[1:])


def most_an_exact_update_moves(beta1: float, beta2: float, step: int) -> float:
    """Cauchy and Schwarz on the sums of the moments, with their corrections."""
    total = math.fsum((beta1**2 / beta2) ** index for index in range(step))
    ratio = (1 - beta1) * math.sqrt(total / (1 - beta2))
    return ratio * math.sqrt(1 - beta2**step) / (1 - beta1**step)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95), (0.0, 0.99), (0.95, 0.9)])
@pytest.mark.parametrize("seed", range(4))
def test_no_update_is_larger_than_an_exact_one_can_be(betas: tuple[float, float], seed: int) -> None:
    """Small and large elements share groups, change places, vanish and come back."""
    rng, group = np.random.default_rng(seed), Group(*betas, eps=1e-30)
    for step in range(1, 400):
        sizes = 2.0 ** rng.integers(-40, 20, 32) * (rng.random(32) < 0.4)
        moved = group.update(rng.standard_normal(32) * sizes)
        assert np.isfinite(moved).all()
        assert np.abs(moved).max() <= 1.01 * most_an_exact_update_moves(*betas, step)


def test_a_small_moment_beside_a_large_one_does_not_become_zero() -> None:
    """What made plain linear 8 bits diverge: a second moment far below its group's largest was rounded to 0."""
    group, rng = Group(), np.random.default_rng(3)
    sizes = np.full(32, 1e-6)
    sizes[5] = 1.0
    for _ in range(300):
        moved = group.update(rng.standard_normal(32) * sizes)
        assert (group.root > 0).all()
        # It moves less than an exact update would, and never more than the learning rate allows.
        assert np.abs(np.delete(moved, 5)).max() < 1.0
    assert np.abs(group.decoded_root[5] / math.sqrt(group.exact_second[5]) - 1) < 0.1


def test_zeros_stay_zeros_and_a_moment_without_gradients_fades() -> None:
    group = Group()
    assert not group.update(np.zeros(32)).any()
    assert not group.scales.any() and not group.root.any() and not group.first.any()
    group.update(np.full(32, 0.1))
    grads = np.zeros(32)
    grads[0] = 0.1
    for _ in range(200):
        moved = group.update(grads)
    # The others do not drift on by what rounding would have kept of them.
    assert not group.first[1:].any() and not moved[1:].any() and group.first[0] == 127


@pytest.mark.parametrize("scale", [1e-9, 1.0])
def test_second_moments_follow_gradients_that_become_smaller_whatever_their_size(scale: float) -> None:
    """Rounded to the nearest, a root would stay where it is: it falls by less than half a code in a step."""
    group, rng = Group(eps=1e-30), np.random.default_rng(1)
    for step in range(6000):
        size = scale if step < 1000 else 0.1 * scale
        group.update(rng.standard_normal(32) * size)
    ratio = group.decoded_root / np.sqrt(group.exact_second)
    assert abs(ratio.mean() - 1) < 0.03 and np.abs(ratio - 1).max() < 0.2


@pytest.mark.parametrize("exponent", [-40, 20])
def test_updates_do_not_depend_on_the_size_of_gradients(exponent: int) -> None:
    """As AdamW's do not: a factor that is a power of two changes no bit of a code, which fp16 scales could not do."""
    groups, rng = (Group(eps=1e-37), Group(eps=1e-37)), np.random.default_rng(2)
    for _ in range(50):
        grads = rng.standard_normal(32).astype(F32).astype(float)
        moved = [group.update(grads * factor) for group, factor in zip(groups, (1.0, 2.0**exponent), strict=True)]
        assert np.array_equal(moved[0], moved[1])
    assert np.array_equal(groups[0].first, groups[1].first) and np.array_equal(groups[0].root, groups[1].root)


def test_the_largest_gradients_leave_finite_states() -> None:
    group, rng = Group(), np.random.default_rng(5)
    for size in (3e38, 1e30, 1e19, 1e-30, 3e38):
        for _ in range(3):
            moved = group.update(np.clip(rng.standard_normal(32), -1, 1) * size)
            assert np.isfinite(moved).all() and np.isfinite(group.decoded_root).all()
            assert np.isfinite(group.decoded_first).all() and np.isfinite(group.decoded_root**2).all()


def test_dither_fills_its_range_evenly_over_steps() -> None:
    numbers = np.array([reference.dither_of(step) for step in range(1, 257)])
    assert numbers.min() > 0 and numbers.max() < 1
    # Of random numbers, the means would be off by up to 0.06 or so.
    assert np.abs(numbers.mean(axis=0) - 0.5).max() < 0.01
    assert len({row.tobytes() for row in numbers}) == 256


@pytest.mark.parametrize("size", [2.0**-90, 3e-7, 1.0, 2.0**60])
def test_codes_of_first_moments_are_right_to_one_and_never_beyond_the_largest(size: float) -> None:
    """The largest of a group is a scale or just below it, where roundings could carry to the next code."""
    rng, codes, scales = np.random.default_rng(0), np.empty(32 * 512, np.int8), np.empty(512, np.uint16)
    first = (rng.uniform(-1, 1, (512, 32)) * size).astype(F32)
    # Numbers with 8 bits, as scales have them, and the three below each.
    ends = (np.linspace(128, 255, 128)[:, None] * size).astype(F32).view(np.uint32) - np.arange(4, dtype=np.uint32)
    first[:, 0], first[:, 1] = ends.ravel().view(F32), -ends.ravel().view(F32)
    for dither in (0.5 / 32768, 0.5, 1 - 0.5 / 32768):
        reference.encode_first(first.ravel(), np.full(32, dither, F32), codes, scales)
        share = first.astype(float) / reference._widen(scales).astype(float)[:, None]
        exact = (254 * share / (1 + np.abs(share))).ravel() + dither
        assert np.abs(codes.astype(int)).max() == 127
        assert np.abs(codes - (exact - 0.5)).max() < 0.5 + 2e-4
