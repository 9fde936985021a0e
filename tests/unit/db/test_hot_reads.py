"""What polls and watches read all the time: always what is committed, made once while it is the same, in bounded
memory."""

from __future__ import annotations

import asyncio
import sqlite3
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Connection, Engine, event, text

from horizon_server.db.accounts import AccountStore
from horizon_server.db.database import NUM_READERS, Database
from horizon_server.db.job_rows import EndedRecords, Records
from horizon_server.db.jobs import JobStore
from horizon_server.db.sharing import SharingStore
from horizon_server.errors import DatabaseUnavailable
from horizon_server.events import Message, StateChanged
from horizon_server.records.account import Token, User
from horizon_server.records.job import JobRecord, JobState
from horizon_server.spec import parse_job_spec

JOB = JobRecord(
    job_id="j1",
    owner="ada",
    spec=parse_job_spec({"name": "one", "model": "m", "dataset": "d"}),
    model_id="m",
    dataset_id="d",
    eval_dataset_id="",
    job_state=JobState.QUEUED,
)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    async with Database.opened(tmp_path / "horizon.db") as opened:
        yield opened


async def cancelled(store: JobStore, job_id: str) -> None:
    await store.create(replace(JOB, job_id=job_id), request_id=str(uuid.uuid4()))
    await store.move(job_id, StateChanged(job_state="CANCELLED"))


async def test_a_record_is_made_again_only_when_its_row_has_changed(database: Database, tmp_path: Path) -> None:
    store = JobStore(database)
    await cancelled(store, "j1")
    first = await store.get("j1")
    assert first is not None
    assert await store.get("j1") is first
    assert (await store.page(owner="ada", states=(), before=0, limit=10))[0][1] is first
    await store.append("j1", Message(level="info", text="news"))
    second = await store.get("j1")
    assert second == replace(first, last_sequence=first.last_sequence + 1)
    with sqlite3.connect(tmp_path / "horizon.db") as other:  # as `horizond` does next to a daemon
        other.execute("UPDATE jobs SET message = 'by another process'")
    third = await store.get("j1")
    assert third == replace(second, message="by another process")


async def test_places_in_the_queue_are_counted_each_time(database: Database) -> None:
    store = JobStore(database)
    for job_id in ("j1", "j2"):
        await store.create(replace(JOB, job_id=job_id), request_id=str(uuid.uuid4()))
    place = [job.queue_position for job in (await store.get("j1"), await store.get("j2")) if job]
    assert place == [1, 2]
    await store.move("j1", StateChanged(job_state="CANCELLED"))
    second = await store.get("j2")
    assert second is not None
    assert second.queue_position == 1


async def test_the_records_that_are_kept_are_bounded(database: Database) -> None:
    store = JobStore(database)
    store._records = Records(most=3)
    for number in range(8):
        await cancelled(store, f"j{number}")
    jobs = await store.page(owner=None, states=(), before=0, limit=10)
    assert [job.job_id for _, job in jobs] == [f"j{number}" for number in reversed(range(8))]
    assert len(store._records._kept) == 3


async def test_a_page_reads_whole_rows_only_of_jobs_that_go_on(database: Database) -> None:
    store = JobStore(database)
    for number in range(30):
        await cancelled(store, f"j{number}")
    await store.create(replace(JOB, job_id="waits"), request_id=str(uuid.uuid4()))
    whole: list[int] = []

    def note(_connection: object, _cursor: object, statement: str, parameters: tuple[object, ...], *_: object) -> None:
        if "FROM jobs" in statement and "jobs.spec" in statement:
            whole.append(len(parameters))

    async def listed() -> list[JobRecord]:
        return [job for _, job in await store.page(owner="ada", states=(), before=0, limit=101)]

    before = await listed()
    event.listen(Engine, "before_cursor_execute", note)
    try:
        # A step of another user's job commits.
        await store.append("waits", Message(level="info", text="news"))
        whole.clear()
        now = await listed()
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    assert sum(whole) == 1, "of the jobs in the page one has not ended"
    assert all(one is other for one, other in zip(before[1:], now[1:], strict=True))
    assert now[0].last_sequence == before[0].last_sequence + 1


