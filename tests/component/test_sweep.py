"""What a sweep may take: nothing on the word of a database that may be the wrong one, and nothing for good before its
days are over."""

from __future__ import annotations

import datetime
import logging
import os
import shutil
import sqlite3
import time
from functools import partial
from pathlib import Path

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts, blob_file

from horizon_server.db.pairing import STATE_ID_FILE
from horizon_server.errors import NotFound
from horizon_server.main import sweep
from horizon_server.records.account import Principal

ADA = Principal(name="ada", role="user", project="ada")


@pytest.fixture
def make_daemon(make_daemon: MakeDaemon) -> MakeDaemon:
    """Daemons with prepared data of their own: a sweep removes what other daemons know."""
    return partial(make_daemon, prepared=None)


async def pushed(daemon: DaemonParts) -> Principal:
    ada = await daemon.user("ada")
    await daemon.dataset(ada, "chats")
    await daemon.model(ada, "tiny")
    return ada


async def swept(daemon: DaemonParts) -> str:
    """Sweep as the daemon does at its start and every hour; return what it finds wrong."""
    problem = await daemon.parts.pairing.problem() or ""
    await sweep(daemon.parts)
    return problem


def contents(state: Path) -> set[str]:
    """What users have sent, and the folders of their models."""
    files = [path for folder in ("blobs", "models") for path in (state / folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(state)) for path in files}


def backup(state: Path, place: Path) -> None:
    with sqlite3.connect(state / "horizon.db") as source, sqlite3.connect(place) as target:
        source.backup(target)


def put_back(place: Path, state: Path) -> None:
    for path in state.glob("horizon.db*"):
        path.unlink()
    shutil.copy(place, state / "horizon.db")


