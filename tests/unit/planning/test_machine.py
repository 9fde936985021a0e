"""Facts about the machine: the tightest control-group limit counts, v1 and v2."""

from __future__ import annotations

from pathlib import Path

import psutil

from horizon_server.planning import machine


def test_without_limits_the_machine_counts(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/\n")
    assert machine.host_memory(tmp_path, tmp_path / "own").limit_bytes == psutil.virtual_memory().total


def test_the_tightest_of_a_v2_chain_counts_and_page_cache_is_free(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/lab/job\n")
    for folder, limit, used in (("lab", "300000000", "250000000"), ("lab/job", "max", "5")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "memory.max").write_text(limit)
        (tmp_path / folder / "memory.current").write_text(used)
        (tmp_path / folder / "memory.stat").write_text("inactive_file 100000000\nactive_file 50000000\n")
    memory = machine.host_memory(tmp_path, tmp_path / "own")
    assert (memory.limit_bytes, memory.available_bytes) == (300000000, 200000000)


def test_a_v1_limit_counts_and_its_huge_number_means_none(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("5:cpu:/box\n4:memory:/box\n")
    (tmp_path / "memory/box").mkdir(parents=True)
    (tmp_path / "memory/box/memory.limit_in_bytes").write_text("9223372036854771712")
    assert machine.host_memory(tmp_path, tmp_path / "own").limit_bytes == psutil.virtual_memory().total
    (tmp_path / "memory/box/memory.limit_in_bytes").write_text("1000000")
    (tmp_path / "memory/box/memory.usage_in_bytes").write_text("400000")
    assert machine.host_memory(tmp_path, tmp_path / "own").available_bytes == 600000
