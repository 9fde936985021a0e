"""Limits of what one user may ask of the daemon that no other test of their part covers; docs/security.md lists them
all."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sqlalchemy import event
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts

from horizon_formats.formats import MAX_COLUMN_BYTES
from horizon_proto.v1 import dataset_pb2, job_pb2
from horizon_server.api.audited import _MAX_REPEATED, _MAX_VALUE_CHARS
from horizon_server.api.grpc.audited import asked_by
from horizon_server.blobs.concurrency import MAX_SHARED_CALLS, SharedCalls
from horizon_server.blobs.space import MAX_RESERVE_BYTES, RESERVE_FILE, Space
from horizon_server.children.child import Limits
from horizon_server.db import pushed
from horizon_server.db.audit import MAX_CHARS
from horizon_server.db.tables import DatasetRow
from horizon_server.durable import kept_free_bytes
from horizon_server.errors import BadSetting, DiskFull, InvalidSpec, QuotaExceeded, Stalled, TooLarge
from horizon_server.records.blob import MAX_FILES, BlobFile, BlobRef
from horizon_server.records.housekeeping import Selection
from horizon_server.records.sharing import Allowance, NodeCondition, Quota
from horizon_server.scheduling.quotas import MAX_QUEUED_JOBS, why_not_queued
from horizon_server.services.accounts import MAX_LABEL
from horizon_server.services.housekeeping import caches, deletion
from horizon_server.services.pushed import DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE, page_limit
from horizon_server.services.sharing import MAX_MESSAGE_LENGTH
from horizon_server.services.uploads import MAX_REFS


@pytest_asyncio.fixture
async def still(make_daemon: MakeDaemon, tmp_path: Path) -> AsyncIterator[DaemonParts]:
    """A daemon whose queue does not run."""
    async with make_daemon(tmp_path / "state", queue=False) as made:
        yield made


async def _announce(daemon: DaemonParts, owner: Any, name: str, num_files: int = 1, **options: Any) -> Any:
    files = [BlobFile(path=f"{i:04d}.jsonl", sha256=f"{i:064x}", size_bytes=10) for i in range(num_files)]
    given = {"request_id": str(uuid.uuid4()), "format": "auto", "field_map": {}} | options
    return await daemon.services.datasets.create(owner, name=name, files=files, **given)


async def test_column_names_of_a_map_are_bounded(still: DaemonParts) -> None:
    ann = await still.user("ann")
    await _announce(still, ann, "fits", format="messages", field_map={"messages": "\u00e4" * (MAX_COLUMN_BYTES // 2)})
    with pytest.raises(InvalidSpec, match=r"field_map.messages is '.{1,60}longer than 256 bytes"):
        column = "\u00e4" * (MAX_COLUMN_BYTES // 2 + 1)
        await _announce(still, ann, "long", format="messages", field_map={"messages": column})


async def test_a_list_reads_no_more_than_it_shows(still: DaemonParts) -> None:
    ann = await still.user("ann")
    for i in range(20):
        await _announce(still, ann, f"d{i}", MAX_FILES)
    num_loaded = 0

    def count(*_: object) -> None:
        nonlocal num_loaded
        num_loaded += 1

    event.listen(DatasetRow, "load", count)
    try:
        page, token = await still.services.datasets.list(ann, page_size=MAX_PAGE_SIZE)
    finally:
        event.remove(DatasetRow, "load", count)

    assert [record.name for record in page] == ["d19"]
    assert token
    assert num_loaded < 20, "the announcements of all datasets were read for a page of one"


async def test_one_user_has_a_bounded_number_of_datasets(still: DaemonParts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushed, "MAX_RESOURCES", 3)
    ann, bob = await still.user("ann"), await still.user("bob")
    for i in range(3):
        await _announce(still, ann, f"d{i}")
    with pytest.raises(
        QuotaExceeded, match="ann has 3 datasets, the maximum; delete some: horizon dataset delete NAME"
    ):
        await _announce(still, ann, "d3")
    await _announce(still, ann, "d2")  # what is there already is no new one
    await _announce(still, bob, "d3")


def test_one_user_has_a_bounded_number_of_queued_jobs() -> None:
    ids = [f"job_{i}" for i in range(MAX_QUEUED_JOBS)]
    ann = Allowance(holder="user", name="ann")
    assert why_not_queued(ann, ids[1:]) == ""
    assert why_not_queued(ann, ids).startswith(f"quota: {MAX_QUEUED_JOBS} of {MAX_QUEUED_JOBS} queued jobs of user ann")
    assert why_not_queued(dataclasses.replace(ann, quota=Quota(max_queued_jobs=MAX_QUEUED_JOBS + 1)), ids) == ""
    # Of a project, which has many users, only an admin knows.
    assert why_not_queued(Allowance(holder="project", name="lab"), ids) == ""


async def test_checks_of_one_user_leave_a_slot_to_others() -> None:
    calls, running, release = SharedCalls[str](), asyncio.Queue[str](), asyncio.Event()

    async def check(key: str) -> str:
        running.put_nowait(key)
        await release.wait()
        return key

    async def join(key: str, user: str) -> str:
        return await calls.join(key, lambda: check(key), user=user)

    async with asyncio.timeout(240), asyncio.TaskGroup() as group:
        asked = [group.create_task(join(f"eve-{i}", "eve")) for i in range(5)]
        assert await running.get() == "eve-0"
        asked += [group.create_task(join(f"{user}-0", user)) for user in ("ann", "bob")]
        assert await running.get() == "ann-0"
        for _ in range(10):
            await asyncio.sleep(0)
        assert running.empty(), f"more than {MAX_SHARED_CALLS} ran"
        release.set()
    assert sorted(task.result() for task in asked) == ["ann-0", "bob-0", *(f"eve-{i}" for i in range(5))]


async def test_a_check_that_takes_too_long_says_so(still: DaemonParts, monkeypatch: pytest.MonkeyPatch) -> None:
    from horizon_server.datasets import checking

    assert checking._LIMITS.wall_s is not None
    monkeypatch.setattr(checking, "_LIMITS", Limits(wall_s=0.001))
    with pytest.raises(Stalled, match="checking chats took longer than 0 s; push it as several smaller datasets"):
        await still.dataset(await still.user("ann"))


async def test_contents_asked_for_at_once_are_bounded(still: DaemonParts) -> None:
    refs = [BlobRef(sha256=f"{i:064x}", size_bytes=1) for i in range(MAX_REFS + 1)]
    assert len(await still.services.blobs.missing("ann", refs[:MAX_REFS])) == MAX_REFS
    with pytest.raises(TooLarge, match=str(MAX_REFS)):
        await still.services.blobs.missing("ann", refs)


def test_a_page_is_bounded() -> None:
    assert [page_limit(size) for size in (0, 1, MAX_PAGE_SIZE, MAX_PAGE_SIZE + 1, 2**31 - 1)] == [
        DEFAULT_PAGE_SIZE,
        1,
        MAX_PAGE_SIZE,
        MAX_PAGE_SIZE,
        MAX_PAGE_SIZE,
    ]


async def test_a_message_of_the_node_is_bounded(still: DaemonParts) -> None:
    root = await still.user("root", role="admin")
    await still.services.sharing.set_node(root, NodeCondition(mode="cordoned", message="x" * MAX_MESSAGE_LENGTH))
    with pytest.raises(InvalidSpec, match=str(MAX_MESSAGE_LENGTH)):
        await still.services.sharing.set_node(
            root, NodeCondition(mode="cordoned", message="x" * (MAX_MESSAGE_LENGTH + 1))
        )


async def test_one_user_has_a_bounded_number_of_tokens(still: DaemonParts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizon_server.db.accounts.MAX_TOKENS", 2)
    accounts = still.services.accounts
    await still.user("ann")
    tokens = [(await accounts.create_token("ann", lifetime_s=None, label="x" * MAX_LABEL))[0] for _ in range(2)]
    with pytest.raises(QuotaExceeded, match="ann has 2 tokens, the maximum; revoke one first"):
        await accounts.create_token("ann", lifetime_s=None)
    await accounts.revoke_token(tokens[0].token_id)
    await accounts.create_token("ann", lifetime_s=None)
    with pytest.raises(BadSetting, match=f"at most {MAX_LABEL} printable letters"):
        await accounts.create_token("ann", lifetime_s=None, label="x" * (MAX_LABEL + 1))


async def test_a_token_that_a_user_creates_has_a_longest_life(still: DaemonParts) -> None:
    ann = await still.user("ann")
    days = still.settings.max_token_days
    await still.services.identity.create_token(ann, label="", scope="full", lifetime_s=days * 86400)
    with pytest.raises(InvalidSpec, match=f"must be above 0 and at most {days:g} days"):
        await still.services.identity.create_token(ann, label="", scope="full", lifetime_s=days * 86400 + 60)


def test_what_is_audited_of_a_request_is_bounded() -> None:
    request = dataset_pb2.CreateDatasetRequest(name="chats", field_map={"messages": "x" * 5000})
    states = job_pb2.ListJobsRequest(states=[job_pb2.JOB_STATE_QUEUED] * 1000, page_token="x" * 5000)
    assert asked_by(states).resource == ""
    assert json.loads(asked_by(states).detail("")) == {
        "states": [int(job_pb2.JOB_STATE_QUEUED)] * _MAX_REPEATED,
        "page_token": "x" * _MAX_VALUE_CHARS,
    }
    assert asked_by(request).resource == "chats"
    assert max(len(asked_by(made).detail("")) for made in (request, states)) <= MAX_CHARS["detail"]


async def test_a_deletion_is_bounded(still: DaemonParts, monkeypatch: pytest.MonkeyPatch) -> None:
    ann = await still.user("ann")
    keys = tuple(f"d{i}" for i in range(deletion.MAX_KEYS + 1))
    with pytest.raises(TooLarge, match=f"at most {deletion.MAX_KEYS} are allowed"):
        await anext(still.services.deletions.delete(ann, Selection(kind="dataset", keys=keys)))
    for i in range(3):
        await _announce(still, ann, f"d{i}")
    monkeypatch.setattr(deletion, "MAX_DELETIONS", 2)
    with pytest.raises(TooLarge, match=r"3 datasets match; at most 2 can be deleted in one call\. Narrow"):
        await anext(still.services.deletions.delete(ann, Selection(kind="dataset", keys=keys[:3])))


def test_the_reserve_is_bounded(tmp_path: Path) -> None:
    Space(tmp_path, min_free_bytes=0).tend_reserve()
    reserve = tmp_path / RESERVE_FILE
    assert not reserve.exists() or reserve.stat().st_size <= MAX_RESERVE_BYTES


def test_space_is_kept_for_the_daemon(tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    assert kept_free_bytes(tmp_path) == min(2 * 2**30, usage.total // 100)
    with pytest.raises(DiskFull, match="are kept for the daemon"):
        Space(tmp_path, min_free_bytes=usage.total).require(1, "the upload")


def test_a_long_log_keeps_its_ends(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("".join(f"line {i}\n" for i in range(10_000)))
    caches.cut_log(log, 5000)
    kept = log.read_text()
    assert len(kept) < 5200
    assert kept.startswith("line 0\n")
    assert kept.endswith("line 9999\n")
