"""Priorities, quotas, usage and the node's condition, through the real services: who may, with which numbers, and what
it says."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.component.jobs.conftest import ADA, held
from tests.conftest import MakeDaemon
from tests.daemon_parts import ROOT, DaemonParts, blob_file, chat_rows

from horizon_server.db.sharing import SharingStore
from horizon_server.errors import (
    DoesNotFit,
    Draining,
    InUse,
    InvalidSpec,
    NotAllowed,
    NotFound,
    QuotaExceeded,
    WrongJobState,
)
from horizon_server.events import Message
from horizon_server.records.account import EVERYONE, Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.sharing import Allowance, NodeCondition, Outlook, Quota, Usage
from horizon_server.settings import Settings

S = JobState
EVE = Principal(name="eve", role="viewer", project="eve")
BOB = Principal(name="bob", role="user", project="bob")


@pytest.fixture
async def quiet(make_daemon: MakeDaemon, state_dir: Path) -> AsyncIterator[DaemonParts]:
    """A daemon whose queue does not move."""
    async with make_daemon(state_dir, queue=False) as made:
        yield made


def sharing(daemon: DaemonParts) -> SharingStore:
    return daemon.services.sharing.store


async def member_of_lab(daemon: DaemonParts, name: str) -> Principal:
    user = await daemon.services.accounts.add_user(name, project="lab")
    principal = Principal(name=user.name, role=user.role, project=user.project)
    await daemon.dataset(principal)
    return principal


async def announce(daemon: DaemonParts, owner: Principal, name: str, num_bytes: int, request_id: str = "") -> None:
    await daemon.services.datasets.create(
        owner,
        request_id=request_id or str(uuid.uuid4()),
        name=name,
        format="auto",
        field_map={},
        files=[blob_file(f"{name}.jsonl", b"x" * num_bytes)],
    )


def host_bytes(job: JobRecord) -> int:
    assert job.plan is not None
    return job.plan.host_total_bytes


async def test_a_submitted_job_has_its_specs_priority_and_project(quiet: DaemonParts) -> None:
    before_s = time.time()
    job = await quiet.submit(ADA, priority=-100)
    assert (job.priority, job.project, job.queued_s == job.created_s >= before_s) == (-100, "ada", True)
    with pytest.raises(InvalidSpec, match="priority is 101; it must be a whole number from -100 to 100"):
        quiet.spec(priority=101)


async def test_a_priority_is_set_by_its_owner_and_above_100_by_admins(quiet: DaemonParts) -> None:
    update, job = quiet.services.jobs.update, await quiet.submit(ADA, "mine")
    changed = await update(ADA, "mine", priority=7)
    assert (changed.job_id, changed.priority, changed.spec.priority) == (job.job_id, 7, 0)
    assert (await update(ADA, "mine", priority=7)).last_sequence == changed.last_sequence
    with pytest.raises(
        NotAllowed, match="only an admin may set a priority above 100, which passes the jobs of all users"
    ):
        await update(ADA, "mine", priority=101)
    for number in (-101, 1001):
        with pytest.raises(
            InvalidSpec, match=f"priority is {number}; it must be from -100 to 100, or up to 1000 for admins"
        ):
            await update(ROOT, job.job_id, priority=number)
    with pytest.raises(NotFound):
        await update(BOB, job.job_id, priority=1)
    with pytest.raises(NotAllowed):
        await update(EVE, job.job_id, priority=1)
    assert (await update(ROOT, job.job_id, priority=1000)).priority == 1000
    events = [event.payload for event in await quiet.parts.journal.store.events_after(job.job_id, 0, 100)]
    assert [event.text for event in events if isinstance(event, Message)] == [
        "priority is now 7, set by ada",
        "priority is now 1000, set by root",
    ]
    await quiet.services.jobs.cancel(ADA, "mine")
    with pytest.raises(WrongJobState, match="is CANCELLED; only a job that has not ended has a priority"):
        await update(ADA, "mine", priority=0)


async def test_a_quota_of_queued_jobs_holds_for_submit_and_resume(quiet: DaemonParts) -> None:
    await quiet.allow("user", "ada", max_queued_jobs=2)
    jobs, request_id = quiet.services.jobs, str(uuid.uuid4())
    first = await jobs.submit(ADA, request_id=request_id, spec=quiet.spec("first"))
    await quiet.services.jobs.pause(ADA, (await quiet.submit(ADA, "paused")).job_id)
    await quiet.submit(ADA, "second")
    with pytest.raises(QuotaExceeded, match=r"^quota: 2 of 2 queued jobs of user ada .*; .*" + first.job_id):
        await quiet.submit(ADA, "third")
    with pytest.raises(QuotaExceeded, match="quota: 2 of 2 queued jobs of user ada"):
        await jobs.resume(ADA, "paused")
    # An answer that was lost is asked for again: the job is there.
    assert (await jobs.submit(ADA, request_id=request_id, spec=quiet.spec("first"))).job_id == first.job_id
    await jobs.cancel(ADA, "second")
    assert (await jobs.resume(ADA, "paused")).job_state is S.QUEUED


async def test_calls_at_the_same_time_cannot_pass_a_quota(quiet: DaemonParts) -> None:
    await quiet.allow("user", "ada", max_queued_jobs=3)
    answers = await asyncio.gather(*(quiet.submit(ADA, f"j{i}") for i in range(10)), return_exceptions=True)
    assert sum(isinstance(answer, JobRecord) for answer in answers) == 3
    assert sum(isinstance(answer, QuotaExceeded) for answer in answers) == 7


async def test_a_projects_quota_counts_the_jobs_of_all_its_users(quiet: DaemonParts) -> None:
    cleo, dan = await member_of_lab(quiet, "cleo"), await member_of_lab(quiet, "dan")
    await quiet.allow("project", "lab", max_queued_jobs=2)
    await quiet.submit(cleo)
    await quiet.submit(dan)
    for user in (cleo, dan):
        with pytest.raises(QuotaExceeded, match="quota: 2 of 2 queued jobs of project lab"):
            await quiet.submit(user, "more")
    assert (await quiet.submit(ADA)).job_state is S.QUEUED


async def test_a_job_larger_than_a_quota_of_memory_is_refused_with_the_numbers(quiet: DaemonParts) -> None:
    needed = host_bytes(await quiet.submit(ADA, "fits"))
    await quiet.allow("user", "ada", max_host_bytes=needed)
    assert (await quiet.submit(ADA, "just")).job_state is S.QUEUED
    await quiet.allow("user", "ada", max_host_bytes=2**20)
    words = (
        rf"^the job needs {needed / 2**20:.1f} MiB of host memory and user ada may have 1.0 MiB; .*horizond user "
        r"set ada --max-host"
    )
    with pytest.raises(QuotaExceeded, match=words):
        await quiet.submit(ADA, "too-large")
    with pytest.raises(QuotaExceeded, match=words):
        await quiet.services.sharing.simulate(ADA, quiet.spec())


async def test_a_quota_of_stored_bytes_counts_what_is_announced(quiet: DaemonParts) -> None:
    held_bytes = len(chat_rows())
    await quiet.allow("user", "ada", max_stored_bytes=held_bytes + 1000)
    request_id = str(uuid.uuid4())
    await announce(quiet, ADA, "a", 600, request_id)
    with pytest.raises(QuotaExceeded, match=r"quota: .* stored by user ada .*, and this needs .* more"):
        await announce(quiet, ADA, "b", 401)
    await announce(quiet, ADA, "b", 400)
    await announce(quiet, ADA, "a", 600, request_id)  # the same call, and the same content: nothing new
    await announce(quiet, ADA, "b", 400)
    # An upload that was given up frees what it had announced.
    await announce(quiet, ADA, "b", 300)
    await announce(quiet, ADA, "c", 100)
    with pytest.raises(QuotaExceeded):
        await announce(quiet, ADA, "d", 1)
    await quiet.services.datasets.delete(ADA, "c")
    await announce(quiet, ADA, "d", 1)
    files = [
        blob_file(path, content) for path, content in (("config.json", b"{}" * 40), ("model.safetensors", b"x" * 40))
    ]
    with pytest.raises(QuotaExceeded):
        await quiet.services.models.create(ADA, request_id=str(uuid.uuid4()), name="m", files=files)


async def test_checkpoints_are_stored_bytes_too_and_members_share_a_projects(quiet: DaemonParts) -> None:
    cleo, dan = await member_of_lab(quiet, "cleo"), await member_of_lab(quiet, "dan")
    quiet.write_checkpoint(await quiet.submit(cleo), 1, {"model.safetensors": b"x" * 5000})
    quiet.write_checkpoint(await quiet.submit(ADA), 1, {"model.safetensors": b"x" * 70000})
    stored = 2 * len(chat_rows()) + 5000
    assert (await quiet.services.sharing.quotas.stored_bytes())["cleo"] == len(chat_rows()) + 5000
    await quiet.allow("project", "lab", max_stored_bytes=stored + 10)
    with pytest.raises(QuotaExceeded, match="stored by project lab"):
        await announce(quiet, dan, "more", 11)
    await announce(quiet, dan, "more", 10)
    await quiet.services.jobs.cancel(cleo, "job")
    await quiet.services.jobs.delete_checkpoint(cleo, "job", 1)
    await announce(quiet, dan, "again", 5000)


async def test_users_see_their_own_usage_and_others_see_all(quiet: DaemonParts) -> None:
    cleo, job = await member_of_lab(quiet, "cleo"), await quiet.submit(ADA)
    theirs = await quiet.submit(cleo)
    quiet.write_checkpoint(job, 1, {"model.safetensors": b"x" * 5000})
    now_s = time.time()
    for owner, one in (("ada", job), ("cleo", theirs)):
        await sharing(quiet).charge(one.project, owner, device_s=9.5, num_tokens=70, job_id=one.job_id, now_s=now_s)
    await sharing(quiet).charge("physics", "ada", device_s=1.0, num_tokens=1, job_id=job.job_id, now_s=now_s)
    await quiet.services.jobs.cancel(ADA, job.job_id)
    usage, size = quiet.services.sharing.usage, len(chat_rows())
    own = [
        Usage(project="ada", user="ada", device_s=9.5, num_tokens=70, stored_bytes=size + 5000, jobs={"CANCELLED": 1}),
        Usage(project="physics", user="ada", device_s=1.0, num_tokens=1),
    ]
    labs = Usage(project="lab", user="cleo", device_s=9.5, num_tokens=70, stored_bytes=size)
    assert await usage(ADA, now_s - 60) == own
    assert await usage(cleo, now_s - 60) == [labs]
    assert await usage(BOB, now_s - 60) == []
    for principal in (ROOT, EVE):
        assert await usage(principal, now_s - 60) == [own[0], labs, own[1]]
    for since_s in (-1.0, now_s + 3600):
        with pytest.raises(InvalidSpec, match="it must be a time in the past"):
            await usage(ADA, since_s)


async def test_a_quota_shows_what_is_used_of_it(daemon: DaemonParts) -> None:
    await daemon.allow("user", "ada", max_queued_jobs=5, device_hours_per_week=10)
    running = await held(daemon)
    queued = await daemon.services.jobs.pause(ADA, (await held(daemon, "paused")).job_id)
    await daemon.until(queued.job_id, S.PAUSED)
    await sharing(daemon).charge("lab", "ada", device_s=3600, job_id=running.job_id, now_s=time.time() - 86400)
    [(mine, used), (project, used_by_project)] = await daemon.services.sharing.quota(ADA)
    # What no admin has set is shown as the node's settings have it.
    most = Settings.model_fields["max_resident_jobs"].default
    quota = Quota(max_queued_jobs=5, device_hours_per_week=10, max_resident_jobs=most)
    assert mine == Allowance(holder="user", name="ada", quota=quota)
    assert project == Allowance(holder="project", name="ada")
    assert (used.queued_jobs, used.resident_jobs, used.host_bytes) == (0, 1, host_bytes(running))
    assert used.stored_bytes == used_by_project.stored_bytes > len(chat_rows())  # the paused job has a checkpoint
    # What was charged to another project counts for the user only.
    assert used.device_hours == pytest.approx(1 + used_by_project.device_hours)
    assert used_by_project.device_hours < 0.1


async def test_quotas_are_those_of_all_projects_that_a_user_submits_to(quiet: DaemonParts) -> None:
    await quiet.allow("project", "lab", max_resident_jobs=1)
    member = replace(ADA, memberships={"lab": "member", "physics": "viewer"})
    found = await quiet.services.sharing.quota(member)
    assert [(one.holder, one.name) for one, _ in found] == [("user", "ada"), ("project", "ada"), ("project", "lab")]
    assert found[2][0].quota.max_resident_jobs == 1


async def test_a_paused_job_and_a_dataset_in_use_say_what_to_do_by_name(quiet: DaemonParts) -> None:
    job = await quiet.submit(ADA, "mine")
    paused = await quiet.services.jobs.pause(ADA, job.job_id)
    assert paused.message == "paused by a user; resume it with: horizon job resume mine"
    with pytest.raises(InUse, match=rf"is needed by job {job.job_id} of ada; cancel {job.job_id}, or wait for its end"):
        await quiet.services.datasets.delete(ADA, "chats")


async def test_a_dataset_that_others_jobs_need_too_says_what_its_owner_can_do(quiet: DaemonParts) -> None:
    await quiet.services.datasets.share(ADA, "chats", EVERYONE)
    mine = await quiet.submit(ADA, "mine")
    await quiet.submit(BOB, "theirs", dataset=(await quiet.services.datasets.get(ADA, "chats")).dataset_id)
    words = (
        rf"is needed by jobs {mine.job_id} of ada, 1 of other users; cancel {mine.job_id}, and wait for the end of "
        r"the other one$"
    )
    with pytest.raises(InUse, match=words):
        await quiet.services.datasets.delete(ADA, "chats")


async def test_no_two_rows_of_the_queue_have_the_same_place(quiet: DaemonParts) -> None:
    jobs = [await quiet.submit(ADA, name) for name in ("first", "second", "third", "fourth")]
    # The queue was looked at before the first was resumed and the last came.
    places = {jobs[1].job_id: 2, jobs[2].job_id: 1}
    quiet.parts.scheduler.runtime.view.outlooks = {
        job_id: Outlook(why="waits", place=at) for job_id, at in places.items()
    }
    rows = [(job.spec.name, job.queue_position) for job in await quiet.services.jobs.queue(ADA)]
    assert rows == [("third", 1), ("second", 2), ("first", 3), ("fourth", 4)]


async def test_a_reason_names_the_jobs_that_its_reader_may_see(quiet: DaemonParts) -> None:
    lab = {name: await member_of_lab(quiet, name) for name in ("carl", "dora")}
    carl = replace(lab["carl"], memberships={"lab": "member"})
    first, mine = await quiet.submit(lab["dora"], "first"), await quiet.submit(lab["carl"], "mine")
    hidden = await quiet.submit(ADA, "secret")
    twins = [await quiet.submit(lab["carl"], "twin") for _ in range(2)]
    view = quiet.parts.scheduler.runtime.view
    await view.situation({})
    ids = [job.job_id for job in (mine, first, hidden, twins[0])]
    view.outlooks = {mine.job_id: Outlook(why=f"jobs {', '.join(ids[:3])} and {ids[3]} free it; job job_0abc is next")}

    async def read_by(reader: Principal) -> str:
        outlook = (await quiet.services.jobs.get(reader, mine.job_id)).outlook
        assert outlook is not None
        return outlook.why

    words = f"jobs mine, first of dora, {hidden.job_id} and {twins[0].job_id} free it; job job_0abc is next"
    assert await read_by(carl) == words
    all_seen = f"jobs mine of carl, first of dora, secret of ada and {twins[0].job_id} free it; job job_0abc is next"
    assert await read_by(ROOT) == all_seen
    assert await read_by(carl) == words
    queue = {job.job_id: job.outlook for job in await quiet.services.jobs.queue(carl)}
    assert queue[mine.job_id] == Outlook(why=words)


async def test_nothing_is_simulated_while_the_daemon_shuts_down(quiet: DaemonParts) -> None:
    await quiet.drain()
    for ask in (quiet.submit(ADA), quiet.services.sharing.simulate(ADA, quiet.spec())):
        with pytest.raises(Draining, match="takes no new jobs"):
            await ask


async def test_a_window_in_the_past_says_when_it_ended(quiet: DaemonParts) -> None:
    with pytest.raises(InvalidSpec, match=r"the window has ended already .*; give one that ends in the future"):
        await quiet.services.sharing.set_node(ROOT, NodeCondition(window_start_s=5.0, window_end_s=6.0))


async def test_a_window_that_begins_while_the_queue_is_read_has_begun(
    quiet: DaemonParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = SharingStore.condition

    async def set_and_read(store: SharingStore) -> NodeCondition:
        now_s = time.time()
        await store.set_condition(NodeCondition(window_start_s=now_s, window_end_s=now_s + 60))
        return await read(store)

    monkeypatch.setattr(SharingStore, "condition", set_and_read)
    situation, _ = await quiet.parts.scheduler.runtime.view.situation({})
    assert not situation.node.is_open
    assert situation.condition.at(situation.now_s) == "drained"


async def test_only_admins_set_the_node_and_it_stays_set(make_daemon: MakeDaemon, state_dir: Path) -> None:
    soon_s = time.time() + 3600
    condition = NodeCondition(mode="cordoned", message="new GPU", window_start_s=soon_s, window_end_s=soon_s + 7200)
    async with make_daemon(state_dir, queue=False) as daemon:
        service = daemon.services.sharing
        for principal in (ADA, EVE):
            with pytest.raises(NotAllowed, match="only an admin may cordon or drain the node"):
                await service.set_node(principal, condition)
        assert await service.condition() == NodeCondition()
        assert await service.set_node(ROOT, condition) == condition
        for start_s, end_s, field in (
            (soon_s, None, "window_end_time"),
            (None, soon_s, "window_start_time"),
            (soon_s, soon_s, "window_end_time"),
            (5.0, 6.0, "window_end_time"),
        ):
            with pytest.raises(InvalidSpec) as caught:
                await service.set_node(ROOT, NodeCondition(window_start_s=start_s, window_end_s=end_s))
            assert caught.value.violations[0].field == field
        with pytest.raises(InvalidSpec, match="message has 1001 letters; it must have at most 1000"):
            await service.set_node(ROOT, NodeCondition(message="x" * 1001))
        for message in ("\x1b[31mred", "\u202egnp.exe", "two\nlines"):
            with pytest.raises(InvalidSpec, match="one line of printable letters"):
                await service.set_node(ROOT, NodeCondition(message=message))
    async with make_daemon(state_dir, queue=False) as daemon:
        assert await daemon.services.sharing.condition() == condition


async def test_a_simulation_answers_and_stores_nothing(quiet: DaemonParts) -> None:
    simulate = quiet.services.sharing.simulate
    outlook, plan, _ = await simulate(ADA, quiet.spec())
    assert outlook.why
    assert plan.fits
    with pytest.raises(NotFound, match="dataset 'not-pushed-yet' does not exist"):
        await simulate(ADA, quiet.spec(dataset="not-pushed-yet"))
    assert await quiet.services.jobs.queue(ADA) == []
    with pytest.raises(NotFound, match="model 'nothing' does not exist"):
        await simulate(ADA, quiet.spec(model="nothing"))
    with pytest.raises(NotAllowed, match="project physics is not yours"):
        await simulate(ADA, quiet.spec(project="physics"))
    with pytest.raises(DoesNotFit, match="are available"):
        await simulate(ADA, quiet.spec(train={"tokens_per_step": 67_108_864, "sequence_length": 1024}))
