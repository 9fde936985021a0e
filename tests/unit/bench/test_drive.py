"""The bench of drives, on a tiny file: it moves what the store moves, in the rings that the planner takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.drive import SHAPES, Form, Shape, emulated, layout_of, ring_of, use_of
from tests.support.drives import drive_folders

from horizon_server.planning.drives import RINGS
from horizon_server.store.layout import COMPRESSED_GROUP

_SPAN = 1 << 16


@pytest.mark.parametrize("form", ["exact", "compressed"])
def test_a_ring_and_plain_calls_are_measured_in_pairs(tmp_path: Path, form: Form) -> None:
    [drive] = drive_folders(tmp_path, 1)
    layout = layout_of(4, 5 * _SPAN // 2, form)
    use = use_of(drive, layout, slots=RINGS[0], span=_SPAN, num_pairs=2)
    bytes_each = 10 if form == "exact" else 3 + 4 / COMPRESSED_GROUP
    assert use.num_bytes == 4 * 5 * _SPAN // 2 * bytes_each
    for found in (use.rates, use.ratios, use.processor_s):
        assert len(found) == 2 and min(found) > 0


def test_a_step_takes_no_less_than_its_drive(tmp_path: Path) -> None:
    [drive] = drive_folders(tmp_path, 1)
    shape = Shape(name="the drive decides", forward_s=0.05, backward_s=0.1, drive_s=0.4, clips=True)
    assert emulated(drive, shape, slots=RINGS[0], num_steps=1) > 0.9 * shape.drive_s


def test_a_ring_grows_where_steps_wait_for_the_drive() -> None:
    assert {shape.name: ring_of(shape) > RINGS[0] for shape in SHAPES} == {
        shape.name: shape.clips and shape.drive_s > shape.forward_s for shape in SHAPES
    }
