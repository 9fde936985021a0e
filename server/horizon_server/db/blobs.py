"""Which contents datasets and models are made of."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from sqlalchemy import select

from horizon_server.db.database import Database
from horizon_server.db.tables import BlobReferenceRow, DatasetRow, ModelRow

_RESOURCES = ((DatasetRow, DatasetRow.dataset_id), (ModelRow, ModelRow.model_id))
_VARIABLES_PER_QUERY = 10_000
"""SQLite takes 32,766."""


class BlobReferences:
    """The contents that datasets and models refer to. Each call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of_ready(self, owner: str, among: Collection[str]) -> frozenset[str]:
        """Return those of `among` that anything READY of `owner` is made of."""
        ready: set[str] = set()
        pairs: list[tuple[str, str]] = []
        async with self._database.reading() as session:
            for part in _parts(among):
                query = select(BlobReferenceRow.sha256, BlobReferenceRow.resource_id)
                rows = await session.execute(query.where(BlobReferenceRow.sha256.in_(part)))
                pairs += [(sha256, resource_id) for sha256, resource_id in rows]
            # Not as a join: SQLite would go through all that the owner has, and each row has its list of files before `ready`.
            for part in _parts({resource_id for _, resource_id in pairs}):
                for table, its_id in _RESOURCES:
                    owned = select(its_id).where(its_id.in_(part), table.owner == owner, table.ready.is_(True))
                    ready.update(await session.scalars(owned))
        return frozenset(sha256 for sha256, resource_id in pairs if resource_id in ready)

    async def of_any(self, among: Collection[str]) -> frozenset[str]:
        """Return those of `among` that anything of any user, READY or announced, is made of."""
        found: set[str] = set()
        async with self._database.reading() as session:
            for part in _parts(among):
                query = select(BlobReferenceRow.sha256).where(BlobReferenceRow.sha256.in_(part))
                found.update(await session.scalars(query))
        return frozenset(found)

    async def of_all(self) -> frozenset[str]:
        """Return the contents of everything, READY or announced, of all users."""
        async with self._database.reading() as session:
            return frozenset(await session.scalars(select(BlobReferenceRow.sha256).distinct()))


def _parts(among: Collection[str]) -> Iterator[list[str]]:
    wanted = list(among)
    for start in range(0, len(wanted), _VARIABLES_PER_QUERY):
        yield wanted[start : start + _VARIABLES_PER_QUERY]
