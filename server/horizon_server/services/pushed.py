"""Datasets and models from announcement to READY: who may see them, which of them a job means, when they may be
removed.

Contents arrive through `services.uploads`. What both kinds have in common is in `PushedService`; each kind adds what an
announcement must hold, how its files are checked, and what else there is to remove.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Generic, TypeVar

import structlog

from horizon_formats.formats import DatasetFormat, check_field_map, parse_format
from horizon_formats.model_files import is_hub_id
from horizon_server.blobs.concurrency import SharedCalls, in_thread
from horizon_server.blobs.parts import disk_full_reported
from horizon_server.blobs.store import link_folder, remove_folder, remove_unreferenced
from horizon_server.blobs.trash import size_of
from horizon_server.datasets.checking import check_dataset
from horizon_server.datasets.reading import StoredFile, server_errors
from horizon_server.datasets.recipe import remove_prepared
from horizon_server.db.pushed import DatasetStore, ModelStore, PushedStore, page_token
from horizon_server.errors import (
    HorizonError,
    InUse,
    InvalidModel,
    InvalidSpec,
    NotFound,
)
from horizon_server.records.account import EVERYONE, NODE, Principal
from horizon_server.records.blob import BlobFile, BlobRef, DatasetRecord, ModelRecord, PushedRecord, check_files, digest
from horizon_server.services.access import may_see, require_change, require_create
from horizon_server.services.model_check import check_config, check_names
from horizon_server.services.model_child import check_model, model_digest
from horizon_server.services.quotas import Quotas
from horizon_server.services.uploads import Uploads
from horizon_server.spec import NAME_PATTERN, NAME_RULE
from horizon_server.store.adapter_files import PEFT_LORA
from horizon_server.store.base_digest import DigestBook
from horizon_server.store.model_files import CONFIG_FILE, parse_config

log = structlog.get_logger(__name__)

RecordT = TypeVar("RecordT", bound=PushedRecord)
# Returns id and owner of jobs that have not ended and refer to the resource.
FindUsers = Callable[[str], Awaitable[Sequence[tuple[str, str]]]]
# Raises InvalidModel for a folder whose model cannot be trained.
ModelTrial = Callable[[Path], Awaitable[None]]

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000

MAX_ANNOUNCED_CONFIG_BYTES = 2**20
# Of the name of a dataset that is named after its file.
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]+")
_STEM_CHARS, _DIGEST_CHARS = 40, 12
# How long a submission waits for the digest of a folder of the node; a client's call may take twice as long.
DIGEST_WAIT_S = 15.0


def page_limit(page_size: int) -> int:
    """Return how many items a page may have: the default for 0, and never more than the maximum. Raises InvalidSpec
    below 0."""
    if page_size < 0:
        raise InvalidSpec.of("page_size", f"page_size is {page_size}; it must be 0 or more")
    return min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)


def _as_seen(principal: Principal, record: RecordT) -> RecordT:
    """Return a record without the projects that it is shared with and the caller is not in."""
    if not record.shared_with or principal.sees_all or principal.name == record.owner:
        return record
    known = (EVERYONE, *principal.memberships)
    return dataclasses.replace(record, shared_with=tuple(name for name in record.shared_with if name in known))


class PushedService(ABC, Generic[RecordT]):
    """What callers may do with the resources of one kind."""

    def __init__(
        self,
        store: PushedStore[Any, RecordT],
        uploads: Uploads,
        *,
        max_bytes: int,
        users_of: FindUsers,
        quotas: Quotas,
    ) -> None:
        self._store = store
        self._uploads = uploads
        self._max_bytes = max_bytes
        self._users_of = users_of
        self._quotas = quotas
        self._kind = store.record_type.kind
        self._finalizing = SharedCalls[RecordT]()
        self._readers = Counter[str]()

    @abstractmethod
    async def _check(self, record: RecordT) -> dict[str, Any]:
        """Check the files, all of which have arrived, and return the fields that are known from then on."""

    async def _clean_up(self, record: RecordT) -> None:
        """Remove what a resource has besides its contents: after it was deleted, or when its check has failed."""

    async def finalize(self, principal: Principal, resource_id: str) -> RecordT:
        """Check the files and make the resource READY. A caller who hangs up may ask again and joins the check under
        way.

        Raises:
            InvalidUpload: when files have not arrived.
            InvalidData, InvalidModel: with file, line or field of what is wrong.
            WorkerDied: when the check was killed; the same call may be repeated.
        """
        record = await self.get_for_change(principal, resource_id)
        if record.ready:
            return record
        return await self._finalizing.join(record.id, lambda: self._finalize(record), user=record.owner)

    async def get(self, principal: Principal, key: str) -> RecordT:
        """Return what `key` means to the caller: by id, else their own of that name, else the only one they may see.

        Raises NotFound when there is none that they may see; InvalidSpec when several users have one of that name.
        """
        # Names of other users are left out before anything is counted: an answer must not depend on what the caller may
        # not see.
        visible = [
            _as_seen(principal, record)
            for record in await self._store.find(key)
            if may_see(principal, record.owner, shared_with=record.shared_with)
        ]
        by_id = [record for record in visible if record.id == key]
        own = [record for record in visible if record.owner == principal.name]
        found = by_id or own or visible
        if not found:
            raise NotFound.named(self._kind, key)
        if len(found) > 1:
            owners = ", ".join(f"{record.id} of {record.owner}" for record in found[:5])
            raise InvalidSpec(f"several users have a {self._kind} named {key}; give an id: {owners}")
        return found[0]

    async def get_ready(self, principal: Principal, key: str) -> RecordT:
        """Return what `key` means to the caller, as `get` does. Raises NotFound also when its upload is not
        finished."""
        record = await self.get(principal, key)
        if not record.ready:
            raise NotFound(f"{self._kind} {key} is not ready: its upload was not finished; push it again")
        return record

    async def get_for_change(self, principal: Principal, key: str) -> RecordT:
        """Return what `key` means to the caller, as `get` does. Raises NotAllowed when they may only use it."""
        record = await self.get(principal, key)
        require_change(principal, record.owner, f"{self._kind} {key}", shared_with=record.shared_with)
        return record

    async def share(self, principal: Principal, key: str, project: str) -> RecordT:
        """Let all members of a project, or `EVERYONE`, use a resource; return it. Raises NotFound, NotAllowed."""
        record = await self.get_for_change(principal, key)
        return await self._store.share(record.id, project, granted_by=principal.name, now_s=time.time())

    async def unshare(self, principal: Principal, key: str, project: str) -> RecordT:
        """Take back what `share` allowed; return the resource. Jobs that were submitted with it keep it. Raises
        NotFound, NotAllowed."""
        record = await self.get_for_change(principal, key)
        return await self._store.unshare(record.id, project)

    async def by_id(self, resource_id: str) -> RecordT:
        """Return one resource by id for a job, which was allowed to use it when it was submitted. Raises NotFound."""
        found = [record for record in await self._store.find(resource_id) if record.id == resource_id]
        if not found:
            raise NotFound(f"{self._kind} {resource_id} does not exist any more")
        return found[0]

    async def delete(self, principal: Principal, key: str) -> None:
        """Remove a resource and the contents that nothing else is made of. Raises as `require_deletable` does."""
        record = await self.get(principal, key)
        await self.require_deletable(principal, record)
        await self._remove(record)

    async def require_deletable(self, principal: Principal, record: RecordT) -> None:
        """Let pass what the caller may delete now.

        Raises:
            NotAllowed: when it is another user's.
            InUse: when a job that has not ended refers to it, a preview reads it, or it is being checked.
        """
        require_change(principal, record.owner, f"{self._kind} {record.name}", shared_with=record.shared_with)
        if users := await self._users_of(record.id):
            seen = [f"{job_id} of {owner}" for job_id, owner in users if may_see(principal, owner)]
            # Of others' jobs, which the caller may not see, the number only.
            hidden = len(users) - len(seen)
            named = [*seen, *([f"{hidden} of other users"] if hidden else [])]
            what = "job" if len(users) == 1 else "jobs"
            # Who may delete the resource may cancel their own jobs, and an admin all.
            mine = [job_id for job_id, owner in users if principal.role == "admin" or owner == principal.name]
            others = len(users) - len(mine)
            its = "its" if len(users) == 1 else "their"
            if not mine:
                free = f"wait for {its} end"
            elif others:
                free = (
                    f"cancel {', '.join(mine)}, and wait for the end of the other "
                    f"{'one' if others == 1 else f'{others}'}"
                )
            else:
                free = f"cancel {', '.join(mine)}, or wait for {its} end"
            raise InUse(f"{self._kind} {record.name} is needed by {what} {', '.join(named)}; {free}")
        if self._finalizing.runs(record.id):
            raise InUse(
                f"{self._kind} {record.name} is being checked right now; try again in a moment", retry_after_s=5.0
            )
        if self._readers[record.id]:
            raise InUse(
                f"{self._kind} {record.name} is being read by a preview; try again in a moment", retry_after_s=5.0
            )

    async def freed_bytes(self, record: RecordT) -> int:
        """Return the bytes that deleting a resource frees: of the contents that nothing else is made of."""
        sole = await self._uploads.only_of(record.id)
        return sum({file.sha256: file.size_bytes for file in record.files if file.sha256 in sole}.values())

    @contextmanager
    def reading(self, resource_id: str) -> Iterator[None]:
        """Keep a resource from being deleted until the end of the block."""
        self._readers[resource_id] += 1
        try:
            yield
        finally:
            self._readers[resource_id] -= 1

    async def unfinished(self, max_age_s: float) -> list[RecordT]:
        """Return announcements older than that which were never finalized and are not being checked now."""
        unfinished = await self._store.unfinished(time.time() - max_age_s)
        return [record for record in unfinished if not self._finalizing.runs(record.id)]

    async def sweep(self, max_age_s: float) -> int:
        """Remove announcements older than that which were never finalized; return how many."""
        idle = await self.unfinished(max_age_s)
        for record in idle:
            await self._remove(record)
        return len(idle)

    async def close(self) -> None:
        """Stop checks that still run; the next finalize starts them again."""
        await self._finalizing.close()

    def _require_announcement(self, principal: Principal, name: str) -> None:
        require_create(principal)
        # Only what the node itself has fetched may have the name that it has on the hub.
        is_from_hub = principal == NODE and is_hub_id(name)
        if not is_from_hub and not NAME_PATTERN.fullmatch(name):
            raise InvalidSpec.of("name", f"name is {name!r:.80}; it must be {NAME_RULE}")

    async def _announce(self, principal: Principal, announced: RecordT, *, request_id: str) -> RecordT:
        check_files(announced.files, what=self._kind, max_bytes=self._max_bytes)
        # What everybody uses is charged to nobody.
        admit, members = (
            (None, ()) if principal == NODE else await self._quotas.admit_push(principal, announced.size_bytes)
        )
        record, replaced = await self._store.create(announced, request_id=request_id, admit=admit, members=members)
        if replaced is not None:
            await self._drop_contents(replaced, keep=record.files)
        return record

    async def _finalize(self, record: RecordT) -> RecordT:
        await self._uploads.require_all(record.owner, record.files)
        try:
            ready = await self._store.make_ready(record.id, **await self._check(record))
        except BaseException:  # also where the daemon stops meanwhile
            await self._clean_up(record)
            raise
        # Only now: after a failed check the next finalize needs the proof that the owner has sent the files.
        await self._uploads.release(record.owner, record.files)
        return ready

    async def _remove(self, record: RecordT) -> None:
        # The record first: a crash in between leaves files that the next sweep finds, never a READY resource without
        # files.
        await self._store.delete(record.id)
        await self._clean_up(record)
        await self._drop_contents(record, keep=())

    async def _drop_contents(self, record: RecordT, *, keep: Sequence[BlobFile]) -> None:
        kept = {file.ref for file in keep}
        dropped = [file for file in record.files if file.ref not in kept]
        await self._uploads.release(record.owner, dropped)
        await self._uploads.collect(dropped)

    async def list(
        self, principal: Principal, *, page_size: int = 0, page_token: str = ""
    ) -> tuple[list[RecordT], str]:
        """Return a page of what the caller may see, newest first, and the token of the next; empty on the last."""
        owner = None if principal.sees_all else principal.name
        records, following = await self._store.page(
            owner=owner, projects=principal.memberships, limit=page_limit(page_size), token=page_token
        )
        return [_as_seen(principal, record) for record in records], following

    def token_after(self, record: RecordT) -> str:
        """Return the token of the page that follows this one of the list."""
        return page_token(record)


def _name_of_file(file: BlobFile) -> str:
    """Return the name of the dataset that a file is made into."""
    stem = _NOT_IN_NAMES.sub("-", PurePosixPath(file.path).name.partition(".")[0]).strip("-._")
    return f"{stem[:_STEM_CHARS] or 'file'}-{file.sha256[:_DIGEST_CHARS]}"


class DatasetService(PushedService[DatasetRecord]):
    """What callers may do with datasets. A dataset has no files of its own: its rows are read from the blob store."""

    def __init__(
        self,
        store: DatasetStore,
        uploads: Uploads,
        *,
        max_bytes: int,
        users_of: FindUsers,
        quotas: Quotas,
        prepared_root: Path,
    ) -> None:
        """`prepared_root` holds the tokens of datasets, in one folder per digest."""
        super().__init__(store, uploads, max_bytes=max_bytes, users_of=users_of, quotas=quotas)
        self.prepared_root = prepared_root

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
            QuotaExceeded: when the user or the project would store more than an admin allows.
        """
        self._require_announcement(principal, name)
        with server_errors():
            check_field_map(parse_format(format), field_map)
        announced = DatasetRecord(
            dataset_id=f"dataset_{secrets.token_hex(6)}",
            owner=principal.name,
            name=name,
            format=format,
            field_map=dict(field_map),
            files=tuple(files),
            digest=digest(files, format, dict(field_map)),
            created_s=time.time(),
        )
        return await self._announce(principal, announced, request_id=request_id)

    async def take(self, principal: Principal, file_name: str, content: BlobRef) -> DatasetRecord:
        """Make a READY dataset of one file that the caller has just sent. Its name follows from the file's name and
        content, so that the same file again is the same dataset. Where it cannot be one, nothing of it is kept.

        Raises what `create` and `finalize` raise.
        """
        file = BlobFile(path=file_name, sha256=content.sha256, size_bytes=content.size_bytes)
        record = None
        try:
            record = await self.create(
                principal,
                request_id=str(uuid.uuid4()),
                name=_name_of_file(file),
                format=DatasetFormat.AUTO.value,
                field_map={},
                files=[file],
            )
            ready = await self.finalize(principal, record.id)
        except HorizonError:
            if record is None:
                await self.forget(principal, content)
            else:
                await self._remove(record)
            raise
        # Also where the dataset was there already.
        await self._uploads.release(principal.name, [file])
        return ready

    async def forget(self, principal: Principal, content: BlobRef) -> None:
        """Remove a content that the caller has sent, where nothing refers to it."""
        file = BlobFile(path="", sha256=content.sha256, size_bytes=content.size_bytes)
        await self._uploads.release(principal.name, [file])
        await self._uploads.collect([file])

    def data_files(self, record: DatasetRecord) -> tuple[StoredFile, ...]:
        """Return where the files of a dataset are, with the names their owner gave them."""
        store = self._uploads.store
        return tuple(StoredFile(path=store.path(file.sha256), name=file.path) for file in record.files)

    async def freed_bytes(self, record: DatasetRecord) -> int:
        """Return the bytes that deleting a dataset frees, those of its tokens included."""
        freed = await super().freed_bytes(record)
        if not record.ready or await self._store.has_ready(record.digest, but=record.id):
            return freed
        return freed + await in_thread(lambda: size_of(self.prepared_root / record.digest))

    async def orphaned_tokens(self) -> list[Path]:
        """Return the folders of tokens without a dataset: a daemon that was killed while it deleted a dataset has left
        them."""
        root = self.prepared_root
        folders = await in_thread(lambda: list(root.iterdir()) if root.is_dir() else [])
        return [folder for folder in folders if not await self._store.has_ready(folder.name)]

    async def sweep(self, max_age_s: float) -> int:
        """Remove announcements older than that which were never finalized, and tokens without a dataset; return how
        many of the first."""
        removed = await super().sweep(max_age_s)
        for folder in await self.orphaned_tokens():
            await self._remove_prepared(folder.name)
        return removed

    async def _remove(self, record: DatasetRecord) -> None:
        await super()._remove(record)
        if record.ready:
            await self._remove_prepared(record.digest)

    async def _remove_prepared(self, content: str) -> None:
        # Datasets of equal content share their tokens, of all users. No job can be using them: a dataset that one needs
        # stays.
        if not await self._store.has_ready(content):
            await in_thread(lambda: remove_prepared(self.prepared_root, content))

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


