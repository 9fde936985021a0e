"""Sessions: jobs whose steps are called over the network. Takes calls, keeps them, and answers with their results."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from horizon_server.blobs.concurrency import to_the_end
from horizon_server.blobs.space import Space
from horizon_server.errors import (
    HorizonError,
    InvalidSpec,
    NotFound,
    RequestIdReused,
    TooLarge,
    TooManyCalls,
    WrongJobState,
)
from horizon_server.jobs.scheduler import RESUMED
from horizon_server.records.account import Principal
from horizon_server.records.job import ENDED, JobRecord, JobState, StopRequest
from horizon_server.records.session import Call, Close, Closed, LoadState, OptimStep, Result
from horizon_server.services.access import require_change
from horizon_server.services.jobs import JobService
from horizon_server.services.session_checks import check_call
from horizon_server.spec import JobSpec
from horizon_server.texts import size_text
from horizon_server.worker_link.calls import CallFiles

MAX_CALLS_IN_FLIGHT = 1024
"""Calls of a session that have no result yet."""
MAX_KEPT_BYTES = 2**30
"""Of the calls of a session that no checkpoint has yet."""
MAX_WAIT_S = 60.0
"""Of a caller for a result; then it asks again."""
MAX_SEQUENCES = 256
"""Of a caller's own numbers of calls, the newest: an older one cannot be sent again."""
IDLE = StopRequest.IDLE.name
_LOOK_S = 1.0


@dataclass(kw_only=True, eq=False)
class _Open:
    """What is known of a session that was called since the daemon began."""

    last: int
    """The number of its newest call."""
    done: int
    """Up to which all calls have results."""
    num_bytes: int
    """Of the calls that are kept; those that were removed since it was counted are in it."""
    called_s: float = field(default_factory=time.monotonic)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_closed: bool = False
    """Whether its newest call is its end."""
    num_waiting: int = 0
    """Callers that wait for a result now."""
    sequences: dict[int, int] = field(default_factory=dict)
    """Numbers of calls, by those that their caller counts with."""
    changed: int = 0
    """The newest call that changes the weights, of those that this daemon has kept."""
    has_stale: bool = False
    """Whether the file of these may tell of a call that was never kept."""


