"""A job's events as server-sent events: numbered, resumable, with heartbeats, and gone at once when the daemon closes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator

from horizon_server.api.http.bodies import finite
from horizon_server.api.http.problems import error_body
from horizon_server.errors import HorizonError, InvalidSpec
from horizon_server.events import JobEvent, kind_of

HEARTBEAT_S = 15.0
_RETRY_MS = 2000


def resume_after(header: str | None, query: str | None) -> int:
    """Return the event number to go on after: the browser's Last-Event-ID header, else the `after` parameter, else 0.

    Raises:
        InvalidSpec: when it is no whole number from 0 on.
    """
    name, given = ("Last-Event-ID", header) if header else ("after", query)
    if not given:
        return 0
    if given.isascii() and given.isdigit() and len(given) <= 18:
        return int(given)
    sentence = f"{name} is {given!r:.40}; it must be the number of the last event received, a whole number from 0 on"
    raise InvalidSpec.of(name, sentence)


async def event_lines(
    events: AsyncIterator[JobEvent], closing: asyncio.Event, *, heartbeat_s: float = HEARTBEAT_S
) -> AsyncIterator[bytes]:
    """Yield the stream's frames until the job has ended (a last `end` event), the daemon closes, or the caller goes away.

    A refusal on the way, such as Draining, becomes a `problem` event with the error catalogue's body.
    """
    yield f"retry: {_RETRY_MS}\n\n".encode()
    news = asyncio.create_task(_next(events))
    closed = asyncio.create_task(closing.wait())
    try:
        while True:
            await asyncio.wait({news, closed}, timeout=heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
            if not news.done():
                if closed.done():
                    return
                yield b": heartbeat\n\n"
                continue
            got = news.result()
            if not isinstance(got, JobEvent):
                yield _last_frame(got)
                return
            # Asked for before the yield: whoever cancels finds the source inside a task, and cancelling that closes it.
            news = asyncio.create_task(_next(events))
            yield event_frame(got)
    finally:
        news.cancel()
        closed.cancel()


def event_frame(event: JobEvent) -> bytes:
    """Return one event as a frame: its number is the id, its kind the event's name."""
    body = {"sequence": event.sequence, "time_s": event.time_s, **dataclasses.asdict(event.payload)}
    return _frame(f"id: {event.sequence}\nevent: {kind_of(event.payload)}", body)


async def _next(events: AsyncIterator[JobEvent]) -> JobEvent | HorizonError | None:
    try:
        return await anext(events, None)
    except HorizonError as error:
        return error


def _last_frame(got: HorizonError | None) -> bytes:
    if got is None:
        return _frame("event: end", {})
    return _frame("event: problem", error_body(got).model_dump())


def _frame(head: str, body: object) -> bytes:
    data = json.dumps(finite(body), separators=(",", ":"), allow_nan=False)
    return f"{head}\ndata: {data}\n\n".encode()
