"""Keeps a stream of answers going across cuts of the connection. Knows nothing of what flows; the caller keeps the place to go on from."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from horizon_client.connection import Backoff, RetryPolicy
from horizon_client.errors import HorizonClientError, Unavailable
from horizon_client.progress import OnNotice

AnswerT = TypeVar("AnswerT")


async def followed(
    reopen: Callable[[], AsyncIterator[AnswerT]],
    is_over: Callable[[], Awaitable[bool]],
    *,
    retry: RetryPolicy,
    on_notice: OnNotice,
    what: str,
) -> AsyncIterator[AnswerT]:
    """Yield the answers of the stream that `reopen` opens; after a cut open it again, with growing waits.

    A stream that ends well before `is_over` says so (a daemon that drains) counts as cut.

    Raises:
        Unavailable: when nothing came for as long as `retry` allows.
    """
    backoff = Backoff(retry)
    while True:
        try:
            async with aclosing(reopen()) as answers:  # type: ignore[type-var]
                async for answer in answers:
                    backoff.succeeded()
                    yield answer
            if await is_over():
                return
            problem: HorizonClientError = Unavailable("the server ended the stream early")
        except Unavailable as error:
            problem = error
        wait_s = backoff.wait_s(problem)
        if wait_s is None:
            raise problem
        on_notice(f"{what} was cut ({problem.message}); going on in {wait_s:.1f} s")
        await asyncio.sleep(wait_s)