async def test_a_page_shows_what_can_still_change_of_an_ended_job(database: Database, tmp_path: Path) -> None:
    store = JobStore(database)
    await store.create(JOB, request_id=str(uuid.uuid4()))
    await store.move("j1", StateChanged(job_state="FAILED"))

    async def listed() -> JobRecord:
        return (await store.page(owner="ada", projects={"lab"}, states=(), before=0, limit=10))[0][1]

    first = await listed()
    assert await listed() is first
    await store.set("j1", deletion_s=5.0)
    assert (await listed()).deletion_s == 5.0
    await store.set("j1", keep_files=True, deletion_s=None)
    assert await listed() == replace(first, keep_files=True)
    await store.append("j1", Message(level="info", text="late"))
    assert (await listed()).last_sequence == first.last_sequence + 1
    await store.move("j1", StateChanged(job_state="QUEUED", reason="RESUMED"), requeue=True)
    assert ((await listed()).job_state, (await listed()).queue_position) == (JobState.QUEUED, 1)
    await store.move("j1", StateChanged(job_state="CANCELLED"))
    assert (await listed()).job_state is JobState.CANCELLED
    with sqlite3.connect(tmp_path / "horizon.db") as other:  # as `horizond` does next to a daemon
        other.execute("DELETE FROM events")
        other.execute("DELETE FROM jobs")
    assert await store.page(owner="ada", states=(), before=0, limit=10) == []


async def test_a_new_job_in_the_row_of_a_deleted_one_is_not_taken_for_that(database: Database) -> None:
    store = JobStore(database)
    await cancelled(store, "j1")
    ((number, _),) = await store.page(owner="ada", states=(), before=0, limit=10)
    await store.begin_deletion("j1", mark=1.0)
    await store.delete("j1")
    # SQLite gives the number of the newest row again where that is gone.
    await store.create(replace(JOB, job_id="j2", owner="ben"), request_id=str(uuid.uuid4()))
    await store.move("j2", StateChanged(job_state="CANCELLED"))
    ((again, shown),) = await store.page(owner="ben", states=(), before=0, limit=10)
    assert (again, shown.job_id, shown.owner) == (number, "j2", "ben")


async def test_a_page_shows_what_an_ended_job_is_charged_for_afterwards(database: Database) -> None:
    store = JobStore(database)
    await cancelled(store, "j1")
    await store.page(owner="ada", states=(), before=0, limit=10)
    await SharingStore(database).charge("ada", "ada", job_id="j1", device_s=2.5, num_tokens=7, now_s=0.0)
    ((_, shown),) = await store.page(owner="ada", states=(), before=0, limit=10)
    assert (shown.device_s, shown.num_tokens) == (2.5, 7)


async def test_the_ended_jobs_that_are_kept_are_bounded_and_those_not_listed_go_first(database: Database) -> None:
    store = JobStore(database)
    store._ended = EndedRecords(most=4)
    for number in range(6):
        await cancelled(store, f"j{number}")
    for limit, before in ((2, 0), (2, 3), (2, 0), (1, 4)):
        await store.append("j0", Message(level="info", text="news"))  # a commit: the answer before is not given again
        await store.page(owner=None, states=(), before=before, limit=limit)
    assert len(store._ended._kept) == 4
    assert {5, 6} <= set(store._ended._kept), "of the newest page, which is listed all the time"


async def test_a_member_of_projects_sees_the_newest_jobs_of_all_of_them_once(database: Database) -> None:
    store = JobStore(database)
    whose = [("ada", "ada"), ("bob", "lab"), ("eve", "eve"), ("ada", "lab"), ("bob", "bob"), ("eve", "geo")]
    for number, (owner, project) in enumerate(whose * 3):
        job = replace(JOB, job_id=f"j{number}", owner=owner, project=project)
        await store.create(job, request_id=str(uuid.uuid4()))
        if number % 2:
            await store.move(job.job_id, StateChanged(job_state="CANCELLED"))

    async def ids(limit: int, before: int = 0, *, states: tuple[JobState, ...] = ()) -> list[str]:
        rows = await store.page(owner="ada", projects={"lab", "geo"}, states=states, before=before, limit=limit)
        return [job.job_id for _, job in rows]

    expected = [f"j{number}" for number in reversed(range(18)) if number % 6 in (0, 1, 3, 5)]
    assert await ids(100) == expected
    assert await ids(5) == expected[:5]
    assert await ids(5, before=10) == [one for one in expected if int(one[1:]) < 9][:5]
    assert await ids(100, states=(JobState.QUEUED,)) == ["j12", "j6", "j0"]