async def test_a_daemon_without_its_database_removes_nothing(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with make_daemon(state, queue=False) as daemon:
        await pushed(daemon)
        assert await swept(daemon) == ""
    before = contents(state)
    backup(state, tmp_path / "backup.db")
    for path in state.glob("horizon.db*"):
        path.unlink()
    async with make_daemon(state, queue=False) as daemon:
        await daemon.user("ada")
        problem = await swept(daemon)
        assert "it was created again, or comes from another folder; put the right horizon.db back" in problem
        assert contents(state) == before
        assert not (state / "trash").exists()
    put_back(tmp_path / "backup.db", state)
    async with make_daemon(state, queue=False) as daemon:
        assert await swept(daemon) == ""
        assert (await daemon.services.datasets.get(ADA, "chats")).ready
        assert contents(state) == before


async def test_a_folder_of_an_older_version_without_its_database_loses_nothing(
    make_daemon: MakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such a folder has no id yet."""
    state = tmp_path / "state"
    async with make_daemon(state, queue=False) as daemon:
        await pushed(daemon)
    before = contents(state)
    for path in state.glob("horizon.db*"):
        path.unlink()
    assert not (state / STATE_ID_FILE).exists()
    async with make_daemon(state, queue=False) as daemon:
        assert "the database is new, but" in await swept(daemon)
        assert contents(state) == before
    logged = capsys.readouterr().out
    assert "nothing is removed from the state folder" in logged
    assert "the database is new, but" in logged


async def test_an_older_database_removes_nothing_until_a_person_accepts_it(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    async with make_daemon(state, queue=False) as daemon:
        ada = await daemon.user("ada")
        await daemon.dataset(ada, "first", b'{"text": "first"}\n')
        assert await swept(daemon) == ""
    backup(state, tmp_path / "older.db")
    async with make_daemon(state, queue=False) as daemon:
        await daemon.dataset(ada, "second", b'{"text": "second"}\n')
        await daemon.model(ada, "tiny")
        assert await swept(daemon) == ""
    before = contents(state)
    backup(state, tmp_path / "newer.db")

    put_back(tmp_path / "older.db", state)
    async with make_daemon(state, queue=False) as daemon:
        problem = await swept(daemon)
        assert "the database is older than the contents" in problem
        assert contents(state) == before
        second = state / "blobs" / blob_file("x", b'{"text": "second"}\n').sha256[:2]
        await daemon.services.datasets.delete(ada, "first")
        assert second.exists()
        assert (state / "trash").exists(), "not even what a user deletes is removed for good on its word"
        command = problem.partition("with: echo ")[2]
        line, _, place = command.partition(" > ")
        Path(place).write_text(line.strip("'") + "\n")
        assert await swept(daemon) == ""
        assert contents(state) < before
        with pytest.raises(NotFound):
            await daemon.services.datasets.get(ada, "second")

    put_back(tmp_path / "newer.db", state)
    async with make_daemon(state, queue=False) as daemon:
        assert await swept(daemon) == ""
        assert contents(state) == before, "what the database knows again comes back from the trash"


async def test_an_upload_that_was_given_up_goes_to_the_trash_and_then_for_good(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    async with make_daemon(state, queue=False, upload_expiry_s=3600.0, trash_days=2) as daemon:
        await pushed(daemon)
        await swept(daemon)
        before = contents(state)
        await daemon.upload("ada", b"given up")
        await swept(daemon)
        assert contents(state) > before, "it may be an upload under way"
        for entry in (state / "uploads").glob("*/*"):
            os.utime(entry, (1, 1))
        await swept(daemon)
        assert contents(state) == before
        [kept] = [path for path in (state / "trash").rglob("*") if path.is_file()]
        assert kept.read_bytes() == b"given up"
        today = kept.relative_to(state / "trash").parts[0]
        for days, expected in ((2, True), (3, False)):
            date = datetime.datetime.fromtimestamp(time.time() - days * 86400, datetime.UTC).strftime("%Y-%m-%d")
            (state / "trash" / today).rename(state / "trash" / date)
            today = date
            await swept(daemon)
            assert (state / "trash" / date).exists() == expected


async def test_a_model_that_was_fetched_in_part_stays_until_nothing_arrives_for_long(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    part = tmp_path / "state/hub/lab--tiny/1111/model.safetensors.partial"
    async with make_daemon(tmp_path / "state", queue=False, upload_expiry_s=3600.0) as daemon:
        part.parent.mkdir(parents=True)
        part.write_bytes(b"half")
        for path in (part.parent, part.parent.parent):
            os.utime(path, (1, 1))
        await swept(daemon)
        assert part.read_bytes() == b"half"
        os.utime(part, (1, 1))
        await swept(daemon)
        assert list((tmp_path / "state/hub").iterdir()) == []


async def test_what_a_user_deletes_frees_its_space_at_once(make_daemon: MakeDaemon, tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with make_daemon(state, queue=False) as daemon:
        ada = await pushed(daemon)
        await swept(daemon)
        await daemon.services.datasets.delete(ada, "chats")
        await daemon.services.models.delete(ada, "tiny")
        assert [path for path in (state / "blobs").rglob("*") if path.is_file()] == []
        assert list((state / "models").iterdir()) == []
        assert not (state / "trash").exists()


async def test_tokens_whose_dataset_is_gone_are_removed_and_others_stay(
    make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """As a daemon leaves them that is killed between the two."""
    state = tmp_path / "state"
    async with make_daemon(state, queue=False) as daemon:
        ada = await pushed(daemon)
        kept = state / "prepared" / (await daemon.services.datasets.get(ada, "chats")).digest / "key"
        for folder in (kept, state / "prepared" / ("0" * 64) / "key"):
            folder.mkdir(parents=True)
        assert await swept(daemon) == ""
        assert list((state / "prepared").iterdir()) == [kept.parent]
        assert kept.exists()


async def test_the_log_says_what_goes(
    make_daemon: MakeDaemon, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = tmp_path / "state"
    logging.getLogger().setLevel(logging.INFO)
    async with make_daemon(state, queue=False, upload_expiry_s=3600.0) as daemon:
        await swept(daemon)
        await daemon.upload("ada", b"given up")
        for entry in (state / "uploads").glob("*/*"):
            os.utime(entry, (1, 1))
        await swept(daemon)
    logged = capsys.readouterr().out
    assert "moved to the trash" in logged
    assert "num_bytes=8" in logged
    assert blob_file("x", b"given up").sha256 in logged
