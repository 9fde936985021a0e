"""Blocking file work off the event loop, which is always over when its caller continues, cancelled or not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


async def in_thread(call: Callable[[], ResultT]) -> ResultT:
    """Run `call` in a thread. When the caller is cancelled, wait for the thread first: its file must not be touched by two.

    Thread: `call` runs in the loop's default executor.
    """
    return await to_the_end(asyncio.to_thread(call))


async def to_the_end(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Run `work`. When the caller is cancelled, however often, let it end first."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError:
                continue
        if not task.cancelled():
            task.exception()
        raise