async def test_a_revoked_token_is_known_to_be_revoked_at_once(database: Database, tmp_path: Path) -> None:
    accounts = AccountStore(database)
    await accounts.insert_user(User(name="ada", role="user", project="ada", created_s=0.0))
    token = Token(token_id="tok_1", user="ada", created_s=0.0, expires_s=None, revoked_s=None)
    await accounts.insert_token(token, "abc")
    found = await accounts.find("abc")
    assert found is not None
    assert found[0].revoked_s is None
    with sqlite3.connect(tmp_path / "horizon.db") as other:
        other.execute("UPDATE tokens SET revoked_s = 5")
    found = await accounts.find("abc")
    assert found is not None
    assert found[0].revoked_s == 5
    assert await accounts.find("abcd") is None


async def test_a_look_up_that_meets_a_lock_waits_in_a_thread(database: Database, tmp_path: Path) -> None:
    count = text("SELECT count(*) FROM users")
    assert await database.look_up("count", lambda connection: connection.scalar(count)) == 0
    was_refused = False

    def locked_at_first(connection: Connection) -> int | None:
        nonlocal was_refused
        if not was_refused:
            was_refused = True
            connection.execute(text("SELECT no_such_function()"))
        found: int | None = connection.scalar(count)
        return found

    assert await database.look_up("locked", locked_at_first) == 0
    assert was_refused
    with pytest.raises(DatabaseUnavailable, match="no such table"):
        await database.look_up(
            "absent", lambda connection: connection.scalar(text("SELECT count(*) FROM absent_table"))
        )
    assert await database.look_up("count", lambda connection: connection.scalar(count)) == 0


async def test_a_look_up_is_answered_again_only_after_a_commit(database: Database, tmp_path: Path) -> None:
    num_reads = 0

    def count(connection: Connection) -> object:
        nonlocal num_reads
        num_reads += 1
        return connection.scalar(text("SELECT count(*) FROM users"))

    async def found() -> tuple[object, int]:
        return await database.look_up("count", count), num_reads

    assert [await found() for _ in range(3)] == [(0, 1)] * 3
    await AccountStore(database).insert_user(User(name="ada", role="user", project="ada", created_s=0.0))
    assert [await found() for _ in range(3)] == [(1, 2)] * 3
    with sqlite3.connect(tmp_path / "horizon.db") as other:  # as `horizond` does next to a daemon
        other.execute("INSERT INTO users (name, role, project, created_s) VALUES ('bob', 'user', 'bob', 0)")
        assert await found() == (1, 2)
    assert await found() == (2, 3)
    assert await database.look_up("another key", count) == 2
    assert num_reads == 4


async def test_look_ups_without_an_end_let_others_run(database: Database) -> None:
    async def look_up_for_ever() -> None:
        while True:
            await database.look_up("one", lambda _: 1)

    # Both would wait for ever for a turn of the loop.
    looking = [asyncio.create_task(look_up_for_ever()) for _ in range(2)]
    for _ in range(10):
        await asyncio.sleep(0)
    for task in looking:
        task.cancel()
    await asyncio.wait(looking, timeout=240)


async def test_the_answers_that_are_kept_are_bounded(database: Database) -> None:
    for number in range(2000):
        assert await database.look_up(number, lambda _: number) == number  # noqa: B023  # called before the next round
        assert len(database._answers._kept) <= 501


async def test_a_write_whose_caller_leaves_is_carried_out_and_the_next_one_follows(database: Database) -> None:
    store = JobStore(database)
    await cancelled(store, "j1")
    for number in range(10):
        writing = asyncio.create_task(store.append("j1", Message(level="info", text=str(number))))
        for _ in range(number):
            await asyncio.sleep(0)
        writing.cancel()
        await asyncio.wait([writing])
        await store.append("j1", Message(level="info", text="kept"))
    events = await store.events_after("j1", 2, 100)
    assert [event.sequence for event in events] == list(range(3, 3 + len(events)))
    assert [e.payload.text for e in events if isinstance(e.payload, Message)].count("kept") == 10


async def test_reads_that_fill_every_place_do_not_hold_up_a_write(database: Database) -> None:
    store = JobStore(database)
    await cancelled(store, "j1")
    release = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(connection: Connection) -> None:
        connection.scalar(text("SELECT 1"))
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result(240)

    reads = [asyncio.create_task(database.read(slow)) for _ in range(2 * NUM_READERS)]
    await asyncio.wait_for(store.append("j1", Message(level="info", text="at once")), 240)
    assert not any(read.done() for read in reads)
    release.set()
    await asyncio.wait_for(asyncio.gather(*reads), 240)
