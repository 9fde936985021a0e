"""Samples that wait, are drawn, or wait to be fetched. What one program asks at nearly the same time is drawn together.

They are in memory alone: after a restart of the daemon a program asks again, as it does for what was kept too long.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from horizon_server.errors import (
    DoesNotFit,
    Draining,
    HorizonError,
    InvalidData,
    InvalidSpec,
    RequestIdReused,
    TooManyCalls,
)
from horizon_server.records.sample import MAX_ANSWERS, MAX_PROMPTS

MAX_WAITING = 1024
"""Samples of a user that are not drawn yet."""
MAX_WAITING_BYTES = 64 * 2**20
"""Of their requests."""
MAX_FINISHED_BYTES = 64 * 2**20
"""Of a user's drawn samples: the oldest go."""
MAX_FINISHED = 4096
"""Drawn samples of a user that are kept."""
MAX_KEPT_S = 600.0
"""How long a drawn sample is kept."""
_GATHER_S = 0.02
"""How long the first of several waits for others: a program sends them one by one."""
_OF_ONE = (InvalidSpec, InvalidData, DoesNotFit)
"""Errors that may be due to one sample of several."""
_log = logging.getLogger(__name__)

Draw = Callable[[Sequence[Any]], Awaitable[Sequence[bytes]]]
"""Draws several requests of one group together."""


@dataclass(kw_only=True, eq=False)
class _Asked:
    user: str
    key: str
    request: Any
    num_bytes: int
    num_answers: int
    draw: Draw
    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: bytes = b""
    error: HorizonError | None = None
    is_wanted: bool = True


class WaitingSamples:
    """Thread: belongs to one event loop."""

    def __init__(self) -> None:
        self._of_user: defaultdict[str, dict[str, _Asked]] = defaultdict(dict)
        self._groups: dict[Hashable, deque[_Asked]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(
        self, user: str, key: str, request: Any, *, group: Hashable, num_bytes: int, num_answers: int, draw: Draw
    ) -> None:
        """Have a request drawn, with others of its group where several wait. The same one again is the one that is
        there.

        Args:
            group: of requests that may be drawn together, all of one user and token; None draws it alone.

        Raises:
            RequestIdReused: when another request has the key.
            TooManyCalls: when too many, or too large ones, of the user wait.
        """
        own = self._of_user[user]
        if (known := own.get(key)) is not None:
            if known.request != request:
                raise RequestIdReused("seq_id is that of another sample of this sampling session; count on")
            return
        waiting = [one for one in own.values() if not one.done.is_set()]
        if len(waiting) >= MAX_WAITING or sum(one.num_bytes for one in waiting) + num_bytes > MAX_WAITING_BYTES:
            raise TooManyCalls(
                f"{len(waiting)} samples of {user} wait; at most {MAX_WAITING}, and {MAX_WAITING_BYTES} bytes, may",
                retry_after_s=1.0,
            )
        asked = _Asked(user=user, key=key, request=request, num_bytes=num_bytes, num_answers=num_answers, draw=draw)
        own[key] = asked
        place: Hashable = object() if group is None else group
        if (queue := self._groups.get(place)) is not None:
            queue.append(asked)
        else:
            self._groups[place] = deque([asked])
            task = asyncio.create_task(self._draw_group(place, gathers=group is not None), name="tinker-samples")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def result(self, user: str, key: str, wait_s: float) -> bytes | None:
        """Return what was drawn; None where it is not within this time.

        Raises KeyError when there is no such sample, or not any more; and what drawing raised.
        """
        asked = self._of_user.get(user, {})[key]
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await asked.done.wait()
        if asked.error is not None:
            raise asked.error
        return asked.result if asked.done.is_set() else None

    def cancel(self, user: str, key: str) -> None:
        """Forget a sample. One that is being drawn is drawn to its end, and counts until then."""
        asked = self._of_user.get(user, {}).get(key)
        if asked is None:
            return
        asked.is_wanted = False
        queue = next((queue for queue in self._groups.values() if asked in queue), None)
        if queue is not None:
            queue.remove(asked)
            self._finish(asked, b"")
        elif asked.done.is_set():
            self._forget(user, key, asked)

    async def close(self) -> None:
        """End what is being drawn."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _draw_group(self, place: Hashable, *, gathers: bool) -> None:
        queue = self._groups[place]
        try:
            while queue:
                if gathers:
                    await asyncio.sleep(_GATHER_S)
                batch: list[_Asked] = []
                while queue and len(batch) < MAX_PROMPTS and _num_answers([*batch, queue[0]]) <= MAX_ANSWERS:
                    batch.append(queue.popleft())
                if batch:
                    await self._draw(batch)
                elif queue:  # one alone has too many answers: the sampler says so
                    await self._draw([queue.popleft()])
        finally:
            del self._groups[place]
            self._fail(queue, Draining("the daemon is shutting down"))

    async def _draw(self, batch: Sequence[_Asked]) -> None:
        try:
            results = await batch[0].draw([one.request for one in batch])
        except _OF_ONE as error:
            if len(batch) == 1:
                self._fail(batch, error)
                return
            for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
                await self._draw(half)
        except HorizonError as error:
            self._fail(batch, error)
        except asyncio.CancelledError:
            self._fail(batch, Draining("the daemon is shutting down"))
            raise
        except Exception:  # noqa: BLE001  # a bug must not leave the others waiting
            _log.exception("samples could not be drawn")
            self._fail(batch, HorizonError("something went wrong inside the daemon; its log says what"))
        else:
            for one, result in zip(batch, results, strict=True):
                self._finish(one, result)

    def _forget(self, user: str, key: str, asked: _Asked) -> None:
        own = self._of_user.get(user, {})
        if own.get(key) is asked:
            del own[key]
        if not own:
            self._of_user.pop(user, None)

    def _drop_oldest(self, user: str) -> None:
        """Keep no more drawn samples of a user than may be."""
        finished = [(key, one) for key, one in self._of_user.get(user, {}).items() if one.done.is_set()]
        num_bytes, num = sum(len(one.result) for _, one in finished), len(finished)
        for key, one in finished:
            if num_bytes <= MAX_FINISHED_BYTES and num <= MAX_FINISHED:
                break
            self._forget(user, key, one)
            num_bytes, num = num_bytes - len(one.result), num - 1

    def _finish(self, one: _Asked, result: bytes | HorizonError) -> None:
        if isinstance(result, HorizonError):
            one.error = result
        else:
            one.result = result
        one.done.set()
        if isinstance(result, Draining) or not one.is_wanted:
            self._forget(one.user, one.key, one)  # asked again, it is drawn
            return
        self._drop_oldest(one.user)
        asyncio.get_running_loop().call_later(MAX_KEPT_S, self._forget, one.user, one.key, one)

    def _fail(self, batch: Iterable[_Asked], error: HorizonError) -> None:
        for one in batch:
            self._finish(one, error)


def _num_answers(batch: Sequence[_Asked]) -> int:
    return sum(one.num_answers for one in batch)
