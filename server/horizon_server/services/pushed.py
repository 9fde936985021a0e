"""Datasets and models from announcement to READY: who may see them, when they may be used, when they may be removed.

What both kinds have in common. Contents arrive through `services.uploads`. A kind adds what an announcement must hold, how its files are
checked, and what else there is to remove. Knows neither the wire nor the database's tables.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Generic, TypeVar

from horizon_server.blobs.concurrency import SharedCalls
from horizon_server.db.pushed import PushedStore
from horizon_server.errors import InUse, InvalidSpec, NotFound
from horizon_server.records.account import Principal
from horizon_server.records.blob import BlobFile, check_files
from horizon_server.records.pushed import PushedRecord
from horizon_server.services.access import may_see, require_change
from horizon_server.services.uploads import Uploads
from horizon_server.spec import NAME_PATTERN, NAME_RULE

RecordT = TypeVar("RecordT", bound=PushedRecord)
FindUser = Callable[[str], Awaitable[str | None]]
"""Returns the id of a job that has not ended and refers to the resource, or None."""

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000


def check_name(name: str) -> None:
    """Refuse a name that resources cannot have.

    Raises:
        InvalidSpec: with the rule.
    """
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidSpec.of("name", f"name is {name!r:.80}; it must be {NAME_RULE}")


def page_limit(page_size: int) -> int:
    """Return how many items a page may have: 0 means the default, and more than the maximum means the maximum.

    Raises:
        InvalidSpec: for a negative size.
    """
    if page_size < 0:
        raise InvalidSpec.of("page_size", f"page_size is {page_size}; it must be 0 or more")
    return min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


class PushedService(ABC, Generic[RecordT]):
    """What callers may do with the resources of one kind."""

    def __init__(
        self,
        store: PushedStore[Any, RecordT],
        uploads: Uploads,
        *,
        max_bytes: int,
        in_use: FindUser,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._uploads = uploads
        self._max_bytes = max_bytes
        self._in_use = in_use
        self._clock = clock
        self._kind = store.record_type.kind
        self._finalizing = SharedCalls[RecordT]()

    @abstractmethod
    async def _check(self, record: RecordT) -> dict[str, Any]:
        """Check the files, all of which have arrived, and return the fields that are known from then on."""

    async def _clean_up(self, record: RecordT) -> None:
        """Remove what a resource has besides its contents: after it was deleted, or when its check has failed."""

    async def finalize(self, principal: Principal, resource_id: str) -> RecordT:
        """Check the files and make the resource READY. A caller who hangs up may ask again and joins the check under way.

        Raises:
            InvalidUpload: when files have not arrived.
            InvalidData, InvalidModel: with file, line or field of what is wrong.
            WorkerDied: when the check was killed; the same call may be repeated.
        """
        record = await self.get(principal, resource_id)
        require_change(principal, record.owner, f"{self._kind} {resource_id}")
        if record.ready:
            return record
        return await self._finalizing.join(record.id, lambda: self._finalize(record))

    async def get(self, principal: Principal, key: str) -> RecordT:
        """Return what `key` means to the caller: by id, else their own of that name, else the only one they may see.

        Raises:
            NotFound: when there is none that they may see.
            InvalidSpec: when several users have one of that name.
        """
        visible = [record for record in await self._store.find(key) if may_see(principal, record.owner)]
        by_id = [record for record in visible if record.id == key]
        own = [record for record in visible if record.owner == principal.name]
        found = by_id or own or visible
        if not found:
            raise NotFound(f"{self._kind} {key!r:.80} does not exist, or is not yours")
        if len(found) > 1:
            owners = ", ".join(f"{record.id} of {record.owner}" for record in found[:5])
            raise InvalidSpec(f"several users have a {self._kind} named {key}; give an id: {owners}")
        return found[0]

    async def by_id(self, resource_id: str) -> RecordT:
        """Return one resource by id for a job, which was allowed to use it when it was submitted.

        Raises:
            NotFound: when it was deleted.
        """
        found = [record for record in await self._store.find(resource_id) if record.id == resource_id]
        if not found:
            raise NotFound(f"{self._kind} {resource_id} does not exist any more")
        return found[0]

    async def list(
        self, principal: Principal, *, page_size: int = 0, page_token: str = ""
    ) -> tuple[list[RecordT], str]:
        """Return a page of what the caller may see, newest first, and the token of the next; empty on the last."""
        owner = None if principal.sees_all else principal.name
        return await self._store.page(owner=owner, limit=page_limit(page_size), token=page_token)

    async def delete(self, principal: Principal, key: str) -> None:
        """Remove a resource and the contents that nothing else is made of.

        Raises:
            InUse: when a job that has not ended refers to it.
        """
        record = await self.get(principal, key)
        require_change(principal, record.owner, f"{self._kind} {key}")
        job_id = await self._in_use(record.id)
        if job_id is not None:
            raise InUse(f"{self._kind} {record.name} is needed by job {job_id}; cancel the job or wait for its end")
        if self._finalizing.runs(record.id):
            raise InUse(
                f"{self._kind} {record.name} is being checked right now; try again in a moment", retry_after_s=5.0
            )
        await self._remove(record)

    async def sweep(self, max_age_s: float) -> int:
        """Remove announcements older than that which were never finalized; return how many."""
        unfinished = await self._store.unfinished(self._clock() - max_age_s)
        idle = [record for record in unfinished if not self._finalizing.runs(record.id)]
        for record in idle:
            await self._remove(record)
        return len(idle)

    async def close(self) -> None:
        """Stop checks that still run; the next finalize starts them again."""
        await self._finalizing.close()

    def _new_id(self) -> str:
        return f"{self._kind}_{secrets.token_hex(6)}"

    async def _announce(self, announced: RecordT, *, request_id: str) -> RecordT:
        check_files(announced.files, what=self._kind, max_bytes=self._max_bytes)
        record, replaced = await self._store.create(announced, request_id=request_id)
        if replaced is not None:
            await self._drop_contents(replaced, keep=record.files)
        return record

    async def _finalize(self, record: RecordT) -> RecordT:
        await self._uploads.require_all(record.owner, record.files)
        try:
            ready = await self._store.make_ready(record.id, **await self._check(record))
        except BaseException:
            await self._clean_up(record)
            raise
        await self._uploads.release(record.owner, record.files)
        return ready

    async def _remove(self, record: RecordT) -> None:
        await self._store.delete(record.id)
        await self._clean_up(record)
        await self._drop_contents(record, keep=())

    async def _drop_contents(self, record: RecordT, *, keep: Sequence[BlobFile]) -> None:
        kept = {file.ref for file in keep}
        dropped = [file for file in record.files if file.ref not in kept]
        await self._uploads.release(record.owner, dropped)
        await self._uploads.collect(dropped)
