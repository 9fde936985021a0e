from __future__ import annotations

import pytest
import torch

from horizon_server.engine.device.arena import Arena
from horizon_server.errors import DoesNotFit


def test_peaks_are_kept_by_component_and_in_all() -> None:
    arena = Arena(limit_bytes=None)
    weights = arena.allocate("weights", 100, torch.float32)
    arena.charge("workspace", 50)
    arena.charge("workspace", -50)
    arena.free(weights)
    arena.charge("gradients", 10)

    assert arena.peak_bytes() == {"weights": 400, "workspace": 50, "gradients": 10}
    assert arena.held_bytes() == {"weights": 0, "workspace": 0, "gradients": 10}
    assert arena.peak_total_bytes == 450


def test_the_limit_binds_to_the_byte_and_the_refusal_carries_the_numbers() -> None:
    arena = Arena(limit_bytes=1000)
    arena.allocate("weights", 200, torch.float32)
    arena.charge("workspace", 200)

    with pytest.raises(
        DoesNotFit, match=r"gradients needs 4 bytes more, but 1,000 of the limit of 1,000 bytes"
    ) as refused:
        arena.allocate("gradients", 1, torch.float32)
    assert "weights 800, workspace 200" in str(refused.value)
    arena.charge("workspace", -4)
    arena.allocate("gradients", 1, torch.float32)


def test_views_belong_to_the_arena() -> None:
    arena = Arena(limit_bytes=None)
    tensor = arena.allocate("weights", 64, torch.float32)

    assert arena.owns(tensor[8:16].view(2, 4))
    assert not arena.owns(torch.zeros(64))