class ModelService(PushedService[ModelRecord]):
    """What callers may do with models. `root` holds one folder of hard links per READY model."""

    def __init__(
        self,
        store: ModelStore,
        uploads: Uploads,
        *,
        root: Path,
        digests: Path,
        max_bytes: int,
        users_of: FindUsers,
        quotas: Quotas,
        trial: ModelTrial | None,
    ) -> None:
        """`digests` is the book of the digests of models. `trial` builds the class of a checked model; None checks its
        files alone."""
        super().__init__(store, uploads, max_bytes=max_bytes, users_of=users_of, quotas=quotas)
        self._root, self._trial, self._digests = root, trial, digests
        self._reading = SharedCalls[str]()

    async def create(
        self, principal: Principal, *, request_id: str, name: str, files: Sequence[BlobFile], config: bytes = b""
    ) -> ModelRecord:
        """Announce a model folder; the same name with the same content gives the one that is there.

        `config` is the content of its config.json, for a refusal before anything is sent. Empty: not known yet.

        Raises:
            InvalidSpec, TooLarge: for an announcement that cannot be fulfilled.
            InvalidModel: for a folder that its names or its config already rule out: pickles, code, no weights, an
                encoder.
            AlreadyExists: when the name is taken by other content.
            QuotaExceeded: when the user or the project would store more than an admin allows.
        """
        self._require_announcement(principal, name)
        check_names(files)
        if config:
            announced_sha256 = next((file.sha256 for file in files if file.path == CONFIG_FILE), "")
            if len(config) > MAX_ANNOUNCED_CONFIG_BYTES or hashlib.sha256(config).hexdigest() != announced_sha256:
                raise InvalidModel(
                    f"the announced {CONFIG_FILE} is not the one of files: it must have the same sha256, and at most "
                    f"{MAX_ANNOUNCED_CONFIG_BYTES} bytes; leave it out otherwise"
                )
            check_config(parse_config(config))
        announced = ModelRecord(
            model_id=f"model_{secrets.token_hex(6)}",
            owner=principal.name,
            name=name,
            files=tuple(files),
            # A folder has no order, unlike the files of a dataset, whose rows follow each other.
            digest=digest(sorted(files, key=lambda file: file.path)),
            created_s=time.time(),
        )
        return await self._announce(principal, announced, request_id=request_id)

    async def newest(self, limit: int) -> list[ModelRecord]:
        """Return the READY ones among those that were announced last, of all users, newest first."""
        records, _ = await self._store.page(owner=None, limit=limit, token="")
        return [record for record in records if record.ready]

    async def get(self, principal: Principal, key: str) -> ModelRecord:
        """Return what `key` means to the caller, as for every kind; of a model of the hub that is not here, the error
        says who can add it."""
        try:
            return await super().get(principal, key)
        except NotFound:
            if not is_hub_id(key):
                raise
            raise NotFound(
                f"model {key} is not on this node, and jobs fetch nothing; an administrator adds it there for "
                f"everybody: horizond model add {key}"
            ) from None

    def folder(self, model_id: str) -> Path:
        """Return where the folder of a READY model is."""
        return self._root / model_id

    async def digest_of(self, principal: Principal, folder: Path) -> str:
        """Return the digest of a model folder, made when it was pushed; of a folder of the node, when it is first asked
        for.

        Raises:
            InUse: while the folder's weights are being read for it, which continues without the caller.
            InvalidModel: where the folder cannot be read.
        """
        if known := await asyncio.to_thread(DigestBook(self._digests).known, folder):
            return known
        reading = self._reading.join(
            str(folder), lambda: model_digest(folder, digests=self._digests), user=principal.name
        )
        try:
            async with asyncio.timeout(DIGEST_WAIT_S):
                return await reading
        except TimeoutError as error:
            raise InUse(
                "the model's weights are being read for their digest, which is done once; try again in a minute",
                retry_after_s=10.0,
            ) from error

    async def close(self) -> None:
        """Stop checks and readings that still run."""
        await super().close()
        await self._reading.close()

    async def orphaned_folders(self) -> list[Path]:
        """Return the folders without a record."""
        known, root = await self._store.ids(), self._root
        return await in_thread(
            lambda: [path for path in root.iterdir() if path.name not in known] if root.is_dir() else []
        )

    async def sweep(self, max_age_s: float) -> int:
        """Remove announcements older than that which were never finalized; move folders without a record to the trash.
        Return how many."""
        removed = await super().sweep(max_age_s)
        known = await self._store.ids()
        return removed + await in_thread(lambda: remove_unreferenced(self._root, known, self._uploads.store.trash))

    async def _check(self, record: ModelRecord) -> dict[str, Any]:
        folder = self.folder(record.model_id)
        with disk_full_reported():
            await in_thread(lambda: link_folder(self._uploads.store.path, record.files, folder))
        facts = await check_model(folder, digests=self._digests)
        if self._trial is not None and facts["architecture"] != PEFT_LORA:
            await self._trial(folder)
        return {**facts}

    async def _clean_up(self, record: ModelRecord) -> None:
        await in_thread(lambda: remove_folder(self.folder(record.model_id)))
