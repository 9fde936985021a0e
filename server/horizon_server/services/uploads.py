"""Who has which content: what a caller still has to send, and what nothing refers to any more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from horizon_server.blobs.store import BlobStore
from horizon_server.db.pushed import BlobReferences
from horizon_server.errors import FieldViolation, HorizonError, InvalidUpload, TooLarge
from horizon_server.records.blob import BlobFile, BlobRef, BlobStatus, WholeBlob, check_ref

TakenT = TypeVar("TakenT")

MAX_REFS = 8192
# Of one message with small contents.
MAX_WHOLE_BLOBS = 1000
MAX_WHOLE_BYTES = 2**20


class Uploads:
    """Takes contents from callers and says what is missing."""

    def __init__(
        self,
        store: BlobStore,
        references: BlobReferences,
        *,
        max_blob_bytes: int,
        on_upload: Callable[[int, str], None] = lambda num_bytes, result: None,
    ) -> None:
        """`on_upload` gets the bytes of each call and its result: stored, partial, refused or cut."""
        self.store = store
        self._references = references
        self._max_blob_bytes = max_blob_bytes
        self._on_upload = on_upload
        self._collecting = asyncio.Lock()

    async def missing(self, owner: str, refs: Sequence[BlobRef]) -> list[BlobStatus]:
        """Return how far each content is that `owner` still has to send. Raises InvalidSpec or TooLarge for impossible
        ones."""
        if len(refs) > MAX_REFS:
            raise TooLarge(f"{len(refs)} contents are asked for; ask for at most {MAX_REFS} in one call")
        for i, ref in enumerate(refs):
            check_ref(ref, max_bytes=self._max_blob_bytes, field=f"blobs[{i}]")
        ready = await self._references.of_ready(owner, {ref.sha256 for ref in refs})
        statuses = [await self._status(owner, ref, ready) for ref in dict.fromkeys(refs)]
        return [status for status in statuses if not status.complete]

    async def status(self, owner: str, ref: BlobRef) -> BlobStatus:
        """Return how far one content is. Raises InvalidSpec or TooLarge for what cannot name a content."""
        check_ref(ref, max_bytes=self._max_blob_bytes)
        return await self._status(owner, ref, await self._references.of_ready(owner, [ref.sha256]))

    async def write(self, owner: str, ref: BlobRef, offset: int, chunks: AsyncIterator[bytes]) -> BlobStatus:
        """Take `chunks` of a content from `offset` on; nothing is read of what `owner` has already.

        Raises:
            InvalidSpec, TooLarge: for what cannot name a content.
            InvalidUpload, UploadInProgress, DiskFull: as for `BlobStore.write`.
        """
        check_ref(ref, max_bytes=self._max_blob_bytes)
        if self._has(owner, ref, await self._references.of_ready(owner, [ref.sha256])):
            return BlobStatus(blob=ref, committed_bytes=ref.size_bytes, complete=True)
        return await self._taken(
            chunks,
            lambda counted: self.store.write(owner, ref, offset, counted),
            lambda status: "stored" if status.complete else "partial",
        )

    async def receive(self, owner: str, chunks: AsyncIterator[bytes]) -> BlobRef:
        """Take a content whose size and sha256 nobody has announced. Raises as `BlobStore.receive` does."""
        receive = partial(self.store.receive, owner, max_bytes=self._max_blob_bytes)
        return await self._taken(chunks, receive, lambda _: "stored")

    async def write_whole(self, owner: str, blobs: Sequence[WholeBlob]) -> None:
        """Store small contents that came in one message: all of them, or none where one is wrong.

        Raises:
            InvalidSpec, TooLarge: for what cannot name a content, and for more than one message may hold.
            InvalidUpload, UploadInProgress, DiskFull: as for `BlobStore.write_whole`.
        """
        num_bytes, result = sum(len(whole.data) for whole in blobs), "cut"
        try:
            if len(blobs) > MAX_WHOLE_BLOBS or num_bytes > MAX_WHOLE_BYTES:
                raise TooLarge(
                    f"{len(blobs)} contents with {num_bytes} bytes are sent in one call; send at most "
                    f"{MAX_WHOLE_BLOBS} contents with {MAX_WHOLE_BYTES} bytes in all, and larger ones with WriteBlob"
                )
            for i, whole in enumerate(blobs):
                check_ref(whole.blob, max_bytes=self._max_blob_bytes, field=f"blobs[{i}].blob")
            ready = await self._references.of_ready(owner, {whole.blob.sha256 for whole in blobs})
            await self.store.write_whole(owner, blobs, ready=ready)
            result = "stored"
        except HorizonError:
            result = "refused"
            raise
        finally:
            self._on_upload(num_bytes, result)

    async def _taken(
        self,
        chunks: AsyncIterator[bytes],
        take: Callable[[AsyncIterator[bytes]], Awaitable[TakenT]],
        result_of: Callable[[TakenT], str],
    ) -> TakenT:
        """Return what `take` makes of the chunks, and report how many bytes it has read, and with which result."""
        num_bytes, result = 0, "cut"

        async def counted() -> AsyncIterator[bytes]:
            nonlocal num_bytes
            async for data in chunks:
                num_bytes += len(data)
                yield data

        try:
            taken = await take(counted())
            result = result_of(taken)
        except HorizonError:
            result = "refused"
            raise
        finally:
            self._on_upload(num_bytes, result)
        return taken

    async def require_all(self, owner: str, files: Sequence[BlobFile]) -> None:
        """Let pass when `owner` has sent every file. Raises InvalidUpload with one violation per file that is not
        there."""
        ready = await self._references.of_ready(owner, {file.sha256 for file in files})
        statuses = {file.ref: await self._status(owner, file.ref, ready) for file in files}
        absent = [(i, file) for i, file in enumerate(files) if not statuses[file.ref].complete]
        if not absent:
            return
        raise InvalidUpload(
            f"{len(absent)} of {len(files)} files have not arrived whole, {absent[0][1].path} among them; send them, "
            "then finalize again",
            violations=[
                FieldViolation(
                    field=f"files[{i}]",
                    description=f"{file.path}: {statuses[file.ref].committed_bytes} of {file.size_bytes} bytes have "
                    "arrived",
                )
                for i, file in absent
            ],
        )

    async def release(self, owner: str, files: Iterable[BlobFile]) -> None:
        """Forget that `owner` has sent these: something READY of theirs refers to them from now on."""
        async with self._collecting:
            await self.store.forget_proofs(owner, {file.ref for file in files})

    async def collect(self, files: Iterable[BlobFile]) -> int:
        """Remove those contents that nothing refers to any more; return how many."""
        async with self._collecting:
            candidates = {file.sha256 for file in files}
            return await self.store.remove_unreferenced(await self._references.of_any(candidates), candidates)

    async def only_of(self, resource_id: str) -> frozenset[str]:
        """Return the contents that one resource and no other is made of."""
        return await self._references.only_of(resource_id)

    async def garbage(self, max_age_s: float) -> tuple[list[Path], list[Path]]:
        """Return what `sweep` would remove: partial uploads, and contents that nothing refers to."""
        async with self._collecting:
            referenced = await self._references.of_all()
            expired = await self.store.expired(max_age_s)
            return expired, await self.store.unreferenced(referenced, expired=expired)

    async def sweep(self, max_age_s: float) -> int:
        """Remove partial uploads older than that, then move every content that nothing refers to to the trash; return
        how many files."""
        async with self._collecting:
            expired = await self.store.expire(max_age_s)
            return expired + await self.store.sweep(await self._references.of_all())

    async def _status(self, owner: str, ref: BlobRef, ready: frozenset[str]) -> BlobStatus:
        if self._has(owner, ref, ready):
            return BlobStatus(blob=ref, committed_bytes=ref.size_bytes, complete=True)
        return await self.store.status(owner, ref)  # makes the empty content, which need not be sent

    def _has(self, owner: str, ref: BlobRef, ready: frozenset[str]) -> bool:
        # What others have sent is never shown: it has to be sent again, and is then stored once (ADR 0007).
        return self.store.has(owner, ref, ready)
