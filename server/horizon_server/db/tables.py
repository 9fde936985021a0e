"""The tables, as SQLAlchemy sees them. Rows never leave `db`: its classes turn them into records. Times are Unix
seconds."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Awaitable, Callable

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
    # What their jobs are charged to where the spec names none.
    project: Mapped[str] = mapped_column(String(63))
    created_s: Mapped[float] = mapped_column(Float)
    # Since when no token of theirs is accepted; null while they may call.
    disabled_s: Mapped[float | None] = mapped_column(Float)


class TokenRow(Table):
    """A bearer token. Only its sha256 is stored; `token_id` is what people see and revoke."""

    __tablename__ = "tokens"
    __table_args__ = (Index("tokens_by_user", "user"),)
    token_id: Mapped[str] = mapped_column(String(16), primary_key=True)
    user: Mapped[str] = mapped_column(ForeignKey("users.name"))
    sha256: Mapped[str] = mapped_column(String(64), unique=True)
    created_s: Mapped[float] = mapped_column(Float)
    expires_s: Mapped[float | None] = mapped_column(Float)
    revoked_s: Mapped[float | None] = mapped_column(Float)
    scope: Mapped[str] = mapped_column(String(16), server_default="full")
    label: Mapped[str] = mapped_column(String(63), server_default="")
    # The user or, for commands on the node, the system account.
    created_by: Mapped[str] = mapped_column(String(63), server_default="")
    last_used_s: Mapped[float | None] = mapped_column(Float)


class MemberRow(Table):
    """What a user may do in a project: viewer, member or admin."""

    __tablename__ = "members"
    __table_args__ = (Index("members_by_user", "user"),)
    project: Mapped[str] = mapped_column(String(63), primary_key=True)
    user: Mapped[str] = mapped_column(String(63), primary_key=True)
    role: Mapped[str] = mapped_column(String(16))
    added_s: Mapped[float] = mapped_column(Float)


class GrantRow(Table):
    """A dataset or model that all members of a project may use; an empty project is everyone."""

    __tablename__ = "grants"
    __table_args__ = (Index("grants_by_project", "project"),)
    resource_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    project: Mapped[str] = mapped_column(String(63), primary_key=True)
    granted_by: Mapped[str] = mapped_column(String(63))
    granted_s: Mapped[float] = mapped_column(Float)


class AuditRow(Table):
    """One change, carried out or refused: who, when, from where, what, and how it ended."""

    __tablename__ = "audit"
    __table_args__ = (Index("audit_by_time", "time_s"), Index("audit_by_user", "user", "time_s"))
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    time_s: Mapped[float] = mapped_column(Float)
    user: Mapped[str] = mapped_column(String(63))
    token_id: Mapped[str] = mapped_column(String(16))
    origin: Mapped[str] = mapped_column(String(128))
    action: Mapped[str] = mapped_column(String(64))
    resource: Mapped[str] = mapped_column(String(256))
    outcome: Mapped[str] = mapped_column(String(64))
    detail: Mapped[str] = mapped_column(Text)


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
    async def of(
        cls,
        session: AsyncSession,
        *,
        user: str,
        request_id: str,
        method: str,
        body: object,
        is_same: Callable[[str], Awaitable[bool]] | None = None,
    ) -> RequestRow:
        """Return the row of a call: of the same earlier one, or a new row whose empty `resource_id` the caller sets in
        this transaction.

        Where the body's hash differs, `is_same` may still recognise it by the resource that the earlier call made.

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
        elif row.method != method or (
            row.body_sha256 != sha256 and not (is_same is not None and await is_same(row.resource_id))
        ):
            raise RequestIdReused(f"request_id {request_id} was used before with another body; choose a new one")
        return row


class DatasetRow(Table):
    """A pushed dataset."""

    __tablename__ = "datasets"
    __table_args__ = (
        UniqueConstraint("owner", "name"),
        # Pages go by it. With the owner: the rows of others, with their lists of files, are then not read.
        Index("datasets_by_age", "created_s", "dataset_id", "owner"),
    )
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
    __table_args__ = (UniqueConstraint("owner", "name"), Index("models_by_age", "created_s", "model_id", "owner"))
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

    # The files are in the resource's own row too, with their names; but to search those lists, SQLite would read every
    # row whole.

    __tablename__ = "blob_references"
    sha256: Mapped[str] = mapped_column(String(64), primary_key=True)
    resource_id: Mapped[str] = mapped_column(String(32), primary_key=True, index=True)


