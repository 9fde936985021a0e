"""Attempts on several nodes: a worker whose other ranks an agent runs, which is in this process here."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.component.worker.test_rank_processes import Inputs, started, to_the_end, until_step
from tests.support.fleet import reservation, serving
from tests.support.orders import STOP
from tests.support.worker_attempts import Daemon, always, assert_same, attempt, result, spec_of, worker_request

from horizon_server.children.entry import Answer, Failure, Line
from horizon_server.codec import to_plain
from horizon_server.events import AttemptReady, EvalDone, Message, StepDone, TurnWanted
from horizon_server.nodes.agent import NodeAgent
from horizon_server.nodes.directory import NodeDirectory
from horizon_server.nodes.key import make_key
from horizon_server.worker_link.orders import TURN, YIELD
from horizon_server.worker_link.request import Fleet

WAIT_S = 240.0
PATIENT = "tests.support.patient_worker"
ONE_EACH: dict[str, Any] = {"turns": True, "num_ranks": 2, "num_nodes": 2, "lanes": 4}
TWO_EACH = {**ONE_EACH, "num_ranks": 4}


@dataclass(frozen=True, kw_only=True)
class Other:
    """The other node, and the daemon's end of it."""

    agent: NodeAgent
    key: Path

    def ask(self, call: Callable[[NodeDirectory], Any]) -> Any:
        """Have the daemon do something with the node."""
        return asyncio.run(call(NodeDirectory(addresses=[self.agent.address], key_file=self.key)))

    def reserve(self, request: dict[str, Any]) -> dict[str, Any]:
        """The request of a worker, with the node reserved for it."""
        sizes = {plane: os.fstat(fd).st_size for plane, fd in request["planes"].items()}
        others = self.ask(lambda nodes: nodes.reserve(reservation(plane_bytes=sizes), least=1, most=1))
        fleet = Fleet(address="127.0.0.1", others=others, key_file=self.key)
        return {**request, "fleet": to_plain(fleet)}

    def release(self) -> None:
        """Have it forget the job."""
        self.ask(lambda nodes: nodes.release("job_1"))

    def ranks(self) -> dict[int, psutil.Process]:
        """The processes of its ranks, by number. Those of the worker's own node are the worker's children."""
        lines = [(child, child.cmdline()) for child in psutil.Process().children()]
        return {int(line[line.index("--rank") + 1]): child for child, line in lines if "--rank" in line}


@pytest.fixture
def other(tmp_path: Path) -> Iterator[Other]:
    key = tmp_path / "fleet.pem"
    make_key(key)
    with serving(tmp_path / "node", key) as agent:
        yield Other(agent=agent, key=key)


def warnings_of(lines: list[Line]) -> list[str]:
    return [line.text for line in lines if isinstance(line, Message) and line.level == "warning"]


def ready_at(lines: list[Line]) -> int:
    return next(line.step for line in lines if isinstance(line, AttemptReady))


def continue_in_memory(request: dict[str, Any], folder: Path) -> list[Line]:
    """What another worker says that goes on after one which has ended."""
    (folder / "journal.jsonl").unlink()
    with started({**request, "resume_from_memory": True}, folder, module=PATIENT) as worker:
        lines = to_the_end(worker)
        assert worker.wait() == 0, lines[-1]
    return lines


def test_two_nodes_give_the_bits_of_one_rank(inputs: Inputs, other: Other) -> None:
    spec = spec_of(4, train={"tokens_per_step": 64}, eval_dataset="e", eval_every_steps=2)
    alone, folder, daemon = inputs("alone"), inputs("two"), Daemon(always)
    attempt(alone, spec, daemon, lanes=4)
    more: dict[str, Any] = {"evaluations": {"eval": str(folder / "prepared")}}
    with (
        worker_request(folder, spec, **TWO_EACH, **more) as request,
        started(other.reserve(request), folder, module=PATIENT) as worker,
    ):
        lines = to_the_end(worker)
        assert worker.wait() == 0
    assert lines[-1] == Answer({"outcome": "succeeded", "reason": "", "message": ""})
    assert_same(result(folder, 4), result(alone, 4))
    for kind, names in ((StepDone, ("step", "loss", "grad_norm")), (EvalDone, ("step", "eval_loss"))):
        told = [[getattr(line, name) for name in names] for line in lines if isinstance(line, kind)]
        assert told == [[getattr(line, name) for name in names] for line in daemon.said(kind)]


