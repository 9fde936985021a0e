"""Children: events and an answer up, limits kept, gone at the end; and how one that died without a word is
explained."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from horizon_server.children import child as child_module
from horizon_server.children.child import ChildTask, Limits, OnEvent, exit_reason, log_tail, streamed
from horizon_server.children.entry import Answer, Failure, decode_line, encode_line
from horizon_server.errors import (
    FieldViolation,
    HorizonError,
    InvalidData,
    InvalidSpec,
    IoFailed,
    OutOfMemory,
    Stalled,
    WorkerCrashed,
    WorkerDied,
    WorkerFailed,
)
from horizon_server.events import Message, WorkerLine
from horizon_server.settings import child_environment

TALKER = """
import ctypes, os, pathlib, signal, sys, time
from horizon_server.children.entry import serve
from horizon_server.errors import FieldViolation, InvalidData
from horizon_server.events import Message

def work(request, events):
    mode = request["mode"]
    print("hello from the log", flush=True)
    if mode == "tell":
        events.send(Message(level="info", text="ready"))
        return "told"
    if mode == "refuse":
        odd = FieldViolation(field="line[3]", description="odd")
        raise InvalidData("line 3 is odd", violations=[odd], retry_after_s=2)
    if mode == "damaged":
        raise InvalidData(": line 3 is odd", file=pathlib.Path("/data/rows/a.jsonl"))
    if mode == "greedy":
        return len(bytearray(1 << 30))
    if mode == "refused":
        raise OSError(12, os.strerror(12))
    if mode == "torch":
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 286720 bytes.")
    if mode == "library":
        raise ImportError("libx.so: failed to map segment from shared object: Cannot allocate memory")
    if mode == "native":
        os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\\n  what():  std::bad_alloc\\n")
        os.abort()
    if mode == "loader":
        os.write(2, b"cannot allocate memory for thread-local data: ABORT\\n")
        os._exit(127)
    if mode == "busy":
        while True:
            pass
    if mode == "tell and exit":
        events.send(Message(level="info", text="ready"))
        os._exit(3)
    if mode == "silent":
        events.send(Message(level="info", text=str(os.getpid())))
        time.sleep(600)
    if mode == "crash":
        ctypes.string_at(0)
    if mode == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "gone":
        pathlib.Path("/no/such/folder/file").read_text()
    if mode == "defect":
        return 1 // 0
    if mode == "babble":
        os.write(events._descriptor, b"Traceback (most recent call last):\\n")
    if mode == "endless":
        os.write(events._descriptor, b"x" * (17 << 20))
    if mode == "exit":
        os._exit(3)
    if mode == "linger":
        import threading
        threading.Thread(target=time.sleep, args=(600,)).start()
        return os.getpid()
    if mode == "large":
        return "\\U0001f600" * 500_000
    if mode == "signals":
        return [signal.getsignal(number) is expected for number, expected in (
            (signal.SIGINT, signal.SIG_IGN), (signal.SIGTERM, signal.SIG_DFL), (signal.SIGPIPE, signal.SIG_IGN))]
    if mode == "limits":
        import resource
        adjusted = pathlib.Path("/proc/self/oom_score_adj").read_text()
        limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE)]
        return [*limits, int(adjusted)]

if __name__ == "__main__":
    sys.exit(serve(work, who="the talker"))
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "talker.py").write_text(TALKER)
    return child_environment() | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


def talker(environment: dict[str, str], **limits: Any) -> ChildTask:
    meanings: dict[type[HorizonError], HorizonError] = {}
    if limits.pop("means", False):
        meanings[Stalled] = InvalidSpec("a slow talker")
    return ChildTask(
        module="talker", who="the talker", environment=environment, limits=Limits(**limits), meanings=meanings
    )


async def ask(environment: dict[str, str], mode: str, **limits: Any) -> Any:
    return await talker(environment, **limits).run({"mode": mode})


async def test_events_come_up_and_output_goes_to_the_log(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "request.json").write_text("x" * 1000)
    child = await talker(environment).start(
        {"mode": "tell"}, request_file=tmp_path / "request.json", log_file=tmp_path / "log"
    )
    seen: list[WorkerLine] = []

    async def on_event(event: WorkerLine) -> None:
        seen.append(event)

    assert await child.answer(on_event) == "told"
    assert seen == [Message(level="info", text="ready")]
    assert log_tail(tmp_path / "log") == "hello from the log"
    assert (tmp_path / "request.json").read_text() == '{\n "mode": "tell"\n}'
    child.kill()


