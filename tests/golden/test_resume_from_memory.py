"""kill -9 at random moments, on memory that outlives the worker: the next one continues with the weights that are
there, to the bit."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest
from tests.golden.memory_life import DupFd, Said, live
from tests.support.drives import drive_folders
from tests.support.further import further
from tests.support.worker_attempts import assert_same, result, spec_of, worker_request, write_inputs

from horizon_server.jobs.folders import CheckpointFolder
from horizon_server.records.execution import Residency

NUM_KILLS = 6
NUM_STEPS = 60
MORE_STEPS = 2
SAVE_EVERY = 10
WAIT_S = 120.0


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Processes that start in no time: everything is imported once, before they fork."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.golden.memory_life"])
    return context


@dataclass(kw_only=True)
class Lives:
    """What the workers of one job have said, one after another."""

    losses: list[tuple[int, str]] = field(default_factory=list)
    began: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def await_rest(pid: int | None) -> None:
    """Wait until every thread of a process sleeps, and still does a while later."""
    end_s, looks_at_rest = time.monotonic() + WAIT_S, 0
    while looks_at_rest < 5:
        assert time.monotonic() < end_s, "the worker does not come to rest"
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
        asleep = all(stat.rpartition(")")[2].split()[0] == "S" for stat in stats)
        looks_at_rest = looks_at_rest + 1 if asleep else 0
        time.sleep(0.05)


def live_once(
    processes: ForkServerContext,
    lives: Lives,
    request: dict[str, Any],
    log: Path,
    *,
    num_steps: int,
    delay_s: float,
    rests: bool = False,
) -> bool:
    """Let a worker live until it has reported `num_steps` steps and `delay_s` longer, then kill it. True: it was done
    before.

    If the kill comes late, the worker does at most `MORE_STEPS` more. With `rests` it is killed when all of its threads
    sleep, so that no update of the weights is cut.
    """
    ours, theirs = multiprocessing.Pipe()
    descriptors = {name: DupFd(fd) for name, fd in request["planes"].items()}
    process = processes.Process(
        target=live,
        args=({**request, "planes": {}}, descriptors, log, theirs, num_steps + (0 if rests else MORE_STEPS)),
    )
    process.start()
    theirs.close()
    seen = 0
    try:
        while True:
            if seen >= num_steps:
                process.join(delay_s)
                if rests:
                    await_rest(process.pid)
                process.kill()
            try:
                assert ours.poll(WAIT_S), "the worker neither continued nor ended"
                said = ours.recv()
            except EOFError:
                process.join()
                assert process.exitcode == -signal.SIGKILL, log.read_text()
                return False
            if said == "done":
                return True
            assert isinstance(said, Said)
            if said.ready >= 0:
                lives.began.append(said.ready)
            elif said.step >= 0:
                lives.losses.append((said.step, said.loss))
                seen += 1
            else:
                lives.warnings.append(said.warning)
    finally:
        process.kill()
        process.join()
        ours.close()


@pytest.mark.parametrize(
    ("model_type", "train", "on_drives", "span"),
    [
        # Updates of all units overlap with the next step; the table's rows are updated apart.
        ("llama", {}, False, 0),
        # Each unit is updated in backward, as its gradient lands.
        ("llama", {"max_grad_norm": None}, False, 0),
        ("llama", {"optimizer_states": "compressed"}, False, 0),
        ("llama", {"optimizer_states": "compressed"}, True, 0),
        # The killed one has its states on drives, and the undisturbed one in memory.
        ("llama", {}, True, 0),
        ("llama", {"max_grad_norm": None, "compute_dtype": "bfloat16"}, True, 0),
        # Head and table too, span by span.
        ("llama", {}, True, 1056),
        ("llama", {"max_grad_norm": None, "optimizer_states": "compressed"}, True, 1056),
        *further(("gpt2", {}, False, 0)),
    ],
)
def test_a_job_that_is_killed_again_and_again_ends_with_the_bits_of_an_undisturbed_one(
    processes: ForkServerContext, model_type: str, train: dict[str, Any], on_drives: bool, span: int, tmp_path: Path
) -> None:
    folders = drive_folders(tmp_path) if on_drives else ()
    spec = spec_of(NUM_STEPS, train={"epochs": None, **train}, checkpoint={"every_steps": SAVE_EVERY})
    whole, killed = Lives(), Lives()
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        # Wide enough for matrices that are compressed, where the job says so.
        write_inputs(tmp_path / name, model_type, **({"hidden_size": 64} if "optimizer_states" in train else {}))
    with worker_request(tmp_path / "whole", spec) as request:
        assert live_once(processes, whole, request, tmp_path / "log", num_steps=NUM_STEPS + 1, delay_s=0)
    wanted = dict(whole.losses)
    assert list(wanted) == list(range(1, NUM_STEPS + 1))

    chance = random.Random(7)
    with worker_request(tmp_path / "killed", spec, folders=folders, span=span) as request:
        for kill in range(NUM_KILLS):
            # On a busy machine every other kill may cut an update.
            rests = kill == NUM_KILLS // 2
            delay_s = chance.uniform(0, 0.02)
            num_steps, log = chance.randint(1, 9 - MORE_STEPS), tmp_path / "log"
            done = live_once(processes, killed, request, log, num_steps=num_steps, delay_s=delay_s, rests=rests)
            assert not done, f"the run ended before kill {kill}: give it more steps"
            newest = CheckpointFolder(tmp_path / "killed/checkpoints", "job_1").newest()
            request = {**request, "resume_from": newest and str(newest), "resume_from_memory": True}
        assert live_once(processes, killed, request, tmp_path / "log", num_steps=NUM_STEPS + 1, delay_s=0)

    from_memory = NUM_KILLS - len(killed.warnings)
    reasons = Counter(warning.split("loaded again: ")[1] for warning in killed.warnings)
    print(f"{model_type} {train}: {from_memory} of {NUM_KILLS} kills were continued from memory; {dict(reasons)}")
    assert [(step, loss) for step, loss in killed.losses if wanted[step] != loss] == []
    assert {step for step, _ in killed.losses} == set(wanted), "a step was never reported"
    assert all("loaded again: " in warning for warning in killed.warnings)
    assert_same(result(tmp_path / "whole", NUM_STEPS), result(tmp_path / "killed", NUM_STEPS))
    repeated = len(killed.losses) - NUM_STEPS
    assert repeated <= SAVE_EVERY * len(killed.warnings) + NUM_KILLS
    assert from_memory >= 1, "no kill was continued from memory"


def test_what_was_on_the_device_is_lost_with_the_worker_and_the_job_continues_from_its_checkpoint(
    processes: ForkServerContext, tmp_path: Path
) -> None:
    spec = spec_of(3 * SAVE_EVERY, train={"epochs": None}, checkpoint={"every_steps": SAVE_EVERY})
    whole, killed = Lives(), Lives()
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        write_inputs(tmp_path / name, "llama")
    with worker_request(tmp_path / "whole", spec) as request:
        assert live_once(processes, whole, request, tmp_path / "log", num_steps=NUM_STEPS, delay_s=0)
    kept = Residency(resident_layers=2, state_layers=2)
    with worker_request(tmp_path / "killed", spec, kept=kept) as request:
        # From 0 on to 14 or a little more, from 10 on to 17, from 10 on to 22.
        for num_steps in (14, 7, 12):
            done = live_once(processes, killed, request, tmp_path / "log", num_steps=num_steps, delay_s=0, rests=True)
            assert not done
            newest = CheckpointFolder(tmp_path / "killed/checkpoints", "job_1").newest()
            request = {**request, "resume_from": newest and str(newest), "resume_from_memory": True}
        assert live_once(processes, killed, request, tmp_path / "log", num_steps=NUM_STEPS, delay_s=0)
    assert killed.began == [0, 10, 10, 20]
    assert len(killed.warnings) == 3 and all("while its device had newer ones" in text for text in killed.warnings)
    wanted = dict(whole.losses)
    assert [(step, loss) for step, loss in killed.losses if wanted[step] != loss] == []
    assert_same(result(tmp_path / "whole", 3 * SAVE_EVERY), result(tmp_path / "killed", 3 * SAVE_EVERY))
