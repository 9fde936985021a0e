"""What another daemon may ask of this one at once."""

from __future__ import annotations

import asyncio

import pytest
from tests.component.fleet.conftest import Fleet

from horizon_server.api.box import server
from horizon_server.errors import TooManyCalls
from horizon_server.events import Message
from horizon_server.nodes.boxes import BoxCall
from horizon_server.records.account import NODE
from horizon_server.services.fleet.guest import MAX_EVENTS
from horizon_server.services.fleet.records import Asked


async def test_events_come_a_bounded_number_at_a_time(fleet: Fleet) -> None:
    await fleet.box.set_node("cordoned")
    job = await fleet.head.submit(fleet.ada, model="tiny", node="box2")
    async with asyncio.timeout(240):
        while (there := await fleet.box.parts.journal.store.get(job.job_id)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for number in range(MAX_EVENTS + 20 - there.last_sequence):
        await fleet.box.append(there, Message(level="info", text=f"{number}"))
    guest = fleet.box.services.guest
    (first,) = await guest.updates(NODE, Asked(after={job.job_id: 0}))
    assert [one.sequence for one in first.events] == [*range(1, MAX_EVENTS + 1)]
    (rest,) = await guest.updates(NODE, Asked(after={job.job_id: MAX_EVENTS}))
    assert len(rest.events) == 20
    # The head asks for more until it has all.
    async with asyncio.timeout(240):
        while (await fleet.head.job(job.job_id)).journal_line < MAX_EVENTS + 20:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_calls_of_other_daemons_are_bounded(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    client = fleet.head.services.jobs.boxes.clients["box2"]
    assert await client.ask(BoxCall(name="report", caller=NODE))
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 0)
    with pytest.raises(TooManyCalls, match="0 calls of other daemons are under way; call again"):
        await client.ask(BoxCall(name="report", caller=NODE))
