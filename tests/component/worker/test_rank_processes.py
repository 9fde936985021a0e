"""Attempts on several devices: a worker that starts its other ranks, what they make together, and what becomes of it
when one of them dies."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.linked_worker import LinkedWorker
from tests.support.orders import STOP
from tests.support.worker_attempts import Daemon, always, assert_same, attempt, result, spec_of, worker_request

from horizon_server.children.entry import Answer, Failure, Line
from horizon_server.events import AttemptReady, EvalDone, Message, StepDone, TurnEnded, TurnWanted
from horizon_server.process_variables import CHILD_VARIABLES
from horizon_server.records.execution import Parallel
from horizon_server.worker_link.orders import RELEASE, TURN, YIELD

Inputs = Callable[[str], Path]


@contextmanager
def started(request: dict[str, Any], folder: Path, *, module: str = "horizon_server.worker") -> Iterator[LinkedWorker]:
    (folder / "request.json").write_text(json.dumps(request))
    # Two ranks on few processors: one thread each, whatever the machine.
    with LinkedWorker(folder / "request.json", module=module, **CHILD_VARIABLES) as worker:
        worker.connect()
        yield worker


def to_the_end(worker: LinkedWorker) -> list[Line]:
    lines = []
    for line in worker.lines():
        lines.append(line)
        if orders := always(line):
            worker.order(orders)
    return lines


def until_step(worker: LinkedWorker, step: int, then: Callable[[], None]) -> list[Line]:
    """What a worker says to its end; `then` is done in the step after that one.

    Each turn is one step: however late `then` is done, the worker is no more than that step further.
    """
    lines, steps, is_done = list[Line](), 0, False
    for line in worker.lines():
        lines.append(line)
        steps += isinstance(line, StepDone)
        if isinstance(line, TurnWanted):
            # It may have ended of what `then` did.
            with suppress(ConnectionError):
                worker.order(TURN + YIELD)
            if steps == step and not is_done:
                is_done = True
                then()
    return lines


def ranks_of(worker: LinkedWorker) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(worker.process.pid).children()
        if "horizon_server.worker.rank" in child.cmdline()
    ]


@pytest.mark.parametrize(
    ("case", "parallel", "layer_ranks"),
    [
        ("plain", "rows", ()),
        ("random numbers", "rows", ()),
        ("random numbers", "layers", ()),
        ("random numbers", "layers", (1, 0)),
    ],
)
def test_two_ranks_give_the_bits_of_one(
    case: str, parallel: Parallel, layer_ranks: tuple[int, ...], inputs: Inputs
) -> None:
    train: dict[str, Any] = {"tokens_per_step": 64}
    if case == "random numbers":
        # Drawn by lane, whoever computes it.
        train |= {"neftune_noise_alpha": 5.0, "trainable": ["lora"], "lora": {"rank": 2, "alpha": 4, "dropout": 0.3}}
    spec = spec_of(4, train=train, eval_dataset="e", eval_every_steps=2)
    alone, folder = inputs("alone"), inputs("two")
    daemon = Daemon(always)
    attempt(alone, spec, daemon, lanes=4)
    more: dict[str, Any] = {"evaluations": {"eval": str(folder / "prepared")}, "layer_ranks": layer_ranks}
    with (
        worker_request(folder, spec, turns=True, num_ranks=2, lanes=4, parallel=parallel, **more) as request,
        started(request, folder) as worker,
    ):
        lines = to_the_end(worker)
        assert worker.wait() == 0
    assert lines[-1] == Answer({"outcome": "succeeded", "reason": "", "message": ""})
    assert_same(result(folder, 4), result(alone, 4))
    for kind, names in ((StepDone, ("step", "loss", "grad_norm")), (EvalDone, ("step", "eval_loss"))):
        told = [[getattr(line, name) for name in names] for line in lines if isinstance(line, kind)]
        assert told == [[getattr(line, name) for name in names] for line in daemon.said(kind)]


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="the kernel has no NUMA")
def test_what_a_rank_owns_is_on_its_node(inputs: Inputs) -> None:
    """There may be one node only: the kernel's list of policies shows which memory has one."""
    folder, mappings = inputs("job"), list[str]()
    with (
        worker_request(folder, spec_of(3), turns=True, num_ranks=2, lanes=2, numa_nodes=(0, 0)) as request,
        started(request, folder) as worker,
    ):
        for line in worker.lines():
            if isinstance(line, Message) and "SYS_NICE" in line.text:
                pytest.skip("this container may not set a memory policy")
            if isinstance(line, TurnWanted):
                # It waits for the turn, and does not end meanwhile.
                mappings = Path(f"/proc/{worker.process.pid}/numa_maps").read_text().splitlines()
                worker.order(TURN + YIELD)
        assert worker.wait() == 0
    placed = [line for line in mappings if "memfd" in line and "prefer:0" in line]
    for plane in ("hi", "lo", "exp_avg", "exp_avg_sq"):
        assert any(f"-{plane}\\" in line for line in placed), (plane, mappings)


