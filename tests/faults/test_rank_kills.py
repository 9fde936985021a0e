"""`kill -9` of any rank of an attempt, at any moment, on two devices or on two nodes with two devices each.

The next attempt continues, on one node also on another number of ranks, by rows or by layers, and the result has the
bits of a job that nothing disturbed.

HORIZON_KILLS is the number of kills (`make test-all` has 300), HORIZON_KILLS_SEED what their moments are drawn from.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.component.worker.test_nodes import Other
from tests.support.fleet import serving
from tests.support.linked_worker import LinkedWorker
from tests.support.worker_attempts import (
    Daemon,
    always,
    assert_same,
    attempt,
    inputs,
    result,
    spec_of,
    worker_request,
)

from horizon_server.children.entry import Answer
from horizon_server.events import StepDone
from horizon_server.nodes.key import make_key
from horizon_server.process_variables import CHILD_VARIABLES
from horizon_server.store.manifest import is_complete

__all__ = ["inputs"]

NUM_KILLS = int(os.environ.get("HORIZON_KILLS", "3"))
SEED = int(os.environ.get("HORIZON_KILLS_SEED", "10"))
NUM_STEPS, LANES = 30, 4

pytestmark = pytest.mark.timeout(300 + 60 * NUM_KILLS)


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_kills_of_ranks_lose_nothing_and_change_no_bit(num_nodes: int, inputs: Callable[[str], Path]) -> None:
    spec = spec_of(NUM_STEPS, train={"tokens_per_step": 64}, checkpoint={"every_steps": 5})
    whole, folder = inputs("whole"), inputs("killed")
    attempt(whole, spec, Daemon(always), lanes=LANES)
    chance, losses, times = random.Random(SEED), dict[int, float](), Times()
    with ExitStack() as stack:
        request = stack.enter_context(
            worker_request(folder, spec, turns=True, num_ranks=2 * num_nodes, num_nodes=num_nodes, lanes=LANES)
        )
        if num_nodes > 1:
            make_key(folder / "fleet.pem")
            agent = stack.enter_context(serving(folder / "node", folder / "fleet.pem"))
            request = Other(agent=agent, key=folder / "fleet.pem").reserve(request)
        num_killed, lives, answer = 0, 0, None
        while answer is None:
            kill = None if num_killed >= NUM_KILLS else chance
            answer, was_killed = life({**request, "resume_from_memory": lives > 0}, folder, kill, losses, times)
            num_killed, lives = num_killed + was_killed, lives + 1
            # A job of few steps may be done before as many kills: it starts again, in the same memory.
            if answer is not None and num_killed < NUM_KILLS:
                assert_same(result(folder, NUM_STEPS), result(whole, NUM_STEPS))
                for checkpoint in sorted((folder / "checkpoints").iterdir()):
                    for file in sorted(checkpoint.rglob("*"), reverse=True):
                        file.rmdir() if file.is_dir() else file.unlink()
                    checkpoint.rmdir()
                answer, lives = None, 0
    assert answer == Answer({"outcome": "succeeded", "reason": "", "message": ""})
    assert_same(result(folder, NUM_STEPS), result(whole, NUM_STEPS))
    assert sorted(losses) == list(range(1, NUM_STEPS + 1))
    waited = ", ".join(f"{seconds:.1f}" for seconds in sorted(times.to_next_step_s))
    print(f"{num_killed} kills; seconds from a kill to the next step: {waited}")


@dataclass
class Times:
    """When something was killed since the newest step, and how long each next step took after it."""

    killed_s: float | None = None
    to_next_step_s: list[float] = field(default_factory=list)

    def step(self) -> None:
        if self.killed_s is not None:
            self.to_next_step_s.append(time.monotonic() - self.killed_s)
        self.killed_s = None


def life(
    request: dict[str, Any], folder: Path, chance: random.Random | None, losses: dict[int, float], times: Times
) -> tuple[Answer | None, bool]:
    """One worker, to its end or a kill; returns its answer, and whether it was killed. A step that is done again must
    have the loss that it had."""
    checkpoints = folder / "checkpoints"
    complete = sorted(path for path in checkpoints.glob("step-*") if is_complete(path)) if checkpoints.is_dir() else []
    again = {**request, "resume_from": str(complete[-1]) if complete else None}
    if chance is not None and request["fleet"] is None:
        # The model has two layers.
        num_ranks, parallel = chance.choice([(2, "rows"), (2, "layers"), (3, "rows")])
        how = {"num_ranks": num_ranks, "parallel": parallel}
        execution = {**request["plan"]["execution"], **how}
        again["plan"] = {**request["plan"], "execution": execution}
    (folder / "journal.jsonl").unlink(missing_ok=True)
    (folder / "request.json").write_text(json.dumps(again))
    killed, due, target = threading.Event(), threading.Event(), 0
    with LinkedWorker(folder / "request.json", **CHILD_VARIABLES) as worker:
        worker.connect()
        if chance is not None:
            # A quarter while it starts, the others around some step.
            target = 0 if chance.random() < 0.25 else chance.randrange(1, NUM_STEPS)
            which, delay_s = chance.random(), chance.uniform(0.0, 0.1 if target else 6.0)
            threading.Thread(target=kill_one, args=(worker, which, due, delay_s, killed, times), daemon=True).start()
            if not target:
                due.set()
        last = None
        for line in worker.lines():
            last = line
            if isinstance(line, StepDone):
                # Steps that were on their way do not count.
                if not killed.is_set():
                    times.step()
                assert losses.setdefault(line.step, line.loss) == line.loss, line.step
                if line.step >= target:
                    due.set()
            if orders := always(line):
                with suppress(OSError):
                    worker.order(orders)
        worker.wait()
        wait_for_no_rank(folder)
    return (last if isinstance(last, Answer) else None), killed.is_set()


def kill_one(
    worker: LinkedWorker, which: float, due: threading.Event, delay_s: float, killed: threading.Event, times: Times
) -> None:
    due.wait(240.0)
    time.sleep(delay_s)
    with suppress(psutil.Error):
        first = psutil.Process(worker.process.pid)
        # Those of another node are this process's own.
        others = [*first.children(), *psutil.Process().children()]
        ranks = [first, *(child for child in others if "--rank" in child.cmdline())]
        if first.status() == psutil.STATUS_ZOMBIE:
            return
        killed.set()
        times.killed_s = time.monotonic()
        ranks[int(which * len(ranks))].send_signal(signal.SIGKILL)


def wait_for_no_rank(folder: Path) -> None:
    end_s = time.monotonic() + 120
    while any(str(folder) in " ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < end_s, "a rank outlives its worker"
        time.sleep(0.05)
