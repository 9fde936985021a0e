"""The link between daemon and worker: every report arrives once, whichever daemon reads it, and the worker waits for
none."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.linked_worker import LinkedWorker
from tests.support.orders import STOP
from tests.support.processes import collect_workers

from horizon_server.children.entry import Answer
from horizon_server.errors import Diverged, WorkerCrashed, WorkerDied
from horizon_server.events import Message, TurnEnded, TurnWanted, WorkerLine
from horizon_server.settings import child_environment
from horizon_server.worker_link.daemon_end import Worker, replay_journal
from horizon_server.worker_link.orders import RELEASE, TURN
from horizon_server.worker_link.protocol import PROTOCOL, OtherVersion, WorkerGreeting

TALKER = """
import os, pathlib, signal, sys, time
from horizon_server.errors import Diverged
from horizon_server.events import Message, TurnEnded, TurnWanted
from horizon_server.records.job import StopRequest
from horizon_server.worker_link.worker_end import serve_worker

def say(link, *texts):
    for text in texts:
        link.send(Message(level="info", text=str(text)))

def wait_for(file):
    while not pathlib.Path(file).exists():
        time.sleep(0.01)

def work(request, link):
    folder, mode = request["folder"], request["mode"]
    say(link, *range(request.get("many", 3)))
    if mode == "turns":
        link.send(TurnWanted())
        link.orders.wait(None)
        say(link, "has the turn" if link.orders.has_turn else "has none")
        wait_for(folder + "/go")
        link.orders.end_turn()
        link.send(TurnEnded(released=True))
    wait_for(folder + "/go")
    if mode == "stop":
        while link.orders.current is StopRequest.NOTHING:
            time.sleep(0.01)
        return link.orders.current.value
    if mode == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if mode == "fail":
        raise Diverged("the loss is not finite")
    say(link, "last")
    return "done"

if __name__ == "__main__":
    serve_worker(work, who="the talker")
"""

MUTE = """
import pathlib, signal, socket, sys
from horizon_server.worker_link.protocol import SOCKET_FILE

listener = socket.socket(socket.AF_UNIX)
listener.bind(str(pathlib.Path(sys.argv[1]).with_name(SOCKET_FILE)))
listener.listen()
accepted, _ = listener.accept()
accepted.recv(65536)
accepted.close()
if pathlib.Path("stays").exists():
    signal.pause()
sys.exit(7)
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    (tmp_path / "talker.py").write_text(TALKER)
    (tmp_path / "mute.py").write_text(MUTE)
    yield child_environment() | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    collect_workers(tmp_path)


def request_of(folder: Path, mode: str, **more: Any) -> dict[str, Any]:
    return {"mode": mode, "folder": str(folder), "planes": {}, **more}


async def start(folder: Path, environment: dict[str, str], mode: str, **more: Any) -> Worker:
    return await Worker.start(
        "talker", request_of(folder, mode, **more), folder=folder / "attempt", environment=environment
    )


