"""Datasets and models in the database, announced once per request and unique by owner and name; and the contents they
are made of."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Generic, TypeVar

from sqlalchemy import delete, func, insert, select, true, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute, aliased

from horizon_server.codec import from_plain, to_plain
from horizon_server.db.database import Database, parts
from horizon_server.db.tables import BlobReferenceRow, DatasetRow, GrantRow, ModelRow, RequestRow
from horizon_server.errors import AlreadyExists, InvalidSpec, NotFound, QuotaExceeded
from horizon_server.records.account import EVERYONE
from horizon_server.records.blob import MAX_FILES, BlobFile, DatasetRecord, ModelRecord, PushedRecord

# Datasets of one user, and models: every listing and sweep goes through them.
MAX_RESOURCES = 10_000
_ROWS_AT_ONCE = 8

RowT = TypeVar("RowT", DatasetRow, ModelRow)
RecordT = TypeVar("RecordT", bound=PushedRecord)

# How the table of grants has `EVERYONE`.
_ALL_PROJECTS = ""
_RESOURCES = ((DatasetRow, DatasetRow.dataset_id), (ModelRow, ModelRow.model_id))

AdmitPush = Callable[[Mapping[str, int]], None]
"""Gets the bytes that users have pushed or announced before a new announcement; what it raises refuses that one."""


class PushedStore(Generic[RowT, RecordT]):
    """One table of pushed resources: its columns are the fields of its record. Each call is one transaction."""

    row_type: type[RowT]
    record_type: type[RecordT]

    def __init__(self, database: Database) -> None:
        self._database = database
        self._kind = self.record_type.kind
        self._id: InstrumentedAttribute[str] = getattr(self.row_type, f"{self._kind}_id")
        names = [field.name for field in dataclasses.fields(self.record_type)]
        self._columns = [name for name in names if name != "shared_with"]

    async def create(
        self, record: RecordT, *, request_id: str, admit: AdmitPush | None = None, members: Collection[str] = ()
    ) -> tuple[RecordT, RecordT | None]:
        """Store an announcement and return it with the unfinished one of the same name that it replaced.

        An earlier call of the same request_id, or the same content under the same name, gives what is there already.
        `admit` may refuse what is new, for the bytes that `members` have.

        Raises:
            RequestIdReused: when the request_id was used for something else.
            AlreadyExists: when the name is taken by other content.
            NotFound: when what the request had made is deleted by now.
            QuotaExceeded: when the owner has as many as one user may have.
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
                        f"{self._kind} {request.resource_id}, which this request_id made, is deleted; push with a new "
                        "request_id"
                    )
                return await self._shared(session, self._record(made)), None
            table = self.row_type
            row = await session.scalar(select(table).where(table.owner == record.owner, table.name == record.name))
            existing = await self._shared(session, self._record(row)) if row else None
            replaced = None
            if existing is not None and not existing.same_content(record):
                if existing.ready:
                    raise AlreadyExists(
                        f"{self._kind} {record.name} exists with other content ({existing.id}); delete it or choose "
                        "another name"
                    )
                # An upload that was given up must not keep its name until it expires.
                await self._delete(session, existing.id)
                existing, replaced = None, existing
            request.resource_id = (existing or record).id
            if existing is None:
                owned = await session.scalar(select(func.count()).select_from(table).where(table.owner == record.owner))
                if (owned or 0) >= MAX_RESOURCES:
                    raise QuotaExceeded(
                        f"{record.owner} has {owned} {self._kind}s, the maximum; delete some: horizon {self._kind} "
                        "delete NAME"
                    )
                if admit is not None:
                    admit(await pushed_bytes(session, members))
                plain = {name: getattr(record, name) for name in self._columns}
                session.add(table(**plain | {"files": to_plain(record.files)}))
                await session.flush()
                shas = {file.sha256 for file in record.files}
                references = [{"sha256": sha256, "resource_id": record.id} for sha256 in shas]
                await session.execute(insert(BlobReferenceRow), references)
            return existing or record, replaced

    async def find(self, key: str) -> list[RecordT]:
        """Return those of that id or name, of all owners."""
        query = select(self.row_type).where((self._id == key) | (self.row_type.name == key))
        async with self._database.reading() as session:
            return await self._shared_all(session, [self._record(row) for row in await session.scalars(query)])

    async def page(
        self, *, owner: str | None, projects: Collection[str] = (), limit: int, token: str
    ) -> tuple[list[RecordT], str]:
        """Return a page, newest first, and the token of the next; a page ends early where its files would be too many.

        Those of `owner`, and what was shared with everyone or with one of `projects`; all of them where `owner` is
        None.
        """
        order = (self.row_type.created_s, self._id)
        query = select(self.row_type).order_by(*(column.desc() for column in order)).limit(limit + 1)
        if owner is not None:
            shared = select(GrantRow.resource_id).where(GrantRow.project.in_([_ALL_PROJECTS, *projects]))
            # An expression, not the column: else SQLite would find all of the owner's by the index of names, and read
            # and sort them whole for each page, instead of going by age.
            query = query.where((self.row_type.owner.concat("") == owner) | self._id.concat("").in_(shared))
        if token:
            query = query.where(tuple_(*order) < _read_token(token))
        page: list[RecordT] = []
        num_files, is_last = 0, True
        async with self._database.reading() as session:
            # Row by row: the files of a whole page of announcements are gigabytes of JSON, of which few are shown.
            rows = await session.stream_scalars(query.execution_options(yield_per=_ROWS_AT_ONCE))
            async for row in rows:
                record = self._record(row)
                num_files += len(record.files)
                # One message must hold the page.
                if len(page) == limit or (page and num_files > MAX_FILES):
                    is_last = False
                    break
                page.append(record)
            page = await self._shared_all(session, page)
        if is_last:
            return page, ""
        return page, page_token(page[-1])

    async def delete(self, resource_id: str) -> None:
        """Remove it."""
        async with self._database.session() as session:
            await self._delete(session, resource_id)

    async def unfinished(self, before_s: float) -> list[RecordT]:
        """Return those announced before that time and never finalized."""
        query = select(self.row_type).where(self.row_type.ready.is_(False), self.row_type.created_s < before_s)
        async with self._database.reading() as session:
            return [self._record(row) for row in await session.scalars(query)]

    async def has_ready(self, digest: str, *, but: str = "") -> bool:
        """Whether anything READY of any user has this digest, besides the one of the id `but`."""
        same = self.row_type.digest == digest, self.row_type.ready.is_(True), self._id != but
        query = select(self._id).where(*same).limit(1)
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
            return await self._shared(session, self._record(row))

    async def share(self, resource_id: str, project: str, *, granted_by: str, now_s: float) -> RecordT:
        """Let a project, or `EVERYONE`, use it; return it. Raises NotFound when it was deleted meanwhile."""
        async with self._database.session() as session:
            row = await self._row(session, resource_id)
            known = _ALL_PROJECTS if project == EVERYONE else project
            if await session.get(GrantRow, (resource_id, known)) is None:
                session.add(GrantRow(resource_id=resource_id, project=known, granted_by=granted_by, granted_s=now_s))
                await session.flush()
            return await self._shared(session, self._record(row))

    async def unshare(self, resource_id: str, project: str) -> RecordT:
        """Take back that a project, or `EVERYONE`, may use it; return it. Raises NotFound when it was deleted
        meanwhile."""
        async with self._database.session() as session:
            row = await self._row(session, resource_id)
            known = _ALL_PROJECTS if project == EVERYONE else project
            await session.execute(
                delete(GrantRow).where(GrantRow.resource_id == resource_id, GrantRow.project == known)
            )
            return await self._shared(session, self._record(row))

    async def _row(self, session: AsyncSession, resource_id: str) -> RowT:
        row = await session.get(self.row_type, resource_id)
        if row is None:
            raise NotFound(f"{self._kind} {resource_id} was deleted meanwhile")
        return row

    async def _shared(self, session: AsyncSession, record: RecordT) -> RecordT:
        return (await self._shared_all(session, [record]))[0]

    async def _shared_all(self, session: AsyncSession, records: list[RecordT]) -> list[RecordT]:
        """Return the records with whom each is shared with."""
        projects: dict[str, list[str]] = {}
        for part in parts([record.id for record in records]):
            query = select(GrantRow.resource_id, GrantRow.project).where(GrantRow.resource_id.in_(part))
            for resource_id, project in await session.execute(query.order_by(GrantRow.project)):
                projects.setdefault(resource_id, []).append(EVERYONE if project == _ALL_PROJECTS else project)
        return [
            dataclasses.replace(record, shared_with=tuple(projects[record.id])) if record.id in projects else record
            for record in records
        ]

    async def _delete(self, session: AsyncSession, resource_id: str) -> None:
        await session.execute(delete(GrantRow).where(GrantRow.resource_id == resource_id))
        await session.execute(delete(BlobReferenceRow).where(BlobReferenceRow.resource_id == resource_id))
        await session.execute(delete(self.row_type).where(self._id == resource_id))

    def _record(self, row: RowT) -> RecordT:
        plain = {name: getattr(row, name) for name in self._columns}
        return self.record_type(**plain | {"files": from_plain(tuple[BlobFile, ...], row.files)})


