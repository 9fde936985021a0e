"""Datasets: what `services.pushed` does for all pushed resources, with a check of every row."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import structlog

from horizon_formats.formats import check_field_map, parse_format
from horizon_server.blobs.concurrency import in_thread
from horizon_server.datasets.checking import check_dataset
from horizon_server.datasets.reading import StoredFile, server_errors
from horizon_server.db.pushed import DatasetStore
from horizon_server.records.account import Principal
from horizon_server.records.blob import BlobFile, digest
from horizon_server.records.pushed import DatasetRecord
from horizon_server.services.access import require_create
from horizon_server.services.pushed import FindUser, PushedService, check_name
from horizon_server.services.uploads import Uploads

log = structlog.get_logger(__name__)


class DatasetService(PushedService[DatasetRecord]):
    """What callers may do with datasets. A dataset has no files of its own: its rows are read from the blob store."""

    def __init__(
        self,
        store: DatasetStore,
        uploads: Uploads,
        *,
        max_bytes: int,
        in_use: FindUser,
        clock: Callable[[], float] = time.time,
        remove_prepared: Callable[[str], None] = lambda digest: None,
    ) -> None:
        """`remove_prepared` removes the tokens of the dataset with this digest, and blocks."""
        super().__init__(store, uploads, max_bytes=max_bytes, in_use=in_use, clock=clock)
        self._remove_prepared = remove_prepared

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
        announced = DatasetRecord(
            dataset_id=self._new_id(),
            owner=principal.name,
            name=name,
            format=format,
            field_map=dict(field_map),
            files=tuple(files),
            digest=digest(files, format, dict(field_map)),
            created_s=self._clock(),
        )
        return await self._announce(announced, request_id=request_id)

    def data_files(self, record: DatasetRecord) -> tuple[StoredFile, ...]:
        """Return where the files of a dataset are, with the names their owner gave them."""
        store = self._uploads.store
        return tuple(StoredFile(path=store.path(file.sha256), name=file.path) for file in record.files)

    async def _remove(self, record: DatasetRecord) -> None:
        await super()._remove(record)
        # Datasets of equal content share their tokens, of all users.
        if record.ready and not await self._store.has_ready(record.digest):
            await in_thread(lambda: self._remove_prepared(record.digest))

    async def _check(self, record: DatasetRecord) -> dict[str, Any]:
        found = await check_dataset(
            self.data_files(record),
            name=record.name,
            dataset_format=parse_format(record.format),
            field_map=record.field_map,
        )
        log.info("dataset checked", dataset=record.dataset_id, rows=found.num_rows, blank_lines=found.num_blank_lines)
        content = digest(record.files, found.format, dict(record.field_map))
        return {"format": found.format.value, "num_rows": found.num_rows, "digest": content}
