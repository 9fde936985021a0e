"""The disk never gets so full that the database cannot be written: uploads end before, and a reserve is given up."""

from __future__ import annotations

import collections
import os
import shutil
from pathlib import Path

import pytest
from tests.conftest import MakeDaemon
from tests.daemon_parts import DaemonParts

from horizon_server.blobs.space import RESERVE_FILE, Space
from horizon_server.durable import durable_folder
from horizon_server.errors import DiskFull

MIB = 2**20
Usage = collections.namedtuple("Usage", "total used free")


class Disk:
    """What the disk says of itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, total: int = 100 * MIB, free: int = 50 * MIB) -> None:
        self.total, self.free = total, free
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(self.total, self.total - self.free, self.free))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def test_one_percent_stays_free_by_default_and_never_more_than_two_gib(tmp_path: Path, disk: Disk) -> None:
    space = Space(tmp_path)
    assert (space.kept_bytes, space.free_bytes) == (MIB, 49 * MIB)
    disk.total, disk.free = 2**50, 2**40
    assert space.kept_bytes == 2 * 2**30
    assert Space(tmp_path, 5).kept_bytes == 5


def test_what_would_take_the_kept_space_is_refused_with_the_numbers(tmp_path: Path, disk: Disk) -> None:
    space = Space(tmp_path)
    space.require(49 * MIB, "this upload")
    with pytest.raises(DiskFull, match="this upload needs 49"):
        space.require(49 * MIB + MIB // 2, "this upload")
    disk.free = MIB // 2
    with pytest.raises(DiskFull, match="horizon job delete"):
        space.require(0, "preparing dataset chats")


def test_the_reserve_is_made_given_up_on_a_full_disk_and_made_again(tmp_path: Path, disk: Disk) -> None:
    space, reserve = Space(tmp_path), tmp_path / RESERVE_FILE
    disk.free = 2 * MIB
    space.tend_reserve()
    assert not reserve.exists(), "not where it would take the last space"
    disk.free = 50 * MIB
    space.tend_reserve()
    assert reserve.stat().st_size == MIB
    assert reserve.stat().st_blocks * 512 >= MIB, "not a hole"
    disk.free = MIB // 2
    space.tend_reserve()
    assert reserve.exists()
    disk.free = MIB // 8
    space.tend_reserve()
    assert not reserve.exists()
    assert not space.give_up_reserve()
    disk.free = 50 * MIB
    space.tend_reserve()
    assert reserve.exists()


def test_a_disk_without_room_for_the_reserve_goes_without(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    Space(tmp_path).tend_reserve()
    assert not (tmp_path / RESERVE_FILE).exists()


def test_a_checkpoint_leaves_the_kept_space_free(tmp_path: Path, disk: Disk) -> None:
    with (
        pytest.raises(DiskFull, match="are kept for the daemon"),
        durable_folder(tmp_path / "x", needed_bytes=50 * MIB),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


async def test_an_upload_ends_before_the_kept_space_is_used(
    make_daemon: MakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with make_daemon(tmp_path / "state", queue=False) as daemon:
        await daemon.user("ada")
        disk = Disk(monkeypatch, free=2 * MIB)
        with pytest.raises(DiskFull, match="this upload needs 3"):
            await daemon.upload("ada", b"x" * 3 * MIB)
        disk.free = 50 * MIB
        await daemon.upload("ada", b"x" * 3 * MIB)


async def test_a_write_that_finds_the_disk_full_gives_the_reserve_up(daemon: DaemonParts) -> None:
    reserve = daemon.state_dir / RESERVE_FILE
    reserve.write_bytes(b"x")
    async with daemon.database.session() as session:
        connection = await session.connection()
        pages = (await connection.exec_driver_sql("PRAGMA page_count")).scalar_one()
        await connection.exec_driver_sql(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskFull):
        for number in range(1000):
            await daemon.user(f"user{number}-{'x' * 50}")
    assert not reserve.exists()
