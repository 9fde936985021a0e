"""Facts about the machine: the tightest control-group limit counts, v1 and v2; its rates are kept whole, forgotten when
it changes, and measured when nobody waits."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.rates import RATES

from horizon_server.children.entry import Answer, Failure, encode_line
from horizon_server.errors import BadSetting, WorkerFailed
from horizon_server.planning import machine
from horizon_server.planning.machine import (
    Accelerator,
    Gpu,
    IdleMeasurement,
    Machine,
    RateBook,
    measure_rates,
    numa_nodes_of,
    usable_accelerators,
    worker_environment,
)
from horizon_server.planning.rates import PeerRates

MACHINE = Machine(cpu="a processor", num_cpus=2, num_threads=2, accelerators=())


def fake_python(folder: Path, script: str) -> str:
    """An interpreter that runs a shell script instead of Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def reply(folder: Path, line: bytes) -> str:
    """A script that writes one line to the descriptor of its `-m MODULE REQUEST --events-fd N`."""
    (folder / "line").write_bytes(line)
    return f"cat {folder}/line > /proc/self/fd/$5"


def test_rates_are_kept(tmp_path: Path) -> None:
    book = RateBook(tmp_path, MACHINE)
    assert book.read() == {}
    book.write({"host": RATES})
    assert RateBook(tmp_path, MACHINE).read() == {"host": RATES}
    assert [path.name for path in tmp_path.iterdir()] == ["rates.json"]


@pytest.mark.parametrize(
    "change",
    [{"cpu": "another"}, {"num_cpus": 4}, {"num_threads": 1}, {"accelerators": ("H100",)}, {"version": "0.0.0"}],
)
def test_rates_of_another_machine_are_none(tmp_path: Path, change: dict[str, Any]) -> None:
    RateBook(tmp_path, MACHINE).write({"host": RATES, "cuda": RATES})
    assert RateBook(tmp_path, dataclasses.replace(MACHINE, **change)).read() == {}


def broken(document: dict[str, Any], case: str) -> str:
    if case == "cut":
        return json.dumps(document)[:-20]
    if case == "a field too many":
        return json.dumps({**document, "version": 99})
    if case == "a rate of zero":
        document["devices"]["host"]["h2d_bytes_per_s"] = 0
    if case == "a field too few":
        del document["devices"]["host"]["adamw_bytes_per_s"]
    return json.dumps(document if case != "a list" else [document])


@pytest.mark.parametrize("case", ["cut", "a field too many", "a rate of zero", "a field too few", "a list"])
def test_a_file_that_cannot_be_trusted_is_none(tmp_path: Path, case: str) -> None:
    book = RateBook(tmp_path, MACHINE)
    book.write({"host": RATES})
    book.path.write_text(broken(json.loads(book.path.read_text()), case))
    assert book.read() == {}


def test_a_machine_says_what_it_can_compute_on() -> None:
    assert Machine.of((), num_threads=3).device_kinds == ("host",)
    with_gpu = Machine.of((Accelerator(index=0, name="H100", memory_bytes=1),), num_threads=3)
    assert (with_gpu.device_kinds, with_gpu.accelerators, with_gpu.num_threads) == (("host", "cuda"), ("H100",), 3)
    assert with_gpu.cpu


@pytest.mark.parametrize(
    ("line", "has_bf16"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("flags\t\t: fpu avx2", False),
        ("Features\t: fp asimd bf16", True),
        ("Features\t: fp asimd", False),
    ],
)
def test_bf16_is_measured_on_the_host_where_the_cpu_has_instructions_for_it(
    line: str, has_bf16: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n")
    monkeypatch.setattr(machine, "_CPU_INFO", tmp_path / "cpuinfo")
    found = Machine.of((), num_threads=1)
    assert found.has_bf16 == has_bf16
    bf16 = {"host_bfloat16": ("host", "bfloat16")} if has_bf16 else {}
    assert found.measured == {"host": ("host", "float32"), **bf16}


GPUS = tuple(Gpu(index=i, name=name, memory_bytes=i + 1, uuid=f"GPU-{i}{i}-aa") for i, name in enumerate("abc"))


async def usable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, uuids: list[str] | None, wanted: str | None = None
) -> list[str]:
    """The names of the GPUs that can be used, where torch names these; None: it cannot be asked."""
    script = "exit 1" if uuids is None else reply(folder, encode_line(Answer(uuids)))
    monkeypatch.setattr(sys, "executable", fake_python(folder, script))
    return [gpu.name for gpu in await usable_accelerators(GPUS, os.environ, wanted=wanted)]


@pytest.mark.parametrize(
    ("uuids", "names"),
    [(["22-aa", "00-aa"], ["c", "a"]), (["99-zz"], ["a", "b", "c"]), (["", ""], ["a", "b", "c"]), ([], []), (None, [])],
)
async def test_the_first_gpu_is_the_one_that_torch_finds_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uuids: list[str] | None, names: list[str]
) -> None:
    assert await usable(tmp_path, monkeypatch, uuids) == names


@pytest.mark.parametrize(("wanted", "name"), [("2", "c"), ("0", "a"), ("GPU-22-aa", "c"), ("GPU-00", "a")])
async def test_the_setting_chooses_by_index_or_uuid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, name: str
) -> None:
    assert await usable(tmp_path, monkeypatch, ["22-aa", "00-aa"], wanted) == [name]


@pytest.mark.parametrize("wanted", ["1", "7", "GPU-", "x"])
async def test_a_gpu_that_cannot_be_used_is_refused_with_those_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    with pytest.raises(
        BadSetting, match=rf"setting gpu: '{wanted}' names . of the GPUs .*\(2 \(GPU-22-aa\), 0 \(GPU-00-aa\)\)"
    ):
        await usable(tmp_path, monkeypatch, ["22-aa", "00-aa"], wanted)


