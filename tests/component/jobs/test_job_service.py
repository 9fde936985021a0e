"""The heart, for real: service, queue and attempts over the real database, with workers that follow a script."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import structlog
from tests.component.jobs.conftest import held
from tests.daemon_parts import ROOT, WAIT_S, DaemonParts, Script

from horizon_server.children.child import Limits
from horizon_server.errors import (
    DoesNotFit,
    Draining,
    InvalidSpec,
    NotAllowed,
    NotFound,
    RequestIdReused,
    WrongJobState,
)
from horizon_server.events import CheckpointWritten, JobEvent, Message, StateChanged, StepDone
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.spec import JobSpec, parse_job_spec

S = JobState


def states(events: list[JobEvent]) -> list[tuple[str, str]]:
    return [(e.payload.job_state, e.payload.reason) for e in events if isinstance(e.payload, StateChanged)]


def steps(events: list[JobEvent]) -> list[int]:
    return [event.payload.step for event in events if isinstance(event.payload, StepDone)]


async def test_a_job_runs_from_submit_to_its_last_event(daemon: DaemonParts, ada: Principal) -> None:
    job = await daemon.submit(ada, "first", Script(num_steps=3))
    assert (job.job_state, job.queue_position) == (S.QUEUED, 1)
    done = await daemon.until(job.job_id, S.SUCCEEDED)
    assert (done.step, done.num_steps, done.attempt) == (3, 3, 1)
    assert done.data_report["packed_rows"] == 4
    events = await daemon.events(job.job_id)
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    assert [name for name, _ in states(events)] == ["QUEUED", "PREPARING", "STARTING", "RUNNING", "SUCCEEDED"]
    assert steps(events) == [1, 2, 3]
    assert [event.payload.step for event in events if isinstance(event.payload, CheckpointWritten)] == [3]
    [checkpoint] = await daemon.services.jobs.checkpoints(ada, job.job_id)
    assert (checkpoint.step, checkpoint.last) == (3, True)
    assert structlog.contextvars.get_contextvars() == {}


async def test_the_same_request_gives_the_same_job(daemon: DaemonParts, ada: Principal) -> None:
    request_id, jobs = str(uuid.uuid4()), daemon.services.jobs
    first = await jobs.submit(ada, request_id=request_id, spec=daemon.spec("once"))
    again = await jobs.submit(ada, request_id=request_id, spec=daemon.spec("once"))
    assert again.job_id == first.job_id
    with pytest.raises(RequestIdReused):
        await jobs.submit(ada, request_id=request_id, spec=daemon.spec("other"))
    assert len((await jobs.list(ada))[0]) == 1


class NewerSpec(JobSpec):
    """A job spec of a later version: it has one field more."""

    smoothing: float = 0.5


async def test_a_request_is_the_same_for_a_version_with_more_fields(daemon: DaemonParts, ada: Principal) -> None:
    """A submission whose answer an upgrade of the daemon swallowed was refused as another body when it was repeated."""
    request_id, jobs = str(uuid.uuid4()), daemon.services.jobs
    given = daemon.spec("once").given()
    first = await jobs.submit(ada, request_id=request_id, spec=parse_job_spec(given))
    again = await jobs.submit(ada, request_id=request_id, spec=NewerSpec.model_validate(given))
    assert again.job_id == first.job_id
    with pytest.raises(RequestIdReused):
        await jobs.submit(ada, request_id=request_id, spec=NewerSpec.model_validate({**given, "smoothing": 0.1}))


async def test_a_default_that_is_given_makes_no_other_request(daemon: DaemonParts, ada: Principal) -> None:
    request_id, jobs = str(uuid.uuid4()), daemon.services.jobs
    first = await jobs.submit(ada, request_id=request_id, spec=daemon.spec("once"))
    for default in ({"priority": 0}, {"project": ada.project}):
        again = await jobs.submit(ada, request_id=request_id, spec=daemon.spec("once", **default))
        assert again.job_id == first.job_id


async def test_what_cannot_run_is_refused_and_leaves_nothing(daemon: DaemonParts, ada: Principal) -> None:
    bob, eve = await daemon.user("bob"), await daemon.user("eve", role="viewer")
    with pytest.raises(NotFound, match="chats"):
        await daemon.submit(bob)
    with pytest.raises(NotAllowed, match="viewer"):
        await daemon.submit(eve)
    with pytest.raises(DoesNotFit, match="are available"):
        await daemon.submit(ada, train={"tokens_per_step": 67_108_864, "sequence_length": 1024})
    with pytest.raises(NotAllowed, match="project physics is not yours"):
        await daemon.submit(ada, project="physics")
    assert await daemon.services.jobs.queue(ROOT) == []
    assert (await daemon.services.jobs.plan(ada, daemon.spec()))[1].fits


async def test_others_cannot_see_or_change_a_job(daemon: DaemonParts, ada: Principal) -> None:
    job = await held(daemon)
    bob, eve = await daemon.user("bob"), await daemon.user("eve", role="viewer")
    jobs = daemon.services.jobs
    for call in (jobs.get, jobs.cancel, jobs.pause, jobs.resume):
        with pytest.raises(NotFound):
            await call(bob, job.job_id)
    with pytest.raises(NotAllowed):
        await jobs.cancel(eve, job.job_id)
    assert (await jobs.get(eve, job.job_id)).job_id == job.job_id
    assert (await jobs.list(bob))[0] == []
    await jobs.cancel(ROOT, job.job_id)
    await daemon.until(job.job_id, S.CANCELLED)


Call = Callable[[Principal, str], Awaitable[JobRecord]]


@pytest.fixture
def hold_preparation(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Stops the process of every preparation before it begins."""

    def stop(pid: int, _: Limits) -> None:
        os.kill(pid, signal.SIGSTOP)

    return lambda: monkeypatch.setattr("horizon_server.children.child.limit", stop)


