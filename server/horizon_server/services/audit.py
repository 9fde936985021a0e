"""The audit log: every change, from before it is made, carried out or refused; and failed logins."""

from __future__ import annotations

import logging
import os
import pwd
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from horizon_server.db.audit import AuditStore
from horizon_server.db.database import Database
from horizon_server.errors import HorizonError
from horizon_server.records.account import Principal
from horizon_server.records.audit import UNKNOWN, AuditEntry

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

# About 150 MB. The oldest are deleted first, whatever their age.
MAX_ENTRIES = 500_000
# Of one user: refused changes that are written one by one in a minute. More are counted, and written as one entry.
MAX_REFUSED_A_MINUTE = 30
_MINUTE_S = 60.0
# How a call ended that has begun a change and may have made it.
_PERHAPS_MADE = frozenset({"OK", "CANCELLED", HorizonError.reason})
# Without a login uid, such as in a container.
_NO_LOGIN = 2**32 - 1


class Audit(AuditStore):
    """Writes the audit log of a running daemon."""

    def __init__(self, database: Database, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(database)
        self._clock = clock
        self._refused: dict[str, tuple[float, int]] = {}

    async def begin(
        self, caller: Principal, *, origin: str, action: str, resource: str, detail: str = ""
    ) -> AuditEntry:
        """Write that `caller` is about to change `resource`, and return the entry for `end`."""
        return await self.write(
            AuditEntry(
                time_s=self._clock(),
                user=caller.name,
                token_id=caller.token_id,
                origin=origin,
                action=action,
                resource=resource,
                outcome=UNKNOWN,
                detail=detail,
            )
        )

    async def end(self, entry: AuditEntry) -> None:
        """Write how a change ended that has begun with an entry."""
        is_written = entry.number != 0
        if not (is_written and entry.outcome in _PERHAPS_MADE):
            since_s, num_refused = self._refused.get(entry.user, (0.0, 0))
            if self._clock() - since_s >= _MINUTE_S:
                since_s, num_refused, left_out = self._clock(), 0, max(0, num_refused - MAX_REFUSED_A_MINUTE)
                more = f" ({left_out} earlier refusals were left out)" if left_out else ""
                entry = replace(entry, detail=entry.detail + more)
            self._refused[entry.user] = (since_s, num_refused + 1)
            if num_refused >= MAX_REFUSED_A_MINUTE:
                if is_written:
                    await self._reported(self.remove(entry.number), entry)
                return
        if is_written:
            changes = {"resource": entry.resource, "outcome": entry.outcome, "detail": entry.detail}
            await self._reported(self.change(entry.number, **changes), entry)
        else:
            await self.write(entry)

    async def write(self, entry: AuditEntry) -> AuditEntry:
        """Write an entry and return it with its number, which is 0 where the database cannot be written: the log then
        has it."""
        number = await self._reported(self.insert(entry), entry)
        return replace(entry, number=number or 0)

    async def _reported(self, writing: Awaitable[Result], entry: AuditEntry) -> Result | None:
        try:
            return await writing
        except HorizonError as error:
            # A full disk must not keep users from deleting.
            _log.error("the audit log cannot be written (%s): %s", error.message, entry)
            return None

    async def expire(self, days: float) -> int:
        """Delete entries that are older than that many days, and the oldest beyond the maximum."""
        return await self.trim(before_s=self._clock() - days * 86400.0, max_entries=MAX_ENTRIES)


def command_account() -> tuple[str, str]:
    """Return the system account that runs this command, and its origin, which names who logged in where sudo has
    changed the account."""
    account = _account(os.getuid())
    try:
        login_uid = int(Path("/proc/self/loginuid").read_text("ascii"))
    except (OSError, ValueError):
        login_uid = _NO_LOGIN
    login = "" if login_uid in (_NO_LOGIN, os.getuid()) else f", logged in as {_account(login_uid)}"
    return account, f"command on the node by {account}{login}"


def _account(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
