"""Pushed resources in the database: announced once per request, unique by owner and name, listed newest first.

What datasets and models have in common. Every public call is one transaction.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from horizon_server.db.database import Database
from horizon_server.db.requests import Requests
from horizon_server.db.tables import DatasetRow, ModelRow
from horizon_server.errors import AlreadyExists, InvalidSpec, NotFound
from horizon_server.records.blob import MAX_FILES, BlobFile


class Named(Protocol):
    """What a resource's record tells the repository."""

    @property
    def id(self) -> str: ...  # noqa: D102
    @property
    def owner(self) -> str: ...  # noqa: D102
    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def ready(self) -> bool: ...  # noqa: D102
    @property
    def created_s(self) -> float: ...  # noqa: D102
    @property
    def files(self) -> tuple[BlobFile, ...]: ...  # noqa: D102
    def same_content(self, other: Self, /) -> bool: ...  # noqa: D102


RowT = TypeVar("RowT", DatasetRow, ModelRow)
RecordT = TypeVar("RecordT", bound=Named)


class NamedRows(ABC, Generic[RowT, RecordT]):
    """One table of pushed resources. Subclasses say which, and how a row becomes a record."""

    what: str
    row_type: type[RowT]

    def __init__(self, database: Database, requests: Requests) -> None:
        self._database = database
        self._requests = requests

    @abstractmethod
    def id_column(self) -> InstrumentedAttribute[str]:
        """Return the column of the table's ids."""

    @abstractmethod
    def to_record(self, row: RowT) -> RecordT:
        """Return what the domain knows of a row."""

    @abstractmethod
    def to_row(self, record: RecordT) -> RowT:
        """Return the row of a new record."""

    @abstractmethod
    def request_body(self, record: RecordT) -> object:
        """Return what makes two create calls the same call, as plain data."""

    async def create(self, record: RecordT, *, request_id: str) -> tuple[RecordT, RecordT | None]:
        """Store an announcement, or return what the same request or the same content made before; see the services' ports."""
        request: dict[str, Any] = {
            "user": record.owner,
            "request_id": request_id,
            "method": f"Create{self.what.capitalize()}",
            "body": self.request_body(record),
        }
        async with self._database.session() as session:
            earlier = await self._requests.once(session, **request)
            if earlier is not None:
                return await self._made_earlier(session, earlier), None
            existing, replaced = await self._same_name(session, record), None
            if existing is not None and not existing.same_content(record):
                if existing.ready:
                    raise AlreadyExists(
                        f"{self.what} {record.name} exists with other content ({existing.id}); delete it or choose another name"
                    )
                await self._delete(session, existing.id)
                existing, replaced = None, existing
            if existing is None:
                session.add(self.to_row(record))
                await session.flush()
            stored = existing or record
            await self._requests.record(session, **request, resource_id=stored.id)
            return stored, replaced

    async def find(self, key: str) -> list[RecordT]:
        """Return those of that id or name, of all owners."""
        query = select(self.row_type).where((self.id_column() == key) | (self.row_type.name == key))
        async with self._database.reading() as session:
            return [self.to_record(row) for row in await session.scalars(query)]

    async def page(self, *, owner: str | None, limit: int, token: str) -> tuple[list[RecordT], str]:
        """Return a page, newest first, and the token of the next; a page ends early where its files would be too many."""
        order = (self.row_type.created_s, self.id_column())
        query = select(self.row_type).order_by(*(column.desc() for column in order)).limit(limit + 1)
        if owner is not None:
            query = query.where(self.row_type.owner == owner)
        if token:
            query = query.where(tuple_(*order) < _read_token(token))
        async with self._database.reading() as session:
            records = [self.to_record(row) for row in await session.scalars(query)]
        page = records[: _fitting(records, limit)]
        more = len(records) > len(page)
        return page, _token(page[-1]) if more else ""

    async def delete(self, resource_id: str) -> None:
        """Remove it."""
        async with self._database.session() as session:
            await self._delete(session, resource_id)

    async def unfinished(self, before_s: float) -> list[RecordT]:
        """Return those announced before that time and never finalized."""
        query = select(self.row_type).where(self.row_type.ready.is_(False), self.row_type.created_s < before_s)
        async with self._database.reading() as session:
            return [self.to_record(row) for row in await session.scalars(query)]

    async def ids(self) -> frozenset[str]:
        """Return the ids of all."""
        async with self._database.reading() as session:
            return frozenset(await session.scalars(select(self.id_column())))

    async def make_ready(self, resource_id: str, **fields: Any) -> RecordT:
        """Set `fields` and make it READY.

        Raises:
            NotFound: when it was deleted meanwhile.
        """
        async with self._database.session() as session:
            row = await session.get(self.row_type, resource_id)
            if row is None:
                raise NotFound(
                    f"{self.what} {resource_id} was deleted, or replaced by a newer push, while it was being checked"
                )
            for name, value in fields.items():
                setattr(row, name, value)
            row.ready = True
            return self.to_record(row)

    async def _made_earlier(self, session: AsyncSession, resource_id: str) -> RecordT:
        row = await session.get(self.row_type, resource_id)
        if row is None:
            raise NotFound(
                f"{self.what} {resource_id}, which this request_id made, is deleted; push with a new request_id"
            )
        return self.to_record(row)

    async def _same_name(self, session: AsyncSession, record: RecordT) -> RecordT | None:
        query = select(self.row_type).where(self.row_type.owner == record.owner, self.row_type.name == record.name)
        row = await session.scalar(query)
        return self.to_record(row) if row else None

    async def _delete(self, session: AsyncSession, resource_id: str) -> None:
        row = await session.get(self.row_type, resource_id)
        if row is not None:
            await session.delete(row)
            await session.flush()


def file_documents(files: Sequence[BlobFile]) -> list[dict[str, object]]:
    """Return files as the table keeps them."""
    return [dataclasses.asdict(file) for file in files]


def blob_files(documents: Any) -> tuple[BlobFile, ...]:
    """Return files from the table."""
    return tuple(BlobFile(**document) for document in documents)


def _fitting(records: Sequence[Named], limit: int) -> int:
    """Return how many of the records make a page: at least one, and few enough files for one message."""
    num_files = 0
    for i, record in enumerate(records[:limit]):
        num_files += len(record.files)
        if num_files > MAX_FILES and i > 0:
            return i
    return min(limit, len(records))


def _token(record: Named) -> str:
    return base64.urlsafe_b64encode(json.dumps([record.created_s, record.id]).encode()).decode()


def _read_token(token: str) -> tuple[float, str]:
    try:
        created_s, resource_id = json.loads(base64.urlsafe_b64decode(token))
        if isinstance(created_s, float) and isinstance(resource_id, str):
            return created_s, resource_id
    except (ValueError, TypeError, binascii.Error, RecursionError):
        pass
    sentence = "page_token is not one of ours; pass the next_page_token of an earlier answer, or leave it out"
    raise InvalidSpec.of("page_token", sentence)
