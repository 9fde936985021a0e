"""Jobs and their events in the database."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from horizon_server.db.database import Database
from horizon_server.db.requests import Requests
from horizon_server.db.tables import EventRow, JobRow
from horizon_server.errors import NotFound, WrongJobState
from horizon_server.events import JobEvent, Payload, StateChanged, decode, encode
from horizon_server.records.job import JobRecord, JobState, may_move
from horizon_server.records.plan import JobPlan, StepPrediction
from horizon_server.spec import parse_job_spec

_PLAIN = (
    "job_id", "owner", "model_id", "dataset_id", "eval_dataset_id", "reason", "message", "wanted", "step", "num_steps", "attempt",
    "created_s", "started_s", "ended_s", "last_sequence",
)  # fmt: skip


class JobStore:
    """Implements `jobs.ports.JobStore`."""

    def __init__(self, database: Database, requests: Requests) -> None:
        self._database = database
        self._requests = requests

    async def create(self, job: JobRecord, *, request_id: str) -> tuple[JobRecord, JobEvent | None]:
        """Store a new job with its first event, or return the job of the same earlier request and None."""
        body = job.spec.to_mapping()
        async with self._database.session() as session:
            earlier = await self._requests.once(
                session, user=job.owner, request_id=request_id, method="SubmitJob", body=body
            )
            if earlier is not None:
                return _record(await _row(session, earlier)), None
            row = JobRow(
                **{name: getattr(job, name) for name in _PLAIN},
                name=job.spec.name,
                spec=body,
                job_state=job.job_state.value,
                queued_s=job.created_s,
                last_step="",
                plan=_plan_document(job.plan),
                data_report=job.data_report or None,
            )
            session.add(row)
            await session.flush()
            change = StateChanged(job_state=job.job_state.value, message=job.message)
            stored = _add_event(session, row, change)
            await self._requests.record(
                session, user=job.owner, request_id=request_id, method="SubmitJob", body=body, resource_id=job.job_id
            )
            return _record(row), stored

    async def get(self, job_id: str) -> JobRecord | None:
        """Return one job by id."""
        async with self._database.reading() as session:
            row = await session.scalar(select(JobRow).where(JobRow.job_id == job_id))
            return _record(row) if row else None

    async def find_by_name(self, name: str, owner: str | None) -> list[JobRecord]:
        """Return the jobs of that name, newest first, of one owner or of all (None)."""
        query = select(JobRow).where(JobRow.name == name).order_by(JobRow.number.desc()).limit(10)
        async with self._database.reading() as session:
            rows = await session.scalars(query if owner is None else query.where(JobRow.owner == owner))
            return [_record(row) for row in rows]

    async def page(
        self, *, owner: str | None, states: Sequence[JobState], before: int, limit: int
    ) -> list[tuple[int, JobRecord]]:
        """Return jobs newest first with their submission numbers, below `before` where that is not 0."""
        query = select(JobRow).order_by(JobRow.number.desc()).limit(limit)
        if owner is not None:
            query = query.where(JobRow.owner == owner)
        if states:
            query = query.where(JobRow.job_state.in_([s.value for s in states]))
        if before:
            query = query.where(JobRow.number < before)
        async with self._database.reading() as session:
            return [(row.number, _record(row)) for row in await session.scalars(query)]

    async def in_states(self, states: Sequence[JobState]) -> list[JobRecord]:
        """Return all jobs in these states in queue order: first submitted first."""
        query = select(JobRow).where(JobRow.job_state.in_([s.value for s in states])).order_by(JobRow.number)
        async with self._database.reading() as session:
            return [_record(row) for row in await session.scalars(query)]

    async def move(self, job_id: str, change: StateChanged, **fields: Any) -> tuple[JobRecord, JobEvent]:
        """Change the state and store the event.

        Raises:
            WrongJobState: when the machine does not allow the move.
        """
        async with self._database.session() as session:
            row = await _row(session, job_id)
            if not may_move(JobState(row.job_state), JobState(change.job_state)):
                raise WrongJobState(f"job {job_id} is {row.job_state} and cannot become {change.job_state}")
            row.job_state, row.reason, row.message = change.job_state, change.reason, change.message
            _set(row, fields)
            return _record_with(row, _add_event(session, row, change))

    async def append(self, job_id: str, payload: Payload, **fields: Any) -> tuple[JobRecord, JobEvent]:
        """Store an event and set `fields` of the job."""
        async with self._database.session() as session:
            row = await _row(session, job_id)
            _set(row, fields)
            return _record_with(row, _add_event(session, row, payload))

    async def set(self, job_id: str, **fields: Any) -> JobRecord:
        """Set fields of the job without an event."""
        async with self._database.session() as session:
            row = await _row(session, job_id)
            _set(row, fields)
            return _record(row)

    async def events_after(self, job_id: str, sequence: int, limit: int) -> list[JobEvent]:
        """Return events with a greater number, in order."""
        query = select(EventRow).where(EventRow.job_id == job_id, EventRow.sequence > sequence)
        async with self._database.reading() as session:
            rows = await session.scalars(query.order_by(EventRow.sequence).limit(limit))
            return [_event(row) for row in rows]

    async def counts(self) -> dict[str, int]:
        """Return the number of jobs by state, every state named."""
        async with self._database.reading() as session:
            rows = await session.execute(select(JobRow.job_state, func.count()).group_by(JobRow.job_state))
            found = {job_state: number for job_state, number in rows}  # noqa: C416  # a Row is no tuple to every SQLAlchemy
        return {state.value: found.get(state.value, 0) for state in JobState}


async def _row(session: AsyncSession, job_id: str) -> JobRow:
    row = await session.scalar(select(JobRow).where(JobRow.job_id == job_id))
    if row is None:
        raise NotFound(f"job {job_id} does not exist")
    return row


def _set(row: JobRow, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name == "plan":
            row.plan = _plan_document(value)
        elif name == "data_report":
            row.data_report = value
        elif name == "last_step":
            row.last_step = "" if value is None else encode(value)
        else:
            assert name in _PLAIN, name
            setattr(row, name, value)


def _add_event(session: AsyncSession, row: JobRow, payload: Payload) -> JobEvent:
    row.last_sequence += 1
    stored = EventRow(job_id=row.job_id, sequence=row.last_sequence, time_s=time.time(), body=encode(payload))
    session.add(stored)
    return _event(stored)


def _event(row: EventRow) -> JobEvent:
    return JobEvent(job_id=row.job_id, sequence=row.sequence, time_s=row.time_s, payload=decode(row.body))


def _plan_document(plan: JobPlan | None) -> dict[str, Any] | None:
    return None if plan is None else dataclasses.asdict(plan)


def _plan(document: dict[str, Any] | None) -> JobPlan | None:
    if not document:
        return None
    prediction = document.get("prediction")
    return JobPlan(**{**document, "prediction": StepPrediction(**prediction) if prediction else None})


def _record_with(row: JobRow, event: JobEvent) -> tuple[JobRecord, JobEvent]:
    return _record(row), event


def _record(row: JobRow) -> JobRecord:
    return JobRecord(
        **{name: getattr(row, name) for name in _PLAIN},
        spec=parse_job_spec(row.spec),
        job_state=JobState(row.job_state),
        last_step=decode(row.last_step) if row.last_step else None,
        plan=_plan(row.plan),
        data_report=row.data_report or {},
    )
