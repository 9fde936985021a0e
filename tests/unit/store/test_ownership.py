"""Which rank owns which part of a unit: everything once, in whole pages, whatever the number of ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest

from horizon_server.records.execution import Parallel
from horizon_server.store.layout import UNIT_ALIGN_ELEMENTS, build_layout, with_trained
from horizon_server.store.ownership import Ownership, divided, length

PAGE = UNIT_ALIGN_ELEMENTS
SHAPES = {
    "model.embed_tokens.weight": (1000, 48),
    **{f"model.layers.{index}.mlp.weight": (100, 300) for index in range(2)},
    **{f"model.layers.{index}.norm.weight": (300,) for index in range(2)},
    "model.norm.weight": (48,),
    "lm_head.weight": (1000, 48),
}
LAYOUT = build_layout(SHAPES, num_layers=2, tied=False)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_each_element_has_one_owner_and_parts_are_pages(num_ranks: int) -> None:
    ownership = Ownership(layout=LAYOUT, num_ranks=num_ranks)
    for unit in LAYOUT.units:
        parts = ownership.trained(unit.index)
        assert len(parts) == num_ranks and parts[0].start == 0 and parts[-1].stop == unit.trained_elements
        for one, other in pairwise(parts):
            assert one.stop == other.start and one.start % PAGE == 0
            # All but the last are equal, as an all-gather needs them.
            assert length(one) == length(parts[0])
    rows = ownership.rows()
    assert [row for of_rank in rows for row in of_rank] == list(range(1000))
    assert all((part.start % 48, part.start % PAGE) == (0, 0) for part in ownership.trained(0))


def test_what_is_frozen_is_divided_by_itself() -> None:
    layout = with_trained(LAYOUT, lambda name: "norm" in name, is_bfloat16=lambda _: True)
    ownership = Ownership(layout=layout, num_ranks=2)
    unit = layout.units[1]
    assert ownership.frozen(1)[0].start == unit.trained_elements
    assert ownership.frozen(1)[-1].stop == unit.unpacked_elements
    assert not ownership.has_rows
    # A frozen table is divided at whole rows too: on several nodes they travel.
    assert [row for of_rank in ownership.rows() for row in of_rank] == list(range(1000))
    assert all((part.start % 48, part.start % PAGE) == (0, 0) for part in ownership.frozen(0))


@pytest.mark.parametrize("parallel", ["rows", "layers"])
@pytest.mark.parametrize("plane", ["hi", "lo", "exp_avg", "grad"])
def test_what_ranks_own_of_a_plane_is_all_of_it_once(plane: str, parallel: Parallel) -> None:
    ownership = Ownership(layout=LAYOUT, num_ranks=2, parallel=parallel)
    parts = sorted(
        (part.start, part.stop) for rank in range(2) for part in ownership.parts_in(plane, rank) if length(part)
    )
    left_out = LAYOUT.units[0].trained_elements if plane == "grad" and LAYOUT.has_row_gradients else 0
    assert (parts[0][0], parts[-1][1]) == (0, LAYOUT.num_elements - left_out)
    assert all(one[1] == other[0] and one[1] % PAGE == 0 for one, other in pairwise(parts))


def test_too_few_pages_are_the_last_rank_s() -> None:
    assert divided(0, 3 * PAGE, 4, block=PAGE) == (slice(0, 0), slice(0, 0), slice(0, 0), slice(0, 3 * PAGE))


def test_the_numbers_of_units_follow_each_other() -> None:
    ownership = Ownership(layout=LAYOUT, num_ranks=3)
    numbers = [ownership.numbers(unit.index) for unit in LAYOUT.units]
    assert numbers[0].start == 0 and numbers[-1].stop == ownership.num_numbers
    # A number for each row of the rank with the most of them, where the table's gradient is rows.
    assert length(numbers[0]) >= 3 * max(map(len, ownership.rows()))
