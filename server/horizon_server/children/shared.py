"""A child that answers several calls at the same time, from the daemon's side: each call has its own lines, end and
limit.

A caller who leaves or reads slowly is of no concern to the others: the child is told to drop the call, or to compute
nothing for it meanwhile. What ends the child ends all its calls, each with the same error.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from horizon_server.children.calls import Ask, Begun, CallLine, Continue, Hold, Leave, decode_call_line, encode_order
from horizon_server.children.child import LONG_LINE_BYTES, Child
from horizon_server.children.entry import Answer, Failure
from horizon_server.errors import HorizonError, Stalled, WorkerFailed
from horizon_server.events import WorkerLine

# Lines of a call that wait for its reader, from which on nothing is computed for it.
_MOST_WAITING = 256


@dataclass(eq=False, kw_only=True)
class _Call:
    number: int
    sent_s: float
    begun_s: float | None = None
    is_held: bool = False
    lines: asyncio.Queue[CallLine] = field(default_factory=asyncio.Queue)
    timer: asyncio.TimerHandle | None = None


class SharedChild:
    """One running child, whose module serves `CallPipe`. Thread: belongs to one event loop."""

    def __init__(self, child: Child, *, limit_s: float) -> None:
        """A call may take `limit_s` from when the child has begun it; and as long the child may be silent when a call
        waits to be begun."""
        self._child, self._limit_s = child, limit_s
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._heard_s = 0.0
        self._error: HorizonError | None = None
        self.has_begun = False
        """Whether it has begun a call: it has loaded what it needs for all."""
        self._reading = asyncio.create_task(self._read(), name="lines of a child")

    @property
    def pid(self) -> int:
        """The process."""
        return self._child.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, as far as the daemon knows."""
        return self._error is None and self._child.is_running

    async def lines(self, user: str, request: Any) -> AsyncGenerator[WorkerLine | Answer, None]:
        """Ask, and yield the events of this call as they come, then its answer. Closing the generator drops the call.

        Raises:
            HorizonError: that the child reported of this call, or that ended the child, as `Child.answer` does.
            Stalled: when it exceeds its limit.
        """
        if self._error is not None:
            raise self._child.meant(copy.copy(self._error))
        call = _Call(number=next(self._numbers), sent_s=self._now_s())
        self._calls[call.number] = call
        self._look_at(call)
        try:
            await self._child.send(encode_order(Ask(call=call.number, user=user, request=request)))
            while True:
                line = await call.lines.get()
                if call.is_held and call.lines.qsize() <= _MOST_WAITING // 2:
                    call.is_held = False
                    self._tell(call, Continue(call=call.number))
                match line:
                    case Answer():
                        yield line
                        return
                    case Failure(error):
                        raise self._child.meant(error)
                    case Begun():
                        pass
                    case event:
                        yield event
        finally:
            self._tell(call, Leave(call=call.number))
            self._forget(call)

    async def end(self) -> None:
        """End it at once, and return when it is gone."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        self._fail_all(WorkerFailed("the child was ended"))
        await self._child.end()

    async def _read(self) -> None:
        """Hand every line to its call, and the end to all. Never waits for a caller."""
        try:
            error = await self._read_to_the_end()
        except HorizonError as failure:
            error = failure
        self._fail_all(error)
        self._child.kill()

    async def _read_to_the_end(self) -> HorizonError:
        while raw := await self._child.read_line():
            # A long line is parsed in a thread: it would hold up the event loop.
            is_long = len(raw) >= LONG_LINE_BYTES
            number, line = await asyncio.to_thread(decode_call_line, raw) if is_long else decode_call_line(raw)
            self._heard_s = self._now_s()
            if number is None:
                return line.error if isinstance(line, Failure) else WorkerFailed("the child ended with no reason")
            self.has_begun |= isinstance(line, Begun)
            # Of a call that has been left, lines may still be on their way.
            if (call := self._calls.get(number)) is not None:
                self._hand(call, line)
        return await self._child.death()

    def _hand(self, call: _Call, line: CallLine) -> None:
        call.lines.put_nowait(line)
        if isinstance(line, Begun):
            call.begun_s = self._heard_s
        elif isinstance(line, Answer | Failure):
            self._forget(call)
        elif not call.is_held and call.lines.qsize() >= _MOST_WAITING:
            call.is_held = True
            self._tell(call, Hold(call=call.number))

    def _tell(self, call: _Call, order: Hold | Continue | Leave) -> None:
        if call.number in self._calls:
            self._child.write(encode_order(order))

    def _forget(self, call: _Call) -> None:
        self._calls.pop(call.number, None)
        if call.timer is not None:
            call.timer.cancel()

    def _look_at(self, call: _Call) -> None:
        """End a call that has taken too long, or the child where it has not answered at all; else look again later."""
        now_s = self._now_s()
        since_s = max(self._heard_s, call.sent_s) if call.begun_s is None else call.begun_s
        if (left_s := since_s + self._limit_s - now_s) > 0:
            call.timer = asyncio.get_running_loop().call_later(left_s, self._look_at, call)
            return
        error = Stalled(f"{self._child.who} took longer than {self._limit_s:g} s")
        if call.begun_s is None:
            self._fail_all(error)
            self._child.kill()
        else:
            self._tell(call, Leave(call=call.number))
            self._forget(call)
            call.lines.put_nowait(Failure(error))

    def _fail_all(self, error: HorizonError) -> None:
        self._error = self._error or error
        for call in list(self._calls.values()):
            self._forget(call)
            # A copy for each: an error that is raised keeps where that was.
            call.lines.put_nowait(Failure(copy.copy(self._error)))

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
