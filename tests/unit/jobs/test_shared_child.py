"""A child that answers several calls at the same time, from the daemon's side: whose lines are whose, who waits for
whom, and how calls and the child end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from horizon_server.children.calls import (
    Ask,
    Begun,
    Continue,
    Hold,
    Leave,
    Order,
    decode_call_line,
    decode_order,
    encode_call_line,
    encode_order,
)
from horizon_server.children.child import ChildTask, Limits
from horizon_server.children.entry import Answer, Failure
from horizon_server.children.shared import _MOST_WAITING, SharedChild
from horizon_server.errors import DoesNotFit, HorizonError, InvalidData, OutOfMemory, Stalled, WorkerDied, WorkerFailed
from horizon_server.events import Message
from horizon_server.settings import child_environment

TALKER = """
import sys
from horizon_server.children.calls import Ask, Begun, CallPipe, Continue, Hold, Leave
from horizon_server.children.entry import Answer, Failure, serve
from horizon_server.errors import InvalidData, OutOfMemory
from horizon_server.events import Message

def work(request, events):
    pipe = CallPipe(sys.stdin.buffer, events)
    running, held, left = {}, set(), []
    while (orders := pipe.orders(wait=not set(running) - held)) is not None:
        for order in orders:
            if isinstance(order, Leave):
                left.append(order.call)
                running.pop(order.call, None)
                continue
            if isinstance(order, Hold | Continue):
                (held.add if isinstance(order, Hold) else held.discard)(order.call)
                continue
            what = order.request
            if what == "die":
                raise OutOfMemory("there is no more")
            if what == "silent":
                continue
            pipe.send(order.call, Begun())
            if what == "bad":
                pipe.send(order.call, Failure(InvalidData("line 3 is odd")))
            elif what == "odd line":
                events.write(b"what?\\n")
            elif what == "begun":
                pass
            elif what == "left":
                pipe.send(order.call, Answer(left))
            elif what == "greedy":
                pipe.send(order.call, Failure(OutOfMemory("no room for this one")))
            else:
                running[order.call] = [order.user, 0, what]
        for call in [call for call in running if call not in held]:
            user, number, most = running[call]
            pipe.send(call, Message(level="info", text=f"{user} {number}"))
            running[call][1] += 1
            if number + 1 == most:
                del running[call]
                pipe.send(call, Answer([user, most]))

if __name__ == "__main__":
    sys.exit(serve(work, who="the talker"))