async def in_state(
    daemon: DaemonParts, ada: Principal, state: JobState, hold_preparation: Callable[[], None]
) -> JobRecord:
    """Return a job that stays in this state until something is done to it."""
    jobs = daemon.services.jobs
    match state:
        case S.QUEUED:
            await daemon.set_node("cordoned")
            return await daemon.submit(ada, "waiting")
        case S.PREPARING:  # of a length of its own, so that nothing prepared fits
            hold_preparation()
            job = await daemon.submit(ada, "preparing", train={"sequence_length": 200 + len(str(daemon.state_dir))})
        case S.STARTING:
            job = await daemon.submit(ada, "starting", Script(hold_at="start"))
        case S.RUNNING:
            job = await held(daemon)
        case S.STOPPING:
            job = await held(daemon, deaf=True)
            return await jobs.pause(ada, job.job_id)
        case S.PAUSED:
            await daemon.set_node("cordoned")
            job = await daemon.submit(ada, "parked")
            return await jobs.pause(ada, job.job_id)
        case S.SUCCEEDED:
            job = await daemon.submit(ada, "done")
        case S.FAILED:
            job = await daemon.submit(ada, "broken", Script(fail_at=2))
        case S.CANCELLED:
            job = await held(daemon)
            await jobs.cancel(ada, job.job_id)
    return await daemon.until(job.job_id, state)


@pytest.mark.parametrize("state", list(JobState))
async def test_cancel_in_every_state(
    daemon: DaemonParts, ada: Principal, state: JobState, hold_preparation: Callable[[], None]
) -> None:
    job = await in_state(daemon, ada, state, hold_preparation)
    answer = await daemon.services.jobs.cancel(ada, job.job_id)
    if state in (S.SUCCEEDED, S.FAILED, S.CANCELLED):
        assert answer.job_state is state, "what has ended stays as it is, and the answer shows it"
        return
    if state is S.STOPPING:  # the others hear the order; released as well, they might do their steps first
        daemon.release("held")
    ended = await daemon.until(job.job_id, S.CANCELLED)
    assert (ended.reason, ended.message, ended.wanted) == ("CANCELLED", "cancelled by a user", "")
    assert ended.ended_s > 0
    assert (await daemon.events(job.job_id))[-1].payload.job_state == "CANCELLED"  # type: ignore[union-attr]


@pytest.mark.parametrize("state", list(JobState))
async def test_pause_in_every_state(
    daemon: DaemonParts, ada: Principal, state: JobState, hold_preparation: Callable[[], None]
) -> None:
    job = await in_state(daemon, ada, state, hold_preparation)
    if state in (S.SUCCEEDED, S.FAILED, S.CANCELLED):
        with pytest.raises(WrongJobState, match=f"is {state}; only a job that has not ended can be paused"):
            await daemon.services.jobs.pause(ada, job.job_id)
        return
    await daemon.services.jobs.pause(ada, job.job_id)
    if state is S.STOPPING:  # the others hear the order; released as well, they might do their steps first
        daemon.release("held")
    paused = await daemon.until(job.job_id, S.PAUSED)
    assert (paused.reason, paused.wanted, paused.ended_s) == ("PAUSED", "", 0.0)
    assert (await daemon.services.jobs.pause(ada, job.job_id)).job_state is S.PAUSED
    if state is S.RUNNING:
        assert [c.step for c in await daemon.services.jobs.checkpoints(ada, job.job_id)] == [1]


