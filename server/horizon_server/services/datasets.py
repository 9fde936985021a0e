"""Datasets from announcement to READY: who may see them, when they may be used, when they may go.

Contents arrive through `blobs.uploads`; rows are checked by the child of `datasets.checking`; records are kept behind the `DatasetStore`
port. Knows neither the wire nor the database.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

import structlog

from horizon_formats.formats import check_field_map, parse_format
from horizon_server.blobs.shared_calls import SharedCalls
from horizon_server.blobs.uploads import Uploads
from horizon_server.datasets.checking import check_dataset
from horizon_server.datasets.reading import StoredFile, server_errors
from horizon_server.errors import InUse, NotFound
from horizon_server.records.account import Principal
from horizon_server.records.blob import BlobFile, check_files, digest
from horizon_server.records.dataset import DatasetRecord
from horizon_server.services.access import require_change, require_create
from horizon_server.services.lookup import check_name, choose, page_limit

log = structlog.get_logger(__name__)

DatasetPage = tuple[list[DatasetRecord], str]
"""Some datasets, and the token of the next page; empty on the last."""
InUsePort = Callable[[str], Awaitable[str | None]]
"""Returns the id of a job that has not ended and refers to the resource, or None."""


class DatasetStore(Protocol):
    """Where datasets are kept. Each call is one transaction."""

    async def create(self, record: DatasetRecord, *, request_id: str) -> tuple[DatasetRecord, DatasetRecord | None]:
        """Store the announcement and return it with the unfinished one of the same name that it replaced.

        An earlier call of the same request_id, or the same content under the same name, gives what is there already.
        Raises RequestIdReused, AlreadyExists, or NotFound where what the request had made is deleted by now.
        """
        ...

    async def find(self, key: str) -> list[DatasetRecord]:
        """Return those of that id or name, of all owners."""
        ...

    async def page(self, *, owner: str | None, limit: int, token: str) -> DatasetPage:
        """Return a page, newest first, of one owner or of all (None), and the token of the next."""
        ...

    async def mark_ready(self, dataset_id: str, *, format: str, num_rows: int, digest: str) -> DatasetRecord:  # noqa: A002
        """Make it READY; raises NotFound when it was deleted meanwhile."""
        ...

    async def delete(self, dataset_id: str) -> None:
        """Remove it."""
        ...

    async def unfinished(self, before_s: float) -> list[DatasetRecord]:
        """Return those announced before that time and never finalized."""
        ...


class DatasetService:
    """What callers may do with datasets. A dataset has no files of its own: its rows are read from the blob store."""

    def __init__(
        self,
        store: DatasetStore,
        uploads: Uploads,
        *,
        max_bytes: int,
        in_use: InUsePort,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._uploads = uploads
        self._max_bytes = max_bytes
        self._in_use = in_use
        self._clock = clock
        self._finalizing = SharedCalls[DatasetRecord]()

    async def create(
        self,
        principal: Principal,
        *,
        request_id: str,
        name: str,
        format: str,  # noqa: A002  # the contract's word
        field_map: Mapping[str, str],
        files: Sequence[BlobFile],
    ) -> DatasetRecord:
        """Announce a dataset; the same name with the same content gives the one that is there.

        Raises:
            InvalidSpec, TooLarge: for an announcement that cannot be fulfilled.
            AlreadyExists: when the name is taken by other content.
        """
        require_create(principal)
        check_name(name)
        with server_errors():
            check_field_map(parse_format(format), field_map)
        check_files(files, what="dataset", max_bytes=self._max_bytes)
        announced = DatasetRecord(
            dataset_id=f"dataset_{secrets.token_hex(6)}",
            owner=principal.name,
            name=name,
            format=format,
            field_map=dict(field_map),
            files=tuple(files),
            digest=_digest(format, field_map, files),
            created_s=self._clock(),
        )
        record, replaced = await self._store.create(announced, request_id=request_id)
        if replaced is not None:
            await self._drop_contents(replaced, keep=record.files)
        return record

    async def finalize(self, principal: Principal, dataset_id: str) -> DatasetRecord:
        """Check every row and make the dataset READY. A caller who hangs up may ask again and joins the check under way.

        Raises:
            InvalidUpload: when files have not arrived.
            InvalidData: with file, line and field of what is wrong.
        """
        record = await self.get(principal, dataset_id)
        require_change(principal, record.owner, f"dataset {dataset_id}")
        if record.ready:
            return record
        return await self._finalizing.join(record.dataset_id, lambda: self._finalize(record))

    async def get(self, principal: Principal, key: str) -> DatasetRecord:
        """Return one dataset by id or name.

        Raises:
            NotFound: when the caller sees none.
        """
        return choose(principal, key, await self._store.find(key), what="dataset")

    async def by_id(self, dataset_id: str) -> DatasetRecord:
        """Return one dataset by id, whoever asks: for jobs that were allowed to use it.

        Raises:
            NotFound: when it is gone.
        """
        found = [record for record in await self._store.find(dataset_id) if record.dataset_id == dataset_id]
        if not found:
            raise NotFound(f"dataset {dataset_id} does not exist any more")
        return found[0]

    async def list(self, principal: Principal, *, page_size: int = 0, page_token: str = "") -> DatasetPage:
        """Return a page of what the caller may see, newest first, and the token of the next."""
        owner = None if principal.sees_all else principal.name
        return await self._store.page(owner=owner, limit=page_limit(page_size), token=page_token)

    async def delete(self, principal: Principal, key: str) -> None:
        """Remove a dataset and the contents that nothing else is made of.

        Raises:
            InUse: when a job that has not ended refers to it.
        """
        record = await self.get(principal, key)
        require_change(principal, record.owner, f"dataset {key}")
        job_id = await self._in_use(record.dataset_id)
        if job_id is not None:
            raise InUse(f"dataset {record.name} is needed by job {job_id}; cancel the job or wait for its end")
        if self._finalizing.runs(record.dataset_id):
            raise InUse(f"dataset {record.name} is being checked right now; try again in a moment", retry_after_s=5.0)
        await self._remove(record)

    def data_files(self, record: DatasetRecord) -> tuple[StoredFile, ...]:
        """Return where the files of a dataset lie, with the names their owner gave them."""
        store = self._uploads.store
        return tuple(StoredFile(path=store.path(file.sha256), name=file.path) for file in record.files)

    async def sweep(self, max_age_s: float) -> int:
        """Remove announcements older than that which were never finalized; return how many."""
        unfinished = await self._store.unfinished(self._clock() - max_age_s)
        idle = [record for record in unfinished if not self._finalizing.runs(record.dataset_id)]
        for record in idle:
            await self._remove(record)
        return len(idle)

    async def close(self) -> None:
        """Stop checks that still run; they start anew at the next finalize."""
        await self._finalizing.close()

    async def _finalize(self, record: DatasetRecord) -> DatasetRecord:
        await self._uploads.require_all(record.owner, record.files)
        found = await check_dataset(
            self.data_files(record),
            name=record.name,
            dataset_format=parse_format(record.format),
            field_map=record.field_map,
        )
        log.info("dataset checked", dataset=record.dataset_id, rows=found.num_rows, blank_lines=found.num_blank_lines)
        content = _digest(found.format, record.field_map, record.files)
        ready = await self._store.mark_ready(
            record.dataset_id, format=found.format.value, num_rows=found.num_rows, digest=content
        )
        await self._uploads.release(record.owner, record.files)
        return ready

    async def _remove(self, record: DatasetRecord) -> None:
        await self._store.delete(record.dataset_id)
        await self._drop_contents(record, keep=())

    async def _drop_contents(self, record: DatasetRecord, *, keep: Sequence[BlobFile]) -> None:
        kept = {file.ref for file in keep}
        dropped = [file for file in record.files if file.ref not in kept]
        await self._uploads.release(record.owner, dropped)
        await self._uploads.collect(dropped)


def _digest(dataset_format: str, field_map: Mapping[str, str], files: Sequence[BlobFile]) -> str:
    return digest(files, dataset_format, dict(field_map))
