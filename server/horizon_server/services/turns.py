"""Limits how many calls of one user are under way, so that no user's calls keep those of others waiting for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from horizon_server.errors import TooManyCalls

AT_ONCE = 2
"""Half of the database's readers (`db.database.NUM_READERS`): two users at their bound still leave every other one a turn."""
MAX_CALLS = 64
"""Of these `AT_ONCE` run and the others wait. Fifty scripts that poll every second stay far below it: a read takes milliseconds."""


@dataclass
class _User:
    turns: asyncio.Semaphore
    num_calls: int = field(default=0)


class UserTurns:
    """Gives every user's calls their turns.

    Thread: belongs to one event loop.
    """

    def __init__(self, *, at_once: int = AT_ONCE, max_calls: int = MAX_CALLS) -> None:
        self._at_once = at_once
        self._max_calls = max_calls
        self._users: dict[str, _User] = {}

    @asynccontextmanager
    async def of(self, name: str) -> AsyncIterator[None]:
        """Hold one turn of that user for the block.

        Raises:
            TooManyCalls: when too many of their calls are under way already.
        """
        user = self._users.setdefault(name, _User(asyncio.Semaphore(self._at_once)))
        if user.num_calls >= self._max_calls:
            raise TooManyCalls(
                f"{name} has {user.num_calls} calls under way, the maximum; wait for their answers, then call again",
                retry_after_s=1.0,
            )
        user.num_calls += 1
        try:
            async with user.turns:
                yield
        finally:
            user.num_calls -= 1
            if user.num_calls == 0:
                del self._users[name]