@pytest.mark.parametrize("state", list(JobState))
async def test_resume_in_every_state(
    daemon: DaemonParts, ada: Principal, state: JobState, hold_preparation: Callable[[], None]
) -> None:
    job = await in_state(daemon, ada, state, hold_preparation)
    if state not in (S.PAUSED, S.FAILED):
        with pytest.raises(WrongJobState, match="only a PAUSED or FAILED job can be resumed"):
            await daemon.services.jobs.resume(ada, job.job_id)
        return
    resumed = await daemon.services.jobs.resume(ada, job.job_id)
    assert (resumed.job_state, resumed.reason, resumed.queue_position) == (S.QUEUED, "RESUMED", 1)
    await daemon.set_node("open")
    await daemon.until(job.job_id, S.SUCCEEDED)


async def test_a_pause_at_the_moment_a_job_leaves_the_queue_is_carried_out(
    daemon: DaemonParts, ada: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database says PREPARING already, and the attempt has not heard of it yet."""
    move, pauses = daemon.parts.journal.move, list[asyncio.Task[JobRecord]]()

    async def moved(job: JobRecord, state: JobState, **fields: Any) -> JobRecord:
        record = await move(job, state, **fields)
        if state is S.PREPARING:
            pauses.append(asyncio.create_task(daemon.services.jobs.pause(ada, job.job_id)))
            await asyncio.wait(pauses, timeout=0.5)
        return record

    monkeypatch.setattr(daemon.parts.journal, "move", moved)
    job = await daemon.submit(ada, "early")
    assert (await daemon.until(job.job_id, S.PAUSED)).reason == "PAUSED"


async def test_a_resumed_job_continues_from_its_checkpoint(daemon: DaemonParts, ada: Principal) -> None:
    job = await held(daemon)
    await daemon.services.jobs.pause(ada, job.job_id)
    await daemon.until(job.job_id, S.PAUSED)
    daemon.release("held")
    await daemon.services.jobs.resume(ada, job.job_id)
    done = await daemon.until(job.job_id, S.SUCCEEDED)
    assert (done.attempt, steps(await daemon.events(job.job_id))) == (2, [1, 2, 3, 4])


async def test_a_second_pause_ends_the_wait_of_the_first_for_disk_space(daemon: DaemonParts, ada: Principal) -> None:
    job = await held(daemon, no_space=True)
    await daemon.services.jobs.pause(ada, job.job_id)
    async with asyncio.timeout(WAIT_S):
        async for event in daemon.parts.journal.follow(job.job_id, 0):
            if isinstance(event.payload, Message) and event.payload.text == "no space":
                break
    assert (await daemon.job(job.job_id)).job_state is S.STOPPING
    await daemon.services.jobs.pause(ada, job.job_id)
    await daemon.until(job.job_id, S.PAUSED)
    assert await daemon.services.jobs.checkpoints(ada, job.job_id) == []
    daemon.release("held")
    await daemon.services.jobs.resume(ada, job.job_id)
    done = await daemon.until(job.job_id, S.SUCCEEDED)
    assert (done.attempt, done.step) == (2, 4)


async def test_cancel_wins_over_pause(daemon: DaemonParts, ada: Principal) -> None:
    job = await held(daemon, deaf=True)
    await daemon.services.jobs.pause(ada, job.job_id)
    await daemon.services.jobs.cancel(ada, job.job_id)
    await daemon.services.jobs.pause(ada, job.job_id)
    daemon.release("held")
    await daemon.until(job.job_id, S.CANCELLED)


async def test_a_worker_killed_because_its_job_is_cancelled_is_no_error(
    daemon: DaemonParts, ada: Principal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizon_server.jobs.attempt.CANCEL_GRACE_S", 0.0)
    job = await held(daemon, deaf=True)
    daemon.write_log(job, b"a line of the log\n")
    await daemon.services.jobs.cancel(ada, job.job_id)
    await daemon.until(job.job_id, S.CANCELLED)
    assert [e.payload.text for e in await daemon.events(job.job_id) if isinstance(e.payload, Message)] == []


@pytest.mark.parametrize(
    ("script", "reason", "words"),
    [
        (Script(die_at="start"), "WORKER_DIED", "SIGKILL"),
        (Script(die_at=2), "WORKER_DIED", "SIGKILL"),
        (Script(exit_at=2), "WORKER_DIED", "exit code 7"),
        (Script(fail_at=2), "DIVERGED", "the loss is not finite"),
    ],
)
async def test_a_worker_that_fails_ends_its_job_with_the_true_reason_and_the_queue_continues(
    daemon: DaemonParts, ada: Principal, script: Script, reason: str, words: str
) -> None:
    job = await daemon.submit(ada, "bad", script)
    following = await daemon.submit(ada, "following")
    failed = await daemon.until(job.job_id, S.FAILED)
    assert (failed.reason, failed.ended_s > 0) == (reason, True)
    assert words in failed.message
    await daemon.until(following.job_id, S.SUCCEEDED)
    if script.exit_at:
        texts = [e.payload.text for e in await daemon.events(job.job_id) if isinstance(e.payload, Message)]
        assert "the last words of a worker" in texts[-1]
    await daemon.services.jobs.resume(ada, job.job_id)
    assert (await daemon.until(job.job_id, S.SUCCEEDED)).attempt == 2


async def test_the_queue_shows_resident_jobs_and_then_those_that_wait(daemon: DaemonParts, ada: Principal) -> None:
    first = await held(daemon, "one")
    await daemon.set_node("cordoned")
    second = await daemon.submit(ada, "two")
    assert second.queue_position == 1
    assert [job.job_id for job in await daemon.services.jobs.queue(ROOT)] == [first.job_id, second.job_id]
    users_of = daemon.parts.journal.store.users_of
    assert await users_of(second.dataset_id) == [(first.job_id, "ada"), (second.job_id, "ada")]
    daemon.release("one")
    await daemon.until(first.job_id, S.SUCCEEDED)
    assert await users_of(second.dataset_id) == [(second.job_id, "ada")]
    await daemon.set_node("open")
    await daemon.until(second.job_id, S.SUCCEEDED)
    assert await users_of(second.dataset_id) == []


async def test_a_parked_job_does_not_overtake_those_who_waited(daemon: DaemonParts, ada: Principal) -> None:
    """Park a cheap job, resume it when others wait: it goes to the end of the queue."""
    eve = await daemon.user("eve")
    await daemon.dataset(eve)
    await daemon.set_node("cordoned")
    ticket = await daemon.submit(eve, "ticket")
    await daemon.services.jobs.pause(eve, ticket.job_id)
    waiting = await daemon.submit(ada, "waiting")
    resumed = await daemon.services.jobs.resume(eve, ticket.job_id)
    later = await daemon.submit(ada, "later")
    places = {job.job_id: job.queue_position for job in (await daemon.services.jobs.list(ada))[0] + [resumed]}
    assert [places[job.job_id] for job in (waiting, ticket, later)] == [1, 2, 3]
    queue = [job.job_id for job in await daemon.services.jobs.queue(ROOT)]
    assert queue == [waiting.job_id, ticket.job_id, later.job_id]


async def test_a_name_means_the_newest_job_of_it_and_the_start_of_an_id_the_only_one(
    daemon: DaemonParts, ada: Principal
) -> None:
    await held(daemon, "running")
    older, newer = await daemon.submit(ada, "quick"), await daemon.submit(ada, "quick")
    jobs = daemon.services.jobs
    assert (await jobs.get(ada, "quick")).job_id == newer.job_id
    assert (await jobs.get(ada, older.job_id[:12])).job_id == older.job_id
    bob = await daemon.user("bob")
    for key in ("quick", older.job_id, older.job_id[:12], "job_", "", "\ud800"):
        with pytest.raises(NotFound):
            await jobs.get(bob, key)


async def test_the_start_of_several_ids_names_them(daemon: DaemonParts, ada: Principal) -> None:
    job = await daemon.submit(ada, "model", Script(hold_at=1))
    for job_id in ("job_ff00aa", "job_ff00bb"):
        copy = dataclasses.replace(job, job_id=job_id, job_state=S.QUEUED)
        await daemon.parts.journal.create(copy, request_id=str(uuid.uuid4()))
    with pytest.raises(InvalidSpec, match=r"several jobs.*job_ff00bb, job_ff00aa") as caught:
        await daemon.services.jobs.get(ada, "job_ff00")
    assert caught.value.violations[0].field == "job_id"
    assert (await daemon.services.jobs.get(ada, "job_ff00a")).job_id == "job_ff00aa"


async def test_logs_are_read_from_an_offset_within_reason(daemon: DaemonParts, ada: Principal) -> None:
    job = await daemon.submit(ada, "logged")
    await daemon.until(job.job_id, S.SUCCEEDED)
    jobs = daemon.services.jobs
    whole = b"".join([data async for _, data in jobs.logs(ada, job.job_id)])
    assert b"ready" in whole
    assert b"".join([data async for _, data in jobs.logs(ada, job.job_id, offset=5)]) == whole[5:]
    assert [piece async for piece in jobs.logs(ada, job.job_id, offset=2**62)] == []
    for offset in (-1, 2**63 - 10, 2**64):
        with pytest.raises(InvalidSpec, match="offset is") as caught:
            [piece async for piece in jobs.logs(ada, job.job_id, offset=offset)]
        assert caught.value.violations[0].field == "offset"


@pytest.mark.parametrize(
    "token", ["OTk5OTk5OTk5OTk5OTk5OTk5OTk5", "OTIyMzM3MjAzNjg1NDc3NTgwOA==", "LTE=", "MA==", "x", "\ud800", "eA=="]
)
async def test_a_page_token_that_is_not_ours_names_its_field(daemon: DaemonParts, ada: Principal, token: str) -> None:
    with pytest.raises(InvalidSpec, match="page_token") as caught:
        await daemon.services.jobs.list(ada, page_token=token)
    assert caught.value.violations[0].field == "page_token"


async def test_pages_together_are_all_jobs(daemon: DaemonParts, ada: Principal) -> None:
    await daemon.set_node("cordoned")
    made = [(await daemon.submit(ada, f"job-{i}")).job_id for i in range(5)]
    jobs, token, seen = daemon.services.jobs, "", []
    while True:
        page, token = await jobs.list(ada, page_size=2, page_token=token, states={S.QUEUED})
        seen += [(job.job_id, job.queue_position) for job in page]
        if not token:
            break
    assert seen == list(zip(reversed(made), [5, 4, 3, 2, 1], strict=True))


async def test_a_watch_sees_everything_and_ends_with_the_job(daemon: DaemonParts, ada: Principal) -> None:
    job = await held(daemon)

    async def watch(after: int) -> list[int]:
        return [event.sequence async for event in daemon.services.jobs.watch(ada, job.job_id, after)]

    watches = [asyncio.create_task(watch(after)) for after in (0, 3)]
    daemon.release("held")
    await daemon.until(job.job_id, S.SUCCEEDED)
    last = (await daemon.job(job.job_id)).last_sequence
    async with asyncio.timeout(WAIT_S):
        assert [await task for task in watches] == [list(range(1, last + 1)), list(range(4, last + 1))]


async def test_draining_queues_the_running_job_again_and_ends_every_watch(daemon: DaemonParts, ada: Principal) -> None:
    job = await held(daemon)
    await daemon.set_node("cordoned")
    waiting = await daemon.submit(ada, "waiting")

    async def watch() -> None:
        async for _ in daemon.services.jobs.watch(ada, job.job_id):
            pass

    watching = asyncio.create_task(watch())
    await daemon.drain()
    with pytest.raises(Draining):
        await asyncio.wait_for(watching, WAIT_S)
    with pytest.raises(Draining):
        await daemon.submit(ada, "late")
    drained = await daemon.job(job.job_id)
    assert (drained.job_state, drained.reason, drained.queue_position) == (S.QUEUED, "DRAINED", 1)
    assert (await daemon.job(waiting.job_id)).queue_position == 2
    assert [c.step for c in await daemon.services.jobs.checkpoints(ada, job.job_id)] == [1]


async def test_a_worker_that_does_not_hear_the_drain_is_killed_and_the_owner_reads_why(
    daemon: DaemonParts, ada: Principal
) -> None:
    job = await held(daemon, deaf=True)
    await daemon.drain(0.2)
    drained = await daemon.job(job.job_id)
    assert (drained.job_state, drained.reason) == (S.QUEUED, "DRAINED")
    stored = await daemon.parts.journal.store.events_after(job.job_id, 0, 1000)
    (warning,) = [e.payload.text for e in stored if isinstance(e.payload, Message) and e.payload.level == "warning"]
    assert warning == (
        f"the daemon stopped and killed the worker at step {drained.step}: its checkpoint was not complete after 0.2 "
        "s; the job "
        "continues from its beginning. An admin can set a longer drain_timeout_s"
    )
