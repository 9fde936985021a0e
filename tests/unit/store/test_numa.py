from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from horizon_server.store import numa
from horizon_server.store.numa import NumaNode

NUMA_MAPS = Path("/proc/self/numa_maps")

# In a process of its own, because a policy stays with the thread that sets it.
_PROBE = """
import sys
from horizon_server.store import numa, planes
before = numa.has_policy()
refusal = numa.interleave([0])
again = numa.interleave([0])
mapping = planes.map_anonymous(1 << 22)
planes.touch(mapping, num_threads=4)
maps = open("/proc/self/numa_maps").read()
print(repr(refusal), repr(again), "interleave:0" in maps, before, numa.has_policy())
"""


_PREFER_PROBE = """
import ctypes
from horizon_server.store import numa, planes
mapping = planes.map_memory_file(planes.create_memory_file("probe", 1 << 22), 1 << 22)
start = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
refusal = numa.prefer(start + 100, (1 << 20) - 200, 0)
planes.touch(mapping, num_threads=4)
lines = [line for line in open("/proc/self/numa_maps") if "probe" in line]
print(repr(refusal), sum("prefer:0" in line for line in lines), len(lines))
"""


def node(folder: Path, index: int, *, kib: int, cpus: str) -> None:
    path = folder / f"node{index}"
    path.mkdir()
    (path / "meminfo").write_text(f"Node {index} MemTotal:       {kib} kB\nNode {index} MemFree: 1 kB\n")
    (path / "cpulist").write_text(f"{cpus}\n")


def test_nodes_are_those_with_memory(tmp_path: Path) -> None:
    node(tmp_path, 10, kib=2048, cpus="16-31")
    node(tmp_path, 2, kib=1024, cpus="0-15")
    node(tmp_path, 3, kib=0, cpus="")
    (tmp_path / "node7").mkdir()

    assert numa.nodes(tmp_path) == [
        NumaNode(index=2, memory_bytes=1 << 20, cpus="0-15"),
        NumaNode(index=10, memory_bytes=2 << 20, cpus="16-31"),
    ]
    assert numa.nodes(tmp_path / "missing") == []


@pytest.mark.parametrize(("content", "wanted"), [("1\n", 1), ("0\n", 0), ("-1\n", None), (None, None)])
def test_the_node_of_a_gpu_is_found_by_its_bus_address(tmp_path: Path, content: str | None, wanted: int | None) -> None:
    folder = tmp_path / "0000:3b:00.0"
    folder.mkdir()
    if content is not None:
        (folder / "numa_node").write_text(content)
    assert numa.node_of_pci_device("00000000:3B:00.0", tmp_path) == wanted


@pytest.mark.skipif(len(numa.nodes()) > 1 or not NUMA_MAPS.exists(), reason="there is not exactly one node")
def test_on_one_node_nothing_changes() -> None:
    assert numa.interleave() == ""
    assert "interleave" not in NUMA_MAPS.read_text()


@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="the kernel has no NUMA")
def test_memory_that_threads_touch_is_spread_and_an_earlier_policy_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True, timeout=240)
    if "SYS_NICE" in done.stdout:
        pytest.skip("this container may not set a memory policy")
    assert done.stdout.split() == ["''", "''", "True", "False", "True"]


@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="the kernel has no NUMA")
def test_a_part_of_a_memory_file_is_taken_from_a_node() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PREFER_PROBE], capture_output=True, text=True, check=True, timeout=240
    )
    if "SYS_NICE" in done.stdout:
        pytest.skip("this container may not set a memory policy")
    # Whole pages of the first of four parts; the rest is another line.
    assert done.stdout.split() == ["''", "1", "2"], done.stdout


def test_a_thread_stays_on_the_cpus_of_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node(tmp_path, 0, kib=1024, cpus="0-3,8")
    node(tmp_path, 1, kib=1024, cpus="4-7")
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5, 8})
    chosen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cpus: chosen.append(cpus))
    for index in (0, 1, 2):
        numa.run_on(index)
    assert chosen == [{2, 3, 8}, {5}]