def test_memory_of_all_ranks_is_freed_between_turns(inputs: Inputs) -> None:
    folder = inputs("job")
    with (
        worker_request(folder, spec_of(3), turns=True, num_ranks=2, lanes=2) as request,
        started(request, folder) as worker,
    ):
        steps = 0
        for line in worker.lines():
            if isinstance(line, TurnWanted):
                worker.order(TURN + RELEASE)
            elif isinstance(line, TurnEnded) and steps:
                assert line.released
            steps += isinstance(line, StepDone)
        assert worker.wait() == 0
    assert steps == 3


def test_an_order_to_stop_ends_all_ranks_with_a_checkpoint(inputs: Inputs) -> None:
    folder = inputs("job")
    with (
        worker_request(folder, spec_of(50), turns=True, num_ranks=2, lanes=2) as request,
        started(request, folder) as worker,
    ):
        ranks, steps = [], 0
        for line in worker.lines():
            steps += isinstance(line, StepDone)
            if isinstance(line, TurnWanted) and steps == 2:
                ranks = ranks_of(worker)
                worker.order(STOP)
            elif isinstance(line, TurnWanted):
                worker.order(TURN + YIELD)
        assert worker.wait() == 0
        assert line == Answer({"outcome": "stopped", "reason": "", "message": ""})
    assert len(ranks) == 1 and not any(rank.is_running() for rank in ranks)
    assert list((folder / "checkpoints").iterdir())


@pytest.mark.parametrize("which", ["another", "the first"])
def test_a_rank_that_dies_takes_all_with_it_and_new_ones_continue_in_the_same_memory(
    which: str, inputs: Inputs
) -> None:
    spec = spec_of(12, train={"tokens_per_step": 64}, checkpoint={"every_steps": 0})
    alone, folder = inputs("alone"), inputs("killed")
    attempt(alone, spec, Daemon(always), lanes=4)
    ranks = list[psutil.Process]()

    def kill() -> None:
        ranks.extend(ranks_of(worker))
        os.kill(ranks[0].pid if which == "another" else worker.process.pid, signal.SIGKILL)

    with worker_request(folder, spec, turns=True, num_ranks=2, lanes=4) as request:
        with started(request, folder) as worker:
            line = until_step(worker, 3, kill)[-1]
            # Otherwise each waits for the other as long as a job may pause.
            worker.wait()
            (rank,) = ranks
            rank.wait(240)
            if which == "another":
                assert isinstance(line, Failure) and line.error.reason == "WORKER_DIED", line
                assert "rank 1 was killed by SIGKILL" in line.error.message
        # On another number of ranks.
        again = {**request, "resume_from_memory": True}
        if which == "another":
            again["plan"] = {**again["plan"], "execution": {**again["plan"]["execution"], "num_ranks": 1}}
        (folder / "journal.jsonl").unlink()
        with started(again, folder) as worker:
            lines = to_the_end(worker)
            assert worker.wait() == 0
    ready = next(line for line in lines if isinstance(line, AttemptReady))
    warnings = [line.text for line in lines if isinstance(line, Message) and line.level == "warning"]
    # A kill in the middle of an update is told, and starts from the model again.
    assert 3 <= ready.step < 12 or any("in the middle of an update" in text for text in warnings), (ready, warnings)
    assert_same(result(folder, 12), result(alone, 12))


def test_an_error_of_another_rank_is_the_job_s(inputs: Inputs) -> None:
    folder = inputs("job")
    with worker_request(folder, spec_of(3), turns=True, num_ranks=2, lanes=2) as request:
        request["plan"]["execution"]["device_limit_bytes"] = 100
        with started(request, folder) as worker:
            lines = to_the_end(worker)
            assert worker.wait() == 1
    assert isinstance(lines[-1], Failure) and lines[-1].error.reason == "DOES_NOT_FIT"
