"""The update of states in a GPU's memory, in Triton's interpreter: the bits of the kernel for CPUs and of NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.store.test_adamw import OPTIONS, PLANES, SCALES, assert_same_bits, fill_grads, filled_store

from horizon_server.store import adamw
from horizon_server.store.adamw import AdamWStep, update_unit
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import build_layout
from horizon_server.store.native import Segment

NAMES = ("model.layers.0.proj.weight", "model.layers.0.norm.weight", "model.layers.0.out.weight")


@pytest.fixture
def by_triton(triton_interpreter: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`update_unit` by the kernel for GPUs."""
    triton_interpreter("horizon_server.store.adamw_triton")

    def update(*arguments: Any, **options: Any) -> None:
        # A GPU warns of nothing.
        with monkeypatch.context() as patch, np.errstate(all="ignore"):
            patch.setattr(adamw, "runs_triton", lambda _: True)
            update_unit(*arguments, **options)

    return update


def planes_of(store: HostStore) -> dict[str, torch.Tensor]:
    return {plane: store.plane(plane).view(torch.uint8).clone() for plane in PLANES}


def both(
    by_triton: Callable[..., None], store: Callable[[], HostStore], *, num_steps: int = 3, **options: Any
) -> tuple[HostStore, HostStore]:
    """The same steps of one layer by both kernels. `changes` are of the step's numbers."""
    changes = options.pop("changes", {})
    stores = store(), store()
    for one, update in zip(stores, (update_unit, by_triton), strict=True):
        generator = torch.Generator().manual_seed(7)
        for step in range(1, num_steps + 1):
            update(one, 1, AdamWStep(step=step, **OPTIONS | changes), num_threads=1, **options)
            fill_grads(one, generator)
    return stores


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("changes", "scales"),
    [
        ({}, {}),
        ({"weight_decay": 0.0, "grad_scale": 1.0}, SCALES),
        ({"beta1": 0.0, "eps": 0.0}, {}),
        ({"learning_rate": 0.0}, SCALES),
    ],
)
def test_a_gpu_gives_the_bits_of_the_kernel_for_cpus(
    grad_dtype: torch.dtype, changes: dict[str, float], scales: dict[str, float], by_triton: Callable[..., None]
) -> None:
    stores = both(by_triton, lambda: filled_store(grad_dtype, scales=scales), changes=changes)
    assert_same_bits(*(planes_of(store) for store in stores))
    subnormal = stores[0].unit(1, "exp_avg_sq").abs() < torch.finfo(torch.float32).tiny
    assert int((subnormal & (stores[0].unit(1, "exp_avg_sq") != 0)).sum()) > 100, "the data must reach the subnormals"


@pytest.mark.parametrize("only", [set(), {NAMES[1]}, {NAMES[0], NAMES[2]}])
def test_tensors_without_a_gradient_and_padding_stay_as_they_are(
    only: set[str], by_triton: Callable[..., None]
) -> None:
    before = planes_of(filled_store(torch.bfloat16))
    stores = both(by_triton, lambda: filled_store(torch.bfloat16), num_steps=1, only=only)
    assert_same_bits(*(planes_of(store) for store in stores))
    if not only:
        assert_same_bits(before, planes_of(stores[1]))


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_or_nearly_so_is_split_as_on_the_cpu(
    grad_dtype: torch.dtype, by_triton: Callable[..., None]
) -> None:
    def store() -> HostStore:
        found = filled_store(grad_dtype)
        generator = torch.Generator().manual_seed(3)
        name, size = NAMES[0], found.flat(NAMES[0], "hi").numel()
        # Every pattern of bits may be in memory: largest numbers, infinities, NaN with any payload.
        bits = torch.randint(-(2**31), 2**31 - 1, (size,), generator=generator, dtype=torch.int64).int()
        bits[: size // 2] |= 0x7F000000
        found.flat(name, "hi").view(torch.int16).copy_((bits >> 16).short())
        found.flat(name, "lo").copy_(bits.short())
        special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3e38, -3.39e38, 0.0, -0.0])
        found.flat(name, "grad").copy_(special[torch.randint(len(special), (size,), generator=generator)])
        return found

    one, other = both(by_triton, store, num_steps=1)
    for plane in PLANES:
        wanted, found = (store.unit(1, plane).float() for store in (one, other))
        # A NaN's sign is the processor's own, and so are the bits of one that is in a moment.
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    has_number = ~one.unit(1, "hi").isnan()
    assert 0 < int(has_number.sum()) < len(has_number)
    assert torch.equal(one.unit(1, "lo"), other.unit(1, "lo"))


def test_stretches_that_follow_each_other_and_are_updated_alike_are_one_launch() -> None:
    shapes: dict[str, tuple[int, ...]] = {f"model.layers.0.experts.{i}.proj.weight": (8, 32) for i in range(5)}
    shapes |= {"model.layers.0.norm.weight": (32,), "model.embed_tokens.weight": (8, 32), "model.norm.weight": (32,)}
    store = HostStore.allocate(build_layout(shapes, num_layers=1, tied=True), num_threads=1)
    unit = store.layout.units[1]
    segments = [
        Segment(tensor.offset, tensor.num_elements, 0.5 if tensor.decay else 1.0, 1.0) for tensor in unit.tensors
    ]
    joined = [(segment.offset, segment.num_elements, segment.decay_factor) for segment in adamw._joined(segments)]
    assert joined == [(0, 5 * 256, 0.5), (5 * 256, 32, 1.0)]
