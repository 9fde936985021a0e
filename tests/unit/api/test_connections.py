"""Connections of a port beyond the limits are shut down, the oldest first; those of known users have a limit of their
own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from structlog.testing import capture_logs

from horizon_server.api import connections
from horizon_server.api.connections import REPORT_EVERY_S, Connections

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[tuple[int, list[Pair]]]:
    """Port and six accepted connections, oldest first: the client's end and the server's. Two processors make them,
    where there are two."""
    processors = sorted(os.sched_getaffinity(0))
    with ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, processors)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        made = []
        for number in range(6):
            os.sched_setaffinity(0, {processors[number % min(2, len(processors))]})
            client = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=240))
            made.append((client, stack.enter_context(listener.accept()[0])))
        yield listener.getsockname()[1], made


def are_open(pairs: list[Pair]) -> list[bool]:
    found = []
    for client, _ in pairs:
        client.setblocking(False)
        try:
            found.append(client.recv(1) != b"")
        except BlockingIOError:
            found.append(True)
    return found


def test_the_newest_without_a_token_are_kept(pairs: tuple[int, list[Pair]]) -> None:
    port, made = pairs
    Connections(max_unknown=10, max_unknown_per_address=2).look(port)
    assert are_open(made) == [False] * 4 + [True] * 2


def test_those_of_a_user_have_a_limit_of_their_own(
    pairs: tuple[int, list[Pair]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_PER_USER", 3)
    port, made = pairs
    watched = Connections(max_unknown=1, max_unknown_per_address=1)
    for client, _ in made[:5]:
        host, port_of_client = client.getsockname()[:2]
        watched.identified(host, port_of_client, "ann")
    watched.look(port)
    assert are_open(made) == [False, False, True, True, True, True]


def test_one_line_a_minute_says_how_many_were_shut_down(pairs: tuple[int, list[Pair]]) -> None:
    port, _ = pairs
    now_s = 0.0
    watched = Connections(max_unknown=2, max_unknown_per_address=2, clock=lambda: now_s)
    with capture_logs() as lines:
        for _ in range(3):
            watched.look(port)
        assert [(line["connections"], line["one_from"]) for line in lines] == [(4, "127.0.0.1")]
        watched._max_unknown = 1
        watched.look(port)
        assert len(lines) == 1
        now_s = REPORT_EVERY_S
        watched.look(port)
        watched.look(port)
    assert [line["connections"] for line in lines] == [4, 1]
