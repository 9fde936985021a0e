"""Sessions on one frozen base, against the real daemon: one copy in memory, counted once, and the same bits as alone
whatever is killed."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.daemon_process import DaemonProcess, wait_for, wait_for_state
from tests.support.further import further
from tests.support.pushed_state import DATASET, MODEL, PushedState

from horizon_client import Client
from horizon_client.sessions import Session

WAIT_S = 240.0
NUM_STEPS = 4
# Workers that the test holds while they load frozen weights, and that say so.
_SITECUSTOMIZE = """
import os, pathlib, sys, time

if "horizon_server.worker" in sys.orig_argv:
    from horizon_server import progress
    from horizon_server.store import model_load

    folder, load = pathlib.Path({folder!r}), model_load._load_tensor

    def held(store, header, staging):
        if "lora_" not in header.name:
            (folder / f"loads-{{os.getpid()}}").touch()
            while (folder / "held").exists():
                progress.advance()
                time.sleep(0.01)
        load(store, header, staging)

    model_load._load_tensor = held
"""


@pytest.fixture
def daemon(tmp_path: Path, pushed: PushedState) -> Iterator[DaemonProcess]:
    running = pushed.daemon(tmp_path / "state", max_loading_jobs_of_user=3)
    running.start()
    try:
        yield running
    finally:
        running.close()


def session_of(client: Client, rank: int, **options: Any) -> Session:
    lora = {"rank": rank, "alpha": 8, "dropout": 0.1, **options.pop("lora", {})}
    spec = {"train": {"compute_dtype": "float32"}}
    return client.session(MODEL, lora=lora, max_tokens=64, max_tokens_per_call=256, spec=spec, **options)


def step_of(session: Session, step: int) -> list[Any]:
    generator = torch.Generator().manual_seed(step)
    rows = [{"tokens": torch.randint(3, 200, (length,), generator=generator).tolist()} for length in (9, 14)]
    return [session.forward_backward(rows), session.optim_step(1e-2, max_grad_norm=1.0)]


def weights_of(daemon: DaemonProcess, session: Session) -> bytes:
    checkpoints = daemon.state_dir / "jobs" / session.job.job_id / "checkpoints"
    (checkpoint,) = sorted(checkpoints.glob("step-*"))[-1:]
    return (checkpoint / "adapter_model.safetensors").read_bytes()


def alone(daemon: DaemonProcess, client: Client, rank: int) -> tuple[list[Any], bytes]:
    """What the steps of one session answer, and its adapter."""
    with session_of(client, rank) as session:
        found = [future.result() for step in range(NUM_STEPS) for future in step_of(session, step)]
    return found, weights_of(daemon, session)


def bases(daemon: DaemonProcess) -> dict[str, set[int]]:
    """The workers of each base in memory, by its inode."""
    found: dict[str, set[int]] = defaultdict(set)
    for pid in daemon.worker_pids():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text("ascii").splitlines():
                if "/memfd:horizon-base" in line:
                    found[line.split()[4]].add(pid)
    return dict(found)


def on_one_base(daemon: DaemonProcess, number: int) -> bool:
    return [len(pids) for pids in bases(daemon).values()] == [number]


def kill_worker(daemon: DaemonProcess, session: Session) -> None:
    """kill -9 of a session's worker."""
    of_job = [pid for pid in daemon.worker_pids() if session.job.job_id.encode() in _arguments(pid)]
    assert len(of_job) == 1
    os.kill(of_job[0], signal.SIGKILL)


