"""Two attempts on one frozen base, in this process and in their own: each has the bits that it has alone, whoever loads
the base and whoever dies meanwhile."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.worker_attempts import Daemon, always, assert_same, result, spec_of, worker_request

from horizon_server.children.entry import Line
from horizon_server.codec import from_plain
from horizon_server.errors import InvalidModel
from horizon_server.events import AttemptReady, StepDone
from horizon_server.store import model_load
from horizon_server.store.base_plane import PLANE
from horizon_server.worker.training import Training
from horizon_server.worker_link.request import WorkerRequest

LORA: dict[str, Any] = {"trainable": "lora", "learning_rate": 1e-2}


class Killed(Exception):
    """Stands for the end of a process at a known moment."""


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tensors that were read from a model's files, in their order."""
    names: list[str] = []
    load = model_load._load_tensor

    def noted(store: Any, header: Any, staging: Any) -> None:
        names.append(header.name)
        load(store, header, staging)

    monkeypatch.setattr(model_load, "_load_tensor", noted)
    return names


def trained(request: dict[str, Any], daemon: Daemon | None = None) -> Daemon:
    daemon = daemon or Daemon(always)
    training = Training(from_plain(WorkerRequest, {**request, "turns": True}), events=daemon, orders=daemon.orders)
    try:
        training.run()
    finally:
        training.close()
    return daemon


def dies_at(step: int) -> Daemon:
    def react(line: Line) -> bytes:
        if isinstance(line, StepDone) and line.step == step:
            raise Killed
        return always(line)

    return Daemon(react)


def lora_of(rank: int, **changes: Any) -> Any:
    lora = {"rank": rank, "alpha": 8, "dropout": 0.1, **changes}
    return spec_of(4, train={**LORA, "lora": lora}, checkpoint={"every_steps": 2})


@contextlib.contextmanager
def two(folder: Path, specs: list[Any], **more: Any) -> Iterator[list[dict[str, Any]]]:
    """The requests of two jobs that share a base, in folders of their own."""
    with worker_request(folder, specs[0], **more) as first:
        fd = first["planes"][PLANE]
        with worker_request(folder, specs[1], base_fd=fd, checkpoints=str(folder / "other"), **more) as second:
            yield [first, second]


def both_results(folder: Path, other: Path) -> None:
    for mine, alone in ((folder / "checkpoints", "one"), (folder / "other", "two")):
        moved = folder / "found" / alone
        moved.mkdir(parents=True)
        mine.rename(moved / "checkpoints")
        assert_same(result(moved, 4), result(other / alone, 4))


@pytest.fixture
def alone(inputs: Callable[[str], Path]) -> Callable[[list[Any]], Path]:
    """What two jobs end with where each has a base of its own, below one folder."""

    def run(specs: list[Any]) -> Path:
        for name, spec in zip(("one", "two"), specs, strict=True):
            with worker_request(inputs(name), spec) as request:
                trained(request)
        return inputs("beside").parent

    return run


@pytest.mark.parametrize(
    "changes",
    [[{}, {}], [{"base": "int8"}, {"base": "int8"}], [{"base": "nf4", "dora": True}, {"base": "nf4", "rank": 2}]],
    ids=["source", "int8", "nf4 with dora"],
)
def test_jobs_with_other_adapters_on_one_base_have_the_bits_that_they_have_alone(
    changes: list[dict[str, Any]],
    inputs: Callable[[str], Path],
    alone: Callable[[list[Any]], Path],
    read: list[str],
) -> None:
    specs = [lora_of(**{"rank": rank, **change}) for rank, change in zip((4, 8), changes, strict=True)]
    wanted, folder = alone(specs), inputs("shared")
    read.clear()
    with two(folder, specs) as (first, second):
        trained(first)
        num_read = len(read)
        assert num_read > 10
        trained(second)
        assert len(read) == num_read, "the second one reads nothing"
    both_results(folder, wanted)


def test_of_two_that_are_there_at_once_both_end_with_their_bits_and_a_killed_one_continues(
    inputs: Callable[[str], Path], alone: Callable[[list[Any]], Path], read: list[str]
) -> None:
    specs = [lora_of(4), lora_of(8)]
    wanted, folder = alone(specs), inputs("shared")
    with two(folder, specs) as (first, second):
        with pytest.raises(Killed):
            trained(first, dies_at(3))
        trained(second)
        read.clear()
        again = trained({**first, "resume_from_memory": True})
        assert [ready.step for ready in again.said(AttemptReady)] == [3] and read == []
    both_results(folder, wanted)


def test_one_that_continues_from_its_checkpoint_reads_no_base_that_is_there(
    inputs: Callable[[str], Path], alone: Callable[[list[Any]], Path], read: list[str]
) -> None:
    specs = [lora_of(4), lora_of(8)]
    wanted, folder = alone(specs), inputs("shared")
    with two(folder, specs) as (first, second):
        with pytest.raises(Killed):
            trained(first, dies_at(3))
        read.clear()
        again = trained({**first, "resume_from": str(folder / "checkpoints/step-00000002")})
        assert [ready.step for ready in again.said(AttemptReady)] == [2] and read == []
        trained(second)
    both_results(folder, wanted)


