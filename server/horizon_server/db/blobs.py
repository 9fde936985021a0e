"""Which contents datasets and models are made of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Select, func, literal_column, select

from horizon_server.db.database import Database
from horizon_server.db.tables import DatasetRow, ModelRow

_TABLES: tuple[type[DatasetRow], type[ModelRow]] = (DatasetRow, ModelRow)
_SHA256 = func.json_extract(literal_column("each.value"), "$.sha256")


class BlobReferences:
    """The contents that datasets and models refer to. Each call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def of_ready(self, owner: str, among: Collection[str]) -> frozenset[str]:
        """Return those of `among` that anything READY of `owner` is made of, by sha256."""
        wanted = list(among)
        queries = [
            _contents(table).where(table.owner == owner, table.ready.is_(True), _SHA256.in_(wanted))
            for table in _TABLES
        ]
        return await self._found(queries)

    async def of_all(self) -> frozenset[str]:
        """Return the contents of everything, READY or announced, of everybody, by sha256."""
        return await self._found([_contents(table) for table in _TABLES])

    async def _found(self, queries: Sequence[Select[Any]]) -> frozenset[str]:
        async with self._database.reading() as session:
            return frozenset([sha256 for query in queries for sha256 in await session.scalars(query)])


def _contents(table: type[DatasetRow | ModelRow]) -> Select[Any]:
    """Every content of every row of a table. The database takes the lists apart: a dataset may have thousands of files."""
    each = func.json_each(table.files).table_valued("value", name="each", joins_implicitly=True)
    return select(_SHA256).select_from(table, each)
