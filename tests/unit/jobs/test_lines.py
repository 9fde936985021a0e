"""Lines of a worker are stored in their order while the next ones are read, and no more than a bound wait."""

from __future__ import annotations

import asyncio

import pytest

from horizon_server.errors import DiskFull
from horizon_server.events import Message
from horizon_server.jobs.lines import LineStore, Report


def lines(number: int) -> list[Report]:
    return [(Message(level="info", text=str(i)), i) for i in range(number)]


async def test_a_line_does_not_wait_for_the_one_before_until_too_many_do() -> None:
    stored: list[Report] = []
    may_store = asyncio.Event()

    async def store(line: Report) -> None:
        await may_store.wait()
        stored.append(line)

    said, store_lines = lines(7), LineStore(store, most=3)
    for line in said[:2]:
        await asyncio.wait_for(store_lines.add(line), 240)
    assert (stored, store_lines.is_full) == ([], False)
    third = asyncio.create_task(store_lines.add(said[2]))
    await asyncio.sleep(0)
    assert (third.done(), store_lines.is_full) == (False, True)
    may_store.set()
    await asyncio.wait_for(third, 240)
    assert (stored, store_lines.is_full) == (said[:3], False)
    for line in said[3:]:
        await store_lines.add(line)
    await asyncio.wait_for(store_lines.flush(), 240)
    assert stored == said


async def test_a_line_that_cannot_be_stored_ends_the_reading() -> None:
    async def store(line: Report) -> None:
        raise DiskFull("full")

    store_lines, [first, second] = LineStore(store), lines(2)
    await store_lines.flush()
    await store_lines.add(first)
    await asyncio.sleep(0)
    with pytest.raises(DiskFull):
        await store_lines.add(second)
    with pytest.raises(DiskFull):
        await store_lines.flush()