class DatasetStore(PushedStore[DatasetRow, DatasetRecord]):
    """The datasets."""

    row_type = DatasetRow
    record_type = DatasetRecord


class ModelStore(PushedStore[ModelRow, ModelRecord]):
    """The models."""

    row_type = ModelRow
    record_type = ModelRecord


def page_token(last: PushedRecord) -> str:
    """Return the token of the page that follows the one with this last record."""
    return base64.urlsafe_b64encode(json.dumps([last.created_s, last.id]).encode()).decode()


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
            for part in parts(among):
                query = select(BlobReferenceRow.sha256, BlobReferenceRow.resource_id)
                rows = await session.execute(query.where(BlobReferenceRow.sha256.in_(part)))
                pairs += [(sha256, resource_id) for sha256, resource_id in rows]
            # Not as a join: SQLite would go through all that the owner has, and each row has its list of files before
            # `ready`.
            for part in parts({resource_id for _, resource_id in pairs}):
                for table, its_id in _RESOURCES:
                    owned = select(its_id).where(its_id.in_(part), table.owner == owner, table.ready.is_(True))
                    ready.update(await session.scalars(owned))
        return frozenset(sha256 for sha256, resource_id in pairs if resource_id in ready)

    async def of_any(self, among: Collection[str]) -> frozenset[str]:
        """Return those of `among` that anything of any user, READY or announced, is made of."""
        found: set[str] = set()
        async with self._database.reading() as session:
            for part in parts(among):
                query = select(BlobReferenceRow.sha256).where(BlobReferenceRow.sha256.in_(part))
                found.update(await session.scalars(query))
        return frozenset(found)

    async def only_of(self, resource_id: str) -> frozenset[str]:
        """Return the contents that this resource and no other is made of."""
        other = aliased(BlobReferenceRow)
        shared = select(other.sha256).where(other.sha256 == BlobReferenceRow.sha256, other.resource_id != resource_id)
        query = select(BlobReferenceRow.sha256).where(BlobReferenceRow.resource_id == resource_id, ~shared.exists())
        async with self._database.reading() as session:
            return frozenset(await session.scalars(query))

    async def of_all(self) -> frozenset[str]:
        """Return the contents of everything, READY or announced, of all users."""
        async with self._database.reading() as session:
            return frozenset(await session.scalars(select(BlobReferenceRow.sha256).distinct()))


async def pushed_bytes(session: AsyncSession, owners: Collection[str] | None = None) -> dict[str, int]:
    """Return the bytes of the datasets and models, READY or announced, of each of these owners, or of all (None).

    A content counts once for each dataset or model that it is in.
    """
    found: dict[str, int] = {}
    for table, _ in _RESOURCES:
        file = func.json_each(table.files).table_valued("value")
        size = func.sum(func.json_extract(file.c.value, "$.size_bytes"))
        query = select(table.owner, size).join(file, true()).group_by(table.owner)
        if owners is not None:
            query = query.where(table.owner.in_(owners))
        for owner, num_bytes in await session.execute(query):
            found[owner] = found.get(owner, 0) + num_bytes
    return found
