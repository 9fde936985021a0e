"""The tables, as SQLAlchemy sees them. Rows never leave `db`: its classes turn them into records.

Times are Unix seconds. Documents (specs, files, plans) are JSON text: they are read whole and never queried into.
"""

from __future__ import annotations

from sqlalchemy import JSON, BigInteger, Float, ForeignKey, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


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
    """A create call that was carried out: repeats of it give the same resource."""

    __tablename__ = "requests"
    user: Mapped[str] = mapped_column(String(63), primary_key=True)
    request_id: Mapped[str] = mapped_column(String(64), primary_key=True)
    method: Mapped[str] = mapped_column(String(32))
    body_sha256: Mapped[str] = mapped_column(String(64))
    resource_id: Mapped[str] = mapped_column(String(64))
    created_s: Mapped[float] = mapped_column(Float)


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
    """One content that a dataset or model is made of, READY or announced. The files are in the resource's own row too, with their names."""

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
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    """Order of submission: the pages go by it."""
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
    queue_order: Mapped[int] = mapped_column(BigInteger)
    """The queue goes by it. Given at submission, and again when a user resumes the job: jobs that were waiting then are served first."""
    created_s: Mapped[float] = mapped_column(Float)
    started_s: Mapped[float] = mapped_column(Float)
    ended_s: Mapped[float] = mapped_column(Float)
    last_step: Mapped[str] = mapped_column(Text)
    plan: Mapped[dict[str, object] | None] = mapped_column(JSON)
    data_report: Mapped[dict[str, int] | None] = mapped_column(JSON)
    """Null for jobs of before there was one, and until the data is prepared."""
    last_sequence: Mapped[int] = mapped_column(BigInteger)


class StateFolderRow(Table):
    """Which state folder this database belongs to, in one row; see `db.pairing`."""

    __tablename__ = "state_folder"
    state_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    num_checks: Mapped[int] = mapped_column(BigInteger)
    """Raised here first and then in the folder: a folder that has seen more of them than the database has had another one."""


class EventRow(Table):
    """One event of a job, numbered without gaps."""

    __tablename__ = "events"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"), primary_key=True)
    sequence: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    time_s: Mapped[float] = mapped_column(Float)
    body: Mapped[str] = mapped_column(Text)
