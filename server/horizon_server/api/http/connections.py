"""Bounds on HTTP connections, which uvicorn does not have: how many there are, and how long a client may take to send a
request."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from horizon_server.api.connections import Connections
from horizon_server.api.limits import address_of

# In all; more are closed at once. Those that have shown no valid token: from one address, and in all; then the oldest
# is closed.
MAX_CONNECTIONS = 320
MAX_UNKNOWN_PER_ADDRESS = 128
MAX_UNKNOWN = 192
# How long the head of a request may take, and how long a connection may do without a valid token.
HEAD_S = 10.0
UNKNOWN_S = 60.0
# How long a connection may wait for its next request.
KEEP_ALIVE_S = 5
# Accepted in one go: fewer than may be without a token, so that a request is read before others push its connection
# out.
ACCEPTED_AT_ONCE = 32
# Connections that the kernel keeps until they are accepted.
BACKLOG = 1024
# The key of a connection in the scope of its requests.
SCOPE_KEY = "horizon.connection"


class Bounds:
    """The open connections of one server, oldest first. Thread: one event loop."""

    def __init__(self) -> None:
        # For those that are still setting up TLS, of which uvicorn hears nothing.
        self.watched = Connections(max_unknown=MAX_UNKNOWN, max_unknown_per_address=MAX_UNKNOWN_PER_ADDRESS)
        self._open: dict[BoundedProtocol, str] = {}

    def add(self, connection: BoundedProtocol, address: str) -> bool:
        """Count a new connection. Return False when there are too many, also after the oldest one without a token was
        closed."""
        unknown = [one for one in self._open if not one.is_known]
        of_address = [one for one in unknown if self._open[one] == address]
        for oldest in (
            *of_address[: max(0, len(of_address) - MAX_UNKNOWN_PER_ADDRESS + 1)],
            *unknown[: max(0, len(unknown) - MAX_UNKNOWN + 1)],
        ):
            oldest.abort()
        if len(self._open) >= MAX_CONNECTIONS:
            return False
        self._open[connection] = address
        return True

    def remove(self, connection: BoundedProtocol) -> None:
        """Forget a connection that was closed."""
        self._open.pop(connection, None)


class BoundedProtocol(H11Protocol):
    """One connection. `is_known` says whether a request has shown a valid token."""

    def __init__(self, *args: Any, bounds: Bounds, **values: Any) -> None:
        super().__init__(*args, **values)
        self.is_known = False
        self._bounds = bounds
        self._timers: list[asyncio.TimerHandle] = []
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        """Take the connection, or close it where there are too many."""
        super().connection_made(transport)
        if not self._bounds.add(self, address_of(self.client[0] if self.client else "")):
            self.abort()
            return
        self._timers = [self.loop.call_later(UNKNOWN_S, self._end_if_unknown)]
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        self._bounds.remove(self)
        for timer in (*self._timers, self._head_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle what has arrived; a whole head stops its clock."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            # The task of the request runs after this: it finds what belongs to it.
            cast("dict[str, Any]", self.cycle.scope)[SCOPE_KEY] = self
            if self._head_timer is not None:
                self._head_timer.cancel()

    def on_response_complete(self) -> None:
        """Start the clock of the next request: uvicorn's own stops at its first byte."""
        self._expect_head()
        super().on_response_complete()

    def identified(self, user: str) -> None:
        """Note that a request has shown a valid token of `user`."""
        self.is_known = True
        if self.client is not None:
            self._bounds.watched.identified(*self.client, user)

    def abort(self) -> None:
        """Close without an answer; a client that does not read would keep the connection open otherwise."""
        self._bounds.remove(self)
        self.transport.abort()

    def _expect_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        self._head_timer = self.loop.call_later(HEAD_S, self.abort)

    def _end_if_unknown(self) -> None:
        if not self.is_known:
            self.abort()
