"""1,500 queued jobs of one user and 200 calls at once: a running job's journal lands, and other users are served."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from sqlalchemy import event, text
from tests.component.jobs.conftest import ADA, held
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts

from horizon_server.db.job_rows import _spec
from horizon_server.db.tables import JobRow
from horizon_server.errors import TooManyCalls
from horizon_server.events import Message
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.spec import parse_job_spec

ROOT = Principal(name="root", role="admin", project="root")
EVE = Principal(name="eve", role="user", project="eve")
NUM_QUEUED = 1500


async def fill_queue(daemon: DaemonParts, template: JobRecord, num_jobs: int) -> list[str]:
    """Copy a queued job of ada's into many of eve's; return their ids in queue order."""
    columns = [c.name for c in JobRow.__table__.columns if c.name not in ("number", "job_id", "owner", "queue_order")]
    copied = ", ".join(columns)
    async with daemon.database.session() as session:
        await session.execute(
            text(
                "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < :num) "
                f"INSERT INTO jobs (job_id, owner, queue_order, {copied}) "
                f"SELECT printf('job_eve%05d', i), 'eve', 1000 + i, {copied} FROM n JOIN jobs ON job_id = :template"
            ),
            {"num": num_jobs, "template": template.job_id},
        )
    return [f"job_eve{i:05d}" for i in range(1, num_jobs + 1)]


async def append(daemon: DaemonParts, job_id: str, num_events: int) -> float:
    """Write events one after the other as an attempt does; return the processor seconds of this process in the slowest:
    those that readers take, not those in which another process has the processor."""
    slowest_s = 0.0
    for i in range(num_events):
        started_s = time.process_time()
        await daemon.parts.journal.append(job_id, Message(level="info", text=str(i)))
        slowest_s = max(slowest_s, time.process_time() - started_s)
    return slowest_s


async def test_reads_of_one_user_neither_fail_nor_starve_the_journal_of_another(daemon: DaemonParts) -> None:
    running = await held(daemon)
    await daemon.set_node("cordoned")
    template = await daemon.submit(ADA, "waiting")
    ids = await fill_queue(daemon, template, NUM_QUEUED)
    jobs = daemon.services.jobs
    answers: dict[str, int] = {"ok": 0, "refused": 0}
    over = False

    async def poll(number: int) -> None:
        while not over:
            try:
                job = await jobs.get(EVE, ids[number * 7])
                # Her own jobs keep their order. Ada's is before them by when it came, and behind them by shares: hers
                # trains.
                assert job.queue_position - number * 7 in (1, 2)
                answers["ok"] += 1
            except TooManyCalls as error:
                assert error.retry_after_s
                answers["refused"] += 1
                await asyncio.sleep(0.25)

    pollers = [asyncio.create_task(poll(number)) for number in range(200)]
    await asyncio.sleep(0)
    others_s = []
    for _ in range(5):
        assert await append(daemon, running.job_id, 20) < 20, "an event waits for no reader"
        started_s = time.process_time()
        assert (await jobs.get(ADA, running.job_id)).job_state is JobState.RUNNING
        others_s.append(time.process_time() - started_s)
    over = True
    await asyncio.gather(*pollers)
    assert answers["ok"] > 100
    assert answers["refused"] > 0, "a user has at most so many calls under way"
    assert max(others_s) < 20
    written = await daemon.parts.journal.store.events_after(running.job_id, 0, 1000)
    assert [e.payload.text for e in written if isinstance(e.payload, Message)][-100:] == [*map(str, range(20))] * 5
    daemon.release("held")
    await daemon.until(running.job_id, JobState.SUCCEEDED)


class Reads:
    """Counts statements in a block, and the jobs that they bring."""

    def __init__(self, daemon: DaemonParts) -> None:
        self._counts = Counter[str]()
        database = daemon.database
        engines = (database._reader.sync_engine, database._writer.sync_engine, database._plain)
        self._listeners: list[tuple[Any, str, Callable[..., None]]] = [
            *((engine, "before_cursor_execute", self._count_statement) for engine in engines),
            (JobRow, "load", self._count_job),
        ]

    def __enter__(self) -> Self:
        for listener in self._listeners:
            event.listen(*listener)
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners:
            event.remove(*listener)

    def _count_statement(self, *_: object) -> None:
        self._counts["statements"] += 1

    def _count_job(self, *_: object) -> None:
        self._counts["jobs"] += 1

    def taken(self) -> Counter[str]:
        counts, self._counts = self._counts, Counter()
        return counts


async def test_submit_and_get_cost_the_same_whatever_waits(
    make_daemon: MakeDaemon, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without a scheduler, whose own looks at the queue would be counted too.
    async with make_daemon(state_dir, queue=False) as daemon:
        await _costs_the_same(daemon, monkeypatch)


async def _costs_the_same(daemon: DaemonParts, monkeypatch: pytest.MonkeyPatch) -> None:
    num_parsed = 0
    parse = parse_job_spec

    def counted(plain: object) -> object:
        nonlocal num_parsed
        num_parsed += 1
        return parse(plain)

    monkeypatch.setattr("horizon_server.db.jobs.parse_job_spec", counted)
    running = await daemon.job_in(JobState.RUNNING, ADA, name="running")
    template = await daemon.submit(ADA, "waiting")
    reads, jobs = Reads(daemon), daemon.services.jobs

    async def cost() -> list[tuple[Counter[str], int]]:
        nonlocal num_parsed
        costs = []
        for call in (
            lambda: jobs.get(ADA, template.job_id),
            lambda: jobs.submit(ADA, request_id=str(uuid.uuid4()), spec=daemon.spec("more")),
            lambda: daemon.parts.journal.store.users_of(template.dataset_id),
            lambda: jobs.list(ADA, page_size=2),
        ):
            reads.taken()
            num_parsed = 0
            _spec.cache_clear()
            await call()
            costs.append((reads.taken(), num_parsed))
        return costs

    with reads:
        before = await cost()
        await fill_queue(daemon, template, NUM_QUEUED)
        after = await cost()
    assert [counts for counts, _ in after] == [counts for counts, _ in before]
    assert all(now <= then for (_, now), (_, then) in zip(after, before, strict=True)), "parsed specs"
    assert after[2][1] == 0, "to see whether a dataset is in use no spec is parsed"
    assert (await jobs.get(ADA, running.job_id)).queue_position == 0


async def test_the_bound_is_each_users_own(tmp_path: Path) -> None:
    from horizon_server.services.accounts import UserLocks

    turns, entered, release = UserLocks(at_once=1, max_calls=2), asyncio.Event(), asyncio.Event()

    async def call(user: str) -> str:
        async with turns.of(user):
            entered.set()
            await release.wait()
        return user

    first, second = asyncio.create_task(call("eve")), asyncio.create_task(call("eve"))
    await asyncio.wait_for(entered.wait(), 240)
    with pytest.raises(TooManyCalls, match="eve has 2 calls under way"):
        await asyncio.wait_for(call("eve"), 240)
    other = asyncio.create_task(call("ada"))
    second.cancel()
    release.set()
    assert tuple(await asyncio.wait_for(asyncio.gather(first, other), 240)) == ("eve", "ada")
    assert turns._users == {}