class Heard:
    """What a daemon read, and up to which line."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.turns: list[WorkerLine] = []
        self.num_lines = 0
        self.news = asyncio.Event()

    async def __call__(self, line: WorkerLine, number: int) -> None:
        if isinstance(line, Message):
            assert number == self.num_lines + 1, "without gaps"
            self.texts.append(line.text)
        else:
            self.turns.append(line)
        self.num_lines = number
        self.news.set()

    async def until(self, *, texts: int = 0, turns: int = 0) -> None:
        async with asyncio.timeout(240):
            while len(self.texts) < texts or len(self.turns) < turns:
                self.news.clear()
                await self.news.wait()


async def read(worker: Worker, heard: Heard, *, texts: int, turns: int = 0) -> asyncio.Task[Any]:
    reading = asyncio.create_task(worker.answer(heard))
    await heard.until(texts=texts, turns=turns)
    return reading


async def leave(worker: Worker, reading: asyncio.Task[Any]) -> None:
    reading.cancel()
    await asyncio.wait([reading])
    worker.leave()


async def test_reports_and_an_answer_come_once_and_the_worker_is_gone(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    worker, heard = await start(tmp_path, environment, "end"), Heard()
    greeting, planes = await worker.connect(after=0, wants_planes=True)
    assert (greeting.turn, greeting.holds_memory, planes, greeting.pid) == ("none", False, {}, worker.pid)
    (tmp_path / "go").touch()
    assert await worker.answer(heard) == "done"
    assert heard.texts == ["0", "1", "2", "last"]
    assert worker.is_gone
    worker.leave()


async def test_a_later_daemon_reads_what_the_earlier_one_has_not_stored(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    worker, heard = await start(tmp_path, environment, "end"), Heard()
    await worker.connect(after=0, wants_planes=False)
    await leave(worker, await read(worker, heard, texts=2))
    found = await Worker.find(tmp_path / "attempt")
    assert found is not None and found.pid == worker.pid
    await found.connect(after=heard.num_lines, wants_planes=False)
    (tmp_path / "go").touch()
    assert await found.answer(heard) == "done"
    assert heard.texts == ["0", "1", "2", "last"]
    found.leave()
    assert await Worker.find(tmp_path / "attempt") is None


async def test_one_that_ended_without_a_daemon_has_left_its_last_words(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    worker, heard = await start(tmp_path, environment, "fail", many=5000), Heard()
    await worker.connect(after=0, wants_planes=False)
    await leave(worker, await read(worker, heard, texts=10))
    (tmp_path / "go").touch()
    found = await Worker.find(tmp_path / "attempt")
    if found is not None:
        assert await found.wait(240)
        found.leave()
    with pytest.raises(Diverged, match="the loss is not finite"):
        await replay_journal(tmp_path / "attempt", heard.num_lines, heard)
    assert heard.texts == [str(number) for number in range(5000)]


async def test_turns_stand_where_they_were_for_a_later_daemon(tmp_path: Path, environment: dict[str, str]) -> None:
    worker, heard = await start(tmp_path, environment, "turns"), Heard()
    await worker.connect(after=0, wants_planes=False)
    reading = await read(worker, heard, texts=3)
    await leave(worker, reading)

    async def again() -> tuple[Worker, WorkerGreeting]:
        found = await Worker.find(tmp_path / "attempt")
        assert found is not None
        return found, (await found.connect(after=heard.num_lines, wants_planes=False))[0]

    # Without a daemon it is woken, and has no turn.
    found, greeting = await again()
    if greeting.turn == "none":  # it had not come to ask
        await leave(found, await read(found, heard, texts=3, turns=1))
        found, greeting = await again()
    assert (greeting.turn, greeting.holds_memory) == ("wanted", False)
    found.send_order(TURN)
    reading = await read(found, heard, texts=4)
    await leave(found, reading)
    found, greeting = await again()
    assert (greeting.turn, greeting.holds_memory) == ("held", True)
    (tmp_path / "go").touch()
    assert await found.answer(heard) == "done"
    assert heard.turns[-1] == TurnEnded(released=True)
    found.leave()


@pytest.mark.parametrize(("mode", "error"), [("die", WorkerDied), ("crash", WorkerCrashed)])
async def test_a_death_is_told_after_all_that_was_reported(
    tmp_path: Path, environment: dict[str, str], mode: str, error: type[Exception]
) -> None:
    worker, heard = await start(tmp_path, environment, mode, many=300), Heard()
    await worker.connect(after=0, wants_planes=False)
    (tmp_path / "go").touch()
    with pytest.raises(error):
        await worker.answer(heard)
    assert len(heard.texts) == 300
    worker.leave()


async def test_sigterm_is_an_order_to_stop_whatever_the_version(tmp_path: Path, environment: dict[str, str]) -> None:
    worker = await start(tmp_path, environment, "stop")
    await worker.connect(after=0, wants_planes=False)
    (tmp_path / "go").touch()
    worker.ask_to_stop()
    assert await worker.answer(Heard()) == "drain"
    worker.leave()


def test_memory_travels_to_a_later_daemon(tmp_path: Path, environment: dict[str, str]) -> None:
    plane = os.memfd_create("weights")
    os.write(plane, b"weights")
    (tmp_path / "request.json").write_text(json.dumps(request_of(tmp_path, "end") | {"planes": {"hi": plane}}))
    with LinkedWorker(tmp_path / "request.json", module="talker", **environment) as worker:
        os.close(plane)
        assert worker.connect(wants_planes=True).planes == ("hi",)
        assert os.pread(worker.planes["hi"], 100, 0) == b"weights"
        (tmp_path / "go").touch()
        assert list(worker.lines())[-1] == Answer("done")
        assert worker.wait() == 0


def test_a_torn_line_and_an_unknown_order_do_no_harm(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "request.json").write_text(json.dumps(request_of(tmp_path, "end")))
    with LinkedWorker(tmp_path / "request.json", module="talker", **environment) as worker:
        worker.connect()
        # A daemon continues after what it has read: the worker refuses one that names more lines than it has written.
        with closing(worker.lines()) as lines:
            assert [next(lines) for _ in range(2)] == [Message(level="info", text=text) for text in ("0", "1")]
        worker.order(b"dance\n" + RELEASE + b"sto")
        worker.hang_up()
        worker.connect(after=2)
        worker.order(b"p\n")
        (tmp_path / "go").touch()
        assert list(worker.lines()) == [*(Message(level="info", text=text) for text in ("2", "last")), Answer("done")]


def test_another_version_is_refused_and_the_worker_goes_on(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "request.json").write_text(json.dumps(request_of(tmp_path, "stop")))
    with LinkedWorker(tmp_path / "request.json", module="talker", **environment) as worker:
        # The answer says which version the worker speaks.
        assert worker.connect(protocol=PROTOCOL + 1).protocol == PROTOCOL
        assert list(worker.lines()) == []
        with pytest.raises((AssertionError, ConnectionError, OtherVersion)):
            worker.connect(after=10**6)
        worker.connect()
        (tmp_path / "go").touch()
        worker.order(STOP)
        assert list(worker.lines())[-1] == Answer("drain")


async def test_a_worker_that_dies_before_it_greets_has_died(tmp_path: Path, environment: dict[str, str]) -> None:
    worker = await Worker.start("mute", request_of(tmp_path, ""), folder=tmp_path / "attempt", environment=environment)
    with pytest.raises(ConnectionError):
        await worker.connect(after=0, wants_planes=False)
    with pytest.raises(WorkerDied, match="exit code 7"):
        await worker.answer(Heard())
    worker.leave()


async def test_a_worker_that_lives_and_does_not_greet_is_refused(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizon_server.worker_link.daemon_end._EXIT_S", 0.2)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stays").touch()
    worker = await Worker.start("mute", request_of(tmp_path, ""), folder=tmp_path / "attempt", environment=environment)
    with pytest.raises(OtherVersion, match="without a greeting"):
        await worker.connect(after=0, wants_planes=False)
    worker.kill()
    assert await worker.wait()
    worker.leave()


def test_what_is_in_no_journal_is_known_by_its_beginning() -> None:
    from horizon_server.events import PIPE_KINDS, encode
    from horizon_server.worker_link.daemon_end import _UNKEPT_LINES

    # Answers to prompts, merged models and evaluations are other children's.
    assert PIPE_KINDS - {"ready", "references", "sampled", "sampled_prompt", "merge", "evaluation"} == {
        "call_done",
        "turn_wanted",
        "turn_ended",
        "memory_released",
        "progress",
    }
    assert encode(TurnWanted()).encode().startswith(_UNKEPT_LINES)
    assert not encode(Message(level="info", text="turn_wanted")).encode().startswith(_UNKEPT_LINES)
