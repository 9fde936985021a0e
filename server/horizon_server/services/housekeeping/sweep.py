"""The sweep: what nothing needs any more is removed, at the daemon's start, every hour, and by `horizond gc`.

What a mistake would cost data (contents, models and jobs that the database does not know) goes to the trash; the rest
can be made again or was announced to its owner. Nothing goes while the database may be the wrong one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from horizon_server.blobs.concurrency import in_thread
from horizon_server.db.pairing import Pairing
from horizon_server.errors import HorizonError, InUse, NotFound
from horizon_server.jobs.folders import JobFolders
from horizon_server.records.blob import PushedRecord
from horizon_server.records.housekeeping import Garbage
from horizon_server.records.job import BEING_DELETED, ENDED, RESIDENT, JobRecord, JobState
from horizon_server.services.housekeeping import caches
from horizon_server.services.housekeeping.caches import garbage
from horizon_server.services.housekeeping.retention import DAY_S, Retention
from horizon_server.services.jobs import JobService
from horizon_server.services.pushed import DatasetService, ModelService
from horizon_server.services.uploads import Uploads
from horizon_server.settings import Settings
from horizon_server.spec import LORA

log = structlog.get_logger(__name__)

REQUEST_DAYS = 30
"""How long a request that is repeated still gives what it made."""
_MAX_NAMED = 20


@dataclass(kw_only=True, eq=False)
class Sweep:
    """Finds and removes garbage. Thread: belongs to one event loop; one sweep at a time."""

    settings: Settings
    pairing: Pairing
    uploads: Uploads
    datasets: DatasetService
    models: ModelService
    jobs: JobService
    retention: Retention
    _running: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    async def run(self, *, dry_run: bool = False) -> tuple[list[Garbage], str]:
        """Remove what nothing needs, or only find it; return it, and why nothing may be removed, where that is so."""
        async with self._running:
            problem = await self.pairing.problem(only_look=dry_run)
            self.uploads.store.trusts_database = problem is None
            if problem is not None:
                # A database from a backup, or a new one, would name everything in the folder unused.
                log.error("nothing is removed from the state folder", why=problem)
                return [], problem
            found: list[Garbage] = []
            for part in (self._deletions, self._pushed, self._contents, self._jobs, self._caches, self._trash):
                try:
                    found += await part(dry_run)
                except (HorizonError, OSError):
                    # Tried again in an hour; a disk in trouble must not end the daemon, nor keep the other parts from
                    # freeing space.
                    log.exception("a part of the state folder could not be swept", part=part.__name__.strip("_"))
            if not dry_run:
                _log(found)
            return found, ""

    @property
    def _root(self) -> Path:
        return self.settings.state_dir

    @property
    def _folders(self) -> JobFolders:
        return self.jobs.folders

    async def _deletions(self, dry_run: bool) -> list[Garbage]:
        """Deletions that were announced, or begun by a daemon that was killed."""
        store = self.jobs.journal.store
        if not dry_run:
            for job in await store.being_deleted():
                if job.deletion_s == BEING_DELETED:
                    await _unless_in_use(self.jobs.finish_deletion(job.job_id))
                else:
                    await store.end_deletion(job.job_id)
                    await _unless_in_use(self.retention.delete_checkpoints(job.job_id, why="that was begun"))
            await store.forget_requests(time.time() - REQUEST_DAYS * DAY_S)
        found = await self.retention.garbage()
        if not dry_run:
            await self.retention.apply()
        for job_id, step, size in await self.retention.useless_optimizers():
            place = f"jobs/{job_id}/checkpoints/step-{step:08d}/trainer"
            found.append(
                Garbage(
                    kind="optimizer states",
                    place=place,
                    size_bytes=size,
                    why="the job has succeeded, and has a newer one",
                )
            )
            if not dry_run:
                checkpoints = self._folders.checkpoints(job_id)
                await _unless_in_use(asyncio.to_thread(checkpoints.remove_optimizer, step))
        return found

    async def _pushed(self, dry_run: bool) -> list[Garbage]:
        """Announcements whose upload was given up, and folders of models and tokens that belong to nothing."""
        age_s = self.settings.upload_expiry_s
        unfinished: list[PushedRecord] = [*await self.datasets.unfinished(age_s), *await self.models.unfinished(age_s)]
        found = [
            Garbage(
                kind="announcements",
                place=record.id,
                size_bytes=0,
                why=f"{record.kind} {record.name} was never pushed whole",
            )
            for record in unfinished
        ]
        models, tokens = await self.models.orphaned_folders(), await self.datasets.orphaned_tokens()
        found += await self._as_garbage("models", models, "no model of the database; to the trash")
        found += await self._as_garbage("prepared data", tokens, "its dataset is deleted")
        if not dry_run:
            await self.datasets.sweep(age_s)
            await self.models.sweep(age_s)
        return found

    async def _contents(self, dry_run: bool) -> list[Garbage]:
        partial, contents = await self.uploads.garbage(self.settings.upload_expiry_s)
        found = await self._as_garbage("uploads", partial, "not continued for long")
        found += await self._as_garbage("contents", contents, "nothing is made of it; to the trash")
        if not dry_run:
            await self.uploads.sweep(self.settings.upload_expiry_s)
        age_s, hub = self.settings.upload_expiry_s, self._root / caches.HUB_FOLDER
        fetches = await in_thread(lambda: caches.given_up_fetches(hub, age_s))
        return found + await self._remove("fetches", fetches, "not continued for long", dry_run=dry_run)

    async def _jobs(self, dry_run: bool) -> list[Garbage]:
        """Files of jobs: what deletions left, what the database does not know, old attempts, journals and long logs."""
        store, folders = self.jobs.journal.store, self._folders
        leftovers = await in_thread(folders.leftovers)
        found = await self._remove("deleted", leftovers, "a deletion was cut short", dry_run=dry_run)
        job_ids = await in_thread(folders.ids)
        known = await store.owners(job_ids)
        unknown = [folders.of_job(job_id) for job_id in job_ids if job_id not in known]
        found += await self._as_garbage("jobs", unknown, "no job of the database; to the trash")
        trash = self.uploads.store.trash
        if not dry_run:
            again = await store.owners(await in_thread(lambda: trash.held("jobs")))
            await in_thread(lambda: trash.take_back(folders.of_job(job_id) for job_id in again))
            await in_thread(lambda: trash.put(unknown))
        for job in await store.ended_among(list(known)):
            found += await self._ended(job, dry_run)
        alive = await store.in_states(sorted(RESIDENT))
        for job in alive:
            found += await self._attempts(job, dry_run)
        return found

    async def _ended(self, job: JobRecord, dry_run: bool) -> list[Garbage]:
        assert job.job_state in ENDED, job.job_id
        journals = await in_thread(lambda: caches.stored_journals(self._folders, job.job_id))
        found = await self._remove("journals", journals, "all of it is in the database", dry_run=dry_run)
        # A failed job may be resumed, from them where it has no checkpoint; adapters that are left are for them.
        has_adapters = job.spec.train.trainable == LORA and await in_thread(
            lambda: self._folders.checkpoints(job.job_id).newest() is not None
        )
        if job.job_state is not JobState.FAILED:
            parts = await in_thread(lambda: _if_there(self._folders.unfinished_references(job.job_id)))
            found += await self._remove("unfinished references", parts, "the job has ended", dry_run=dry_run)
        if job.job_state is not JobState.FAILED and not has_adapters:
            start = await in_thread(lambda: _if_there(self._folders.start(job.job_id)))
            found += await self._remove("starting weights", start, "the job has ended", dry_run=dry_run)
        return found + await self._attempts(job, dry_run)

    async def _attempts(self, job: JobRecord, dry_run: bool) -> list[Garbage]:
        folders, job_id, max_bytes = self._folders, job.job_id, self.settings.max_log_bytes
        found: list[Garbage] = []
        if job.attempt > caches.KEPT_ATTEMPTS:
            failed = await self.jobs.journal.store.failed_attempts(job_id)
            paths = await in_thread(lambda: caches.old_attempts(folders, job_id, current=job.attempt, failed=failed))
            found += await self._remove("attempts", paths, f"the job has had {job.attempt} attempts", dry_run=dry_run)
        for path in await in_thread(lambda: caches.long_logs(folders, job_id, max_bytes)):
            place, size = str(path.relative_to(self._root)), path.stat().st_size - max_bytes
            found.append(
                Garbage(kind="logs", place=place, size_bytes=size, why="longer than max_log_bytes; its ends are kept")
            )
            if not dry_run:
                await in_thread(lambda path=path: caches.cut_log(path, max_bytes))  # type: ignore[misc]
        return found

    async def _caches(self, dry_run: bool) -> list[Garbage]:
        """Prepared data and compiled layers that no job has used for long; what resident jobs use is in use."""
        age_s = self.settings.cache_days * DAY_S
        why = f"not used for {self.settings.cache_days:g} days; made again when it is needed"
        resident = await self.jobs.journal.store.in_states(sorted(RESIDENT))
        attempts = [(job.job_id, job.attempt) for job in resident]
        used = await in_thread(lambda: caches.used_data(self._folders, attempts))
        if not dry_run:
            await in_thread(lambda: caches.mark_used(used))
        tokens = await in_thread(lambda: caches.unused_tokens(self.datasets.prepared_root, age_s))
        tokens = [path for path in tokens if path not in used]
        found = await self._remove("prepared data", tokens, why, dry_run=dry_run)
        code = await in_thread(lambda: caches.unused_code(self._folders.compiled, age_s))
        for facts in code:
            found += await self._as_garbage("compiled layers", [facts, *_if_there(facts.with_suffix(".pt2"))], why)
            if not dry_run:
                await in_thread(lambda facts=facts: caches.remove_code(facts))  # type: ignore[misc]
        return found

    async def _trash(self, dry_run: bool) -> list[Garbage]:
        trash, age_s = self.uploads.store.trash, self.settings.trash_days * DAY_S
        days = await in_thread(lambda: trash.expired(age_s))
        found = await self._as_garbage("trash", days, f"in the trash for more than {self.settings.trash_days:g} days")
        if not dry_run:
            await in_thread(lambda: trash.expire(age_s))
        return found

    async def _as_garbage(self, kind: str, paths: Sequence[Path], why: str) -> list[Garbage]:
        return await in_thread(lambda: garbage(kind, paths, why, root=self._root))

    async def _remove(self, kind: str, paths: Sequence[Path], why: str, *, dry_run: bool) -> list[Garbage]:
        found = await self._as_garbage(kind, paths, why)
        if not dry_run:
            await in_thread(lambda: caches.remove_all(paths))
        return found


async def _unless_in_use(work: Awaitable[object]) -> None:
    """Do it, or leave it to the next sweep where a download keeps a checkpoint."""
    try:
        await work
    except (InUse, NotFound) as error:
        log.info("left to the next sweep", why=error.message)


def _if_there(path: Path) -> list[Path]:
    return [path] if path.exists() else []


def _log(found: Sequence[Garbage]) -> None:
    """One line for each kind of what was removed."""
    for kind in dict.fromkeys(one.kind for one in found):
        ones = [one for one in found if one.kind == kind]
        log.info(
            "removed",
            kind=kind,
            number=len(ones),
            num_bytes=sum(one.size_bytes for one in ones),
            places=[one.place for one in ones[:_MAX_NAMED]],
        )
