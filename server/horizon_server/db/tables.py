"""The tables, as SQLAlchemy sees them. Rows never leave `db`: its classes turn them into records. Times are Unix seconds."""

from __future__ import annotations

import hashlib
import json
import time
import uuid

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from horizon_server.errors import InvalidSpec, RequestIdReused


class Table(DeclarativeBase):
    """Root of all tables; its metadata is what the migrations are compared with."""


class UserRow(Table):
    """A person or a script that calls."""

    __tablename__ = "users"
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    role: Mapped[str] = mapped_column(String(16))
    project: Mapped[str] = mapped_column(String(63))
    created_s: Mapped[float] = mapped_column(Float)


class TokenRow(Table):
    """A bearer token. Only its sha256 is stored; `token_id` is what people see and revoke."""

    __tablename__ = "tokens"
    token_id: Mapped[str] = mapped_column(String(16), primary_key=True)
    user: Mapped[str] = mapped_column(ForeignKey("users.name"))
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    created_s: Mapped[float] = mapped_column(Float)
    expires_s: Mapped[float | None] = mapped_column(Float)
    revoked_s: Mapped[float | None] = mapped_column(Float)


class RequestRow(Table):
    """A create call that was carried out, so that a retried one gives the same resource and never a second."""

    __tablename__ = "requests"
    user: Mapped[str] = mapped_column(String(63), primary_key=True)
    request_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    method: Mapped[str] = mapped_column(String(32))
    body_sha256: Mapped[str] = mapped_column(String(64))
    resource_id: Mapped[str] = mapped_column(String(64))
    created_s: Mapped[float] = mapped_column(Float)

    @classmethod
    async def of(cls, session: AsyncSession, *, user: str, request_id: str, method: str, body: object) -> RequestRow:
        """Return the row of a call: of the same earlier one, or a new row whose empty `resource_id` the caller sets in this transaction.

        Raises RequestIdReused when the id was used for another method or body; InvalidSpec when the id is not a UUID.
        """
        try:
            uuid.UUID(request_id)
        except ValueError as error:
            rule = "request_id must be a UUID, chosen by the caller once per intended resource and repeated on retries"
            raise InvalidSpec.of("request_id", rule) from error
        # Per user: nobody can find out, or spoil, what another user has called.
        row = await session.get(cls, (user, request_id))
        sha256 = hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()
        if row is None:
            row = cls(user=user, request_id=request_id, method=method, body_sha256=sha256)
            row.resource_id, row.created_s = "", time.time()
            session.add(row)
        elif (row.method, row.body_sha256) != (method, sha256):
            raise RequestIdReused(f"request_id {request_id} was used before with another body; choose a new one")
        return row


class DatasetRow(Table):
    """A pushed dataset."""

    __tablename__ = "datasets"
    __table_args__ = (UniqueConstraint("owner", "name"),)
    dataset_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    owner: Mapped[str] = mapped_column(String(63))
    name: Mapped[str] = mapped_column(String(63))
    format: Mapped[str] = mapped_column(String(32))
    field_map: Mapped[dict[str, str]] = mapped_column(JSON)
    files: Mapped[list[dict[str, object]]] = mapped_column(JSON)
    ready: Mapped[bool] = mapped_column()
    num_rows: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str] = mapped_column(String(64))
    created_s: Mapped[float] = mapped_column(Float)


class ModelRow(Table):
    """A pushed model folder."""

    __tablename__ = "models"
    __table_args__ = (UniqueConstraint("owner", "name"),)
    model_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    owner: Mapped[str] = mapped_column(String(63))
    name: Mapped[str] = mapped_column(String(63))
    files: Mapped[list[dict[str, object]]] = mapped_column(JSON)
    ready: Mapped[bool] = mapped_column()
    architecture: Mapped[str] = mapped_column(String(64))
    num_parameters: Mapped[int] = mapped_column(BigInteger)
    digest: Mapped[str] = mapped_column(String(64))
    created_s: Mapped[float] = mapped_column(Float)


class BlobReferenceRow(Table):
    """One content that a dataset or model is made of, READY or announced."""

    # The files are in the resource's own row too, with their names; but to search those lists, SQLite would read every row whole.

    __tablename__ = "blob_references"
    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    resource_id: Mapped[str] = mapped_column(String(32), primary_key=True, index=True)


class JobRow(Table):
    """A submitted job."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("jobs_in_queue", "job_state", "queue_order"),
        Index("jobs_by_queue_order", "queue_order"),
        Index("jobs_by_owner", "owner", "number"),
        Index("jobs_by_name", "name", "number"),
    )
    # Order of submission. Pages go by it, as times may be equal, or go backwards with the clock.
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(String(32), unique=True)
    owner: Mapped[str] = mapped_column(String(63))
    name: Mapped[str] = mapped_column(String(63))
    spec: Mapped[dict[str, object]] = mapped_column(JSON)
    model_id: Mapped[str] = mapped_column(Text)
    dataset_id: Mapped[str] = mapped_column(String(32))
    eval_dataset_id: Mapped[str] = mapped_column(String(32))
    job_state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(String(64))
    message: Mapped[str] = mapped_column(Text)
    wanted: Mapped[str] = mapped_column(String(16))
    step: Mapped[int] = mapped_column(BigInteger)
    num_steps: Mapped[int] = mapped_column(BigInteger)
    attempt: Mapped[int] = mapped_column(Integer)
    # The queue goes by it. Given at submission, and again when a user resumes the job: jobs that were waiting then are served first.
    queue_order: Mapped[int] = mapped_column(BigInteger)
    created_s: Mapped[float] = mapped_column(Float)
    started_s: Mapped[float] = mapped_column(Float)
    ended_s: Mapped[float] = mapped_column(Float)
    last_step: Mapped[str] = mapped_column(Text)
    plan: Mapped[dict[str, object] | None] = mapped_column(JSON)
    # Null until the data is prepared, and for jobs of before there was a report.
    data_report: Mapped[dict[str, int] | None] = mapped_column(JSON)
    last_sequence: Mapped[int] = mapped_column(BigInteger)


class StateFolderRow(Table):
    """Which state folder this database belongs to, in one row. `db.pairing` compares it."""

    __tablename__ = "state_folder"
    state_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    # Raised here first and then in the folder: a folder that has seen more of them than the database has had another one.
    num_checks: Mapped[int] = mapped_column(BigInteger)


class EventRow(Table):
    """One event of a job, numbered without gaps."""

    __tablename__ = "events"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"), primary_key=True)
    sequence: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    time_s: Mapped[float] = mapped_column(Float)
    body: Mapped[str] = mapped_column(Text)