class Sessions:
    """Thread: belongs to one event loop; files are written and read in threads."""

    def __init__(self, jobs: JobService, *, space: Space) -> None:
        self._jobs, self._space = jobs, space
        self._open: dict[str, _Open] = {}

    async def open(
        self, principal: Principal, spec: JobSpec, *, request_id: str = "", notes: Sequence[str] = ()
    ) -> JobRecord:
        """Submit a session. `notes` are its first messages. Raises InvalidSpec for the spec of a job with data, and as
        `JobService.submit`."""
        if not spec.is_session:
            raise InvalidSpec.of("method", f"method is {spec.method}; a session has method: session")
        return await self._jobs.submit(principal, request_id=request_id or str(uuid.uuid4()), spec=spec, notes=notes)

    async def call(
        self, principal: Principal, key: str, call: Call, *, number: int | None = None, sequence: int | None = None
    ) -> int:
        """Keep a call for the session to do, and return its number, from 1. Calls are done in the order of their
        numbers. With `number` it may be sent again: the same call under the same number is one call. So it may with
        `sequence`, a number of the caller's own, of which some may be left out: each is larger than the one before.

        Raises:
            NotFound: when the caller has no such session, or a checkpoint to load is not there.
            NotAllowed: when the session is another user's.
            WrongJobState: when it has ended, or was paused by a user.
            InvalidData: for data that cannot be used; each violation names its field.
            InvalidSpec: for a number that is not the next one, or a sequence that is not a later one.
            RequestIdReused: for another call under a number that was used.
            TooLarge: when the calls since the last step take too much of the disk.
            TooManyCalls: when too many calls wait.
            DiskFull: when the node has no room to keep the call.
        """
        job = await self._session(principal, key, changes=True)
        check_call(call, job.spec)
        files, session = self._files(job), await self._known(job)
        async with session.lock:
            if number is not None and number <= session.last:
                await asyncio.to_thread(_require_same, files, number, call)
                return number
            if sequence is not None and session.sequences and sequence <= max(session.sequences):
                known = session.sequences.get(sequence)
                if known is None:
                    raise InvalidSpec.of(
                        "seq_id", f"seq_id is {sequence}; the newest is {max(session.sequences)}, and each is larger"
                    )
                await asyncio.to_thread(_require_same, files, known, call)
                return known
            if job.job_state in ENDED:
                raise WrongJobState(_ended(job))
            if session.is_closed:
                raise WrongJobState(f"session {job.job_id} is closed by its call {session.last}")
            if job.job_state is JobState.PAUSED and job.reason != IDLE:
                raise WrongJobState(
                    f"session {job.job_id} was paused by a user; resume it: horizon job resume {job.job_id}"
                )
            if number is not None and number != session.last + 1:
                raise InvalidSpec.of("number", f"number is {number}; the session's next call has {session.last + 1}")
            if isinstance(call, LoadState):
                await self._require_checkpoint(principal, call)
            await self._require_room(job, files, session)
            # Whole, also for a caller who hangs up: the next call must not take its number.
            number = await to_the_end(self._keep(files, session, call, sequence))
        await self._wake(job)
        return number

    async def result(self, principal: Principal, key: str, number: int, *, wait_s: float = 0.0) -> Result | None:
        """Return what a call has answered; None where it is not done within `wait_s`, of which the daemon waits a
        minute at most.

        Raises:
            NotFound: when the caller has no such session, or it has no such call, or its result is not kept any more.
            WrongJobState: when the session has ended without doing the call.
        """
        job = await self._session(principal, key, changes=False)
        files, session = self._files(job), await self._known(job)
        if not 1 <= number <= session.last:
            raise NotFound(f"session {job.job_id} has no call {number}; its newest is {session.last}")
        end_s = time.monotonic() + min(max(0.0, wait_s), MAX_WAIT_S)
        news = asyncio.Event()
        with (
            self._waits(session),
            self._jobs.scheduler.runtime.calls.waiting(job.job_id, news),
            self._jobs.journal.watching(job.job_id, news),
        ):
            while True:
                news.clear()
                # Before the result: a session that ends writes the last one first.
                now = await self._jobs.journal.store.get(job.job_id)
                found = await asyncio.to_thread(files.result, number)
                has_ended = now is None or now.job_state in ENDED
                # Who has closed a session finds it ended.
                if found is not None and (has_ended or not isinstance(found, Closed)):
                    return found
                if has_ended:
                    raise WrongJobState(_ended(now or job))
                if found is None and number <= session.done:
                    raise NotFound(f"the result of call {number} of session {job.job_id} is not kept any more")
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    return None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await news.wait()

    async def last_number(self, principal: Principal, key: str) -> int:
        """Return the number of the newest call, 0 where there was none. Raises NotFound."""
        return (await self._known(await self._session(principal, key, changes=False))).last

    async def will_change(self, job: JobRecord) -> bool:
        """Whether a call that changes the weights waits in a session, or is being done."""
        session = await self._known(job)
        if session.done < session.last:
            await self._count_done(self._files(job), session)
        return session.changed > session.done

    async def run(self) -> None:
        """Write home sessions that are not called for long, and bring back those that are. Until it is cancelled."""
        while True:
            with contextlib.suppress(HorizonError, OSError):  # looked at again in a second
                await self._look()
            await asyncio.sleep(_LOOK_S)

    async def _look(self) -> None:
        for job in await self._jobs.journal.store.sessions():
            session, files = await self._known(job), self._files(job)
            await self._count_done(files, session)
            if session.done < session.last:
                session.called_s = time.monotonic()
                await self._wake(job)
            elif job.job_state is JobState.RUNNING and not session.num_waiting:
                attempt = self._jobs.scheduler.attempt(job.job_id)
                if attempt is not None and time.monotonic() - session.called_s > 60 * job.spec.session.idle_minutes:
                    await attempt.stop(StopRequest.IDLE)

    async def _require_room(self, job: JobRecord, files: CallFiles, session: _Open) -> None:
        """Let one more call pass. Raises TooManyCalls, TooLarge, DiskFull."""
        if session.last - session.done >= MAX_CALLS_IN_FLIGHT:
            await self._count_done(files, session)
        if session.last - session.done >= MAX_CALLS_IN_FLIGHT:
            raise TooManyCalls(
                f"{MAX_CALLS_IN_FLIGHT} calls of session {job.job_id} have no result yet; wait for some of them",
                retry_after_s=1.0,
            )
        if session.num_bytes >= MAX_KEPT_BYTES:
            # Most of them are in a checkpoint by now, and removed.
            session.num_bytes = sum((await asyncio.to_thread(files.sizes)).values())
        if session.num_bytes >= MAX_KEPT_BYTES:
            raise TooLarge(
                f"the calls of session {job.job_id} since its last step take {size_text(session.num_bytes)}, and at "
                f"most {size_text(MAX_KEPT_BYTES)} are kept; call optim_step before more data"
            )
        self._space.require(0, f"a call of session {job.job_id}")

    async def _keep(self, files: CallFiles, session: _Open, call: Call, sequence: int | None) -> int:
        """Write a call as the next one, and return its number."""
        number = session.last + 1
        sequences = session.sequences
        if sequence is not None:
            kept = sorted(sequences)[1 - MAX_SEQUENCES :]
            sequences = {**{key: sequences[key] for key in kept}, sequence: number}
        news = sequences if sequence is not None or session.has_stale else None
        # Until both are written: the sequences come first, and one without its call means nothing to the next daemon.
        session.has_stale = news is not None
        session.num_bytes += await asyncio.to_thread(_write, files, number, call, news)
        session.sequences, session.has_stale = sequences, False
        session.last, session.is_closed = number, isinstance(call, Close)
        session.called_s = time.monotonic()
        if isinstance(call, OptimStep | LoadState):
            session.changed = number
        return number

    async def _wake(self, job: JobRecord) -> None:
        """Let the session do its calls: its worker looks for them, or it is brought back."""
        attempt = self._jobs.scheduler.attempt(job.job_id)
        if attempt is not None:
            attempt.call()
            return
        now = await self._jobs.journal.store.get(job.job_id)
        if now is not None and now.job_state is JobState.PAUSED and now.reason == IDLE:
            with contextlib.suppress(WrongJobState):  # another call was first
                await self._jobs.journal.move(
                    now, JobState.QUEUED, reason=RESUMED, message="brought back by a call", requeue=True
                )
            self._jobs.scheduler.wake()

    async def _session(self, principal: Principal, key: str, *, changes: bool) -> JobRecord:
        job = await self._jobs.get(principal, key)
        if changes:
            require_change(principal, job.owner, f"job {job.job_id}", project=job.project)
        if not job.spec.is_session:
            raise InvalidSpec.of("session", f"job {job.job_id} has method {job.spec.method}; it is not a session")
        return job

    async def _known(self, job: JobRecord) -> _Open:
        if job.job_id not in self._open:
            files = self._files(job)
            last, sizes = await asyncio.to_thread(lambda: (files.last_number(), files.sizes()))
            done = await asyncio.to_thread(files.num_done, 0, last)
            newest = await asyncio.to_thread(files.call, last)
            stored = await asyncio.to_thread(files.sequences)
            sequences = {sequence: number for sequence, number in stored.items() if number <= last}
            known = _Open(
                last=last,
                done=done,
                num_bytes=sum(sizes.values()),
                is_closed=isinstance(newest, Close),
                sequences=sequences,
                has_stale=sequences != stored,
            )
            self._open.setdefault(job.job_id, known)
        return self._open[job.job_id]

    async def _count_done(self, files: CallFiles, session: _Open) -> None:
        session.done = await asyncio.to_thread(files.num_done, session.done, session.last)

    async def _require_checkpoint(self, principal: Principal, call: LoadState) -> None:
        key, _, step = call.checkpoint.rpartition("@")
        source = await self._jobs.get(principal, key)
        checkpoints = self._jobs.folders.checkpoints(source.job_id)
        if source.job_id != key or not step.isdecimal():
            raise InvalidSpec.of(
                "checkpoint", f"checkpoint is {call.checkpoint!r:.80}; it must be JOB@STEP, with the job's id"
            )
        await asyncio.to_thread(checkpoints.manifest, int(step))

    def _files(self, job: JobRecord) -> CallFiles:
        return CallFiles(self._jobs.folders.calls(job.job_id))

    @contextmanager
    def _waits(self, session: _Open) -> Iterator[None]:
        session.num_waiting += 1
        try:
            yield
        finally:
            session.num_waiting -= 1


def _write(files: CallFiles, number: int, call: Call, sequences: Mapping[int, int] | None) -> int:
    files.open()
    if sequences is not None:
        files.write_sequences(sequences)
    return files.write_call(number, call)


def _require_same(files: CallFiles, number: int, call: Call) -> None:
    """Let a call that is sent again pass. Raises RequestIdReused for another one; of a call that is not kept any more
    nobody can tell."""
    known = files.call(number)
    if known is not None and known != call:
        raise RequestIdReused(f"call {number} of the session was another one; number calls from 1, one after the other")


def _ended(job: JobRecord) -> str:
    why = f": {job.message}" if job.message else ""
    return f"session {job.job_id} is {job.job_state}{why}"
