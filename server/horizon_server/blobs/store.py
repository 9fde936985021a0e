"""The contents on disk: partial uploads per user, whole contents stored once for all users.

`uploads/<user>/<sha256>-<size>.part` is what has arrived from that user; `.proved` next to it means that they have sent
all of it. `blobs/<aa>/<sha256>` is a whole, verified, durable content. Knows no database: its caller passes which
contents are referenced.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from horizon_server.blobs.concurrency import Turn, Turns, in_thread, to_the_end
from horizon_server.blobs.parts import Disk, Part, PartWriter, disk_full_reported
from horizon_server.blobs.space import Space
from horizon_server.blobs.trash import Trash
from horizon_server.durable import sync_folder
from horizon_server.errors import FieldViolation, InvalidUpload, Stalled
from horizon_server.records.blob import EMPTY_SHA256, BlobFile, BlobRef, BlobStatus, WholeBlob
from horizon_server.spec import NAME_PATTERN

MAX_CHUNK_BYTES = 2**20

# Batches of small contents at once, of all users: each holds a thread while it waits for the disk. A user has one at a
# time.
MAX_BATCHES = 2

_PART = ".part"
_WHOLE = ".whole"
_PROVED = ".proved"
# A client that asks how far an upload is has lost its connection. The daemon notices a moment later, and keeps what it
# holds.
_UNWINDING_S = 0.25
# What a file takes on the disk at least.
_BLOCK_BYTES = 4096
# Files of a batch that are written at a time.
_WRITERS = 4
# The turn of a user's batches: a client that sends one again after a cut waits until the first has ended, and finds its
# contents there.
_BATCH = BlobRef(sha256=EMPTY_SHA256, size_bytes=-1)


class BlobStore:
    """Contents below `root`, the daemon's state folder. `trash` is where a sweep puts what nothing refers to.

    Thread: the async methods belong to one event loop; each upload has one writer at a time.
    """

    def __init__(
        self,
        root: Path,
        *,
        disk: Disk | None = None,
        space: Space | None = None,
        turns: Turns | None = None,
        silence_limit_s: float = 120.0,
    ) -> None:
        self.trash = Trash(root)
        # False while the database may be the wrong one: what a user deletes then goes to the trash instead of being
        # removed at once.
        self.trusts_database = True
        self._blobs = root / "blobs"
        self._uploads = root / "uploads"
        self._disk = disk or Disk()
        self._space = space or Space(root)
        self._turns = turns or Turns()
        self._silence_limit_s = silence_limit_s
        # Held while a content is moved into place with its proof, and while unreferenced ones are chosen and removed.
        self._changing = threading.Lock()
        self._batches = asyncio.Semaphore(MAX_BATCHES)
        for folder in (self._blobs, self._uploads):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def path(self, sha256: str) -> Path:
        """Return the place of the whole content, whether or not it is there."""
        return self._blobs / sha256[:2] / sha256

    def holds(self, ref: BlobRef) -> bool:
        """Whether the whole content is here, from any user."""
        path = self.path(ref.sha256)
        return path.is_file() and path.stat().st_size == ref.size_bytes

    def proved_by(self, owner: str, ref: BlobRef) -> bool:
        """Whether `owner` has sent all of a content that is still here."""
        return self._entry(owner, ref, _PROVED).exists() and self.holds(ref)

    def has(self, owner: str, ref: BlobRef, ready: frozenset[str]) -> bool:
        """Whether a content is here that `owner` has sent, or that something READY of theirs is made of (`ready`)."""
        return (ref.sha256 in ready and self.holds(ref)) or self.proved_by(owner, ref)

    async def status(self, owner: str, ref: BlobRef) -> BlobStatus:
        """Return how much has arrived from `owner`; a part that is whole but unverified is verified now."""

        def arrived_bytes() -> int:
            path = self._entry(owner, ref, _PART)
            if not path.exists():
                return 0
            with path.open("rb") as stream:
                arrived = os.fstat(stream.fileno()).st_size
                self._disk.sync(stream.fileno())  # what a writer, or a daemon that crashed, has put in memory only
                return min(arrived, ref.size_bytes)

        if self.proved_by(owner, ref):
            return BlobStatus(blob=ref, committed_bytes=ref.size_bytes, complete=True)
        is_written = not await self._turns.is_free((owner, ref), _UNWINDING_S)
        arrived = await in_thread(arrived_bytes)
        if arrived < ref.size_bytes or is_written:
            return BlobStatus(blob=ref, committed_bytes=arrived, complete=False)
        return await self.write(owner, ref, arrived, _nothing())

    async def write(self, owner: str, ref: BlobRef, offset: int, chunks: AsyncIterator[bytes]) -> BlobStatus:
        """Append `chunks` from `offset` on. When the stream ends early or is cut, what arrived stays for the next try.

        Raises:
            InvalidUpload: a wrong offset, too many bytes, a chunk above 1 MiB, or bytes that have another sha256.
            UploadInProgress: when another connection keeps sending the same.
            DiskFull: what is durable stays, and a retry continues from there.
            Stalled: when the stream stays silent for `silence_limit_s`; what arrived stays.
        """
        async with self._turns.take((owner, ref)) as turn:
            if self.proved_by(owner, ref):
                return BlobStatus(blob=ref, committed_bytes=ref.size_bytes, complete=True)
            with disk_full_reported():
                self._space.require(ref.size_bytes - max(0, offset), "this upload")
                part = Part(self._entry(owner, ref, _PART), disk=self._disk)
                try:
                    # Inside: a call that is cancelled meanwhile has opened the file all the same.
                    await in_thread(lambda: part.open(offset))
                    await self._append_all(turn, part, ref, chunks)
                    whole = part.size_bytes == ref.size_bytes
                    if whole:
                        await in_thread(lambda: self._complete(owner, ref, part))
                finally:
                    await in_thread(part.close)
        return BlobStatus(blob=ref, committed_bytes=part.committed_bytes, complete=whole)

    async def receive(self, owner: str, chunks: AsyncIterator[bytes], *, max_bytes: int) -> BlobRef:
        """Store a content whose size and sha256 are known only once it has arrived; where it does not arrive whole,
        nothing of it is kept.

        What `chunks` raises is raised. Raises as `write` does; InvalidUpload also above `max_bytes`, and when nothing
        arrives.
        """
        # Until then it has a name that nothing else has.
        room = BlobRef(sha256=secrets.token_hex(32), size_bytes=max_bytes)
        path = self._entry(owner, room, _PART)
        async with self._turns.take((owner, room)) as turn:
            part = Part(path, disk=self._disk)
            try:
                with disk_full_reported("nothing of this file is kept: free space there, then send it again"):
                    await in_thread(lambda: part.open(0))
                    await self._append_all(turn, part, room, chunks)
                    ref = BlobRef(sha256=part.hash.hexdigest(), size_bytes=part.size_bytes)
                    if ref.is_empty:
                        raise InvalidUpload("the file is empty; send one that holds something")
                    await in_thread(lambda: self._place(owner, ref, path))
                    await in_thread(lambda: self._sync_folders([ref]))
            finally:
                await in_thread(part.close)
                await in_thread(lambda: path.unlink(missing_ok=True))
        return ref

    async def write_whole(self, owner: str, blobs: Sequence[WholeBlob], *, ready: frozenset[str] = frozenset()) -> None:
        """Store contents that came in one message: all of them, or none where one is wrong. Those of `ready` are the
        owner's already.

        Raises:
            InvalidUpload: for bytes that have another size or sha256.
            UploadInProgress: when another batch of `owner` takes long.
            DiskFull: when there is no space for all of them.
        """
        async with self._turns.take((owner, _BATCH)), self._batches:
            with disk_full_reported("nothing of this batch is kept: free space there, then push again"):
                needed_bytes = sum(-(-blob.blob.size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES for blob in blobs)
                self._space.require(needed_bytes, "this upload")
                await in_thread(lambda: self._store_whole(owner, blobs, ready))

    async def adopt(self, owner: str, files: Mapping[BlobRef, Path]) -> None:
        """Take verified files of the same disk as contents that `owner` has sent. No byte is copied: each place is
        another name of its file, which nobody may change from now on."""

        def link() -> None:
            (self._uploads / owner).mkdir(mode=0o700, parents=True, exist_ok=True)
            for ref, path in files.items():
                # First the note: a daemon that sweeps at this moment keeps what it names.
                self._entry(owner, ref, _PROVED).touch(mode=0o600)
                target = self.path(ref.sha256)
                if not self.holds(ref):
                    path.chmod(0o444)
                    with path.open("rb") as stream:
                        os.fsync(stream.fileno())
                    target.parent.mkdir(mode=0o700, exist_ok=True)
                    with suppress(FileExistsError):  # the same content came from a user meanwhile
                        os.link(path, target)
            self._sync_folders(files)

        await in_thread(link)

    async def forget_proofs(self, owner: str, refs: Iterable[BlobRef]) -> None:
        """Remove the notes that `owner` has sent these contents: something of theirs refers to them now."""
        entries = [self._entry(owner, ref, _PROVED) for ref in refs]
        await in_thread(lambda: _unlink(entries))

    async def expire(self, max_age_s: float) -> int:
        """Remove partial uploads and proofs that were not touched for `max_age_s`; return how many."""
        old = await self.expired(max_age_s)
        held = self._held()  # again: one may have been continued since
        await in_thread(lambda: _unlink(entry for entry in old if entry not in held))
        return len(old)

    async def expired(self, max_age_s: float) -> list[Path]:
        """Return the partial uploads and proofs that were not touched for `max_age_s`."""
        # Here and not in the thread, because the loop changes the turns meanwhile.
        held, before = self._held(), time.time() - max_age_s

        def find() -> list[Path]:
            found = []
            for entry in self._uploads.glob("*/*"):
                with suppress(FileNotFoundError):  # an upload that is complete now
                    if entry.stat().st_mtime < before and entry not in held:
                        found.append(entry)
            return found

        return await in_thread(find)

    async def unreferenced(self, referenced: frozenset[str], *, expired: Iterable[Path] = ()) -> list[Path]:
        """Return the contents that neither `referenced` nor a proof names, besides those proofs that are `expired`."""
        gone = frozenset(expired)
        return await in_thread(
            lambda: list(self._unreferenced(referenced, [path.name for path in self._blobs.glob("*/*")], gone))
        )

    async def remove_unreferenced(self, referenced: frozenset[str], among: Iterable[str]) -> int:
        """Remove those contents of `among` that neither `referenced` nor a proof names; return how many."""

        def remove() -> int:
            paths = self._unreferenced(referenced, candidates)
            if not self.trusts_database:
                return self.trash.put(paths)
            removed = 0
            for path in paths:
                path.unlink()
                removed += 1
            return removed

        candidates = list(among)
        return await in_thread(remove)

    async def sweep(self, referenced: frozenset[str]) -> int:
        """Move every content that neither `referenced` nor a proof names to the trash, and take back what is referenced
        again.

        Returns how many were moved.
        """

        def move() -> int:
            self.trash.take_back(self.path(sha256) for sha256 in referenced)
            return self.trash.put(self._unreferenced(referenced, [path.name for path in self._blobs.glob("*/*")]))

        return await in_thread(move)

    async def _append_all(self, turn: Turn, part: Part, ref: BlobRef, chunks: AsyncIterator[bytes]) -> None:
        writer = PartWriter(part)
        try:
            while True:
                with turn.waiting_for_client():
                    async with asyncio.timeout(self._silence_limit_s):
                        data = await anext(chunks, None)
                if data is None:
                    return
                if len(data) > MAX_CHUNK_BYTES:
                    raise InvalidUpload(
                        f"a piece of {len(data)} bytes was sent; send pieces of at most {MAX_CHUNK_BYTES} bytes"
                    )
                if writer.given_bytes + len(data) > ref.size_bytes:
                    raise InvalidUpload(
                        f"more than the announced {ref.size_bytes} bytes were sent; announce the file's true size and "
                        "sha256"
                    )
                # Several uploads that fit alone may not fit together.
                self._space.require(len(data), "this upload")
                await writer.put(data)
        except TimeoutError as error:
            raise Stalled(
                f"no data arrived for {self._silence_limit_s:g} s; ask for the blob's status and continue from there"
            ) from error
        finally:
            # However the stream ended, even by a cancelled call: what arrived is written, and no thread is left on the
            # file.
            await to_the_end(writer.finish())

    def _complete(self, owner: str, ref: BlobRef, part: Part) -> None:
        found = part.hash.hexdigest()
        if found != ref.sha256:
            part.path.unlink()
            raise InvalidUpload(
                f"the {ref.size_bytes} bytes that arrived have sha256 {found}, not the announced {ref.sha256}; they "
                "are removed: "
                "push again, and if that repeats, check whether the file changes while it is sent"
            )
        self._place(owner, ref, part.path)
        # Not under the lock: files that arrive together share the waiting.
        self._sync_folders([ref])

    def _store_whole(self, owner: str, blobs: Sequence[WholeBlob], ready: frozenset[str]) -> None:
        for i, whole in enumerate(blobs):
            _require_true(whole, f"blobs[{i}]")
        wanted = {whole.blob: whole.data for whole in blobs if not self.has(owner, whole.blob, ready)}
        entries = {ref: self._entry(owner, ref, _WHOLE) for ref in wanted}
        (self._uploads / owner).mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            # Several at a time: the file system makes those durable together that wait for it together.
            with ThreadPoolExecutor(_WRITERS, thread_name_prefix="small-contents") as threads:
                list(threads.map(self._write_file, entries.values(), wanted.values()))
            for ref, entry in entries.items():
                self._place(owner, ref, entry)
        finally:
            # Those in place have no such name any more.
            _unlink(entries.values())
        self._sync_folders(wanted)

    def _write_file(self, path: Path, data: bytes) -> None:
        # A daemon that was killed may have left one, which nobody may write to.
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._disk.write(descriptor, rest) :]
            self._disk.sync(descriptor)
        finally:
            os.close(descriptor)

    def _place(self, owner: str, ref: BlobRef, path: Path) -> None:
        """Move a verified, durable content into its place, or remove it where that content is there, and note who has
        sent it."""
        target = self.path(ref.sha256)
        with self._changing:
            if self.holds(ref):
                path.unlink()
            else:
                # Folders of models are hard links to this file: a change there would change it for everybody.
                path.chmod(0o444)
                target.parent.mkdir(mode=0o700, exist_ok=True)
                path.replace(target)
            self._entry(owner, ref, _PROVED).touch(mode=0o600)

    def _sync_folders(self, refs: Iterable[BlobRef]) -> None:
        """Make the names of contents durable."""
        for folder in {self.path(ref.sha256).parent for ref in refs}:
            sync_folder(folder)
        sync_folder(self._blobs)

    def _held(self) -> set[Path]:
        """The partial uploads that are being written."""
        return {self._entry(owner, ref, _PART) for owner, ref in self._turns.holders}

    def _unreferenced(
        self, referenced: frozenset[str], names: Iterable[str], expired: frozenset[Path] = frozenset()
    ) -> Iterator[Path]:
        """Yield the contents that may go. Nothing else changes them until the iteration ends."""
        with self._changing:
            proofs = set(self._uploads.glob(f"*/*{_PROVED}")) - expired
            proved = {entry.name.partition("-")[0] for entry in proofs}
            for sha256 in names:
                path = self.path(sha256)
                if sha256 not in referenced and sha256 not in proved and path.exists():
                    yield path

    def _entry(self, owner: str, ref: BlobRef, suffix: str) -> Path:
        # Each user has a folder of their own: who could continue another's upload, or learn that it exists, would learn
        # what others have, and get it without having it (ADR 0007).
        assert NAME_PATTERN.fullmatch(owner), owner
        return self._uploads / owner / f"{ref.sha256}-{ref.size_bytes}{suffix}"


def link_folder(path_of: Callable[[str], Path], files: Iterable[BlobFile], target: Path) -> None:
    """Make `target` hold exactly these files, durably, as hard links: no byte is copied, and the files keep their
    users' names.

    `path_of` gives the place of a content by its sha256.
    """
    # An earlier check may have left one.
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(mode=0o700, parents=True)
    for file in files:
        place = target / file.path
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.link(path_of(file.sha256), place)
    for folder in {target.parent, target, *(path for path in target.rglob("*") if path.is_dir())}:
        sync_folder(folder)


def remove_folder(target: Path) -> None:
    """Remove `target` where it is there. The contents it was made of stay."""
    if target.exists():
        shutil.rmtree(target)


def remove_unreferenced(root: Path, known: frozenset[str], trash: Trash) -> int:
    """Move the folders of `root` that no record knows to the trash, and take back those that one knows again. Return
    how many moved."""
    trash.take_back(root / name for name in known)
    return trash.put([path for path in root.iterdir() if path.name not in known] if root.is_dir() else [])


def _require_true(whole: WholeBlob, field: str) -> None:
    found = BlobRef(sha256=hashlib.sha256(whole.data).hexdigest(), size_bytes=len(whole.data))
    if found != whole.blob:
        problem = (
            f"{field} has {found.size_bytes} bytes with sha256 {found.sha256}, not the announced "
            f"{whole.blob.size_bytes} bytes with sha256 {whole.blob.sha256}; nothing of this batch is stored: push "
            "again, and if that repeats, check whether the file "
            "changes while it is sent"
        )
        raise InvalidUpload(problem, violations=[FieldViolation(field=f"{field}.data", description=problem)])


def _unlink(entries: Iterable[Path]) -> None:
    for entry in entries:
        entry.unlink(missing_ok=True)


async def _nothing() -> AsyncIterator[bytes]:
    return
    yield b""  # makes this a generator
