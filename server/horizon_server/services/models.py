"""Model folders from announcement to READY: who may see them, when they may be used, when they may go.

Contents arrive through `blobs.uploads`; folders are checked by `models.folder_checks`; records are kept behind the `ModelStore` port.
Knows neither the wire nor the database.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from horizon_server.blobs.disk import told_when_full
from horizon_server.blobs.folder import link_folder, remove_folder, remove_unreferenced
from horizon_server.blobs.shared_calls import SharedCalls
from horizon_server.blobs.threads import in_thread
from horizon_server.blobs.uploads import Uploads
from horizon_server.errors import InUse, NotFound
from horizon_server.models.folder_checks import check_folder, check_names
from horizon_server.records.account import Principal
from horizon_server.records.blob import BlobFile, check_files, digest
from horizon_server.records.model import ModelRecord
from horizon_server.services.access import require_change, require_create
from horizon_server.services.lookup import check_name, choose, page_limit

ModelPage = tuple[list[ModelRecord], str]
"""Some models, and the token of the next page; empty on the last."""
InUsePort = Callable[[str], Awaitable[str | None]]
"""Returns the id of a job that has not ended and refers to the resource, or None."""


class ModelStore(Protocol):
    """Where models are kept. Each call is one transaction."""

    async def create(self, record: ModelRecord, *, request_id: str) -> tuple[ModelRecord, ModelRecord | None]:
        """Store the announcement and return it with the unfinished one of the same name that it replaced.

        An earlier call of the same request_id, or the same content under the same name, gives what is there already.
        Raises RequestIdReused, AlreadyExists, or NotFound where what the request had made is deleted by now.
        """
        ...

    async def find(self, key: str) -> list[ModelRecord]:
        """Return those of that id or name, of all owners."""
        ...

    async def page(self, *, owner: str | None, limit: int, token: str) -> ModelPage:
        """Return a page, newest first, of one owner or of all (None), and the token of the next."""
        ...

    async def mark_ready(self, model_id: str, *, architecture: str, num_parameters: int) -> ModelRecord:
        """Make it READY; raises NotFound when it was deleted meanwhile."""
        ...

    async def delete(self, model_id: str) -> None:
        """Remove it."""
        ...

    async def unfinished(self, before_s: float) -> list[ModelRecord]:
        """Return those announced before that time and never finalized."""
        ...

    async def ids(self) -> frozenset[str]:
        """Return the ids of all."""
        ...


class ModelService:
    """What callers may do with models. `root` holds one folder of hard links per READY model."""

    def __init__(
        self,
        store: ModelStore,
        uploads: Uploads,
        *,
        root: Path,
        max_bytes: int,
        in_use: InUsePort,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._uploads = uploads
        self._root = root
        self._max_bytes = max_bytes
        self._in_use = in_use
        self._clock = clock
        self._finalizing = SharedCalls[ModelRecord]()

    async def create(
        self, principal: Principal, *, request_id: str, name: str, files: Sequence[BlobFile]
    ) -> ModelRecord:
        """Announce a model folder; the same name with the same content gives the one that is there.

        Raises:
            InvalidSpec, TooLarge: for an announcement that cannot be fulfilled.
            InvalidModel: for a folder that its names already rule out: pickles, code, no config, no weights.
            AlreadyExists: when the name is taken by other content.
        """
        require_create(principal)
        check_name(name)
        check_files(files, what="model", max_bytes=self._max_bytes)
        check_names(files)
        announced = ModelRecord(
            model_id=f"model_{secrets.token_hex(6)}",
            owner=principal.name,
            name=name,
            files=tuple(files),
            digest=digest(sorted(files, key=lambda file: file.path)),
            created_s=self._clock(),
        )
        record, replaced = await self._store.create(announced, request_id=request_id)
        if replaced is not None:
            await self._drop_contents(replaced, keep=record.files)
        return record

    async def finalize(self, principal: Principal, model_id: str) -> ModelRecord:
        """Check config and weights and make the model READY. A caller who hangs up may ask again and joins the check under way.

        Raises:
            InvalidUpload: when files have not arrived.
            InvalidModel: with the file and what is wrong with it.
        """
        record = await self.get(principal, model_id)
        require_change(principal, record.owner, f"model {model_id}")
        if record.ready:
            return record
        return await self._finalizing.join(record.model_id, lambda: self._finalize(record))

    async def get(self, principal: Principal, key: str) -> ModelRecord:
        """Return one model by id or name.

        Raises:
            NotFound: when the caller sees none.
        """
        return choose(principal, key, await self._store.find(key), what="model")

    async def by_id(self, model_id: str) -> ModelRecord:
        """Return one model by id, whoever asks: for jobs that were allowed to use it.

        Raises:
            NotFound: when it is gone.
        """
        found = [record for record in await self._store.find(model_id) if record.model_id == model_id]
        if not found:
            raise NotFound(f"model {model_id} does not exist any more")
        return found[0]

    async def list(self, principal: Principal, *, page_size: int = 0, page_token: str = "") -> ModelPage:
        """Return a page of what the caller may see, newest first, and the token of the next."""
        owner = None if principal.sees_all else principal.name
        return await self._store.page(owner=owner, limit=page_limit(page_size), token=page_token)

    async def delete(self, principal: Principal, key: str) -> None:
        """Remove a model, its folder, and the contents that nothing else is made of.

        Raises:
            InUse: when a job that has not ended refers to it.
        """
        record = await self.get(principal, key)
        require_change(principal, record.owner, f"model {key}")
        job_id = await self._in_use(record.model_id)
        if job_id is not None:
            raise InUse(f"model {record.name} is needed by job {job_id}; cancel the job or wait for its end")
        if self._finalizing.runs(record.model_id):
            raise InUse(f"model {record.name} is being checked right now; try again in a moment", retry_after_s=5.0)
        await self._remove(record)

    def folder(self, model_id: str) -> Path:
        """Return where the folder of a READY model lies."""
        return self._root / model_id

    async def sweep(self, max_age_s: float) -> int:
        """Remove announcements older than that which were never finalized, and folders that a crash left; return how many."""
        unfinished = await self._store.unfinished(self._clock() - max_age_s)
        for record in unfinished:
            if not self._finalizing.runs(record.model_id):
                await self._remove(record)
        known = await self._store.ids()
        return len(unfinished) + await in_thread(
            lambda: remove_unreferenced(self._root, known, self._uploads.store.trash)
        )

    async def close(self) -> None:
        """Stop checks that still run; they start anew at the next finalize."""
        await self._finalizing.close()

    async def _finalize(self, record: ModelRecord) -> ModelRecord:
        await self._uploads.require_all(record.owner, record.files)
        folder = self.folder(record.model_id)
        done = False
        try:
            with told_when_full():
                await in_thread(lambda: link_folder(self._uploads.store, record.files, folder))
            facts = await in_thread(lambda: check_folder(folder))
            ready = await self._store.mark_ready(
                record.model_id, architecture=facts.architecture, num_parameters=facts.num_parameters
            )
            done = True
        finally:
            if not done:
                await in_thread(lambda: remove_folder(folder))
        await self._uploads.release(record.owner, record.files)
        return ready

    async def _remove(self, record: ModelRecord) -> None:
        await self._store.delete(record.model_id)
        await in_thread(lambda: remove_folder(self.folder(record.model_id)))
        await self._drop_contents(record, keep=())

    async def _drop_contents(self, record: ModelRecord, *, keep: Sequence[BlobFile]) -> None:
        kept = {file.ref for file in keep}
        dropped = [file for file in record.files if file.ref not in kept]
        await self._uploads.release(record.owner, dropped)
        await self._uploads.collect(dropped)
