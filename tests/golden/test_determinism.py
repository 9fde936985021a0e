"""The same bits, whatever the pipeline's shape and timing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from horizon_server.engine.device.host import HostDevice

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine

PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq", "grad")
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "three slots": ({}, {"num_weight_slots": 3, "num_gradient_slots": 3}),
    "one slot": ({}, {"num_weight_slots": 1, "num_gradient_slots": 1}),
    "poisoned slots": ({"poison_on_free": True}, {}),
    "random delays": ({"max_delay_s": 0.002, "delay_seed": 1}, {}),
    "delays, poison and three slots": (
        {"max_delay_s": 0.002, "delay_seed": 2, "poison_on_free": True},
        {"num_weight_slots": 3, "num_gradient_slots": 3},
    ),
    "two optimizer threads": ({}, {"optimizer_threads": 2}),
    "a slow link": ({"link_bytes_per_s": 20e6}, {}),
    "offloaded inputs": ({}, {"activation_placement": "host"}),
    "offloaded inputs, poison": ({"poison_on_free": True}, {"activation_placement": "host"}),
    "offloaded inputs, delays, poison and three slots": (
        {"max_delay_s": 0.002, "delay_seed": 3, "poison_on_free": True},
        {"activation_placement": "host", "num_weight_slots": 3, "num_gradient_slots": 3},
    ),
    "offloaded inputs, delays and one slot": (
        {"max_delay_s": 0.002, "delay_seed": 4},
        {"activation_placement": "host", "num_weight_slots": 1, "num_gradient_slots": 1},
    ),
    "offloaded inputs over a slow link": ({"link_bytes_per_s": 20e6}, {"activation_placement": "host"}),
    "resident weights": ({"poison_on_free": True}, {"resident_layers": 2}),
    "resident weights of every layer": ({"poison_on_free": True}, {"resident_layers": 5}),
    "resident weights, offloaded inputs, delays and one slot": (
        {"max_delay_s": 0.002, "delay_seed": 7, "poison_on_free": True},
        {"resident_layers": 3, "activation_placement": "host", "num_weight_slots": 1},
    ),
    "room made ahead": ({"poison_on_free": True}, {"tokens_per_step": 64, "activation_placement": "host"}),
}


IN_BACKWARD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two slots": ({}, {}),
    "one slot": ({}, {"num_weight_slots": 1, "num_gradient_slots": 1}),
    "delays, poison and three slots": (
        {"max_delay_s": 0.002, "delay_seed": 5, "poison_on_free": True},
        {"num_weight_slots": 3, "num_gradient_slots": 3},
    ),
    "delays, poison and offloaded inputs": (
        {"max_delay_s": 0.002, "delay_seed": 6, "poison_on_free": True},
        {"activation_placement": "host"},
    ),
    "resident weights, delays and poison": (
        {"max_delay_s": 0.002, "delay_seed": 8, "poison_on_free": True},
        {"resident_layers": 3},
    ),
}
ThreeSteps = Callable[..., tuple[list[float], dict[str, Tensor]]]


@pytest.fixture
def three_steps(
    engine: Engine,
) -> ThreeSteps:
    """Runs three steps of a five-layer model; returns losses with norms, and every plane."""

    def run_them(
        architecture: str,
        device: dict[str, Any],
        options: dict[str, Any],
        *,
        grad_dtype: torch.dtype | None = torch.float32,
    ) -> tuple[list[float], dict[str, Tensor]]:
        model = engine.tiny_model(architecture, num_hidden_layers=5, layer_types=None)
        store = model.store(grad_dtype=grad_dtype)
        run = engine.start(model, store=store, device=HostDevice(num_threads=1, **device), **options)
        numbers = []
        for step in range(3):
            rows = [engine.pack(engine.documents(12, 7, seed=step)), engine.pack(engine.documents(21, seed=step + 50))]
            report = run.trainer.train_step(rows)
            assert report.skipped == ""
            numbers += [report.loss, report.grad_norm]
        run.trainer.flush()
        planes = PLANES if grad_dtype is not None else PLANES[:-1]
        return numbers, {plane: run.store.plane(plane).clone() for plane in planes}

    return run_them


@pytest.fixture(scope="module")
def undisturbed() -> ThreeSteps:
    """The three steps without any variant; the same ones are run once, by the first test that asks."""
    remembered: dict[tuple[str, ...], tuple[list[float], dict[str, Tensor]]] = {}

    def remember(run_them: ThreeSteps, architecture: str, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
        key = (architecture, *options)
        if key not in remembered:
            remembered[key] = run_them(architecture, {}, options)
        return remembered[key]

    return remember


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_pipeline_and_timing_do_not_change_a_bit(
    architecture: str, variant: str, three_steps: ThreeSteps, undisturbed: ThreeSteps
) -> None:
    numbers, planes = undisturbed(three_steps, architecture)
    device, options = VARIANTS[variant]

    other_numbers, other_planes = three_steps(architecture, device, options)

    assert other_numbers == numbers
    for plane in PLANES:
        assert torch.equal(other_planes[plane], planes[plane]), f"plane {plane} differs"


@pytest.mark.parametrize("variant", IN_BACKWARD)
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_updating_in_backward_gives_the_bits_of_the_deferred_update(
    architecture: str, variant: str, three_steps: ThreeSteps, undisturbed: ThreeSteps
) -> None:
    device, options = IN_BACKWARD[variant]
    numbers, planes = undisturbed(three_steps, architecture, max_grad_norm=None)

    other_numbers, other_planes = three_steps(architecture, device, {**options, "max_grad_norm": None}, grad_dtype=None)

    assert other_numbers == numbers
    for plane, bits in other_planes.items():
        assert torch.equal(bits, planes[plane]), f"plane {plane} differs"
