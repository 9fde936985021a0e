"""Jobs and their events in the database."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from sqlalchemy import case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from horizon_server.db.database import Database
from horizon_server.db.tables import EventRow, JobRow, RequestRow
from horizon_server.errors import NotFound, WrongJobState
from horizon_server.events import JobEvent, Payload, StateChanged, decode, encode
from horizon_server.records.job import ENDED, MOVES, JobRecord, JobState, Wanted
from horizon_server.records.plan import JobPlan, StepPrediction
from horizon_server.spec import JobSpec, parse_job_spec

Figures = tuple[int, str, dict[str, Any]]
"""Number of an event, kind (step or eval), and figures by name."""

_PLAIN = (
    "job_id", "owner", "model_id", "dataset_id", "eval_dataset_id", "reason", "message", "step", "num_steps", "attempt",
    "created_s", "started_s", "ended_s", "last_sequence",
)  # fmt: skip
_ALIVE = [state.value for state in JobState if state not in ENDED]
# More than one is only named in a message: "several jobs have an id that starts so".
_MAX_NAMED = 10


class JobStore:
    """The table of jobs and that of their events. Each call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, job: JobRecord, *, request_id: str) -> tuple[JobRecord, bool]:
        """Store a new job at the end of the queue, with its first event. Return it and True, or the job of the same earlier request
        and False."""
        body = job.spec.to_mapping()
        async with self._database.session() as session:
            request = await RequestRow.of(session, user=job.owner, request_id=request_id, method="SubmitJob", body=body)
            if request.resource_id:
                return await _placed(session, await _row(session, request.resource_id)), False
            request.resource_id = job.job_id
            row = JobRow(name=job.spec.name, spec=body, job_state=job.job_state.value)
            row.queue_order = await _end_of_queue(session)
            _set(row, {name: getattr(job, name) for name in (*_PLAIN, "plan", "data_report", "last_step", "wanted")})
            session.add(row)
            await session.flush()
            _add_event(session, row, StateChanged(job_state=job.job_state.value, message=job.message))
            return await _placed(session, row), True

    async def get(self, job_id: str) -> JobRecord | None:
        """Return one job by id, with its place in the queue."""
        async with self._database.reading() as session:
            row = await session.scalar(select(JobRow).where(JobRow.job_id == job_id))
            return await _placed(session, row) if row else None

    async def find(self, owner: str | None, *, name: str | None = None, prefix: str = "") -> list[JobRecord]:
        """Return the newest few jobs of that name, or whose ids start so, of one owner or of all (None)."""
        # A prefix is compared as a range, which the index of the ids serves; LIKE would read every row.
        starts_so = (JobRow.job_id >= prefix) & (JobRow.job_id < prefix + "\U0010ffff")
        which = starts_so if name is None else JobRow.name == name
        query = select(JobRow).where(which).order_by(JobRow.number.desc()).limit(_MAX_NAMED)
        if owner is not None:
            query = query.where(JobRow.owner == owner)
        async with self._database.reading() as session:
            return [await _placed(session, row) for row in (await session.scalars(query)).all()]

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
            rows = (await session.scalars(query)).all()
            queue: Sequence[int] = ()
            # One read of the whole queue for all rows of the page: counting for each would read it hundreds of times.
            if any(row.job_state == JobState.QUEUED for row in rows):
                queue = (await session.scalars(_queue(JobRow.queue_order))).all()
        places = (bisect_right(queue, row.queue_order) if row.job_state == JobState.QUEUED else 0 for row in rows)
        return [(row.number, _record(row, queue_position=place)) for row, place in zip(rows, places, strict=True)]

    async def in_states(self, states: Sequence[JobState]) -> list[JobRecord]:
        """Return all jobs in these states, in the order of their submission. Meant for states that few jobs are in."""
        query = select(JobRow).where(JobRow.job_state.in_([s.value for s in states])).order_by(JobRow.number)
        async with self._database.reading() as session:
            return [_record(row) for row in await session.scalars(query)]

    async def queued(self, limit: int) -> list[JobRecord]:
        """Return the first jobs of the queue, in their order."""
        async with self._database.reading() as session:
            rows = await session.scalars(_queue(JobRow).limit(limit))
            return [_record(row, queue_position=i) for i, row in enumerate(rows, 1)]

    async def user_of(self, resource_id: str) -> str | None:
        """Return the id of a job that has not ended and needs this dataset or model."""
        needs = or_(*(column == resource_id for column in (JobRow.model_id, JobRow.dataset_id, JobRow.eval_dataset_id)))
        async with self._database.reading() as session:
            query = select(JobRow.job_id).where(JobRow.job_state.in_(_ALIVE), needs)
            return await session.scalar(query.limit(1))

    async def move(self, job_id: str, change: StateChanged, **fields: Any) -> tuple[JobRecord, JobState]:
        """Change the state and store the event. Return the job, and the state it was in before.

        Args:
            fields: of the record. `requeue` sends the job to the end of the queue, instead of to its old place. What a user has
                wanted is over with each move, and the time of the end set or cleared.

        Raises WrongJobState when the state machine does not allow the move.
        """
        requeue = fields.pop("requeue", False)
        async with self._database.session() as session:
            row = await _row(session, job_id)
            before = JobState(row.job_state)
            if change.job_state not in MOVES.get(before, ()):
                raise WrongJobState(f"job {job_id} is {before} and cannot become {change.job_state}")
            row.job_state, row.reason, row.message = change.job_state, change.reason, change.message
            row.wanted, row.ended_s = Wanted.NOTHING.value, time.time() if change.job_state in ENDED else 0.0
            if requeue:
                row.queue_order = await _end_of_queue(session)
            _set(row, fields)
            _add_event(session, row, change)
            return await _placed(session, row), before

    async def append(self, job_id: str, payload: Payload, **fields: Any) -> JobRecord:
        """Store an event and set `fields` of the job."""
        async with self._database.session() as session:
            row = await _row(session, job_id)
            _set(row, fields)
            _add_event(session, row, payload)
            return _record(row)

    async def set(self, job_id: str, **fields: Any) -> JobRecord:
        """Set fields of the job without an event."""
        async with self._database.session() as session:
            row = await _row(session, job_id)
            _set(row, fields)
            return await _placed(session, row)

    async def events_after(self, job_id: str, sequence: int, limit: int) -> list[JobEvent]:
        """Return events with a greater number, in order."""
        query = select(EventRow).where(EventRow.job_id == job_id, EventRow.sequence > sequence)
        async with self._database.reading() as session:
            rows = await session.scalars(query.order_by(EventRow.sequence).limit(limit))
            return [
                JobEvent(job_id=job_id, sequence=row.sequence, time_s=row.time_s, payload=decode(row.body))
                for row in rows
            ]

    async def figures_after(self, job_id: str, sequence: int, names: Sequence[str], limit: int) -> list[Figures]:
        """Return the number, the kind and the named figures of steps and evaluations with a greater number, in order."""
        body = EventRow.body
        # SQLite takes the figures out of the stored events: a tenth of the work of reading those whole.
        taken_out = func.json_extract(body, "$.kind", *(f"$.{name}" for name in names))
        query = (
            select(EventRow.sequence, case((func.json_valid(body) == 1, taken_out), else_=body))
            .where(EventRow.job_id == job_id, EventRow.sequence > sequence)
            .where(or_(body.startswith('{"kind":"step"'), body.startswith('{"kind":"eval"')))
        )
        async with self._database.reading() as session:
            rows = await session.execute(query.order_by(EventRow.sequence).limit(limit))
            found: list[Figures] = []
            for number, text in rows:
                taken = json.loads(text)
                # A whole event comes where SQLite could not read it: NaN is not JSON to it.
                plain = taken if isinstance(taken, dict) else dict(zip(("kind", *names), taken, strict=True))
                found.append((number, plain["kind"], {name: plain.get(name) for name in names}))
            return found

    async def counts(self) -> dict[str, int]:
        """Return the number of jobs by state, every state named."""
        async with self._database.reading() as session:
            rows = await session.execute(select(JobRow.job_state, func.count()).group_by(JobRow.job_state))
            found = {job_state: number for job_state, number in rows}  # noqa: C416  # not every SQLAlchemy types a Row as a tuple
        return {state.value: found.get(state.value, 0) for state in JobState}


