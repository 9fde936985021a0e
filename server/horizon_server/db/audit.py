"""The audit log in the database."""

from __future__ import annotations

import dataclasses
from typing import Any

from sqlalchemy import delete, func, select, update

from horizon_server.db.database import Database
from horizon_server.db.tables import AuditRow
from horizon_server.records.audit import AuditEntry

# Longer texts are cut: what a caller chooses must not fill the disk.
MAX_CHARS = {"user": 63, "origin": 128, "action": 64, "resource": 256, "outcome": 64, "detail": 1000}


class AuditStore:
    """The table of changes. Each call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def insert(self, entry: AuditEntry) -> int:
        """Add an entry at the end and return its number."""
        values = dataclasses.asdict(entry)
        del values["number"]
        async with self._database.session() as session:
            row = AuditRow(**printable(values))
            session.add(row)
            await session.flush()
            return row.number

    async def change(self, number: int, **values: str) -> None:
        """Set fields of an entry."""
        async with self._database.session() as session:
            await session.execute(update(AuditRow).where(AuditRow.number == number).values(**printable(values)))

    async def remove(self, number: int) -> None:
        """Delete an entry."""
        async with self._database.session() as session:
            await session.execute(delete(AuditRow).where(AuditRow.number == number))

    async def entries(
        self,
        *,
        user: str | None = None,
        since_s: float = 0.0,
        action: str | None = None,
        outcome: str | None = None,
        limit: int,
    ) -> list[AuditEntry]:
        """Return the newest entries, oldest first; `action` is a part of the action's name."""
        query = select(AuditRow).where(AuditRow.time_s >= since_s)
        if user is not None:
            query = query.where(AuditRow.user == user)
        if action is not None:
            query = query.where(AuditRow.action.icontains(action, autoescape=True))
        if outcome is not None:
            query = query.where(AuditRow.outcome == outcome)
        async with self._database.reading() as session:
            rows = (await session.scalars(query.order_by(AuditRow.number.desc()).limit(limit))).all()
            names = [field.name for field in dataclasses.fields(AuditEntry)]
            return [AuditEntry(**{name: getattr(row, name) for name in names}) for row in reversed(rows)]

    async def trim(self, *, before_s: float, max_entries: int) -> int:
        """Delete entries from before that time, and the oldest beyond the maximum. Return how many."""
        async with self._database.session() as session:
            newest = await session.scalar(select(func.max(AuditRow.number))) or 0
            gone = await session.execute(
                delete(AuditRow)
                .where((AuditRow.time_s < before_s) | (AuditRow.number <= newest - max_entries))
                .returning(AuditRow.number)
            )
            return len(gone.all())


def printable(values: dict[str, Any]) -> dict[str, Any]:
    """Cut what a caller has chosen, and make it printable: it is shown on an admin's terminal."""
    return {
        name: "".join(one if one.isprintable() else "?" for one in value[: MAX_CHARS[name]])
        if name in MAX_CHARS
        else value
        for name, value in values.items()
    }