async def test_an_error_crosses_with_its_class_message_and_violations(environment: dict[str, str]) -> None:
    with pytest.raises(InvalidData, match=r"^line 3 is odd$") as caught:
        await ask(environment, "refuse")
    assert caught.value.violations == (FieldViolation(field="line[3]", description="odd"),)
    assert caught.value.retry_after_s == 2


async def test_the_file_of_an_error_crosses_and_gets_the_name_that_the_reader_knows(
    environment: dict[str, str],
) -> None:
    with pytest.raises(InvalidData, match=r"^a\.jsonl: line 3 is odd$") as caught:
        await ask(environment, "damaged")
    assert caught.value.file == Path("/data/rows/a.jsonl")
    words = {
        "/data/rows": "a.jsonl of notes: line 3 is odd",
        "/data": "rows/a.jsonl of notes: line 3 is odd",
        "/data/rows/a.jsonl": "notes: line 3 is odd",
        "/data/row": "a.jsonl: line 3 is odd",
    }
    assert {folder: caught.value.with_names({Path(folder): "notes"}).message for folder in words} == words
    assert caught.value.with_names({Path("/data/rows"): ""}).message == "a.jsonl: line 3 is odd"
    assert caught.value.with_names({Path("/data"): "all", Path("/data/rows"): "notes"}).message.startswith(
        "a.jsonl of n"
    )


@pytest.mark.parametrize(
    ("mode", "limits", "kind", "words"),
    [
        ("greedy", {"memory_bytes": 2**29}, OutOfMemory, "the talker ran out of memory"),
        *(
            (mode, {}, OutOfMemory, "the talker ran out of memory")
            for mode in ("refused", "torch", "library", "native")
        ),
        ("busy", {"cpu_s": 1, "wall_s": 60.0}, Stalled, "more than 1 s of processor time"),
        ("busy", {"wall_s": 1.0}, Stalled, "took longer than 1 s"),
        ("silent", {"silence_s": 1.0, "wall_s": 60.0}, Stalled, "reported nothing for 1 s"),
        ("crash", {}, WorkerCrashed, "the talker was ended by signal SIGSEGV"),
        ("killed", {}, WorkerDied, "the talker was killed by SIGKILL"),
        ("exit", {}, WorkerDied, "the talker ended with exit code 3"),
        ("gone", {}, IoFailed, r"the talker could not read or write a file: No such file or directory \(file\)"),
        ("defect", {}, WorkerFailed, "ZeroDivisionError: "),
        ("babble", {}, WorkerFailed, "not an event"),
        ("endless", {}, WorkerFailed, "more than 16777216 bytes"),
    ],
)
async def test_every_bad_end_has_its_error(
    environment: dict[str, str], mode: str, limits: dict[str, Any], kind: type[HorizonError], words: str
) -> None:
    with pytest.raises(HorizonError, match=words) as caught:
        await ask(environment, mode, **limits)
    assert type(caught.value) is kind
    assert (caught.value.retry_after_s is not None) == (mode == "killed"), (
        "only a child that was killed may be repeated"
    )


async def test_an_end_means_what_the_task_says(environment: dict[str, str]) -> None:
    slow = talker(environment, wall_s=1.0, means=True)
    for _ in range(2):
        with pytest.raises(InvalidSpec, match=r"^a slow talker$") as caught:
            await slow.run({"mode": "silent"})
        assert isinstance(caught.value.__cause__, Stalled)
        assert caught.value is not slow.meanings[Stalled]


async def test_a_stream_has_the_events_and_then_the_answer(environment: dict[str, str]) -> None:
    lines = [line async for line in talker(environment).stream({"mode": "tell"})]
    assert lines == [Message(level="info", text="ready"), Answer("told")]
    cut = talker(environment).stream({"mode": "tell and exit"})
    assert await anext(cut) == Message(level="info", text="ready"), "what came before the error"
    with pytest.raises(WorkerDied, match="exit code 3"):
        await anext(cut)


