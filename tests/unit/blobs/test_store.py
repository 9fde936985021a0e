"""Uploads cut, resumed, corrupted, over-long, contested and out of space, on a real folder."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from horizon_server.blobs import parts
from horizon_server.blobs.concurrency import MAX_TURNS_EACH, Turns
from horizon_server.blobs.parts import Disk
from horizon_server.blobs.store import MAX_BATCHES, MAX_CHUNK_BYTES, BlobStore
from horizon_server.errors import DiskFull, InvalidUpload, Stalled, UploadInProgress
from horizon_server.records.blob import EMPTY_SHA256, BlobRef, WholeBlob

CONTENT = random.Random(0).randbytes(3 * 2**20 + 17)


def ref_of(content: bytes) -> BlobRef:
    return BlobRef(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))


REF = ref_of(CONTENT)


async def pieces(content: bytes, size: int = MAX_CHUNK_BYTES) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]


async def then_fail(content: bytes) -> AsyncIterator[bytes]:
    async for piece in pieces(content, 100_000):
        yield piece
    raise ConnectionResetError("the laptop was closed")


class FullDisk(Disk):
    """A disk with room for so many bytes more."""

    def __init__(self, room: int) -> None:
        self.room = room
        # Contents of a batch are written by several threads.
        self._lock = threading.Lock()

    def write(self, descriptor: int, data: memoryview) -> int:
        with self._lock:
            if self.room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            written = super().write(descriptor, data[: self.room])
            self.room -= written
        return written


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


async def test_a_content_arrives_whole_and_read_only(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    status = await store.write("ann", REF, 0, pieces(CONTENT))
    assert (status.complete, status.committed_bytes) == (True, len(CONTENT))
    path = store.path(REF.sha256)
    assert path.read_bytes() == CONTENT
    assert path == tmp_path / "blobs" / REF.sha256[:2] / REF.sha256
    assert path.stat().st_mode & 0o222 == 0
    assert not list((tmp_path / "uploads").glob("*/*.part"))


@pytest.mark.parametrize("cut", [0, 1, 17, 65_535, 2**20 - 1, 2**20, 2**20 + 1, 2 * 2**20, len(CONTENT) - 1, 999_999])
async def test_a_cut_upload_goes_on_from_what_is_committed(tmp_path: Path, cut: int) -> None:
    store = BlobStore(tmp_path)
    with pytest.raises(ConnectionResetError):
        await store.write("ann", REF, 0, then_fail(CONTENT[:cut]))
    status = await BlobStore(tmp_path).status("ann", REF)
    assert (status.complete, status.committed_bytes) == (False, cut)
    status = await BlobStore(tmp_path).write("ann", REF, cut, pieces(CONTENT[cut:]))
    assert status.complete
    assert store.path(REF.sha256).read_bytes() == CONTENT


async def test_a_stream_that_ends_early_is_not_complete(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    status = await store.write("ann", REF, 0, pieces(CONTENT[:1000]))
    assert (status.complete, status.committed_bytes) == (False, 1000)


async def test_bytes_may_be_sent_again_but_never_left_out(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    await store.write("ann", REF, 0, pieces(CONTENT[:5000]))
    with pytest.raises(InvalidUpload, match="5000 bytes have arrived"):
        await store.write("ann", REF, 5001, pieces(CONTENT[5001:]))
    with pytest.raises(InvalidUpload, match="byte -1"):
        await store.write("ann", REF, -1, pieces(CONTENT))
    assert (await store.write("ann", REF, 3000, pieces(CONTENT[3000:]))).complete


async def test_a_gap_at_the_start_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InvalidUpload, match="0 bytes have arrived"):
        await BlobStore(tmp_path).write("ann", REF, 5, pieces(CONTENT[5:]))
    assert files_below(tmp_path) == []


async def test_wrong_bytes_are_removed(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    wrong = bytearray(CONTENT)
    wrong[2_000_000] ^= 1
    with pytest.raises(InvalidUpload, match="not the announced"):
        await store.write("ann", REF, 0, pieces(bytes(wrong)))
    assert files_below(tmp_path) == []
    assert (await store.write("ann", REF, 0, pieces(CONTENT))).complete


async def test_more_bytes_than_announced_are_refused_and_the_rest_can_be_repaired(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    with pytest.raises(InvalidUpload, match="more than the announced"):
        await store.write("ann", REF, 0, pieces(CONTENT + b"x", 2**19))
    assert not store.holds(REF)
    with pytest.raises(InvalidUpload, match="at most 1048576 bytes"):
        await store.write("ann", REF, 0, pieces(CONTENT, 2**20 + 1))


async def test_what_nobody_has_announced_is_stored_when_it_is_whole(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert await store.receive("ann", pieces(CONTENT, 100_000), max_bytes=len(CONTENT)) == REF
    assert store.path(REF.sha256).read_bytes() == CONTENT
    assert store.proved_by("ann", REF)
    assert not store.proved_by("bob", REF)
    # Again, and by another user: it is stored once.
    assert await store.receive("bob", pieces(CONTENT), max_bytes=2**30) == REF
    assert store.proved_by("bob", REF)
    assert not list((tmp_path / "uploads").glob("*/*.part"))


async def test_nothing_is_kept_of_what_does_not_arrive_whole(tmp_path: Path) -> None:
    store = BlobStore(tmp_path, silence_limit_s=0.05)
    with pytest.raises(ConnectionResetError):
        await store.receive("ann", then_fail(CONTENT), max_bytes=2**30)
    with pytest.raises(InvalidUpload, match="more than the announced 1000 bytes"):
        await store.receive("ann", pieces(CONTENT, 600), max_bytes=1000)
    with pytest.raises(InvalidUpload, match="is empty"):
        await store.receive("ann", pieces(b""), max_bytes=1000)

    async def silent() -> AsyncIterator[bytes]:
        yield CONTENT[:100]
        await asyncio.sleep(60)

    with pytest.raises(Stalled):
        await store.receive("ann", silent(), max_bytes=1000)
    full = BlobStore(tmp_path, disk=FullDisk(room=50_000))
    with pytest.raises(DiskFull, match="nothing of this file is kept"):
        await full.receive("ann", pieces(CONTENT), max_bytes=2**30)
    assert files_below(tmp_path) == []


async def test_a_part_that_was_whole_when_the_daemon_died_is_verified_when_asked_for(tmp_path: Path) -> None:
    for content, whole in ((CONTENT, True), (CONTENT[:-1] + b"?", False)):
        part = tmp_path / "uploads" / "ann" / f"{REF.sha256}-{REF.size_bytes}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        store = BlobStore(tmp_path)
        if not whole:
            await store.forget_proofs("ann", [REF])
            with pytest.raises(InvalidUpload):
                await store.status("ann", REF)
            assert not part.exists()
            continue
        assert (await store.status("ann", REF)).complete


async def test_others_parts_and_contents_are_not_told(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    await store.write("ann", REF, 0, pieces(CONTENT[:4000]))
    assert (await store.status("bob", REF)).committed_bytes == 0
    await store.write("ann", REF, 4000, pieces(CONTENT[4000:]))
    assert store.holds(REF)
    assert not (await store.status("bob", REF)).complete
    assert (await store.write("bob", REF, 0, pieces(CONTENT))).complete
    assert len(files_below(tmp_path / "blobs")) == 1, "stored once"


async def test_the_empty_content_needs_no_sending(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    assert (await store.status("ann", BlobRef(sha256=EMPTY_SHA256, size_bytes=0))).complete
    assert store.path(EMPTY_SHA256).read_bytes() == b""


async def test_a_second_upload_reads_no_byte(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    await store.write("ann", REF, 0, pieces(CONTENT))

    async def untouched() -> AsyncIterator[bytes]:
        raise AssertionError("read")
        yield b""

    assert (await store.write("ann", REF, 0, untouched())).complete


@pytest.mark.parametrize("room", [0, 1, 700_000, 2 * 2**20])
async def test_a_full_disk_keeps_what_is_durable_and_a_retry_goes_on(tmp_path: Path, room: int) -> None:
    store = BlobStore(tmp_path)
    await store.write("ann", REF, 0, pieces(CONTENT[:500_000]))
    full = BlobStore(tmp_path, disk=FullDisk(room))
    with pytest.raises(DiskFull, match="disk is full"):
        await full.write("ann", REF, 500_000, pieces(CONTENT[500_000:]))
    kept = 500_000 + room // MAX_CHUNK_BYTES * MAX_CHUNK_BYTES
    status = await store.status("ann", REF)
    assert status.committed_bytes == kept, "all whole pieces"
    assert [path.stat().st_size for path in files_below(tmp_path)] == [kept]
    assert (await store.write("ann", REF, kept, pieces(CONTENT[kept:]))).complete


async def test_a_chunk_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(InvalidUpload, match=f"send pieces of at most {MAX_CHUNK_BYTES} bytes"):
        await BlobStore(tmp_path).write("ann", REF, 0, pieces(CONTENT, MAX_CHUNK_BYTES + 1))


async def test_a_full_disk_at_the_first_byte_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(DiskFull):
        await BlobStore(tmp_path, disk=FullDisk(0)).write("ann", REF, 0, pieces(CONTENT))
    assert files_below(tmp_path) == []


async def test_an_upload_that_cannot_fit_is_refused_before_it_starts(tmp_path: Path) -> None:
    huge = BlobRef(sha256="ab" * 32, size_bytes=2**60)
    with pytest.raises(DiskFull, match="this upload needs 1,073,741,824"):
        await BlobStore(tmp_path).write("ann", huge, 0, pieces(b"x"))
    assert files_below(tmp_path) == []


async def test_a_busy_writer_keeps_its_turn_and_a_silent_one_loses_it(tmp_path: Path) -> None:
    now = [0.0]
    store = BlobStore(tmp_path, turns=Turns(silence_s=10.0, wait_s=0.05, clock=lambda: now[0]))
    waiting = asyncio.Event()

    async def then_silence() -> AsyncIterator[bytes]:
        yield CONTENT[:1000]
        waiting.set()
        await asyncio.Event().wait()

    first = asyncio.create_task(store.write("ann", REF, 0, then_silence()))
    await waiting.wait()
    second = asyncio.create_task(store.write("ann", REF, 0, pieces(CONTENT)))
    await asyncio.sleep(0)
    now[0] += 1.0
    with pytest.raises(UploadInProgress, match="another connection is sending"):
        await second
    now[0] += 10.0
    assert (await store.write("ann", REF, 1000, pieces(CONTENT[1000:]))).complete
    with pytest.raises(UploadInProgress, match="taken this upload over"):
        await first


async def test_what_has_arrived_is_told_while_a_dead_connection_still_holds_the_upload(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    waiting = asyncio.Event()

    async def then_silence() -> AsyncIterator[bytes]:
        yield CONTENT[:1000]
        waiting.set()
        await asyncio.Event().wait()

    first = asyncio.create_task(store.write("ann", REF, 0, then_silence()))
    await waiting.wait()
    status = await store.status("ann", REF)
    assert (status.committed_bytes, status.complete) == (1000, False)
    first.cancel()
    assert (await store.status("ann", REF)).committed_bytes == 1000


async def test_a_silent_stream_is_ended_and_what_it_sent_is_kept(tmp_path: Path) -> None:
    async def then_silence() -> AsyncIterator[bytes]:
        yield CONTENT[:1000]
        await asyncio.Event().wait()

    store = BlobStore(tmp_path, silence_limit_s=0.01)
    with pytest.raises(Stalled, match=r"no data arrived for 0\.01 s"):
        await store.write("ann", REF, 0, then_silence())
    assert (await store.write("ann", REF, 1000, pieces(CONTENT[1000:]))).complete


async def test_one_user_cannot_take_all_streams(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    refs = [ref_of(b"%d" % number) for number in range(MAX_TURNS_EACH + 1)]
    num_waiting = 0
    all_wait = asyncio.Event()

    async def silence() -> AsyncIterator[bytes]:
        nonlocal num_waiting
        num_waiting += 1
        if num_waiting == MAX_TURNS_EACH:
            all_wait.set()
        await asyncio.Event().wait()
        yield b""

    held = [asyncio.create_task(store.write("ann", ref, 0, silence())) for ref in refs[:-1]]
    await all_wait.wait()
    with pytest.raises(UploadInProgress, match="16 uploads of yours"):
        await store.write("ann", refs[-1], 0, pieces(b"16"))
    assert (await store.write("bob", refs[-1], 0, pieces(b"16"))).complete
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert (await store.write("ann", refs[-1], 0, pieces(b"16"))).complete


async def test_a_disk_that_fails_to_sync_behind_the_writing_is_told(tmp_path: Path, monkeypatch: Any) -> None:
    class FailingDisk(Disk):
        num_syncs = 0

        def sync(self, descriptor: int) -> None:
            if self.num_syncs == 0:
                self.num_syncs += 1
                raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(parts, "SYNC_EVERY_BYTES", 2**20)
    with pytest.raises(DiskFull):
        await BlobStore(tmp_path, disk=FailingDisk()).write("ann", REF, 0, pieces(CONTENT))
    assert files_below(tmp_path) == [], "the second sync succeeds, but knows nothing of what the first has lost"
    assert (await BlobStore(tmp_path).write("ann", REF, 0, pieces(CONTENT))).complete


async def test_a_cancelled_writer_has_put_its_file_down(tmp_path: Path) -> None:
    class HeldDisk(Disk):
        started, go_on = threading.Event(), threading.Event()

        def write(self, descriptor: int, data: memoryview) -> int:
            self.started.set()
            self.go_on.wait()
            return super().write(descriptor, data)

    store = BlobStore(tmp_path, disk=HeldDisk())
    task = asyncio.create_task(store.write("ann", REF, 0, pieces(CONTENT)))
    await asyncio.to_thread(HeldDisk.started.wait)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    assert not task.done()
    HeldDisk.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    arrived = (await store.status("ann", REF)).committed_bytes
    assert arrived == 2 * MAX_CHUNK_BYTES, "the piece that was being written is kept, and the one behind it"
    assert (await store.write("ann", REF, arrived, pieces(CONTENT[arrived:]))).complete


async def test_a_call_that_is_cancelled_while_its_file_is_opened_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, really_open = BlobStore(tmp_path), parts.Part.open
    with pytest.raises(ConnectionResetError):
        await store.write("ada", REF, 0, then_fail(CONTENT[:1000]))
    loop, is_opening, may_open = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def open_later(part: parts.Part, offset: int) -> None:
        loop.call_soon_threadsafe(is_opening.set)
        assert may_open.wait(240)
        really_open(part, offset)

    monkeypatch.setattr(parts.Part, "open", open_later)
    writing = asyncio.create_task(store.write("ada", REF, 1000, pieces(CONTENT[1000:])))
    await is_opening.wait()
    writing.cancel()
    await asyncio.sleep(0)
    may_open.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    opened = [entry.readlink() for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
    assert not [path for path in opened if path.is_relative_to(tmp_path)]
    assert (await store.status("ada", REF)).committed_bytes == 1000


async def test_old_halves_expire_and_unreferenced_contents_go(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    other = ref_of(b"kept")
    await store.write("ann", REF, 0, pieces(CONTENT[:10]))
    await store.write("ann", other, 0, pieces(b"kept"))
    assert await store.expire(3600) == 0
    for entry in files_below(tmp_path / "uploads"):
        os.utime(entry, (1, 1))
    assert await store.expire(3600) == 2
    assert files_below(tmp_path / "uploads") == []
    assert await store.sweep(frozenset({other.sha256})) == 0
    assert await store.remove_unreferenced(frozenset(), among=["00" * 32]) == 0
    assert await store.remove_unreferenced(frozenset(), among=[other.sha256]) == 1
    assert files_below(tmp_path) == []


async def test_an_upload_that_ends_while_old_ones_are_looked_for_is_no_error(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    await store.write("ann", REF, 0, pieces(CONTENT[:10]))
    (entry,) = files_below(tmp_path / "uploads")
    # Like a file that was there when the folder was read, a link to nothing is listed and cannot be looked at.
    (entry.parent / "0-ended.part").symlink_to(tmp_path / "absent")
    os.utime(entry, (1, 1))
    assert await store.expire(3600) == 1
    assert not entry.exists()


async def test_a_proof_keeps_a_content(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    await store.write("ann", REF, 0, pieces(CONTENT))
    assert await store.sweep(frozenset()) == 0
    await store.forget_proofs("ann", [REF])
    assert await store.sweep(frozenset()) == 1
    assert not store.holds(REF)
    assert await store.sweep(frozenset({REF.sha256})) == 0
    assert store.holds(REF), "what is referenced again comes back from the trash"


def whole(content: bytes, announced: bytes | None = None) -> WholeBlob:
    return WholeBlob(blob=ref_of(content if announced is None else announced), data=content)


SMALL = [whole(b"%020d" % i) for i in range(50)]


async def test_a_batch_of_small_contents_is_stored_as_if_each_came_alone(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    await store.write_whole("ann", [*SMALL, SMALL[0], whole(b"")])
    for one in [*SMALL, whole(b"")]:
        path = store.path(one.blob.sha256)
        assert path.read_bytes() == one.data
        assert path.stat().st_mode & 0o222 == 0
        assert store.proved_by("ann", one.blob)
        assert not store.proved_by("bob", one.blob)
    assert {entry.suffix for entry in files_below(tmp_path / "uploads")} == {".proved"}


async def test_every_file_of_a_batch_is_durable_before_it_is_in_its_place(tmp_path: Path) -> None:
    class Watched(Disk):
        def sync(self, descriptor: int) -> None:
            super().sync(descriptor)
            synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
            assert files_below(tmp_path / "blobs") == []

    synced: list[str] = []
    await BlobStore(tmp_path, disk=Watched()).write_whole("ann", SMALL)
    assert len(synced) == len(set(synced)) == len(SMALL)
    assert len(files_below(tmp_path / "blobs")) == len(SMALL)


@pytest.mark.parametrize("wrong", [whole(b"x" * 20, SMALL[7].data), whole(b"longer than that", b"longer")])
async def test_one_wrong_content_refuses_its_batch_and_leaves_nothing(tmp_path: Path, wrong: WholeBlob) -> None:
    with pytest.raises(InvalidUpload, match="not the announced") as caught:
        await BlobStore(tmp_path).write_whole("ann", [*SMALL[:3], wrong])
    assert [violation.field for violation in caught.value.violations] == ["blobs[3].data"]
    assert files_below(tmp_path) == []


async def test_a_batch_that_the_disk_has_no_room_for_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="nothing of this batch is kept"):
        await BlobStore(tmp_path, disk=FullDisk(500)).write_whole("ann", SMALL)
    assert files_below(tmp_path) == []
    await BlobStore(tmp_path).write_whole("ann", SMALL)


async def test_a_batch_that_broke_off_in_the_middle_can_be_sent_again(tmp_path: Path) -> None:
    class Dying(Disk):
        def sync(self, descriptor: int) -> None:
            if len(list((tmp_path / "uploads").glob("*/*.whole"))) > 10:
                raise OSError(errno.EIO, "the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        await BlobStore(tmp_path, disk=Dying()).write_whole("ann", SMALL)
    assert files_below(tmp_path) == []
    # What a daemon that was killed leaves: one half written, one in its place that nobody has proved.
    store = BlobStore(tmp_path)
    await store.write_whole("ann", SMALL[:2])
    half = tmp_path / "uploads" / "ann" / f"{SMALL[2].blob.sha256}-20.whole"
    half.write_bytes(b"00")
    half.chmod(0o444)
    next((tmp_path / "uploads" / "ann").glob("*.proved")).unlink()
    await store.write_whole("ann", SMALL)
    assert all(store.path(one.blob.sha256).read_bytes() == one.data for one in SMALL)
    assert not half.exists()


async def test_what_the_sender_has_already_is_not_written_again(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    await store.write_whole("ann", SMALL)
    disk = FullDisk(0)
    await BlobStore(tmp_path, disk=disk).write_whole("ann", SMALL)
    other = BlobStore(tmp_path, disk=disk)
    await other.write_whole("bob", SMALL, ready=frozenset(one.blob.sha256 for one in SMALL))
    assert not other.proved_by("bob", SMALL[0].blob), "the dataset of bob's proves it"


async def test_few_batches_are_written_at_a_time_and_one_of_each_user(tmp_path: Path) -> None:
    """A batch holds a thread; the loop has few of them."""

    class Slow(Disk):
        def sync(self, descriptor: int) -> None:
            owner = Path(f"/proc/self/fd/{descriptor}").readlink().parent.name
            with lock:
                started.append(owner)
                if len(set(started)) == MAX_BATCHES:
                    enough.set()
            assert go_on.wait(240)

    lock, enough, go_on = threading.Lock(), threading.Event(), threading.Event()
    started: list[str] = []
    store = BlobStore(tmp_path, disk=Slow(), turns=Turns(wait_s=0.01))
    owners = [f"user{i}" for i in range(MAX_BATCHES + 2)]
    batches = [asyncio.create_task(store.write_whole(owner, SMALL[:1])) for owner in owners]
    try:
        assert await asyncio.to_thread(enough.wait, 240)
        with pytest.raises(UploadInProgress):
            await store.write_whole(owners[0], SMALL[1:2])
        assert set(started) == set(owners[:MAX_BATCHES])
    finally:
        go_on.set()
        await asyncio.gather(*batches)
    assert all(store.proved_by(owner, SMALL[0].blob) for owner in owners)
