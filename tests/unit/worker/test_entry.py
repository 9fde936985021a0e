"""The worker's two lines to the daemon, and how it says that it failed, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn, cast

import pytest

from horizon_server.children.entry import EventWriter, Failure, decode_line
from horizon_server.codec import from_plain, to_plain
from horizon_server.errors import HorizonError
from horizon_server.events import Message, decode
from horizon_server.records.execution import Execution, Residency
from horizon_server.records.plan import Plan
from horizon_server.spec import parse_job_spec
from horizon_server.worker.__main__ import work
from horizon_server.worker.set_up import SetUp
from horizon_server.worker.training import Training
from horizon_server.worker_link.orders import Orders
from horizon_server.worker_link.request import WorkerRequest

REQUEST = WorkerRequest(
    job_id="job_1",
    attempt=2,
    spec=parse_job_spec({"name": "job", "model": "m", "dataset": "d", "train": {"max_steps": 3}}),
    plan=Plan(
        host_bytes={"weights": 4},
        device_bytes={},
        host_limit_bytes=9,
        num_parameters=1,
        device="cuda:1",
        execution=Execution(device_kind="cuda", gpu="GPU-1", residency=Residency(resident_layers=2)),
    ),
    model=Path("/models/m"),
    prepared=Path("/prepared/p"),
    checkpoints=Path("/checkpoints"),
    resume_from=Path("/checkpoints/step-00000002"),
    planes={"hi": 7, "lo": 8},
)


def test_a_request_is_read_as_it_was_written() -> None:
    assert from_plain(WorkerRequest, json.loads(json.dumps(to_plain(REQUEST)))) == REQUEST


_INTERVAL = """
import sys
from horizon_server.worker.__main__ import work
try:
    work({}, None)
except ValueError:
    print(sys.getswitchinterval())
"""


def test_threads_that_launch_get_the_interpreter_back_quickly() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERVAL],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert float(done.stdout) <= 1e-4


class Part:
    """A trainer, device or store that cannot be closed."""

    def __init__(self, name: str, closed: list[str]) -> None:
        self._name, self._closed = name, closed

    def close(self) -> None:
        self._closed.append(self._name)
        raise RuntimeError(f"{self._name}: CUDA error: unspecified launch failure")


class Unheard(EventWriter):
    orders = Orders()


def test_every_part_is_closed_after_the_first_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    made = object.__new__(Training)
    trainer, device, store = (cast(Any, Part(name, closed)) for name in ("trainer", "device", "store"))
    unused = cast(Any, None)
    made._made_trainer, made._others = trainer, None
    made._set_up = SetUp(
        request=unused,
        folder=unused,
        template=unused,
        adapter=None,
        store=store,
        device=device,
        trace=None,
    )

    def run() -> NoReturn:
        raise ZeroDivisionError("the true reason")

    made.run = run  # type: ignore[method-assign]
    monkeypatch.setattr("horizon_server.worker.training.Training", lambda *_, **__: made)

    with pytest.raises(ZeroDivisionError, match="the true reason"):
        work(REQUEST, Unheard())  # type: ignore[arg-type]
    assert closed == ["trainer", "device", "store"]


def test_events_are_lines_and_a_daemon_that_is_gone_is_no_error() -> None:
    read_fd, write_fd = os.pipe()
    events = EventWriter(write_fd)
    message = Message(level="info", text="two\nlines")
    events.send(message)
    line = os.read(read_fd, 4096)
    assert line.count(b"\n") == 1
    assert decode(line) == message
    os.close(read_fd)
    events.send(message)
    events.send(message)
    os.close(write_fd)


def run_worker(request: Path) -> tuple[int, HorizonError, str]:
    """Run the worker's entry; returns exit code, the error that it reports and what it logged."""
    done = subprocess.run(
        [sys.executable, "-m", "horizon_server.worker", str(request)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    last = decode_line((request.parent / "journal.jsonl").read_bytes().splitlines(keepends=True)[-1])
    assert isinstance(last, Failure)
    return done.returncode, last.error, done.stderr


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"model": "/no/such/model"}, "INVALID_MODEL", "config.json"),
        ({"limits": None}, "WORKER_FAILED", "limits"),
    ],
    ids=["domain-error", "defect"],
)
def test_a_worker_that_fails_says_why(tmp_path: Path, change: dict[str, Any], reason: str, words: str) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps({**to_plain(REQUEST), **change}))
    code, error, logged = run_worker(path)
    assert (code, error.reason) == (1, reason)
    assert words in error.message
    assert "Traceback" in logged
