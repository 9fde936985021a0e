"""Blocking file work off the event loop, without ever leaving it half way behind the caller's back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


async def in_thread(call: Callable[[], ResultT]) -> ResultT:
    """Run `call` in a thread. When the caller is cancelled, wait for the thread first: its file must not be touched by two.

    Thread: `call` runs in the loop's default executor.
    """
    work = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue
        if not work.cancelled():
            work.exception()
        raise
