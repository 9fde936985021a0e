"""What a worker uses is reported by the components of its plan."""

from __future__ import annotations

import mmap

import pytest

from horizon_server.figures import StepFigures
from horizon_server.worker.host_memory import host_components, process_bytes

FIGURES = StepFigures(
    step=1, loss=1.0, grad_norm=1.0, learning_rate=0.1, num_tokens=8, duration_s=1.0,
    host_memory_bytes={"weights": 10, "moments": 20, "gradients": 5, "staging": 3},
    device_memory_bytes={"weights": 100, "gradients": 50, "activations": 30, "workspace": 7},
)  # fmt: skip


@pytest.mark.parametrize(
    ("device", "activations", "staging"),
    [("host", 30, 153), ("cuda:0", 0, 3)],
)
def test_the_components_are_those_of_the_plan(device: str, activations: int, staging: int) -> None:
    used = host_components(FIGURES, device=device, process_bytes=1000)
    assert used == {
        "weights": 10, "moments": 20, "gradients": 5, "activations": activations, "staging": staging,
        "other": 1000 - activations - staging,
    }  # fmt: skip
    assert host_components(FIGURES, device=device, process_bytes=0)["other"] == 0


def test_the_process_counts_its_heap_and_not_what_is_shared() -> None:
    before = process_bytes()
    assert before > 2**20
    with mmap.mmap(-1, 64 * 2**20) as shared:
        shared.write(b"x" * len(shared))
        assert process_bytes() - before < 32 * 2**20
    heap = bytearray(b"x") * (128 * 2**20)
    assert process_bytes() - before > len(heap) // 2
