"""Deleting datasets, models, jobs and checkpoints, one or many: what is in use stays, and the caller learns who uses
it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import structlog

from horizon_server.blobs.trash import size_of
from horizon_server.errors import HorizonError, InUse, InvalidSpec, NotAllowed, NotFound, TooLarge, WrongJobState
from horizon_server.records.account import Principal
from horizon_server.records.blob import PushedRecord
from horizon_server.records.housekeeping import Deletion, Selection
from horizon_server.records.job import ENDED, CheckpointRecord, JobRecord, JobState
from horizon_server.services.access import require_create
from horizon_server.services.jobs import JobService
from horizon_server.services.pushed import MAX_PAGE_SIZE, DatasetService, ModelService

log = structlog.get_logger(__name__)

MAX_KEYS = 1000
MAX_DELETIONS = 10_000
# What keeps one thing from being deleted, but not the others that were asked for.
_REFUSALS = (InUse, NotAllowed, WrongJobState, NotFound)

Target = PushedRecord | JobRecord | CheckpointRecord
AboutToDelete = Callable[[str], Awaitable[None]]


@dataclass(kw_only=True, eq=False)
class Deletions:
    """The use cases of deleting. Thread: belongs to one event loop."""

    datasets: DatasetService
    models: ModelService
    jobs: JobService

    async def delete(
        self, principal: Principal, selection: Selection, *, about_to_delete: AboutToDelete | None = None
    ) -> AsyncGenerator[tuple[Deletion, int, int], None]:
        """Delete one thing after the other; yield each result with its number from 1 and the number of all.

        `about_to_delete` is called before each with its key, such as JOB@STEP.

        Raises, before anything is deleted:
            InvalidSpec: when nothing is named, a key is malformed, or the kind of resource has no such filter.
            NotFound: when a key means nothing.
            NotAllowed: when a filter names the resources of another user and the caller is not an admin.
            TooLarge: for too many keys or resources.
        """
        require_create(principal)
        _check(principal, selection)
        if selection.kind in ("dataset", "model"):
            targets: list[Any] = await self._pushed(principal, selection)
        elif selection.kind == "job":
            targets = await self._jobs(principal, selection)
        else:
            targets = await self._checkpoints(principal, selection)
        if len(targets) > MAX_DELETIONS:
            raise TooLarge(
                f"{len(targets)} {selection.kind}s match; at most {MAX_DELETIONS} can be deleted in one call. Narrow "
                "the filter"
            )
        for i, target in enumerate(targets, 1):
            if about_to_delete is not None and not selection.dry_run:
                await about_to_delete(_key(target))
            yield await self._result(principal, target, dry_run=selection.dry_run), i, len(targets)

    async def _pushed(self, principal: Principal, selection: Selection) -> list[Any]:
        service: Any = self.datasets if selection.kind == "dataset" else self.models
        if selection.keys:
            found = [await service.get(principal, key) for key in selection.keys]
        else:
            found, token = [], ""
            while True:
                page, token = await service.list(principal, page_size=MAX_PAGE_SIZE, page_token=token)
                found += [record for record in page if record.owner == (selection.owner or principal.name)]
                if not token:
                    break
        before_s = time.time() - selection.older_than_s
        return list({record.id: record for record in found if record.created_s <= before_s}.values())

    async def _jobs(self, principal: Principal, selection: Selection) -> list[JobRecord]:
        found = [await self.jobs.get(principal, key) for key in selection.keys]
        if not selection.keys:
            found = await self._of_owner(principal, selection)
        before_s = time.time() - selection.older_than_s
        # One that has not ended is old enough for no filter; named by its key alone, it is refused with the reason.
        return [
            job
            for job in {job.job_id: job for job in found}.values()
            if (not selection.states or job.job_state in selection.states)
            and (not selection.older_than_s or (job.job_state in ENDED and job.ended_s <= before_s))
        ]

    async def _of_owner(self, principal: Principal, selection: Selection) -> list[JobRecord]:
        """The ended jobs of a user, or those in the states that were asked for."""
        found: list[JobRecord] = []
        token = ""
        while True:
            page, token = await self.jobs.list(
                principal, page_size=MAX_PAGE_SIZE, page_token=token, states=selection.states or ENDED
            )
            found += [job for job in page if job.owner == (selection.owner or principal.name)]
            if not token:
                return found

    async def _checkpoints(self, principal: Principal, selection: Selection) -> list[CheckpointRecord]:
        """The checkpoints that are meant. Their age is their own, not that of their job."""
        wanted: list[tuple[JobRecord, int | None]] = []
        for key in selection.keys:
            name, at, step = key.rpartition("@")
            if at and not (step.isdecimal() and len(step) < 19):
                raise InvalidSpec.of(
                    "keys", f"keys: {key!r:.80} is not a checkpoint; write JOB@STEP, or JOB for all of a job"
                )
            wanted.append((await self.jobs.get(principal, name if at else key), int(step) if at else None))
        if not selection.keys:
            wanted = [(job, None) for job in await self._of_owner(principal, selection)]
        before_s = time.time() - selection.older_than_s
        found: dict[tuple[str, int], CheckpointRecord] = {}
        for job, number in wanted:
            if selection.states and job.job_state not in selection.states:
                continue
            records = await self.jobs.checkpoints(principal, job.job_id)
            if number is not None and number not in [record.step for record in records]:
                listed = ", ".join(str(record.step) for record in records) or "none"
                raise NotFound(f"job {job.job_id} has no checkpoint of step {number}; it has: {listed}")
            for record in records:
                if number in (None, record.step) and record.created_s <= before_s:
                    found[record.job_id, record.step] = record
        return list(found.values())

    async def _result(self, principal: Principal, target: Target, *, dry_run: bool) -> Deletion:
        match target:
            case JobRecord():
                deletion = await self._job(principal, target, dry_run=dry_run)
            case CheckpointRecord():
                deletion = await self._checkpoint(principal, target, dry_run=dry_run)
            case PushedRecord():
                deletion = await self._pushed_one(principal, target, dry_run=dry_run)
        if not dry_run and not deletion.refusal:
            log.info("deleted", key=deletion.key, name=deletion.name, size_bytes=deletion.size_bytes, by=principal.name)
        return deletion

    async def _pushed_one(self, principal: Principal, record: Any, *, dry_run: bool) -> Deletion:
        service: Any = self.datasets if record.kind == "dataset" else self.models
        size_bytes = await service.freed_bytes(record)
        found = Deletion(key=record.id, name=record.name, owner=record.owner, size_bytes=size_bytes)
        try:
            await (service.require_deletable(principal, record) if dry_run else service.delete(principal, record.id))
        except _REFUSALS as error:
            return _refused(found, error)
        return found

    async def _job(self, principal: Principal, job: JobRecord, *, dry_run: bool) -> Deletion:
        size_bytes = await asyncio.to_thread(size_of, self.jobs.folders.of_job(job.job_id))
        found = Deletion(key=job.job_id, name=job.spec.name, owner=job.owner, size_bytes=size_bytes)
        try:
            if dry_run:
                await self.jobs.require_deletable(principal, job)
            else:
                await self.jobs.delete(principal, job.job_id)
        except _REFUSALS as error:
            return _refused(found, error)
        return found

    async def _checkpoint(self, principal: Principal, record: CheckpointRecord, *, dry_run: bool) -> Deletion:
        key = _key(record)
        try:
            job = await self.jobs.get(principal, record.job_id)
        except NotFound as error:
            return _refused(Deletion(key=key, name="", owner="", size_bytes=0), error)
        found = Deletion(key=key, name=job.spec.name, owner=job.owner, size_bytes=record.size_bytes)
        try:
            if dry_run:
                await self.jobs.require_checkpoint_deletable(principal, job, record.step)
            else:
                await self.jobs.delete_checkpoint(principal, job.job_id, record.step)
        except _REFUSALS as error:
            return _refused(found, error)
        return found


def _key(target: Target) -> str:
    match target:
        case JobRecord():
            return target.job_id
        case CheckpointRecord():
            return f"{target.job_id}@{target.step}"
        case PushedRecord():
            return target.id


def _refused(deletion: Deletion, error: HorizonError) -> Deletion:
    return replace(deletion, size_bytes=0, refusal=error.message, reason=error.reason)


def _check(principal: Principal, selection: Selection) -> None:
    if len(selection.keys) > MAX_KEYS:
        raise TooLarge(f"{len(selection.keys)} keys are given; at most {MAX_KEYS} are allowed")
    if not selection.keys and not selection.states and not selection.older_than_s:
        raise InvalidSpec.of("keys", "keys is empty; name what to delete, or give states or older_than")
    if selection.states and selection.kind in ("dataset", "model"):
        raise InvalidSpec.of("states", f"states are of jobs and their checkpoints; a {selection.kind} has none")
    if selection.kind == "job" and (alive := sorted(selection.states - ENDED)):
        ended = ", ".join(state for state in JobState if state in ENDED)
        raise InvalidSpec.of(
            "states", f"states has {', '.join(alive)}; only jobs that have ended can be deleted: {ended}"
        )
    if selection.owner not in ("", principal.name) and principal.role != "admin":
        raise NotAllowed(
            f"only an admin may delete what belongs to {selection.owner:.63}; leave owner out for your own"
        )