"""

Make = Callable[..., Awaitable[SharedChild]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Make]:
    (tmp_path / "call_talker.py").write_text(TALKER)
    environment = {**child_environment(), "PYTHONPATH": ":".join([str(tmp_path), *sys.path])}
    made: list[SharedChild] = []

    async def started(*, limit_s: float = 600.0) -> SharedChild:
        task = ChildTask(
            module="call_talker",
            who="the talker",
            environment=environment,
            limits=Limits(),
            meanings={OutOfMemory: DoesNotFit("it takes more than planned")},
        )
        made.append(SharedChild(await task.start({}), limit_s=limit_s))
        return made[-1]

    yield started
    for child in made:
        await child.end()


async def answer(child: SharedChild, request: Any, user: str = "ada") -> tuple[list[str], Any]:
    texts: list[str] = []
    async for line in child.lines(user, request):
        if isinstance(line, Answer):
            return texts, line.value
        assert isinstance(line, Message)
        texts.append(line.text)
    raise AssertionError("no answer")


async def test_every_call_gets_its_own_lines_and_answer(start: Make) -> None:
    child = await start()
    found = await asyncio.gather(*(answer(child, 20 + n, f"user{n}") for n in range(8)))
    for n, (texts, value) in enumerate(found):
        assert value == [f"user{n}", 20 + n]
        assert texts == [f"user{n} {number}" for number in range(20 + n)]
    assert child.has_begun


async def test_a_call_that_fails_fails_alone(start: Make) -> None:
    child = await start()
    long = child.lines("ada", 10**9)
    await anext(long)
    with pytest.raises(InvalidData, match="line 3 is odd"):
        await answer(child, "bad")
    # What the task means by an error holds for that of one call too.
    with pytest.raises(DoesNotFit, match="takes more than planned"):
        await answer(child, "greedy")
    assert isinstance(await anext(long), Message)
    assert child.is_running
    await long.aclose()


async def test_a_caller_who_leaves_drops_the_own_call(start: Make) -> None:
    child = await start()
    long = child.lines("ada", 10**9)
    await anext(long)
    await long.aclose()
    assert (await answer(child, "left"))[1] == [1]
    # Of a call that has ended nobody is told that it was left.
    await answer(child, 3)
    assert (await answer(child, "left"))[1] == [1]


async def test_a_caller_who_does_not_read_holds_up_no_other_and_is_held(start: Make) -> None:
    child = await start()
    slow = child.lines("ada", 10**9)
    await anext(slow)
    (call,) = child._calls.values()
    waiting = [-1, 0]
    async with asyncio.timeout(240):
        # Until no further line comes for it, while another one is read.
        while waiting[-1] != waiting[-2]:
            assert len((await answer(child, 100, "bob"))[0]) == 100
            waiting.append(call.lines.qsize() if call.is_held else waiting[-1] + 1)
    assert waiting[-1] >= _MOST_WAITING
    # All that came are read, and then more come.
    for number in range(1, waiting[-1] + 3 * _MOST_WAITING):
        line = await anext(slow)
        assert isinstance(line, Message) and line.text == f"ada {number}"
    await slow.aclose()


async def test_what_ends_the_child_ends_all_its_calls_with_the_same_error(start: Make) -> None:
    for end, kind, words in (
        ("kill", WorkerDied, "the talker was killed by SIGKILL"),
        ("die", DoesNotFit, "more than planned"),
        ("odd line", WorkerFailed, "is of no call"),
    ):
        child = await start()
        asked = [asyncio.create_task(answer(child, "begun")) for _ in range(3)]
        late = child.lines("ada", 10**9)
        await anext(late)
        if end == "kill":
            os.kill(child.pid, signal.SIGKILL)
        else:
            asked.append(asyncio.create_task(answer(child, end)))
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert {type(error) for error in errors} == {kind}
        assert len({str(error) for error in errors}) == 1 and words in str(errors[0])
        assert len({id(error) for error in errors}) == len(errors)
        with pytest.raises(kind):
            async for _ in late:
                pass
        assert not child.is_running
        with pytest.raises(kind):
            await answer(child, 1)
        await child.end()
        assert not Path(f"/proc/{child.pid}").exists()


def lower_limit(child: SharedChild) -> None:
    """Below what the only call has taken already."""
    (call,) = child._calls.values()
    assert call.begun_s is not None
    child._limit_s = 1e-6
    child._look_at(call)
    child._limit_s = 600.0


async def test_a_call_may_take_so_long_once_it_has_begun(start: Make) -> None:
    child = await start()
    asked = asyncio.create_task(answer(child, "begun"))
    async with asyncio.timeout(240):
        while not child.has_begun:  # noqa: ASYNC110  # nothing announces it
            await asyncio.sleep(0.01)
    lower_limit(child)
    with pytest.raises(Stalled, match=r"the talker took longer than 1e-06 s"):
        await asked
    assert child.is_running
    assert (await answer(child, "left"))[1] == [1]


async def test_a_call_that_never_ends_is_ended_though_its_caller_does_not_read(start: Make) -> None:
    child = await start()
    slow = child.lines("ada", 10**9)
    await anext(slow)
    lower_limit(child)
    assert not child._calls
    with pytest.raises(Stalled):
        async for _ in slow:
            pass
    assert child.is_running


async def test_a_child_that_is_silent_while_a_call_waits_is_ended(start: Make) -> None:
    child = await start(limit_s=0.1)
    with pytest.raises(Stalled):
        await answer(child, "silent")
    assert not child.is_running


async def test_nothing_is_left_of_a_child_that_is_ended(start: Make) -> None:
    child = await start()
    asked = asyncio.create_task(answer(child, "begun"))
    await answer(child, 1)
    await child.end()
    with pytest.raises(HorizonError):
        await asked
    assert not child._calls
    with contextlib.suppress(ProcessLookupError):
        os.kill(child.pid, 0)
        raise AssertionError("it is there")


@pytest.mark.parametrize(
    "order",
    [Ask(call=3, user="ada", request={"a": [1, "\u4e2d"]}), Leave(call=1), Hold(call=10**12), Continue(call=0)],
)
def test_an_order_reaches_the_child_whole(order: Order) -> None:
    assert decode_order(encode_order(order)) == order


def test_a_line_says_whose_it_is() -> None:
    for line in (Begun(), Answer({"a": 1}), Message(level="info", text="7 {")):
        assert decode_call_line(encode_call_line(12, line)) == (12, line)
    number, failure = decode_call_line(encode_call_line(3, Failure(InvalidData("odd"))))
    assert number == 3 and isinstance(failure, Failure) and failure.error.message == "odd"


@pytest.mark.parametrize(
    "line", [b"\n", b"hello\n", b"-1 {}\n", b"1 \n", b"1 {\n", b"9" * 5000 + b" {}\n", b"\xb2 {}\n"]
)
def test_a_line_that_no_child_writes_is_refused(line: bytes) -> None:
    with pytest.raises(WorkerFailed):
        decode_call_line(line)
