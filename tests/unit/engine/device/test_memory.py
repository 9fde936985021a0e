from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from torch import Tensor

from horizon_server.engine.device.memory import Arena, PinnedRanges, StagingRing, split_at
from horizon_server.errors import DoesNotFit


@pytest.mark.parametrize(
    ("cuts", "max_size", "wanted"),
    [
        ([0, 4, 8, 12], 100, [(0, 12)]),
        ([0, 4, 8, 12], 8, [(0, 8), (8, 12)]),
        ([0, 4, 8, 12], 7, [(0, 4), (4, 8), (8, 12)]),
        ([0, 20, 24], 8, [(0, 20), (20, 24)]),
        ([0, 2, 22, 24], 8, [(0, 2), (2, 22), (22, 24)]),
        ([0, 0], 8, []),
    ],
)
def test_pieces_end_at_cuts_and_stay_small_where_they_can(
    cuts: list[int], max_size: int, wanted: list[tuple[int, int]]
) -> None:
    assert split_at(cuts, max_size=max_size) == wanted


def test_only_what_lies_in_one_piece_is_pinned() -> None:
    runtime, memory = CpuRuntime(), torch.zeros(100)
    pinned = PinnedRanges(runtime, max_piece_bytes=240)
    pinned.add(memory, cuts=[0, 40, 80, 100])
    pinned.add(memory, cuts=[0, 40, 80, 100])

    assert len(runtime.registered) == 2
    assert pinned.holds(memory[:40]) and pinned.holds(memory[40:]) and pinned.holds(memory[45:90])
    assert not pinned.holds(memory[39:41]) and not pinned.holds(torch.zeros(4))
    pinned.remove(memory)
    assert not runtime.registered and not pinned.holds(memory[:1])


def test_a_refusal_is_told_with_its_size() -> None:
    pinned = PinnedRanges(CpuRuntime(pinnable_bytes=100))
    pinned.add(torch.zeros(1 << 28, dtype=torch.uint8), cuts=[0, 1 << 28])

    (refusal,) = pinned.refusals
    assert refusal.startswith("the driver refused to pin 0.25 GiB of host memory (CUDA error 2)")
    # cudaHostRegister does not check the memory lock limit on x86, so that is the last of the reasons.
    assert [refusal.find(reason) > 0 for reason in ("free host memory", "WSL", "container", "ulimit -l")] == [True] * 4


@pytest.fixture
def ring() -> StagingRing:
    return StagingRing(CpuRuntime(), object(), num_bytes=64)


def test_the_ring_carries_any_length_up_and_down(ring: StagingRing) -> None:
    for length in (1, 31, 32, 33, 200):
        source, out = torch.randn(length).bfloat16(), torch.zeros(length, dtype=torch.bfloat16)
        back = torch.zeros(length, dtype=torch.bfloat16)
        ring.upload(source, out)
        ring.download(out, torch.bfloat16, _lander(back))
        assert torch.equal(out, source)
        assert torch.equal(back, source)


def test_the_ring_rounds_on_the_way_down(ring: StagingRing) -> None:
    source, back = torch.randn(50), torch.zeros(50, dtype=torch.bfloat16)
    ring.download(source, torch.bfloat16, _lander(back))
    assert torch.equal(back, source.bfloat16())


def test_the_ring_gathers_rows_whole(ring: StagingRing) -> None:
    table, rows, out = torch.randn(40, 5), torch.tensor([3, 39, 0, 7, 8, 21, 2]), torch.zeros(7, 5)
    ring.upload_rows(table, rows, out)
    assert torch.equal(out, table[rows])


def _lander(target: Tensor) -> Callable[[int, Tensor], None]:
    def land(start: int, values: Tensor) -> None:
        target[start : start + values.numel()] = values

    return land


def test_registered_memory_stays_mapped_until_it_is_unregistered() -> None:
    ranges, memory = PinnedRanges(CpuRuntime()), torch.zeros(64)
    seen = weakref.ref(memory)
    ranges.add(memory, cuts=[0, 64])

    del memory
    assert seen() is not None, "the driver would copy from pages that are another mapping's by now"
    ranges.clear()
    assert seen() is None


def test_adding_again_registers_only_what_was_refused() -> None:
    runtime, memory = CpuRuntime(pinnable_bytes=150), torch.zeros(64)
    ranges = PinnedRanges(runtime, max_piece_bytes=128)
    ranges.add(memory, cuts=[0, 32, 64])
    assert not ranges.holds(memory[32:])

    runtime.pinnable_bytes = 1 << 20
    ranges.add(memory, cuts=[0, 32, 64])

    assert ranges.holds(memory[:32]) and ranges.holds(memory[32:])


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