def test_a_loader_that_dies_leaves_a_base_that_another_one_loads(
    inputs: Callable[[str], Path], alone: Callable[[list[Any]], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = [lora_of(4), lora_of(8)]
    wanted, folder = alone(specs), inputs("shared")
    load, left = model_load._load_tensor, [5]

    def cut(store: Any, header: Any, staging: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        load(store, header, staging)

    with two(folder, specs) as (first, second):
        monkeypatch.setattr(model_load, "_load_tensor", cut)
        with pytest.raises(Killed):
            trained(first)
        monkeypatch.setattr(model_load, "_load_tensor", load)
        trained(second)
        trained({**first, "resume_from_memory": True})
    both_results(folder, wanted)


def test_nobody_writes_to_a_base_that_is_there(inputs: Callable[[str], Path]) -> None:
    access: list[str] = []

    def react(line: Line) -> bytes:
        if isinstance(line, StepDone):
            maps = Path("/proc/self/maps").read_text("ascii").splitlines()
            access.extend(line.split()[1] for line in maps if line.split()[4] == str(os.fstat(fd).st_ino))
        return always(line)

    with two(inputs("job"), [lora_of(4), lora_of(8)]) as (first, second):
        fd = first["planes"][PLANE]
        trained(first, Daemon(react))
        size_bytes = os.fstat(fd).st_size
        with mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) as memory:
            before = bytes(memory)
        trained(second, Daemon(react))
        with mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ) as memory:
            assert bytes(memory) == before
    # In each of eight steps one page is writable, which says whether the base is there; not one of its bytes.
    assert access.count("rw-s") == 8 and access.count("r--s") == len(access) - 8 > 8


def test_a_model_that_was_changed_since_the_plan_is_not_mixed_with_the_old_one(inputs: Callable[[str], Path]) -> None:
    folder = inputs("job")
    with two(folder, [lora_of(4), lora_of(8)]) as (first, second):
        trained(first)
        (weights,) = (folder / "model").glob("*.safetensors")
        os.utime(weights, (1.0, 1.0))
        with pytest.raises(InvalidModel, match="its files have changed since the job was planned"):
            trained(second)


_LOADER = """
import json, sys
from pathlib import Path

from horizon_server.planning.trainable import open_for_training
from horizon_server.spec import parse_job_spec
from horizon_server.store.base_plane import BasePlane, base_key

fd, model, spec = int(sys.argv[1]), Path(sys.argv[2]), parse_job_spec(json.loads(sys.argv[3]))
layout = open_for_training(model, spec.train).layout
with BasePlane(layout, fd, key=base_key(model, layout)).loading(model) as has_to_load:
    print("loads" if has_to_load else "is there", flush=True)
    sys.stdin.readline()
"""
"""Says whether it has to load a base, and is at it until it gets a line."""


def test_one_loads_while_the_others_wait_and_its_death_lets_another_one_load(inputs: Callable[[str], Path]) -> None:
    folder, spec = inputs("job"), lora_of(4)
    with worker_request(folder, spec) as request, contextlib.ExitStack() as stack:
        fd = request["planes"][PLANE]
        argv = [sys.executable, "-c", _LOADER, str(fd), str(folder / "model"), json.dumps(spec.to_mapping())]

        def loader() -> subprocess.Popen[str]:
            started = stack.enter_context(
                subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=(fd,))
            )
            stack.callback(started.kill)
            return started

        def says(one: subprocess.Popen[str]) -> str:
            assert one.stdout is not None
            return one.stdout.readline().strip()

        def ends(one: subprocess.Popen[str]) -> int:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.close()
            return one.wait(240)

        first = loader()
        assert says(first) == "loads"
        others = [loader(), loader()]
        first.kill()
        outputs = {one.stdout: one for one in others if one.stdout is not None}
        ((ready,), _, _) = select.select(list(outputs), [], [], 240)
        loads = outputs.pop(ready)
        assert says(loads) == "loads"
        assert ends(loads) == 0
        (waits,) = outputs.values()
        assert says(waits) == "is there" and ends(waits) == 0


def test_what_names_a_base(inputs: Callable[[str], Path]) -> None:
    one, other = inputs("one"), inputs("two")

    def key(folder: Path, spec: Any) -> Any:
        with worker_request(folder, spec) as request:
            base = request["plan"]["base"]
            return None if base is None else base["key"]

    same = [lora_of(4), lora_of(8), lora_of(2, targets=["q_proj"]), lora_of(4, dora=True)]
    (found,) = {key(one, spec) for spec in same}
    assert key(one, spec_of(4)) is None and key(one, spec_of(4, train={"trainable": ["layers"]})) is None
    different = [key(one, lora_of(4, base="int8")), key(one, lora_of(4, base="nf4")), key(other, lora_of(4))]
    (weights,) = (one / "model").glob("*.safetensors")
    content = weights.read_bytes()
    weights.write_bytes(content)
    different.append(key(one, lora_of(4)))
    assert len({found, *different}) == 5
