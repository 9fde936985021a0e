"""The host memory of a packed row against its plan, measured as the benchmark does."""

from __future__ import annotations

from pathlib import Path

from bench.long_rows import measured_bytes, planned_bytes, write_model


def test_a_packed_row_takes_the_memory_that_is_planned_for_its_longest_document(tmp_path: Path) -> None:
    lengths = (2048, 2048, 2048, 2048)
    write_model(tmp_path, "qwen3", sum(lengths))
    planned = planned_bytes(tmp_path, lengths)
    # Wanted, and measured on a quiet machine: within 5 percent. On a busy one the phases of a step overlap otherwise.
    assert 0.9 <= measured_bytes(tmp_path, lengths) / planned <= 1.1
    # No term with the square of the row: a mask of all pairs in fp32 would be 256 MiB.
    assert planned < planned_bytes(tmp_path, (sum(lengths),)) < planned + 200 * 2**20