class JobRow(Table):
    """A submitted job."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("jobs_in_queue", "job_state", "queue_order"),
        Index("jobs_by_queue_order", "queue_order"),
        # All that is compared of a waiting job: their rows are large.
        Index("jobs_by_rank", "job_state", "project", "owner", "priority", "queue_order"),
        Index("jobs_by_owner", "owner", "number"),
        Index("jobs_by_name", "name", "number"),
        Index("jobs_by_end", "ended_s"),
        Index("jobs_by_project", "project", "number"),
        Index("jobs_by_deletion", "deletion_s"),
    )
    # Order of submission. Pages go by it, as times may be equal, or go backwards with the clock.
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(String(32), unique=True)
    owner: Mapped[str] = mapped_column(String(63))
    # The spec's at submission, where that names none the owner's; in a column of its own for accounting.
    project: Mapped[str] = mapped_column(String(63))
    name: Mapped[str] = mapped_column(String(63))
    spec: Mapped[dict[str, object]] = mapped_column(JSON)
    # The spec's at submission, then what `update` has set.
    priority: Mapped[int] = mapped_column(Integer)
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
    # The queue goes by it. Given at submission, and again when a user resumes the job: jobs that were waiting then are
    # served first.
    queue_order: Mapped[int] = mapped_column(BigInteger)
    created_s: Mapped[float] = mapped_column(Float)
    # When it last came into the queue: how long it has waited is counted from here.
    queued_s: Mapped[float] = mapped_column(Float)
    started_s: Mapped[float] = mapped_column(Float)
    ended_s: Mapped[float] = mapped_column(Float)
    device_s: Mapped[float] = mapped_column(Float)
    num_tokens: Mapped[int] = mapped_column(BigInteger)
    last_step: Mapped[str] = mapped_column(Text)
    plan: Mapped[dict[str, object] | None] = mapped_column(JSON)
    # Null until the data is prepared.
    data_report: Mapped[dict[str, int] | None] = mapped_column(JSON)
    last_sequence: Mapped[int] = mapped_column(BigInteger)
    # Automatic restarts since the job last made progress, the furthest step that it failed at, and the last failure.
    num_restarts: Mapped[int] = mapped_column(Integer, server_default="0")
    failed_step: Mapped[int] = mapped_column(BigInteger, server_default="-1")
    last_failure: Mapped[str] = mapped_column(String(80), server_default="")
    # Not loaded before this time: the pause after a failure.
    not_before_s: Mapped[float] = mapped_column(Float, server_default="0")
    # How many lines of the journal of the attempt's worker are stored here: a later daemon continues after them.
    journal_line: Mapped[int] = mapped_column(BigInteger, server_default="0")
    # When its files are deleted, which the owner was warned of; null where nothing is to be.
    deletion_s: Mapped[float | None] = mapped_column(Float)
    # Whether its owner has taken back such a deletion.
    keep_files: Mapped[bool] = mapped_column(server_default="0")
    # The datasets of its named eval sets, as a JSON object of ids by name.
    eval_set_ids: Mapped[str] = mapped_column(Text, server_default="{}")
    # The machine of the fleet that it was sent to; empty for this one.
    box: Mapped[str] = mapped_column(String(63), server_default="")
    # Its first, best and last evaluation, as a JSON object of events; empty before the first.
    evaluations: Mapped[str] = mapped_column(Text, server_default="")
    # What evaluation programs have measured of its checkpoints, as a JSON list.
    task_results: Mapped[str] = mapped_column(Text, server_default="[]")


class StateFolderRow(Table):
    """Which state folder this database belongs to, in one row. `db.pairing` compares it."""

    __tablename__ = "state_folder"
    state_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    # Raised here first and then in the folder: a folder that has seen more of them than the database has had another
    # one.
    num_checks: Mapped[int] = mapped_column(BigInteger)


class EventRow(Table):
    """One event of a job, numbered without gaps."""

    __tablename__ = "events"
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.job_id"), primary_key=True)
    sequence: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    time_s: Mapped[float] = mapped_column(Float)
    body: Mapped[str] = mapped_column(Text)


class ShareUseRow(Table):
    """What a user has used of the device in a project, decayed to a time: fair share after a restart continues from
    here."""

    __tablename__ = "share_uses"
    project: Mapped[str] = mapped_column(String(63), primary_key=True)
    user: Mapped[str] = mapped_column(String(63), primary_key=True)
    device_s: Mapped[float] = mapped_column(Float)
    as_of_s: Mapped[float] = mapped_column(Float)


class UsageHourRow(Table):
    """What a user has used in a project in one hour, for accounting. It never decays."""

    __tablename__ = "usage_hours"
    hour_s: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    project: Mapped[str] = mapped_column(String(63), primary_key=True)
    user: Mapped[str] = mapped_column(String(63), primary_key=True)
    device_s: Mapped[float] = mapped_column(Float)
    num_tokens: Mapped[int] = mapped_column(BigInteger)


class AllowanceRow(Table):
    """The weight and the quota of a user or a project; null is no limit. Those without a row have weight 1 and no
    limits."""

    __tablename__ = "allowances"
    holder: Mapped[str] = mapped_column(String(16), primary_key=True)
    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    weight: Mapped[float] = mapped_column(Float)
    max_queued_jobs: Mapped[int | None] = mapped_column(Integer)
    max_resident_jobs: Mapped[int | None] = mapped_column(Integer)
    max_host_bytes: Mapped[int | None] = mapped_column(BigInteger)
    max_stored_bytes: Mapped[int | None] = mapped_column(BigInteger)
    device_hours_per_week: Mapped[float | None] = mapped_column(Float)
    # Bytes of checkpoints of ended jobs that a user may keep; the oldest beyond that are deleted, after a warning.
    retained_bytes: Mapped[int | None] = mapped_column(BigInteger)


class NodeConditionRow(Table):
    """What an admin has set the node to, in one row; without it the node is open."""

    __tablename__ = "node_condition"
    row_id: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    mode: Mapped[str] = mapped_column(String(16))
    message: Mapped[str] = mapped_column(Text)
    window_start_s: Mapped[float | None] = mapped_column(Float)
    window_end_s: Mapped[float | None] = mapped_column(Float)
    withdrawn: Mapped[list[str]] = mapped_column(JSON, server_default="[]")


class WebhookRow(Table):
    """An address that is told of changes of the states of a project's jobs or, without a project, of its owner's."""

    __tablename__ = "webhooks"
    __table_args__ = (Index("webhooks_by_owner", "owner"), Index("webhooks_by_project", "project"))
    webhook_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    owner: Mapped[str] = mapped_column(String(63))
    project: Mapped[str] = mapped_column(String(63))
    url: Mapped[str] = mapped_column(Text)
    events: Mapped[list[str]] = mapped_column(JSON)
    format: Mapped[str] = mapped_column(String(16))
    # As it is: whoever signs needs the key itself (docs/security.md).
    secret: Mapped[str] = mapped_column(Text)
    created_s: Mapped[float] = mapped_column(Float)
    disabled_s: Mapped[float | None] = mapped_column(Float)
    disable_reason: Mapped[str] = mapped_column(Text)
    last_attempt_s: Mapped[float | None] = mapped_column(Float)
    last_result: Mapped[str] = mapped_column(Text)
    # Deliveries in a row that were given up.
    num_given_up: Mapped[int] = mapped_column(Integer)


class WebhookDeliveryRow(Table):
    """What a webhook is told, until long after it was: the outbox, and what `horizon webhook deliveries` shows."""

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        Index("webhook_deliveries_by_time", "outcome", "next_attempt_s"),
        Index("webhook_deliveries_by_webhook", "webhook_id", "number"),
    )
    number: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=True)
    # The header webhook-id of every attempt.
    delivery_id: Mapped[str] = mapped_column(String(32), unique=True)
    webhook_id: Mapped[str] = mapped_column(String(32))
    event: Mapped[str] = mapped_column(String(32))
    job_id: Mapped[str] = mapped_column(String(32))
    # What is said of the job, as a JSON object.
    facts: Mapped[str] = mapped_column(Text)
    outcome: Mapped[str] = mapped_column(String(16))
    created_s: Mapped[float] = mapped_column(Float)
    num_attempts: Mapped[int] = mapped_column(Integer)
    status_code: Mapped[int] = mapped_column(Integer)
    error: Mapped[str] = mapped_column(Text)
    last_attempt_s: Mapped[float | None] = mapped_column(Float)
    # Null once it has ended.
    next_attempt_s: Mapped[float | None] = mapped_column(Float)