def test_a_rank_that_dies_elsewhere_ends_the_worker_and_another_continues_in_the_same_memory(
    inputs: Inputs, other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranks of a node write to one log: it has errors of those that lost the connection to the one that died.
    tail = "RuntimeError: gloo/transport/tcp/pair.cc: Connection closed by peer"
    monkeypatch.setattr("horizon_server.nodes.agent.log_tail", lambda _: tail)
    spec = spec_of(12, train={"tokens_per_step": 64}, checkpoint={"every_steps": 0})
    alone, folder = inputs("alone"), inputs("killed")
    attempt(alone, spec, Daemon(always), lanes=4)
    with worker_request(folder, spec, **TWO_EACH) as request:
        request = other.reserve(request)
        with started(request, folder, module=PATIENT) as worker:
            lines = until_step(worker, 3, lambda: other.ranks()[3].kill())
            # Otherwise they wait for one another as long as a job may pause.
            worker.wait()
        assert isinstance(lines[-1], Failure) and lines[-1].error.reason == "WORKER_DIED", lines[-1]
        assert "rank 3 was killed by SIGKILL" in lines[-1].error.message
        assert other.agent.address in lines[-1].error.message
        lines = continue_in_memory(request, folder)
    # A kill in the middle of an update is told, and starts from the model again.
    refused = any("weights of one step" in text or "middle of an update" in text for text in warnings_of(lines))
    assert 3 <= ready_at(lines) < 12 or refused, lines
    assert_same(result(folder, 12), result(alone, 12))


def test_a_node_that_is_gone_ends_the_worker_by_what_may_pass(inputs: Inputs, other: Other) -> None:
    folder, address = inputs("job"), other.agent.address
    with (
        worker_request(folder, spec_of(50), **ONE_EACH) as request,
        started(other.reserve(request), folder, module=PATIENT) as worker,
    ):
        lines = until_step(worker, 2, other.agent.close)
        worker.wait()
    assert isinstance(lines[-1], Failure) and lines[-1].error.reason == "WORKER_DIED", lines[-1]
    assert f"rank 1 on {address}" in lines[-1].error.message


def test_ranks_elsewhere_end_with_the_worker(inputs: Inputs, other: Other) -> None:
    folder, ranks = inputs("job"), list[psutil.Process]()

    def kill() -> None:
        ranks.extend(other.ranks().values())
        os.kill(worker.process.pid, signal.SIGKILL)

    with (
        worker_request(folder, spec_of(50), **ONE_EACH) as request,
        started(other.reserve(request), folder, module=PATIENT) as worker,
    ):
        until_step(worker, 2, kill)
        worker.wait()
        gone, alive = psutil.wait_procs(ranks, timeout=240)
        assert len(gone) == 1 and not alive


def test_without_its_memory_on_one_node_a_job_continues_from_the_checkpoint(inputs: Inputs, other: Other) -> None:
    spec = spec_of(6, train={"tokens_per_step": 64}, checkpoint={"every_steps": 2})
    alone, folder = inputs("alone"), inputs("forgotten")
    attempt(alone, spec, Daemon(always), lanes=4)
    with worker_request(folder, spec, **ONE_EACH) as request:
        with started(other.reserve(request), folder, module=PATIENT) as worker:
            until_step(worker, 3, lambda: os.kill(worker.process.pid, signal.SIGKILL))
            worker.wait()
        other.release()
        request = other.reserve(request)
        checkpoint = folder / "checkpoints/step-00000002"
        lines = continue_in_memory({**request, "resume_from": str(checkpoint)}, folder)
    assert any("weights in memory cannot be continued" in text for text in warnings_of(lines)), lines
    assert ready_at(lines) == 2
    assert_same(result(folder, 6), result(alone, 6))


def test_an_order_to_stop_ends_all_ranks_with_a_checkpoint(inputs: Inputs, other: Other) -> None:
    folder, ranks = inputs("job"), list[psutil.Process]()
    with (
        worker_request(folder, spec_of(50), **ONE_EACH) as request,
        started(other.reserve(request), folder, module=PATIENT) as worker,
    ):
        lines, steps = list[Line](), 0
        for line in worker.lines():
            lines.append(line)
            steps += isinstance(line, StepDone)
            if isinstance(line, TurnWanted) and steps == 2:
                ranks.extend(other.ranks().values())
                worker.order(STOP)
            elif isinstance(line, TurnWanted):
                worker.order(TURN + YIELD)
        assert worker.wait() == 0
        assert lines[-1] == Answer({"outcome": "stopped", "reason": "", "message": ""})
        gone, _ = psutil.wait_procs(ranks, timeout=WAIT_S)
        assert len(gone) == 1
    assert list((folder / "checkpoints").iterdir())
