"""`python -m bench` knows every bench."""

from __future__ import annotations

from pathlib import Path

import bench
from bench.__main__ import BENCHES, LEFT_OUT

FOLDER = Path(bench.__file__).parent


def test_each_module_that_can_be_run_is_among_all_or_left_out_for_a_reason() -> None:
    found = {file.stem for file in FOLDER.glob("*.py") if '__name__ == "__main__"' in file.read_text("utf-8")}
    left_out = [name for names in LEFT_OUT.values() for name in names]
    assert found - {"__main__"} == {*BENCHES, *left_out}
    assert not set(BENCHES) & set(left_out) and len(left_out) == len(set(left_out))
