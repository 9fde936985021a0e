"""What a new worker finds in memory: the state of the weights that are there, or a reason why they are of no use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from horizon_server.store.generations import Generations, KeptState, plane_bytes
from horizon_server.store.layout import build_layout
from horizon_server.store.planes import create_memory_file

SHAPES = {"embed_tokens.weight": (10, 6), "layers.0.w": (6, 6), "layers.1.w": (6, 6), "norm.weight": (6,)}
LAYOUT = build_layout(SHAPES, num_layers=2, tied=True)

UNITS = range(len(LAYOUT.units))


@pytest.fixture
def fd() -> Iterator[int]:
    descriptor = create_memory_file("generations", plane_bytes(LAYOUT))
    yield descriptor
    os.close(descriptor)


def update(generations: Generations, generation: int) -> None:
    for unit_index in UNITS:
        generations.begin(unit_index, generation)
        generations.end(unit_index, generation)


def started(fd: int) -> Generations:
    """A worker that has loaded its model and done two steps."""
    generations = Generations(LAYOUT, fd)
    generations.reset()
    generations.keep("start", generation=0)
    for step in (1, 2):
        generations.keep(f"step {step}", generation=step)
        update(generations, step)
    return generations


def test_the_state_of_the_weights_is_found_by_another_worker(fd: int) -> None:
    started(fd).mark_reported()
    assert Generations(LAYOUT, fd).find() == KeptState(text="step 2", reported=True)
    assert Generations(LAYOUT, fd).generation == 2


def test_a_state_whose_update_has_not_begun_is_not_that_of_the_weights(fd: int) -> None:
    generations = started(fd)
    generations.mark_reported()
    generations.keep("step 3", generation=3)
    assert Generations(LAYOUT, fd).find() == KeptState(text="step 2", reported=True)
    # What was forgotten then stays so: the next state comes into its place.
    assert Generations(LAYOUT, fd).find() == KeptState(text="step 2", reported=True)


def test_a_skipped_step_has_a_state_of_its_own_on_the_same_weights(fd: int) -> None:
    started(fd).keep("step 3, skipped", generation=2)
    assert Generations(LAYOUT, fd).find() == KeptState(text="step 3, skipped", reported=False)


@pytest.mark.parametrize("num_whole", UNITS)
def test_weights_in_the_middle_of_an_update_are_refused_wherever_it_was_cut(fd: int, num_whole: int) -> None:
    generations = started(fd)
    generations.keep("step 3", generation=3)
    for unit_index in UNITS[:num_whole]:
        generations.begin(unit_index, 3)
        generations.end(unit_index, 3)
    if num_whole:
        found = Generations(LAYOUT, fd).find()
        assert isinstance(found, str) and "in the middle of an update" in found
    generations.begin(UNITS[num_whole], 3)
    found = Generations(LAYOUT, fd).find()
    assert isinstance(found, str) and "in the middle of an update" in found


def test_weights_that_no_state_is_of_are_refused(fd: int) -> None:
    update(started(fd), 3)
    assert Generations(LAYOUT, fd).find() == "the weights there are not those of a step that was kept"


def test_weights_that_are_being_loaded_are_refused(fd: int) -> None:
    assert Generations(LAYOUT, fd).find() == "nothing was kept there"
    started(fd).reset()
    assert isinstance(Generations(LAYOUT, fd).find(), str)


def test_a_state_that_is_too_long_is_not_kept(fd: int) -> None:
    generations = started(fd)
    generations.keep("x" * plane_bytes(LAYOUT), generation=3)
    assert generations.find() == KeptState(text="step 2", reported=False)


def test_a_store_without_shared_memory_keeps_nothing_for_others() -> None:
    generations = Generations(LAYOUT, None)
    generations.reset()
    generations.keep("start", generation=0)
    assert generations.find() == "nothing was kept there"


def test_several_ranks_have_numbers_of_their_own_for_each_unit() -> None:
    descriptor = create_memory_file("generations", plane_bytes(LAYOUT, max_ranks=4))
    try:
        ranks = [Generations(LAYOUT, descriptor, rank=rank, max_ranks=4) for rank in range(3)]
        ranks[0].reset()
        ranks[0].share(3)
        ranks[0].keep("step 1", generation=1)
        for generations in ranks:
            for unit in LAYOUT.units:
                generations.begin(unit.index, 1)
                generations.end(unit.index, 1)
        assert ranks[1].generation == 1
        assert ranks[1].has_reached(1, 1)
        # One rank is behind in one unit.
        ranks[2].begin(1, 2)
        assert ranks[0].generation is None
        assert not ranks[0].has_reached(1, 2)
        ranks[2].end(1, 1)
        # Fewer ranks continue, and later more again.
        ranks[0].share(1)
        assert ranks[0].find() == KeptState(text="step 1", reported=False)
        ranks[0].share(4)
        assert Generations(LAYOUT, descriptor, rank=3, max_ranks=4).generation == 1
    finally:
        os.close(descriptor)
