"""Datasets and models in the database, announced once per request and unique by owner and name; and the contents they are made of."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Collection, Iterator
from typing import Any, Generic, TypeVar

from sqlalchemy import delete, insert, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from horizon_server.db.database import Database
from horizon_server.db.tables import BlobReferenceRow, DatasetRow, ModelRow, RequestRow
from horizon_server.errors import AlreadyExists, InvalidSpec, NotFound
from horizon_server.records.blob import MAX_FILES, BlobFile, DatasetRecord, ModelRecord, PushedRecord

RowT = TypeVar("RowT", DatasetRow, ModelRow)
RecordT = TypeVar("RecordT", bound=PushedRecord)

_RESOURCES = ((DatasetRow, DatasetRow.dataset_id), (ModelRow, ModelRow.model_id))
# SQLite takes 32,766.
_VARIABLES_PER_QUERY = 10_000


class PushedStore(Generic[RowT, RecordT]):
    """One table of pushed resources: its columns are the fields of its record. Each call is one transaction."""

    row_type: type[RowT]
    record_type: type[RecordT]

    def __init__(self, database: Database) -> None:
        self._database = database
        self._kind = self.record_type.kind
        self._id: InstrumentedAttribute[str] = getattr(self.row_type, f"{self._kind}_id")

    async def create(self, record: RecordT, *, request_id: str) -> tuple[RecordT, RecordT | None]:
        """Store an announcement and return it with the unfinished one of the same name that it replaced.

        An earlier call of the same request_id, or the same content under the same name, gives what is there already.

        Raises:
            RequestIdReused: when the request_id was used for something else.
            AlreadyExists: when the name is taken by other content.
            NotFound: when what the request had made is deleted by now.
        """
        async with self._database.session() as session:
            request = await RequestRow.of(
                session,
                user=record.owner,
                request_id=request_id,
                method=f"Create{self._kind.capitalize()}",
                body=record.announcement,
            )
            if request.resource_id:
                if (made := await session.get(self.row_type, request.resource_id)) is None:
                    raise NotFound(
                        f"{self._kind} {request.resource_id}, which this request_id made, is deleted; push with a new request_id"
                    )
                return self._record(made), None
            table = self.row_type
            row = await session.scalar(select(table).where(table.owner == record.owner, table.name == record.name))
            existing, replaced = self._record(row) if row else None, None
            if existing is not None and not existing.same_content(record):
                if existing.ready:
                    raise AlreadyExists(
                        f"{self._kind} {record.name} exists with other content ({existing.id}); delete it or choose another name"
                    )
                # An upload that was given up must not keep its name until it expires.
                await self._delete(session, existing.id)
                existing, replaced = None, existing
            request.resource_id = (existing or record).id
            if existing is None:
                plain = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
                session.add(table(**plain | {"files": [dataclasses.asdict(file) for file in record.files]}))
                await session.flush()
                shas = {file.sha256 for file in record.files}
                references = [{"sha256": sha256, "resource_id": record.id} for sha256 in shas]
                await session.execute(insert(BlobReferenceRow), references)
            return existing or record, replaced

    async def find(self, key: str) -> list[RecordT]:
        """Return those of that id or name, of all owners."""
        query = select(self.row_type).where((self._id == key) | (self.row_type.name == key))
        async with self._database.reading() as session:
            return [self._record(row) for row in await session.scalars(query)]

    async def page(self, *, owner: str | None, limit: int, token: str) -> tuple[list[RecordT], str]:
        """Return a page, newest first, and the token of the next; a page ends early where its files would be too many."""
        order = (self.row_type.created_s, self._id)
        query = select(self.row_type).order_by(*(column.desc() for column in order)).limit(limit + 1)
        if owner is not None:
            query = query.where(self.row_type.owner == owner)
        if token:
            query = query.where(tuple_(*order) < _read_token(token))
        async with self._database.reading() as session:
            records = [self._record(row) for row in await session.scalars(query)]
        page: list[RecordT] = []
        num_files = 0
        for record in records[:limit]:
            num_files += len(record.files)
            if page and num_files > MAX_FILES:  # one message must hold the page
                break
            page.append(record)
        if len(records) == len(page):
            return page, ""
        return page, base64.urlsafe_b64encode(json.dumps([page[-1].created_s, page[-1].id]).encode()).decode()

    async def delete(self, resource_id: str) -> None:
        """Remove it."""
        async with self._database.session() as session:
            await self._delete(session, resource_id)

    async def unfinished(self, before_s: float) -> list[RecordT]:
        """Return those announced before that time and never finalized."""
        query = select(self.row_type).where(self.row_type.ready.is_(False), self.row_type.created_s < before_s)
        async with self._database.reading() as session:
            return [self._record(row) for row in await session.scalars(query)]

    async def has_ready(self, digest: str) -> bool:
        """Whether anything READY of any user has this digest."""
        query = select(self._id).where(self.row_type.digest == digest, self.row_type.ready.is_(True)).limit(1)
        async with self._database.reading() as session:
            return await session.scalar(query) is not None

    async def ids(self) -> frozenset[str]:
        """Return the ids of all."""
        async with self._database.reading() as session:
            return frozenset(await session.scalars(select(self._id)))

    async def make_ready(self, resource_id: str, **fields: Any) -> RecordT:
        """Set `fields` and make it READY. Raises NotFound when it was deleted meanwhile."""
        async with self._database.session() as session:
            row = await session.get(self.row_type, resource_id)
            if row is None:
                raise NotFound(
                    f"{self._kind} {resource_id} was deleted, or replaced by a newer push, while it was being checked"
                )
            for name, value in fields.items():
                setattr(row, name, value)
            row.ready = True
            return self._record(row)

    async def _delete(self, session: AsyncSession, resource_id: str) -> None:
        await session.execute(delete(BlobReferenceRow).where(BlobReferenceRow.resource_id == resource_id))
        await session.execute(delete(self.row_type).where(self._id == resource_id))

    def _record(self, row: RowT) -> RecordT:
        plain = {field.name: getattr(row, field.name) for field in dataclasses.fields(self.record_type)}
        documents: list[dict[str, Any]] = row.files
        return self.record_type(**plain | {"files": tuple(BlobFile(**document) for document in documents)})


class DatasetStore(PushedStore[DatasetRow, DatasetRecord]):
    """The datasets."""

    row_type = DatasetRow
    record_type = DatasetRecord


class ModelStore(PushedStore[ModelRow, ModelRecord]):
    """The models."""

    row_type = ModelRow
    record_type = ModelRecord


def _read_token(token: str) -> tuple[float, str]:
    try:
        created_s, resource_id = json.loads(base64.urlsafe_b64decode(token))
        if isinstance(created_s, float) and isinstance(resource_id, str) and resource_id.isascii():
            return created_s, resource_id
    except (ValueError, TypeError, RecursionError):
        pass
    problem = "page_token is not valid; pass the next_page_token of an earlier answer, or leave it out"
    raise InvalidSpec.of("page_token", problem)


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
