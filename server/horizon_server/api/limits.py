"""How much of the daemon one address and one user may take: calls, changes, refusals and failed logins.

Thread: one event loop, which gRPC and HTTP share.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from horizon_server.errors import TooManyCalls

# A quarter of the gRPC server's calls: one user's watches cannot take them from all others. Event streams of REST count
# too.
MAX_CALLS_PER_USER = 256
# Calls of one user, on average and in a burst. More wait for their turn, and are refused where that would take longer
# than the patience.
CALLS_PER_S = 100.0
CALLS_BURST = 50
CALLS_PATIENCE_S = 2.0
# Calls of one user that change something.
CHANGES_PER_S = 10.0
CHANGES_BURST = 300
CHANGES_PATIENCE_S = 5.0
# Calls that need no token (health, reflection), open at the same time.
MAX_OPEN_CALLS = 64
MAX_OPEN_CALLS_PER_ADDRESS = 16
# How long one of them may last: watches of health are opened again.
OPEN_CALL_S = 600.0
# Calls of one address that were refused for their token. The answers to more are held back, for some calls at a time.
REFUSALS_PER_S = 20.0
REFUSALS_BURST = 100
HELD_S = 1.0
MAX_HELD = 128
# Rates are kept for this many keys at most: many addresses must not fill the memory.
MAX_KEYS = 10_000


# The calls of a connection all come from one place.
@functools.lru_cache(maxsize=1024)
def address_of(peer: str) -> str:
    """Return who is counted as one caller: an IPv4 address, or the /64 of an IPv6 address, which is one customer's or
    one machine's."""
    try:
        address = ipaddress.ip_address(place_of(peer)[0])
    except ValueError:
        return peer[:64]
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))


def place_of(peer: str) -> tuple[str, int]:
    """Return host and port of what gRPC writes as ipv4:1.2.3.4:5 or ipv6:%5B::1%5D:5; of a host alone, with port 0."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return peer, 0
    host, _, port = rest.rpartition(":")
    return host.replace("%5B", "").replace("%5D", "").strip("[]"), int(port) if port.isdigit() else 0


class Rate:
    """A rate with a burst, for each of many keys."""

    def __init__(self, per_s: float, burst: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s = per_s
        self._burst = burst
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}

    def has_room(self, key: str) -> bool:
        """Whether one more would not have to wait."""
        return self._level(key) >= 1.0

    def reserve(self, key: str, patience_s: float = 0.0) -> float | None:
        """Take one and return how many seconds the caller must wait first; None, and nothing is taken, when beyond the
        patience."""
        level = self._level(key) - 1.0
        if level < -patience_s * self._per_s:
            return None
        # The one that was used last is at the end.
        self._levels.pop(key, None)
        self._levels[key] = (level, self._clock())
        if len(self._levels) > MAX_KEYS:
            del self._levels[next(iter(self._levels))]
        return max(0.0, -level / self._per_s)

    def _level(self, key: str) -> float:
        level, at_s = self._levels.get(key, (self._burst, 0.0))
        return min(self._burst, level + (self._clock() - at_s) * self._per_s)


class CallLimits:
    """Counts the calls that are open, and paces those of each user."""

    def __init__(self, *, calls_per_s: float = CALLS_PER_S) -> None:
        self._num_of_user: Counter[str] = Counter()
        self._num_of_address: Counter[str] = Counter()
        self._calls = Rate(calls_per_s, max(CALLS_BURST, calls_per_s / 2))
        self._changes = Rate(CHANGES_PER_S, CHANGES_BURST)
        self._refusals = Rate(REFUSALS_PER_S, REFUSALS_BURST)
        self._num_held = 0

    @asynccontextmanager
    async def of_user(self, name: str, *, is_change: bool = False) -> AsyncIterator[None]:
        """Count the block as an open call of that user, and begin it when it is its turn.

        Raises:
            TooManyCalls: when the user has too many open, or makes them faster than they can be served in turn.
        """
        if self._num_of_user[name] >= MAX_CALLS_PER_USER:
            raise TooManyCalls(
                f"{name} has {MAX_CALLS_PER_USER} calls open, the maximum; end some watches, then call again",
                retry_after_s=1.0,
            )
        with _counted(self._num_of_user, name):
            await self._paced(self._calls, name, CALLS_PATIENCE_S, "calls")
            if is_change:
                await self._paced(self._changes, name, CHANGES_PATIENCE_S, "changes")
            yield

    async def _paced(self, rate: Rate, name: str, patience_s: float, what: str) -> None:
        wait_s = rate.reserve(name, patience_s)
        if wait_s is None:
            raise TooManyCalls(
                f"{name} makes too many {what} a second; call less often", retry_after_s=max(1.0, patience_s)
            )
        if wait_s:
            await asyncio.sleep(wait_s)

    @contextmanager
    def of_address(self, address: str) -> Iterator[None]:
        """Count the block as an open call without a token. Raises TooManyCalls."""
        if (
            self._num_of_address[address] >= MAX_OPEN_CALLS_PER_ADDRESS
            or self._num_of_address.total() >= MAX_OPEN_CALLS
        ):
            raise TooManyCalls(
                "too many calls without a token are open; end some, then call again", retry_after_s=HELD_S
            )
        with _counted(self._num_of_address, address):
            yield

    async def hold_back(self, address: str) -> None:
        """Let a caller that is refused all the time wait for the answer: it would call again at once."""
        if self._refusals.reserve(address) is None and self._num_held < MAX_HELD:
            self._num_held += 1
            try:
                await asyncio.sleep(HELD_S)
            finally:
                self._num_held -= 1


@contextmanager
def _counted(counts: Counter[str], key: str) -> Iterator[None]:
    counts[key] += 1
    try:
        yield
    finally:
        counts[key] -= 1
        if not counts[key]:
            del counts[key]