async def test_a_stream_that_is_closed_ends_the_child(environment: dict[str, str]) -> None:
    lines = talker(environment).stream({"mode": "silent"})
    first = await anext(lines)
    assert isinstance(first, Message)
    await lines.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(int(first.text), 0)


async def test_a_slow_reader_of_a_stream_gets_every_event() -> None:
    sent = [Message(level="info", text=str(i)) for i in range(1000)]

    async def work(on_event: OnEvent) -> str:
        for event in sent:
            await on_event(event)
        return "all"

    assert [line async for line in streamed(work)] == [*sent, Answer("all")]


async def test_a_child_that_does_not_exit_is_killed(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizon_server.children.child._EXIT_S", 0.2)
    pid = await ask(environment, "linger")
    assert not Path(f"/proc/{pid}").exists()


async def test_limits_and_signals_are_set_in_the_child(environment: dict[str, str]) -> None:
    assert await ask(environment, "limits", file_bytes=12345, oom_score_adj=900) == [12345, 0, 900]
    assert await ask(environment, "signals") == [True, True, True]


async def test_a_child_begins_when_its_limits_are_set_however_late_that_is(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    really_limit = child_module.limit

    def limit_late(pid: int, limits: Limits) -> None:
        time.sleep(2.0)  # a daemon that does not get the processor; a child starts in less
        really_limit(pid, limits)

    monkeypatch.setattr(child_module, "limit", limit_late)
    assert await ask(environment, "limits", file_bytes=12345, oom_score_adj=900) == [12345, 0, 900]


async def test_a_long_answer_arrives_whole(environment: dict[str, str]) -> None:
    assert await ask(environment, "large") == "\U0001f600" * 500_000


async def test_a_caller_who_is_cancelled_ends_the_child(environment: dict[str, str]) -> None:
    pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def on_event(event: WorkerLine) -> None:
        assert isinstance(event, Message)
        pid.set_result(int(event.text))

    child = await talker(environment).start({"mode": "silent"})
    task = asyncio.create_task(child.answer(on_event))
    number = await asyncio.wait_for(pid, 240)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


DAEMON = """
import asyncio, os
from horizon_server.children.child import ChildTask
async def main():
    async def on_event(event):
        print(event.text, flush=True)
    await ChildTask(module="talker", who="the talker", environment=os.environ).run({"mode": "silent"}, on_event)
asyncio.run(main())
"""


def test_a_child_ends_with_a_daemon_that_is_killed(environment: dict[str, str]) -> None:
    with subprocess.Popen([sys.executable, "-c", DAEMON], env=environment, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None
        try:
            watch = os.pidfd_open(int(daemon.stdout.readline()))
        finally:
            daemon.kill()  # else leaving the block would wait for a daemon that a failure has left
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    assert poll.poll(60_000), "the child is still alive"
    os.close(watch)


@pytest.mark.parametrize(
    ("code", "oom_killed", "words"),
    [(-9, True, "at the memory limit"), (-9, False, "SIGKILL"), (-11, False, "SIGSEGV"), (3, False, "exit code 3")],
)
def test_an_end_without_a_word_is_explained(code: int, oom_killed: bool, words: str) -> None:
    assert words in exit_reason(code, oom_killed=oom_killed)


def test_the_tail_of_a_log_is_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xff" + b"".join(b"line %d\n" % i for i in range(5000)))
    assert log_tail(tmp_path / "log", num_lines=2) == "line 4998\nline 4999"
    assert log_tail(tmp_path / "none") == ""


def test_lines_survive_the_way() -> None:
    for line in (Message(level="info", text="a\nb"), Answer({"x": [1, None]}), Answer(None)):
        assert decode_line(encode_line(line)) == line
    back = decode_line(encode_line(Failure(WorkerDied("gone", retry_after_s=1.0))))
    assert isinstance(back, Failure)
    assert (type(back.error), back.error.message, back.error.retry_after_s) == (WorkerDied, "gone", 1.0)
    for broken in (b"", b"[1]\n", b"{}\n", b'{"error": 3}\n', b'{"kind": "none"}\n', b"[" * 100_000):
        with pytest.raises(WorkerFailed, match="not an event"):
            decode_line(broken)
