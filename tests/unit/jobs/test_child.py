"""Children: events up, orders down, gone at the end; and what is said of one that died without a word."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from horizon_server.children.child import STOP, Child, exit_reason, log_tail
from horizon_server.errors import WorkerFailed
from horizon_server.events import AttemptEnded, Message
from horizon_server.settings import child_environment

TALKER = """
import argparse, os, sys
parser = argparse.ArgumentParser(); parser.add_argument("mode"); parser.add_argument("--events-fd", type=int)
arguments = parser.parse_args()
def send(line): os.write(arguments.events_fd, line.encode() + b"\\n")
print("hello from the log", flush=True)
if arguments.mode == "echo":
    send('{"kind":"message","level":"info","text":"ready"}')
    order = sys.stdin.readline().strip()
    send('{"kind":"ended","outcome":"stopped","message":"%s"}' % order)
elif arguments.mode == "babble":
    send("Traceback (most recent call last):")
elif arguments.mode == "endless":
    os.write(arguments.events_fd, b"x" * 300000)
elif arguments.mode == "sleep":
    sys.stdin.readline()
    send('{"kind":"ended","outcome":"stopped","message":"eof"}')
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "talker.py").write_text(TALKER)
    return child_environment() | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


async def start(tmp_path: Path, environment: dict[str, str], mode: str) -> Child:
    return await Child.start("talker", [mode], log=tmp_path / "log", environment=environment)


async def test_events_come_up_orders_go_down_output_goes_to_the_log(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    child = await start(tmp_path, environment, "echo")
    seen = []
    async for line in child.lines():
        seen.append(line)
        if isinstance(line, Message):
            child.tell(STOP)
    assert seen == [Message(level="info", text="ready"), AttemptEnded(outcome="stopped", message="stop")]
    assert await child.wait() == 0
    assert log_tail(tmp_path / "log") == "hello from the log"
    child.tell(STOP)
    child.kill()


@pytest.mark.parametrize(("mode", "words"), [("babble", "no event"), ("endless", "more than 262144 bytes")])
async def test_what_is_no_event_is_refused(tmp_path: Path, environment: dict[str, str], mode: str, words: str) -> None:
    child = await start(tmp_path, environment, mode)
    with pytest.raises(WorkerFailed, match=words):
        async for _ in child.lines():
            pass
    child.kill()
    await child.wait()


async def test_killing_ends_it(tmp_path: Path, environment: dict[str, str]) -> None:
    child = await start(tmp_path, environment, "sleep")
    child.kill()
    assert await child.wait() == -9


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