def _queue(what: Any) -> Any:
    return select(what).where(JobRow.job_state == JobState.QUEUED.value).order_by(JobRow.queue_order)


async def _end_of_queue(session: AsyncSession) -> int:
    last: int | None = await session.scalar(select(func.max(JobRow.queue_order)))
    return (last or 0) + 1


async def _placed(session: AsyncSession, row: JobRow) -> JobRecord:
    position = 0
    if row.job_state == JobState.QUEUED:
        ahead = select(func.count()).where(JobRow.job_state == row.job_state, JobRow.queue_order <= row.queue_order)
        position = await session.scalar(ahead) or 0
    return _record(row, queue_position=position)


async def _row(session: AsyncSession, job_id: str) -> JobRow:
    row = await session.scalar(select(JobRow).where(JobRow.job_id == job_id))
    if row is None:
        raise NotFound(f"job {job_id} does not exist")
    return row


def _set(row: JobRow, fields: dict[str, Any]) -> None:
    for name, value in fields.items():
        if name == "plan":
            row.plan = None if value is None else dataclasses.asdict(value)
        elif name == "data_report":
            row.data_report = value or None
        elif name == "last_step":
            row.last_step = "" if value is None else encode(value)
        elif name == "wanted":
            row.wanted = Wanted(value).value
        else:
            assert name in _PLAIN, name
            setattr(row, name, value)


def _add_event(session: AsyncSession, row: JobRow, payload: Payload) -> None:
    row.last_sequence += 1
    session.add(EventRow(job_id=row.job_id, sequence=row.last_sequence, time_s=time.time(), body=encode(payload)))


@functools.lru_cache(maxsize=4096)
def _spec(text: str) -> JobSpec:
    # A spec never changes, and reading one takes longer than all else of a row: a list of 1,000 jobs took a second of the daemon.
    return parse_job_spec(json.loads(text))


def _record(row: JobRow, *, queue_position: int = 0) -> JobRecord:
    plan: dict[str, Any] = dict(row.plan or {})
    if plan:  # one of an earlier version has no prediction
        prediction = plan.get("prediction")
        plan["prediction"] = StepPrediction(**prediction) if prediction else None
    return JobRecord(
        **{name: getattr(row, name) for name in _PLAIN},
        spec=_spec(json.dumps(row.spec)),
        job_state=JobState(row.job_state),
        wanted=Wanted(row.wanted),
        last_step=decode(row.last_step) if row.last_step else None,
        plan=JobPlan(**plan) if plan else None,
        data_report=row.data_report or {},
        queue_position=queue_position,
    )
