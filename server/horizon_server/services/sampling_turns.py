"""Who may ask the child that answers prompts: calls for the model that it has join, one for another model waits until
these have ended, and those that come after it wait behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass

# Calls that the child has at a time; the others wait for one of them to end.
MAX_CALLS = 64
# And of these, of one user.
MAX_CALLS_OF_USER = 32
# For how long calls join those for the same model, before the node's jobs may have the memory.
MOST_TURN_S = 900.0
# In which the queue looks at the memory.
_PAUSE_S = 1.0


@dataclass(eq=False, kw_only=True)
class _Call:
    model: Hashable
    begins: asyncio.Future[None]


class SamplingTurns:
    """A turn is of one model, and of all calls that join meanwhile. Thread: belongs to one event loop."""

    def __init__(self, *, most_turn_s: float = MOST_TURN_S, pause_s: float = _PAUSE_S) -> None:
        """After a turn that calls have joined for `most_turn_s`, none begins for `pause_s`."""
        self._most_turn_s, self._pause_s = most_turn_s, pause_s
        self._of_user = defaultdict[str, asyncio.Semaphore](lambda: asyncio.Semaphore(MAX_CALLS_OF_USER))
        self._waiting: list[_Call] = []
        self._model: Hashable = None
        self._num_running = 0
        self._began_s = self._pause_end_s = float("-inf")

    def of_user(self, name: str) -> asyncio.Semaphore:
        """The turn among a user's own calls. To be taken first: what waits for it must not keep others waiting."""
        return self._of_user[name]

    @contextlib.asynccontextmanager
    async def of_model(self, model: Hashable) -> AsyncIterator[None]:
        """Wait for the turn of a model, and take part in it until the end of the block."""
        call = _Call(model=model, begins=asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._admit()
        try:
            await call.begins
            yield
        finally:
            if call in self._waiting:
                self._waiting.remove(call)
            else:
                self._leave()
            self._admit()

    def _leave(self) -> None:
        self._num_running -= 1
        loop = asyncio.get_running_loop()
        if self._num_running == 0 and loop.time() >= self._began_s + self._most_turn_s:
            self._pause_end_s = loop.time() + self._pause_s
            loop.call_at(self._pause_end_s, self._admit)

    def _admit(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if not self._waiting or (self._num_running == 0 and now_s < self._pause_end_s):
            return
        if self._num_running == 0:
            self._model, self._began_s = self._waiting[0].model, now_s
            # Those behind others too, so that the model is loaded once for all that want it now.
            joining = [call for call in self._waiting if call.model == self._model]
        elif now_s < self._began_s + self._most_turn_s:
            others = (index for index, call in enumerate(self._waiting) if call.model != self._model)
            joining = self._waiting[: next(others, len(self._waiting))]
        else:
            return
        for call in joining[: MAX_CALLS - self._num_running]:
            self._waiting.remove(call)
            self._num_running += 1
            if not call.begins.done():
                call.begins.set_result(None)
