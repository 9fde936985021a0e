"""CPU counts from the affinity mask and the cgroup limit chain, v1 and v2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from horizon_server.store.cpus import available_cpus, update_threads


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.fixture
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))


@pytest.mark.usefixtures("four_cpus")
@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/a/b", {}, 4),
        ("0::/a/b", {"a/b/cpu.max": "max 100000"}, 4),
        ("0::/a/b", {"a/b/cpu.max": "250000 100000"}, 3),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000"}, 1),
        ("0::/", {"cpu.max": "10000 100000"}, 1),
        ("0::/a", {"a/cpu.max": "900000 100000"}, 4),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "200000", "cpu/a/cpu.cfs_period_us": "100000"}, 2),
        ("4:cpu,cpuacct:/a", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, 4),
        ("7:memory:/a", {"memory/a/cpu.max": "100000 100000"}, 4),
    ],
)
def test_the_tightest_limit_counts(tmp_path: Path, own: str, files: dict[str, str], expected: int) -> None:
    write(tmp_path / "own", own + "\n")
    for name, text in files.items():
        write(tmp_path / "root" / name, text + "\n")
    assert available_cpus(cgroup_root=tmp_path / "root", own_cgroup=tmp_path / "own") == expected


def test_omp_num_threads_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    before = available_cpus()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert available_cpus() == before >= 1


@pytest.mark.parametrize(
    ("num_cpus", "host", "cuda"),
    [(1, 1, 1), (2, 2, 1), (3, 3, 2), (4, 4, 2), (6, 6, 3), (8, 8, 4), (16, 16, 12), (64, 64, 60)],
)
def test_the_optimizer_leaves_cores_to_the_threads_that_feed_a_gpu(num_cpus: int, host: int, cuda: int) -> None:
    assert update_threads(num_cpus, device_kind="host") == host
    assert update_threads(num_cpus, device_kind="cuda") == cuda