def test_a_worker_on_gpus_sees_those_in_its_order_and_allocates_without_gaps() -> None:
    own = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,1"}
    made = worker_environment(own, "cuda", GPUS[1:2])
    assert made == {**own, "CUDA_VISIBLE_DEVICES": "GPU-11-aa", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert worker_environment(own, "cuda", (GPUS[2], GPUS[0]))["CUDA_VISIBLE_DEVICES"] == "GPU-22-aa,GPU-00-aa"
    assert worker_environment(own, "host", GPUS[1:2]) == own
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        chosen = {name: "max_split_size_mb:64"}
        assert worker_environment(chosen, "cuda") == chosen


@pytest.mark.parametrize("fails", [False, True])
async def test_of_several_gpus_each_name_is_measured_and_what_they_do_at_once(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = PeerRates(num_devices=3, together_bytes_per_s=2.0, gather_bytes_per_s=3.0, exchange_bytes_per_s=4.0)
    (tmp_path / "peers").write_bytes(
        encode_line(Failure(WorkerFailed("no way")) if fails else Answer(dataclasses.asdict(peers)))
    )
    (tmp_path / "rates").write_bytes(encode_line(Answer(dataclasses.asdict(RATES))))
    script = f"""
if grep -q peers "$3"; then echo $CUDA_VISIBLE_DEVICES > {tmp_path}/seen; cat {tmp_path}/peers > /proc/self/fd/$5
else echo $CUDA_VISIBLE_DEVICES >> {tmp_path}/alone; cat {tmp_path}/rates > /proc/self/fd/$5; fi"""
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, script))
    gpus = (*GPUS[:2], dataclasses.replace(GPUS[2], name="a"))
    found = await measure_rates(
        dataclasses.replace(MACHINE, accelerators=("a", "b", "a")), environment=os.environ, gpus=gpus
    )
    # A job of one device has its prediction either way.
    first = dataclasses.replace(RATES, peers=None if fails else peers)
    assert found == {"host": RATES, "cuda": first, "cuda b": RATES}
    assert (tmp_path / "seen").read_text() == "GPU-00-aa,GPU-11-aa,GPU-22-aa\n"
    # The host, which sees what this process does, and then the first GPU of each name.
    assert (tmp_path / "alone").read_text().splitlines()[1:] == ["GPU-00-aa", "GPU-11-aa"]


async def test_a_child_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys, "executable", fake_python(tmp_path, reply(tmp_path, encode_line(Failure(WorkerFailed("no such device")))))
    )
    with pytest.raises(WorkerFailed, match="no such device"):
        await measure_rates(MACHINE, environment=os.environ)


async def test_what_is_measured_in_a_quiet_moment_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = encode_line(Answer(dataclasses.asdict(RATES)))
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, reply(tmp_path, answer)))
    book = RateBook(tmp_path, MACHINE)
    await IdleMeasurement(book, environment=os.environ, idle_s=0)()
    assert book.read() == {"host": RATES}

    monkeypatch.setattr(sys, "executable", "/no/such/python")
    await IdleMeasurement(book, environment=os.environ, idle_s=0)()
    assert book.read() == {"host": RATES}, "what is known is not measured again"


async def test_a_measurement_that_failed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = tmp_path / "tried"
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, f"echo x >> {tried}; exit 1"))
    measurement = IdleMeasurement(RateBook(tmp_path, MACHINE), environment=os.environ, idle_s=0)
    await measurement()
    await measurement()
    assert tried.read_text() == "x\n"


async def test_a_job_ends_the_measurement_and_its_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = tmp_path / "started"
    monkeypatch.setattr(
        sys, "executable", fake_python(tmp_path, f"echo $$ > {started}.new; mv {started}.new {started}; exec sleep 600")
    )
    # However little memory the machine has to spare now.
    monkeypatch.setattr(machine, "MEASURE_BYTES", {"host": 1})
    measurement = IdleMeasurement(RateBook(tmp_path, MACHINE), environment=os.environ, idle_s=0)
    task = asyncio.create_task(measurement())
    while not started.exists():
        assert not task.done(), "the measurement has started no child"
        await asyncio.sleep(0.01)
    pid = int(started.read_text())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not (tmp_path / "rates.json").exists()


async def test_a_node_without_free_memory_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MEASURE_BYTES", {"host": 1 << 60})
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    book = RateBook(tmp_path, MACHINE)
    await IdleMeasurement(book, environment=os.environ, idle_s=0)()
    assert book.read() == {}


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


@pytest.mark.parametrize(
    ("nodes", "with_memory", "wanted"),
    [
        ((0, 0, 1, 1), {0, 1}, (0, 0, 1, 1)),
        ((0, 1), {0, 1}, (0, 1)),
        # A node whose memory nobody would use.
        ((0, 0), {0, 1}, ()),
        ((0, 1), {0, 1, 2}, ()),
        ((0, 0), {0}, ()),
        ((0, None), {0, 1}, ()),
        ((), {0}, ()),
    ],
)
def test_ranks_have_homes_where_their_gpus_are_next_to_all_memory(
    nodes: tuple[int | None, ...], with_memory: set[int], wanted: tuple[int, ...]
) -> None:
    gpus = [Gpu(index=i, name="a", memory_bytes=1, uuid=str(i), numa_node=node) for i, node in enumerate(nodes)]
    assert numa_nodes_of(gpus, with_memory) == wanted
