"""Closes the connections of a port that would starve others, which neither gRPC nor asyncio can do while TLS is being
set up.

They are found among the process's own descriptors and shut down there: to their server that looks as if the client had
left.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from horizon_server.api.limits import address_of

# Connections whose calls were made with tokens of one user.
MAX_PER_USER = 64
LOOK_EVERY_S = 0.25
# One line of the log for all that were shut down meanwhile: who opens them chooses how many there are.
REPORT_EVERY_S = 60.0

log = structlog.get_logger(__name__)

Place = tuple[str, int]
"""Address and port of a connection's other end."""


@dataclass
class _Connection:
    inode: int
    descriptor: int
    place: Place


class Connections:
    """The connections of one port. Thread: one event loop."""

    def __init__(
        self, *, max_unknown: int, max_unknown_per_address: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Limit the connections on which no call has presented a valid token, in all and from one address."""
        self._max_unknown = max_unknown
        self._max_unknown_per_address = max_unknown_per_address
        # By inode, oldest first; None is a socket of something else.
        self._seen: dict[int, _Connection | None] = {}
        self._users: dict[Place, str] = {}
        self._clock = clock
        self._shut: set[int] = set()
        self._num_unreported = 0
        self._report_from = ""
        self._report_at_s = clock()

    def identified(self, host: str, port: int, user: str) -> None:
        """Note that a call on the connection from that place has presented a token of `user`."""
        self._users[_plain(host), port] = user

    async def run(self, port: int) -> None:
        """Look after the connections to that port until cancelled."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            self.look(port)

    def look(self, port: int) -> None:
        """Shut down the oldest connections beyond the limits."""
        found = self._found(port)
        places = {connection.place for connection in found}
        self._users = {place: user for place, user in self._users.items() if place in places}
        num_unknown: Counter[str] = Counter()
        num_of_user: Counter[str] = Counter()
        # The newest are kept: a client makes its first call at once, while a connection that has made none for long
        # never will.
        for connection in reversed(found):
            user = self._users.get(connection.place)
            if user is None:
                address = address_of(connection.place[0])
                num_unknown[address] += 1
                is_over = (
                    num_unknown[address] > self._max_unknown_per_address or num_unknown.total() > self._max_unknown
                )
            else:
                num_of_user[user] += 1
                is_over = num_of_user[user] > MAX_PER_USER
            # gRPC closes it a moment later.
            if is_over and connection.inode not in self._shut:
                self._shut.add(connection.inode)
                _shut_down(connection)
                self._num_unreported += 1
                self._report_from = connection.place[0]
        self._shut &= self._seen.keys()
        self._report()

    def _report(self) -> None:
        if not self._num_unreported or self._clock() < self._report_at_s:
            return
        log.warning(
            "too many connections at a time on which no call has presented a valid token, or of one user: the oldest "
            "were shut down",
            connections=self._num_unreported,
            one_from=self._report_from,
        )
        self._num_unreported = 0
        self._report_at_s = self._clock() + REPORT_EVERY_S

    def _found(self, port: int) -> list[_Connection]:
        """Return the open connections, oldest first; of those that came since the last look, the lowest descriptor is
        first."""
        present: dict[int, int] = {}
        for entry in Path("/proc/self/fd").iterdir():
            try:
                status = os.fstat(int(entry.name))
            except OSError:  # closed meanwhile
                continue
            if stat.S_ISSOCK(status.st_mode):
                present[status.st_ino] = int(entry.name)
        self._seen = {inode: seen for inode, seen in self._seen.items() if inode in present}
        # Not by inode: each processor counts its own, so those of connections that two threads accept do not tell which
        # came first.
        for inode in sorted(present.keys() - self._seen.keys(), key=lambda inode: present[inode]):
            self._seen[inode] = _looked_at(inode, present[inode], port)
        return [connection for connection in self._seen.values() if connection is not None]


def _looked_at(inode: int, descriptor: int, port: int) -> _Connection | None:
    with _opened(inode, descriptor) as own:
        if own is None or own.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            other = own.getpeername() if own.getsockname()[1] == port else None
        except OSError:  # one that listens, or whose other end has left
            return None
        return _Connection(inode, descriptor, (_plain(other[0]), other[1])) if other else None


@contextmanager
def _opened(inode: int, descriptor: int) -> Iterator[socket.socket | None]:
    """A second descriptor of a socket, for a block; None where the first one is another file by now."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        yield None
        return
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        yield None
        return
    with socket.socket(fileno=copy) as own:
        yield own


def _shut_down(connection: _Connection) -> None:
    with _opened(connection.inode, connection.descriptor) as own:
        if own is not None:
            with suppress(OSError):  # the client was faster
                own.shutdown(socket.SHUT_RDWR)


def _plain(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)
