"""Who presents a token: users take turns within their limits; wrong tokens are limited by address, logged and
audited."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from horizon_server.api.limits import CallLimits, Rate, address_of
from horizon_server.errors import TooManyCalls, Unauthenticated
from horizon_server.records.account import Principal
from horizon_server.records.audit import AuditEntry
from horizon_server.services.accounts import Accounts
from horizon_server.services.audit import Audit

_log = logging.getLogger(__name__)

# Wrong, expired or revoked tokens that are looked up, by address and in all.
FAILED_LOGINS_PER_S = 0.5
FAILED_LOGINS_BURST = 20
ALL_FAILED_LOGINS_PER_S = 2.0
ALL_FAILED_LOGINS_BURST = 200
_REPORTED_EVERY_S = 60.0


class Logins:
    """Finds the caller of a token. Thread: one event loop."""

    def __init__(
        self, accounts: Accounts, audit: Audit, limits: CallLimits, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._accounts = accounts
        self._audit = audit
        self._limits = limits
        self._clock = clock
        self._failures = Rate(FAILED_LOGINS_PER_S, FAILED_LOGINS_BURST, clock=clock)
        self._all_failures = Rate(ALL_FAILED_LOGINS_PER_S, ALL_FAILED_LOGINS_BURST, clock=clock)
        self._reported_s = float("-inf")
        self._num_unreported = 0

    @asynccontextmanager
    async def admitted(self, secret: str, peer: str, *, is_change: bool = False) -> AsyncIterator[Principal]:
        """Serve the block as a call of who presents `secret`, when it is their turn.

        Raises:
            Unauthenticated: when it is unknown, expired or revoked.
            TooManyCalls: when the user makes too many calls; or when it is not valid, and the address, or all together,
                have failed too often.
        """
        # Before the query that makes sure: one user's calls cost the others as little as possible.
        user, address = await self._accounts.user_of(secret), address_of(peer)
        if user is not None:
            async with self._limits.of_user(user, is_change=is_change):
                yield await self._authenticated(secret, address)
            return
        # Only wrong ones are limited by address: on a shared machine, others at the same address must not be locked
        # out.
        if not (self._failures.has_room(address) and self._all_failures.has_room("")):
            await self._report(address)
            raise TooManyCalls(
                f"too many wrong, expired or revoked tokens came from {address}; check the token, then try again",
                retry_after_s=1.0 / FAILED_LOGINS_PER_S,
            )
        principal = await self._authenticated(secret, address)
        async with self._limits.of_user(principal.name, is_change=is_change):
            yield principal

    async def _authenticated(self, secret: str, address: str) -> Principal:
        try:
            return await self._accounts.authenticate(secret)
        except Unauthenticated:
            self._failures.reserve(address)
            self._all_failures.reserve("")
            await self._report(address)
            raise

    async def _report(self, address: str) -> None:
        # A line for each would let a caller without a token fill the disk.
        self._num_unreported += 1
        now_s = self._clock()
        if now_s - self._reported_s < _REPORTED_EVERY_S:
            return
        number, self._num_unreported, self._reported_s = self._num_unreported, 0, now_s
        what = f"refused {number} wrong, expired or revoked tokens, the last from {address}"
        _log.warning("%s", what)
        await self._audit.write(
            AuditEntry(
                time_s=time.time(),
                user="",
                token_id="",
                origin=address,
                action="login",
                resource="",
                outcome="UNAUTHENTICATED",
                detail=what,
            )
        )
