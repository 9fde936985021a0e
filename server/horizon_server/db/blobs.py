"""Which contents datasets and models are made of."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select

from horizon_server.db.database import Database
from horizon_server.db.tables import DatasetRow, ModelRow


class BlobReferences:
    """Implements `blobs.uploads.BlobReferences`."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of_ready(self, owner: str) -> frozenset[str]:
        """Return the contents of everything READY of `owner`, by sha256."""
        return await self._contents(
            select(DatasetRow.files).where(DatasetRow.owner == owner, DatasetRow.ready.is_(True)),
            select(ModelRow.files).where(ModelRow.owner == owner, ModelRow.ready.is_(True)),
        )

    async def of_all(self) -> frozenset[str]:
        """Return the contents of everything, READY or announced, of everybody, by sha256."""
        return await self._contents(select(DatasetRow.files), select(ModelRow.files))

    async def _contents(self, *queries: Any) -> frozenset[str]:
        async with self._database.reading() as session:
            files = [one for query in queries for row in await session.scalars(query) for one in row]
        return frozenset(str(one["sha256"]) for one in files)
