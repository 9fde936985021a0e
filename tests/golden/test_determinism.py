"""The same bits, whatever the pipeline's shape and timing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch

if TYPE_CHECKING:
    from tests.golden.conftest import Run, TinyModel

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
}


@pytest.fixture
def three_steps(
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Callable[[list[Tensor]], MicroBatch],
) -> Callable[..., tuple[list[float], dict[str, Tensor]]]:
    """Runs three steps of a five-layer model; returns losses with norms, and every plane."""

    def run_them(
        architecture: str, device: dict[str, Any], options: dict[str, Any]
    ) -> tuple[list[float], dict[str, Tensor]]:
        model = tiny_model(architecture, num_hidden_layers=5, layer_types=None)
        run = start(model, device=HostDevice(num_threads=1, **device), **options)
        numbers = []
        for step in range(3):
            rows = [pack(documents(12, 7, seed=step)), pack(documents(21, seed=step + 50))]
            report = run.trainer.train_step(rows)
            numbers += [report.loss, report.grad_norm]
        run.trainer.flush()
        return numbers, {plane: run.store.plane(plane).clone() for plane in PLANES}

    return run_them


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_pipeline_and_timing_do_not_change_a_bit(
    architecture: str, variant: str, three_steps: Callable[..., tuple[list[float], dict[str, Tensor]]]
) -> None:
    numbers, planes = three_steps(architecture, {}, {})
    device, options = VARIANTS[variant]

    other_numbers, other_planes = three_steps(architecture, device, options)

    assert other_numbers == numbers
    for plane in PLANES:
        assert torch.equal(other_planes[plane], planes[plane]), f"plane {plane} differs"