def _arguments(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def restart(daemon: DaemonProcess) -> None:
    daemon.kill()
    daemon.start()


def test_two_sessions_have_the_bits_that_they_have_alone_whatever_is_killed(daemon: DaemonProcess) -> None:
    with daemon.client(daemon.user("ada")) as client:
        wanted = [alone(daemon, client, rank) for rank in (4, 8)]
        with session_of(client, 4) as one, session_of(client, 8) as two, contextlib.ExitStack() as further:
            found: list[list[Any]] = [[], []]
            for step in range(NUM_STEPS):
                for session, answers in zip((one, two), found, strict=True):
                    answers += [future.result() for future in step_of(session, step)]
                assert on_one_base(daemon, 2)
                if step in (1, 2):
                    restart(daemon)
                if step in (0, 2):
                    kill_worker(daemon, one)
                if step == 2:
                    kill_worker(daemon, two)
            # One that comes after all that finds the base of the others.
            three = further.enter_context(session_of(client, 4))
            answers = [future.result() for step in range(NUM_STEPS) for future in step_of(three, step)]
            assert on_one_base(daemon, 3) and answers == wanted[0][0]
        assert found == [answers for answers, _ in wanted]
        assert [weights_of(daemon, session) for session in (one, two, three)] == [
            wanted[0][1],
            wanted[1][1],
            wanted[0][1],
        ]
        wait_for(lambda: not daemon.worker_pids(), WAIT_S)
        wait_for(lambda: client.node.status().host_memory_promised_bytes == 0, WAIT_S)


@pytest.mark.parametrize("killed", ["loader", "daemon", *further("all")])
def test_who_dies_while_the_base_is_loaded_costs_the_others_nothing(
    killed: str, daemon: DaemonProcess, tmp_path: Path
) -> None:
    folder = tmp_path / "held"
    folder.mkdir()
    with daemon.client(daemon.user("ada")) as client:
        wanted = alone(daemon, client, 4)
        (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(folder=str(folder)), "ascii")
        assert daemon.terminate() == 0
        daemon.environment["PYTHONPATH"] = str(folder)
        daemon.start()
        (folder / "held").touch()
        with session_of(client, 4) as one, session_of(client, 4) as two:
            futures = [step_of(session, step) for session in (one, two) for step in range(NUM_STEPS)]
            wait_for(lambda: on_one_base(daemon, 2), WAIT_S)
            wait_for(lambda: any(folder.glob("loads-*")), WAIT_S)
            (loads,) = folder.glob("loads-*")
            loader = int(loads.name.removeprefix("loads-"))
            if killed != "daemon":
                for pid in daemon.worker_pids() if killed == "all" else [loader]:
                    os.kill(pid, signal.SIGKILL)
            if killed != "loader":
                restart(daemon)
            (folder / "held").unlink()
            found = [future.result() for step in futures for future in step]
            assert on_one_base(daemon, 2)
        assert found == [*wanted[0], *wanted[0]]
        assert [weights_of(daemon, session) for session in (one, two)] == [wanted[1], wanted[1]]
        # Nobody loads what is there: one process, and another one where the first was killed.
        assert len(list(folder.glob("loads-*"))) == (1 if killed == "daemon" else 2)


def planned(client: Client, session: Session) -> dict[str, int]:
    """Host memory of a session's plan, by component."""
    plan = client.jobs.get(session.job.job_id).plan
    assert plan is not None
    return dict(plan.host_bytes)


def shared_when_planned(client: Client, *, base: str) -> tuple[int, int]:
    """The frozen weights of a job that is only planned, and how many jobs are on them."""
    train = {"trainable": "lora", "lora": {"rank": 2, "base": base}, "max_steps": 1}
    spec: Any = {"name": "asked", "model": MODEL, "dataset": DATASET, "train": train}
    shared = client.jobs.plan(spec).plan.base
    assert shared is not None
    return shared.num_bytes, shared.num_jobs


def why(client: Client, session: Session) -> str:
    outlook = client.jobs.get(session.job.job_id).outlook
    return "" if outlook is None else outlook.why


def test_what_is_planned_told_and_freed(daemon: DaemonProcess) -> None:
    row = [{"tokens": [5, 6, 7, 8]}]
    with daemon.client(daemon.user("ada")) as client:
        with session_of(client, 4) as one:
            one.forward(row).result()
            total_bytes, base_bytes = sum(planned(client, one).values()), planned(client, one)["base"]
            assert client.node.status().host_memory_promised_bytes == total_bytes
            with session_of(client, 4) as two, session_of(client, 4, lora={"base": "int8"}) as other:
                for session in (two, other):
                    session.forward(row).result()
                packed_bytes = sum(planned(client, other).values())
                # Those of the second session are its adapters and working memory alone.
                promised_bytes = client.node.status().host_memory_promised_bytes
                assert promised_bytes == 2 * total_bytes - base_bytes + packed_bytes
                assert sorted(len(pids) for pids in bases(daemon).values()) == [1, 2]
                wait_for(lambda: ") is shared with 1 job" in why(client, two), WAIT_S)
                assert "its base" not in why(client, other)
                # And of a third one, before it is submitted.
                assert shared_when_planned(client, base="source") == (base_bytes, 2)
                assert shared_when_planned(client, base="nf4")[1] == 0
            wait_for_state(client, two.job.job_id, "SUCCEEDED")
            one.forward(row).result()
            assert on_one_base(daemon, 1)
            assert client.node.status().host_memory_promised_bytes == total_bytes
        with client.session(MODEL, max_tokens=64, max_tokens_per_call=256) as whole:
            whole.forward(row).result()
            assert "base" not in planned(client, whole) and not bases(daemon)
