"""Jobs and their events in the database."""

from __future__ import annotations

import functools
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any

from sqlalchemy import (
    JSON,
    Connection,
    Text,
    bindparam,
    delete,
    func,
    insert,
    not_,
    or_,
    select,
    type_coerce,
    union,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession

from horizon_server.codec import parsed
from horizon_server.db.database import Database, parts
from horizon_server.db.job_rows import STORED_FIELDS, EndedRecords, Records, columns_of, evaluations_after, record_of
from horizon_server.db.tables import EventRow, JobRow, RequestRow
from horizon_server.db.webhooks import queue_deliveries
from horizon_server.errors import NotFound, WrongJobState
from horizon_server.events import EvalDone, JobEvent, Payload, StateChanged, decode, encode
from horizon_server.records.job import ANY_JOB, ENDED, MOVES, RESIDENT, JobFilter, JobRecord, JobState, StopRequest
from horizon_server.spec import parse_job_spec

VisitEvent = Callable[[int, float, dict[str, Any]], None]
"""Gets the number of an event, its time, and its payload as plain data with the key `kind`."""

AdmitJob = Callable[[Sequence[str], Sequence[str]], None]
"""Gets the ids of the owner's jobs, and of the project's, that are in the queue before a new one; what it raises
refuses that one."""

_ENDED = [state.value for state in ENDED]
_EVENTS_AT_ONCE = 5000
# JSON stays text: what is equal to an earlier row gives the same record, and needs no parsing.
_STORED = tuple(
    type_coerce(column, Text).label(column.name) if isinstance(column.type, JSON) else column
    for column in JobRow.__table__.columns
)
# Made once: SQLAlchemy takes longer to put a query together than SQLite to answer it.
_JOBS = select(*_STORED)
# What is in another box is in the queue there.
_HERE = JobRow.box == ""
_BY_ID = _JOBS.where(JobRow.job_id == bindparam("key"))
_IN_STATES = _JOBS.where(JobRow.job_state.in_(bindparam("states", expanding=True)), _HERE).order_by(JobRow.number)
_COUNTS = select(JobRow.job_state, func.count()).where(_HERE).group_by(JobRow.job_state)
_ELSEWHERE = (
    _JOBS.where(JobRow.box != "", JobRow.job_state.in_([state.value for state in JobState if state not in ENDED]))
).order_by(JobRow.number)
_SESSIONS = _JOBS.where(
    _HERE,
    JobRow.job_state.in_([state.value for state in JobState if state not in ENDED]),
    func.json_extract(JobRow.spec, "$.method") == "session",
)
# In whatever case, and without wildcards. The model and the dataset are in the spec.
_SEARCHED = func.lower(
    JobRow.job_id
    + "\n"
    + JobRow.name
    + "\n"
    + JobRow.owner
    + "\n"
    + func.ifnull(func.json_extract(JobRow.spec, "$.model"), "")
    + "\n"
    + func.ifnull(func.json_extract(JobRow.spec, "$.dataset"), "")
)
_FILTERS = {
    "owner": JobRow.owner == bindparam("only_owner"),
    "project": JobRow.project == bindparam("only_project"),
    "search": func.instr(_SEARCHED, func.lower(bindparam("only_search"))) > 0,
}
# Jobs of a page that is read on the event loop: about a millisecond. The service asks for one more than are shown.
_LOOKED_UP = 101
_BY_NUMBERS = _JOBS.where(JobRow.number.in_(bindparam("numbers", expanding=True)))
# Beyond, one query over all of a user's projects is sorted as a whole.
_UNITED_PROJECTS = 100
_ALIVE = [state.value for state in JobState if state not in ENDED]
# More than one is only named in a message: "several jobs have an id that starts so".
_MAX_NAMED = 10


class JobStore:
    """The table of jobs and that of their events. Each call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._records = Records()
        self._ended = EndedRecords()

    async def create(self, job: JobRecord, *, request_id: str, admit: AdmitJob | None = None) -> tuple[JobRecord, bool]:
        """Store a new job at the end of the queue, with its first event. Return it and True, or the job of the same
        earlier request and False. `admit` may refuse a new one."""
        body = job.spec.to_mapping()
        async with self._database.session() as session:

            async def is_made_of(job_id: str) -> bool:
                # The repeated call may give a default that the first one left out.
                made = await session.scalar(select(JobRow.spec).where(JobRow.job_id == job_id))
                return made is not None and parse_job_spec(made).to_mapping() == body

            request = await RequestRow.of(
                session,
                user=job.owner,
                request_id=request_id,
                method="SubmitJob",
                body=job.spec.given(),
                is_same=is_made_of,
            )
            if request.resource_id:
                made = await session.scalar(select(JobRow).where(JobRow.job_id == request.resource_id))
                if made is None:
                    raise NotFound(
                        f"job {request.resource_id}, which this request_id made, is deleted; submit with a new "
                        "request_id"
                    )
                return await self._stored(session, made), False
            if admit is not None:
                admit(*await _queued_ids(session, job.owner, job.project))
            request.resource_id = job.job_id
            row = JobRow(name=job.spec.name, spec=body, job_state=job.job_state.value)
            row.queue_order = await _end_of_queue(session)
            _set(row, {name: getattr(job, name) for name in STORED_FIELDS})
            session.add(row)
            await session.flush()
            event = _add_event(session, row, StateChanged(job_state=job.job_state.value, message=job.message))
            await queue_deliveries(session, row, event.time_s)
            return await self._stored(session, row), True

    async def get(self, job_id: str) -> JobRecord | None:
        """Return one job by id, with its place in the queue."""

        def read(connection: Connection) -> JobRecord | None:
            row = connection.execute(_BY_ID, {"key": job_id}).first()
            return None if row is None else self._records.of(row, queue_position=_place(connection, row))

        return await self._database.look_up(("job", job_id), read)

    async def is_resident(self, job_id: str) -> bool:
        """Return whether a job has an attempt."""
        job = await self.get(job_id)
        return job is not None and job.job_state in RESIDENT

    async def find(
        self, owner: str | None, *, projects: Collection[str] = (), name: str | None = None, prefix: str = ""
    ) -> list[JobRecord]:
        """Return the newest few jobs of that name, or whose ids start so: of one owner and of all in these projects, or
        of all (None)."""
        # A prefix is compared as a range, which the index of the ids serves; LIKE would read every row.
        starts_so = (JobRow.job_id >= prefix) & (JobRow.job_id < prefix + "\U0010ffff")
        which = starts_so if name is None else JobRow.name == name
        query = _JOBS.where(which).order_by(JobRow.number.desc()).limit(_MAX_NAMED)
        if owner is not None:
            query = query.where(_visible(owner, projects))

        def read(connection: Connection) -> list[JobRecord]:
            rows = connection.execute(query).all()
            return [self._records.of(row, queue_position=_place(connection, row)) for row in rows]

        return await self._database.read(read)

    async def page(
        self,
        *,
        owner: str | None,
        projects: Collection[str] = (),
        states: Sequence[JobState],
        only: JobFilter = ANY_JOB,
        before: int,
        limit: int,
    ) -> list[tuple[int, JobRecord]]:
        """Return jobs newest first with their submission numbers, below `before` where that is not 0.

        Those of `owner` and all in `projects`; all jobs where `owner` is None. Of these, those that `only` lets pass.
        """

        named, wanted = sorted(projects), only.given()
        query = _newest(owner is None, len(named), tuple(state.value for state in states), bool(before), tuple(wanted))
        whose_ids = {} if owner is None else {"owner": owner, **{f"project_{i}": name for i, name in enumerate(named)}}
        whose_ids |= {f"only_{name}": value for name, value in wanted.items()}

        def read(connection: Connection) -> list[tuple[int, JobRecord]]:
            rows = connection.execute(query, {**whose_ids, "before": before, "most": limit}).all()
            found = {row.number: record for row in rows if (record := self._ended.of(row)) is not None}
            others = [row.number for row in rows if row.number not in found]
            queue: Sequence[int] = ()
            # One read of the whole queue for all rows of the page: counting for each would read it hundreds of times.
            if any(row.job_state == JobState.QUEUED for row in rows):
                queue = connection.scalars(_queue(JobRow.queue_order)).all()
            for row in connection.execute(_BY_NUMBERS, {"numbers": others}).all() if others else ():
                is_here = row.job_state == JobState.QUEUED and not row.box
                place = bisect_right(queue, row.queue_order) if is_here else 0
                found[row.number] = record = self._records.of(row, queue_position=place)
                self._ended.keep(row, record)
            return [(row.number, found[row.number]) for row in rows if row.number in found]

        # The newest jobs are what everybody looks at. What is further back may have to come from the disk.
        if before or limit > _LOOKED_UP or only.search:
            return await self._database.read(read)
        whose = () if owner is None else (owner, *sorted(projects))  # all who see everything share an answer
        return await self._database.look_up(("page", whose, tuple(states), only, limit), read)

    async def number_of(self, job_id: str) -> int:
        """Return the place of a job in the order of submission, as `page` gives it; 0 where there is no such job."""
        query = select(JobRow.number).where(JobRow.job_id == job_id)
        async with self._database.reading() as session:
            return await session.scalar(query) or 0

    async def in_states(self, states: Sequence[JobState]) -> list[JobRecord]:
        """Return all jobs of this node in these states, in the order of their submission. Meant for states that few
        jobs are in."""
        named = {"states": [state.value for state in states]}
        return await self._database.look_up(
            ("in states", *named["states"]),
            lambda connection: [self._records.of(row) for row in connection.execute(_IN_STATES, named).all()],
        )

    async def elsewhere(self) -> list[JobRecord]:
        """Return the jobs that have not ended and were sent to other boxes, in the order of their submission."""
        return await self._database.look_up(
            "elsewhere", lambda connection: [self._records.of(row) for row in connection.execute(_ELSEWHERE).all()]
        )

    async def sessions(self) -> list[JobRecord]:
        """Return the sessions of this node that have not ended."""
        return await self._database.look_up(
            "sessions", lambda connection: [self._records.of(row) for row in connection.execute(_SESSIONS).all()]
        )

    async def mirror(
        self, job_id: str, events: Sequence[tuple[int, float, Payload]], fields: Mapping[str, Any]
    ) -> tuple[JobRecord, list[JobEvent]]:
        """Store events of a job in another box, which each have a number there, and set `fields` of it. Return the job,
        and the events that were not stored before."""
        async with self._database.session() as session:
            row = await _row(session, job_id)
            # The first one says that it is queued, which it was here before it was there.
            new = [
                _add_event(session, row, payload, time_s)
                for number, time_s, payload in events
                if number > max(1, row.journal_line)
            ]
            _set(row, {**fields, "journal_line": max([row.journal_line, *(number for number, _, _ in events)])})
            for event in new:
                if isinstance(event.payload, StateChanged):
                    row.job_state, row.reason = event.payload.job_state, event.payload.reason
                    row.message, row.attempt = event.payload.message, event.payload.attempt
                    await queue_deliveries(session, row, event.time_s)
                elif isinstance(event.payload, EvalDone):
                    await session.flush()
                    before = (await session.execute(_JOBS.where(JobRow.job_id == job_id))).one()
                    row.evaluations = evaluations_after(record_of(before), event.payload)
            return await self._stored(session, row), new

    async def queued(self, limit: int) -> list[JobRecord]:
        """Return the first jobs of this node's queue, in their order."""

        def read(connection: Connection) -> list[JobRecord]:
            rows = connection.execute(_queue(*_STORED).limit(limit))
            return [self._records.of(row, queue_position=i) for i, row in enumerate(rows, 1)]

        return await self._database.read(read)

    async def heads(self, limit: int) -> list[JobRecord]:
        """Return the queued jobs to decide from, in the order of the queue: the first of each user in each project, by
        priority and age, then the second of each and so on. So however many jobs of one user wait, the others are
        seen."""
        is_queued = (JobRow.job_state == JobState.QUEUED.value) & _HERE
        place = func.row_number().over(order_by=JobRow.queue_order).label("place")
        whose, by_priority = (JobRow.project, JobRow.owner), (JobRow.priority.desc(), JobRow.queue_order)
        rank = func.row_number().over(partition_by=whose, order_by=by_priority).label("rank")
        ranked = select(JobRow.number, place, rank).where(is_queued).subquery()
        places = select(ranked.c.number, ranked.c.place).order_by(ranked.c.rank, ranked.c.place).limit(limit)

        def read(connection: Connection) -> list[JobRecord]:
            place_of = {row.number: row.place for row in connection.execute(places)}
            rows = connection.execute(_JOBS.where(JobRow.number.in_(place_of)))
            jobs = [self._records.of(row, queue_position=place_of[row.number]) for row in rows]
            return sorted(jobs, key=attrgetter("queue_position"))

        return await self._database.read(read)

    async def queued_ids(self, owner: str, project: str) -> tuple[list[str], list[str]]:
        """Return the ids of the jobs in the queue, in their order: those of that owner, and those of that project."""
        async with self._database.reading() as session:
            return await _queued_ids(session, owner, project)

    async def owners(self, job_ids: Collection[str]) -> dict[str, str]:
        """Return the owners of those of these jobs that exist, by job id."""
        found: dict[str, str] = {}
        async with self._database.reading() as session:
            for part in parts(job_ids):
                rows = await session.execute(select(JobRow.job_id, JobRow.owner).where(JobRow.job_id.in_(part)))
                found |= {job_id: owner for job_id, owner in rows}  # noqa: C416  # not every SQLAlchemy types a Row as a tuple
        return found

    async def users_of(self, resource_id: str) -> list[tuple[str, str]]:
        """Return id and owner of the first few jobs that have not ended and need this dataset or model."""
        columns = (JobRow.model_id, JobRow.dataset_id, JobRow.eval_dataset_id)
        # In the text of a JSON object, where it follows a colon: names of sets do not count.
        of_set = JobRow.eval_set_ids.contains(f': "{resource_id}"', autoescape=True)
        needs = or_(*(column == resource_id for column in columns), of_set)
        query = select(JobRow.job_id, JobRow.owner).where(JobRow.job_state.in_(_ALIVE), needs)
        query = query.order_by(JobRow.number).limit(_MAX_NAMED)
        async with self._database.reading() as session:
            return [(job_id, owner) for job_id, owner in await session.execute(query)]  # a Row is not a tuple to all

    async def ended_among(self, job_ids: Collection[str]) -> list[JobRecord]:
        """Return those of these jobs that have ended, the first that ended first."""
        found: list[JobRecord] = []
        async with self._database.reading() as session:
            for part in parts(job_ids):
                query = _JOBS.where(JobRow.job_id.in_(part), JobRow.job_state.in_(_ENDED))
                found += [record_of(row) for row in await session.execute(query)]
        return sorted(found, key=lambda job: (job.ended_s, job.job_id))

    async def being_deleted(self) -> list[JobRecord]:
        """Return the jobs whose deletion, or that of their checkpoints, was begun and not finished."""
        async with self._database.reading() as session:
            return [record_of(row) for row in await session.execute(_JOBS.where(JobRow.deletion_s < 0))]

    async def begin_deletion(self, job_id: str, mark: float) -> None:
        """Mark a job, or its checkpoints, as being deleted: from here on nothing else changes it.

        Raises WrongJobState when it has not ended, NotFound when it is gone or another deletion was begun.
        """
        async with self._database.session() as session:
            row = await _row(session, job_id)
            if row.job_state not in _ENDED:
                raise WrongJobState(f"job {job_id} is {row.job_state} and has not ended")
            row.deletion_s = mark

    async def end_deletion(self, job_id: str) -> None:
        """Take the mark of `begin_deletion` off again."""
        async with self._database.session() as session:
            await session.execute(update(JobRow).where(JobRow.job_id == job_id).values(deletion_s=None))

    async def delete(self, job_id: str) -> None:
        """Remove a job that was marked by `begin_deletion`, with all its events."""
        while True:
            # In parts: the steps of running jobs are stored in between.
            async with self._database.session() as session:
                few = select(EventRow.sequence).where(EventRow.job_id == job_id).limit(_EVENTS_AT_ONCE)
                these = delete(EventRow).where(EventRow.job_id == job_id, EventRow.sequence.in_(few))
                if (await session.execute(these)).rowcount:  # type: ignore[attr-defined]  # of a deletion it is there
                    continue
                await session.execute(delete(JobRow).where(JobRow.job_id == job_id))
                return

    async def failed_attempts(self, job_id: str) -> frozenset[int]:
        """Return the numbers of the attempts that ended with a failure."""
        is_state = EventRow.body.startswith('{"kind":"state"')
        query = select(EventRow.body).where(EventRow.job_id == job_id, is_state)
        async with self._database.reading() as session:
            changes = [decode(body) for body in await session.scalars(query)]
        return frozenset(change.attempt for change in changes if change.job_state == JobState.FAILED)

    async def forget_requests(self, before_s: float) -> int:
        """Forget which request made what before that time: nobody repeats such a request any more. Return how many."""
        async with self._database.session() as session:
            gone = await session.execute(delete(RequestRow).where(RequestRow.created_s < before_s))
            return int(gone.rowcount)  # type: ignore[attr-defined]  # of a deletion it is there

    async def move(self, job_id: str, change: StateChanged, **fields: Any) -> tuple[JobRecord, JobState, JobEvent]:
        """Change the state and store the event. Return the job, the state it was in before, and the event.

        Args:
            fields: of the record. `requeue` sends the job to the end of the queue, instead of to its old place. What a
                user has wanted is over with each move, and the time of the end set or cleared.

        Raises WrongJobState when the state machine does not allow the move.
        """
        requeue = fields.pop("requeue", False)
        async with self._database.session() as session:
            row = await _row(session, job_id)
            before = JobState(row.job_state)
            if change.job_state not in MOVES.get(before, ()):
                raise WrongJobState(f"job {job_id} is {before} and cannot become {change.job_state}")
            row.job_state, row.reason, row.message = change.job_state, change.reason, change.message
            row.wanted, row.ended_s = StopRequest.NOTHING.value, time.time() if change.job_state in ENDED else 0.0
            if change.job_state == JobState.QUEUED:
                # Nothing of a job that runs again is deleted; after its next end its owner is warned again.
                row.queued_s, row.deletion_s = time.time(), None
            if requeue:
                row.queue_order = await _end_of_queue(session)
            _set(row, fields)
            event = _add_event(session, row, change)
            await queue_deliveries(session, row, event.time_s)
            return await self._stored(session, row), before, event

    async def append(self, job_id: str, payload: Payload, **fields: Any) -> tuple[JobRecord, JobEvent]:
        """Store an event and set `fields` of the job. Return both as they are now."""

        def write(connection: Connection) -> tuple[JobRecord, JobEvent]:
            set_ = {"last_sequence": JobRow.last_sequence + 1, **columns_of(fields)}
            if isinstance(payload, EvalDone) and (before := connection.execute(_BY_ID, {"key": job_id}).first()):
                set_["evaluations"] = evaluations_after(record_of(before), payload)
            changed = connection.execute(update(JobRow).where(JobRow.job_id == job_id).values(set_).returning(*_STORED))
            row = changed.first()
            if row is None:
                raise NotFound(f"job {job_id} does not exist")
            event = JobEvent(job_id=job_id, sequence=row.last_sequence, time_s=time.time(), payload=payload)
            plain = {"job_id": job_id, "sequence": event.sequence, "time_s": event.time_s, "body": encode(payload)}
            connection.execute(insert(EventRow), plain)
            return self._records.of(row), event

        return await self._database.write(write)

    async def set(self, job_id: str, **fields: Any) -> JobRecord:
        """Set fields of the job without an event."""
        async with self._database.session() as session:
            row = await _row(session, job_id)
            _set(row, fields)
            return await self._stored(session, row)

    async def _stored(self, session: AsyncSession, row: JobRow) -> JobRecord:
        """Return the record of a row that this transaction has changed."""
        await session.flush()
        is_here = row.job_state == JobState.QUEUED and not row.box
        position = (await session.scalar(_ahead(row)) or 0) if is_here else 0
        stored = (await session.execute(_JOBS.where(JobRow.job_id == row.job_id))).one()
        return self._records.of(stored, queue_position=position)

    async def events_after(self, job_id: str, sequence: int, limit: int) -> list[JobEvent]:
        """Return events with a greater number, in order."""
        query = select(EventRow.sequence, EventRow.time_s, EventRow.body)
        query = query.where(EventRow.job_id == job_id, EventRow.sequence > sequence).order_by(EventRow.sequence)

        def read(connection: Connection) -> list[JobEvent]:
            rows = connection.execute(query.limit(limit))
            return [
                JobEvent(job_id=job_id, sequence=number, time_s=time_s, payload=decode(body))
                for number, time_s, body in rows
            ]

        return await self._database.read(read)

    async def last_times(self, job_id: str) -> dict[str, float]:
        """Return when a job's present attempt began (`attempt`) and when its last step, evaluation and checkpoint were
        done, by the kind of their events; what has not happened is left out."""
        begins = {kind: f'{{"kind":"{kind}"' for kind in ("step", "eval", "checkpoint")}
        begins["attempt"] = f'{{"kind":"state","job_state":"{JobState.PREPARING.value}"'

        def read(connection: Connection) -> dict[str, float]:
            found: dict[str, float] = {}
            for name, start in begins.items():
                query = select(EventRow.time_s).where(EventRow.job_id == job_id, EventRow.body.startswith(start))
                time_s = connection.scalar(query.order_by(EventRow.sequence.desc()).limit(1))
                if time_s is not None:
                    found[name] = time_s
            return found

        return await self._database.read(read)

    async def newest_ended(self, limit: int) -> list[JobRecord]:
        """Return the jobs that ended last, the first that ended first."""
        query = _JOBS.where(JobRow.job_state.in_(_ENDED)).order_by(JobRow.ended_s.desc()).limit(limit)

        def read(connection: Connection) -> list[JobRecord]:
            return [record_of(row) for row in reversed(connection.execute(query).all())]

        return await self._database.read(read)

    async def visit_events(
        self, job_id: str, sequence: int, limit: int, kinds: Sequence[str], visit: VisitEvent, every: int = 1
    ) -> int:
        """Give events of these kinds with a greater number to `visit`, in order and in a thread; return how many.

        Args:
            every: of steps, about one in so many is given.
        """
        # One by one, as plain data: of a hundred thousand, records take ten times as long to make, and to keep them all
        # twice as long.
        is_wanted = or_(*(EventRow.body.startswith(f'{{"kind":"{kind}"') for kind in kinds))
        query = select(EventRow.sequence, EventRow.time_s, EventRow.body)
        query = query.where(EventRow.job_id == job_id, EventRow.sequence > sequence, is_wanted)
        if every > 1:
            is_step = EventRow.body.startswith('{"kind":"step"')
            query = query.where(or_(EventRow.sequence % every == 0, not_(is_step)))

        def read(connection: Connection) -> int:
            rows = 0
            for number, time_s, body in connection.execute(query.order_by(EventRow.sequence).limit(limit)):
                visit(number, time_s, parsed(body))
                rows += 1
            return rows

        return await self._database.read(read)

    async def evaluations(self, job_id: str, *, limit: int) -> list[EvalDone]:
        """Return the last evaluations of a job, oldest first."""
        query = select(EventRow.body).where(EventRow.job_id == job_id, EventRow.body.startswith('{"kind":"eval"'))
        query = query.order_by(EventRow.sequence.desc()).limit(limit)

        def read(connection: Connection) -> list[EvalDone]:
            return [decode(body) for body in reversed(connection.scalars(query).all())]

        return await self._database.read(read)

    async def counts(self) -> dict[str, int]:
        """Return the number of this node's jobs by state, every state named."""

        def read(connection: Connection) -> dict[str, int]:
            found = {job_state: number for job_state, number in connection.execute(_COUNTS)}  # noqa: C416  # not every SQLAlchemy types a Row as a tuple
            return {state.value: found.get(state.value, 0) for state in JobState}

        return dict(await self._database.look_up("counts", read))


@functools.lru_cache(maxsize=256)
def _newest(everyone: bool, num_projects: int, states: tuple[str, ...], is_after: bool, only: tuple[str, ...]) -> Any:
    """Return the query of the newest jobs: their numbers and what tells whether they have changed. It takes owner and
    projects by name, and what `only` names of a `JobFilter`."""
    columns = [getattr(JobRow, name) for name in ("number", "queue_order", *EndedRecords.STAMP)]
    conditions = [_FILTERS[name] for name in only]
    if states:
        conditions.append(JobRow.job_state.in_(states))

    def of(which: Any) -> Any:
        query = select(*columns).where(*conditions).order_by(JobRow.number.desc()).limit(bindparam("most"))
        query = query if which is None else query.where(which)
        return query.where(JobRow.number < bindparam("before")) if is_after else query

    if everyone:
        return of(None)
    whose = [JobRow.owner == bindparam("owner")]
    whose += [JobRow.project == bindparam(f"project_{i}") for i in range(num_projects)]
    if num_projects == 0 or num_projects > _UNITED_PROJECTS:
        return of(or_(*whose))
    # Each with its own index, which has the order of the list: over all together every row of them would be read and
    # sorted.
    united = union(*(select(of(one).subquery()) for one in whose)).subquery()
    return select(united).order_by(united.c.number.desc()).limit(bindparam("most"))


async def _queued_ids(session: AsyncSession, owner: str, project: str) -> tuple[list[str], list[str]]:
    mine, ours = JobRow.owner == owner, JobRow.project == project
    query = select(JobRow.job_id, mine, ours).where(JobRow.job_state == JobState.QUEUED.value, mine | ours)
    rows = (await session.execute(query.order_by(JobRow.queue_order))).all()
    return [row[0] for row in rows if row[1]], [row[0] for row in rows if row[2]]


def _visible(owner: str, projects: Collection[str]) -> Any:
    # Without a project a plain comparison, which one index serves with its order.
    return (JobRow.owner == owner) | JobRow.project.in_(projects) if projects else JobRow.owner == owner


def _queue(*what: Any) -> Any:
    return select(*what).where(JobRow.job_state == JobState.QUEUED.value, _HERE).order_by(JobRow.queue_order)


async def _end_of_queue(session: AsyncSession) -> int:
    last: int | None = await session.scalar(select(func.max(JobRow.queue_order)))
    return (last or 0) + 1


def _place(connection: Connection, row: Any) -> int:
    if row.job_state != JobState.QUEUED or row.box:
        return 0
    return connection.scalar(_ahead(row)) or 0


def _ahead(row: Any) -> Any:
    is_before = JobRow.queue_order <= row.queue_order
    return select(func.count()).where(JobRow.job_state == row.job_state, _HERE, is_before)


async def _row(session: AsyncSession, job_id: str) -> JobRow:
    row = await session.scalar(select(JobRow).where(JobRow.job_id == job_id))
    if row is None:
        raise NotFound(f"job {job_id} does not exist")
    if row.deletion_s is not None and row.deletion_s < 0:
        raise NotFound(f"job {job_id} or its checkpoints are being deleted; try again in a moment")
    return row


def _set(row: JobRow, fields: dict[str, Any]) -> None:
    for name, value in columns_of(fields).items():
        setattr(row, name, value)


def _add_event(session: AsyncSession, row: JobRow, payload: Payload, time_s: float | None = None) -> JobEvent:
    row.last_sequence += 1
    at_s = time.time() if time_s is None else time_s
    event = JobEvent(job_id=row.job_id, sequence=row.last_sequence, time_s=at_s, payload=payload)
    session.add(EventRow(job_id=row.job_id, sequence=event.sequence, time_s=event.time_s, body=encode(payload)))
    return event
