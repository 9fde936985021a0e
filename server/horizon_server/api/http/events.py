"""A job's events as server-sent events: numbered, resumable, and ended at once when the daemon shuts down."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator

from sse_starlette import EventSourceResponse, ServerSentEvent

from horizon_server.api.http.bodies import finite
from horizon_server.api.http.problems import error_body
from horizon_server.api.open_streams import OpenStreams, closing
from horizon_server.errors import HorizonError
from horizon_server.events import JobEvent, kind_of

HEARTBEAT_S = 15
_RETRY_MS = 2000
_SEPARATOR = "\n"
"""Of lines. The page splits frames at an empty line; the library's default is CRLF."""


def event_response(events: AsyncIterator[JobEvent], streams: OpenStreams) -> EventSourceResponse:
    """Return the answer that streams `events`, with heartbeats in between."""
    return EventSourceResponse(
        event_frames(events, streams),
        ping=HEARTBEAT_S,
        ping_message_factory=lambda: ServerSentEvent(comment="heartbeat", sep=_SEPARATOR),
        sep=_SEPARATOR,
    )


async def event_frames(events: AsyncIterator[JobEvent], streams: OpenStreams) -> AsyncIterator[ServerSentEvent]:
    """Yield the stream's frames until the job has ended (a last `end` event), the daemon stops, or the caller is gone.

    An error, such as Draining, becomes a `problem` event with the same body as any other answer's.
    """
    yield ServerSentEvent(retry=_RETRY_MS, sep=_SEPARATOR)
    try:
        async with streams.one(), closing(events):
            # Ended by a timeout of this very task, so it must be the one that iterates: EventSourceResponse does.
            async for event in events:
                body = {"sequence": event.sequence, "time_s": event.time_s, **dataclasses.asdict(event.payload)}
                yield _frame(kind_of(event.payload), body, number=str(event.sequence))
        yield _frame("end", {})
    except HorizonError as error:
        yield _frame("problem", error_body(error).model_dump())


def _frame(event: str, body: object, *, number: str | None = None) -> ServerSentEvent:
    data = json.dumps(finite(body), separators=(",", ":"), allow_nan=False)
    return ServerSentEvent(data, event=event, id=number, sep=_SEPARATOR)
