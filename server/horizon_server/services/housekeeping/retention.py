"""When the checkpoints of ended jobs are deleted: after the days that their spec says, or beyond what their owner may
keep.

Nothing goes before its owner was warned: the time of the deletion is set first, shown with the job, and can be taken
back.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

from horizon_server.db.sharing import SharingStore
from horizon_server.errors import HorizonError, InUse, NotFound, QuotaExceeded, WrongJobState
from horizon_server.events import Message
from horizon_server.records.account import Principal
from horizon_server.records.housekeeping import Garbage
from horizon_server.records.job import CHECKPOINTS_BEING_DELETED, ENDED, CheckpointRecord, JobRecord, JobState
from horizon_server.services.access import require_change
from horizon_server.services.jobs import JobService
from horizon_server.texts import size_text

log = structlog.get_logger(__name__)

DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Due:
    """When the checkpoints of a job are to be deleted (Unix seconds), and why."""

    at_s: float
    why: str


def due_deletions(
    jobs: Iterable[JobRecord],
    num_bytes: Mapping[str, int],
    limits: Mapping[str, int],
    *,
    kept_bytes: Mapping[str, int],
    now_s: float,
    notice_s: float,
) -> dict[str, Due]:
    """Return which checkpoints are to be deleted and when, by job id.

    Args:
        jobs: ended ones that have checkpoints, the first that ended first.
        num_bytes: of the checkpoints, by job id.
        limits: what users may keep of ended jobs; users without a limit are left out.
        kept_bytes: those of the checkpoints that are kept one by one, which stay.
        notice_s: the least time between the warning and the deletion.
    """
    found: dict[str, Due] = {}
    remaining: defaultdict[str, int] = defaultdict(int)
    for job in jobs:
        days = job.spec.checkpoint.keep_days
        stays = job.keep_files or kept_bytes.get(job.job_id, 0) == num_bytes[job.job_id]
        if days is not None and not stays:
            # Also where the daemon was stopped meanwhile: the notice counts from the warning.
            at_s = job.deletion_s or max(job.ended_s + days * DAY_S, now_s + min(notice_s, days * DAY_S))
            found[job.job_id] = Due(at_s=at_s, why=f"checkpoint.keep_days is {days:g}")
            remaining[job.owner] += kept_bytes.get(job.job_id, 0)
        else:
            remaining[job.owner] += num_bytes[job.job_id]
    for job in jobs:
        limit = limits.get(job.owner)
        goes_bytes = 0 if job.keep_files else num_bytes[job.job_id] - kept_bytes.get(job.job_id, 0)
        if job.job_id in found or not goes_bytes or limit is None or remaining[job.owner] <= limit:
            continue
        kept_text = f"{size_text(remaining[job.owner])} of {size_text(limit)} that {job.owner} may keep of ended jobs"
        found[job.job_id] = Due(at_s=job.deletion_s or now_s + notice_s, why=f"the checkpoints take {kept_text}")
        remaining[job.owner] -= goes_bytes
    return found


@dataclass(kw_only=True, eq=False)
class Retention:
    """Announces and carries out deletions of checkpoints, and takes them back. Thread: belongs to one event loop."""

    jobs: JobService
    sharing: SharingStore
    notice_s: float

    async def keep(self, principal: Principal, key: str) -> JobRecord:
        """Keep the checkpoints of an ended job from being deleted automatically, also where that is announced already.

        Raises:
            WrongJobState: when the job has not ended.
            QuotaExceeded: when the jobs that its owner keeps so would take more than an admin allows.
        """
        job = await self.jobs.get(principal, key)
        require_change(principal, job.owner, f"job {job.job_id}", project=job.project)
        if job.job_state not in ENDED:
            raise WrongJobState(f"job {job.job_id} is {job.job_state}; only what an ended job has written can be kept")
        if self.jobs.boxes.has_arrived(job):
            return await self.jobs.boxes.order(principal, job, "keep")
        if job.keep_files:
            return job
        num_bytes = await asyncio.to_thread(self.jobs.folders.checkpoint_bytes)
        await self._require_room(job.owner, {job.job_id: num_bytes.get(job.job_id, 0)}, f"job {job.job_id}")
        text = f"its checkpoints are kept, by {principal.name}"
        await self.jobs.journal.append_now(
            job.job_id, Message(level="info", text=text), deletion_s=None, keep_files=True
        )
        return await self.jobs.get(principal, job.job_id)

    async def keep_checkpoint(self, principal: Principal, key: str, step: int, *, kept: bool) -> CheckpointRecord:
        """Keep one checkpoint of a job from being deleted automatically, or end that; return it as it is now.

        Raises:
            NotFound: when there is none of that step.
            QuotaExceeded: when what its owner keeps so would take more than an admin allows.
        """
        job = await self.jobs.get(principal, key)
        require_change(principal, job.owner, f"job {job.job_id}", project=job.project)
        if self.jobs.boxes.has_arrived(job):
            more = {"step": step, "kept": kept}
            return await self.jobs.boxes.call(principal, job, "keep_checkpoint", CheckpointRecord, **more)
        checkpoints = self.jobs.folders.checkpoints(job.job_id)
        found = await asyncio.to_thread(checkpoints.all)
        one = next((record for record in found if record.step == step), None)
        if one is not None and one.kept == kept:
            return one
        if one is not None and kept:
            all_kept = sum(record.size_bytes for record in found if record.kept or record is one)
            await self._require_room(job.owner, {job.job_id: all_kept}, f"the checkpoint of step {step}")
        changed = await asyncio.to_thread(checkpoints.set_kept, step, kept=kept)  # raises where there is none
        text = f"the checkpoint of step {step} is {'kept' if kept else 'no longer kept'}, by {principal.name}"
        await self.jobs.journal.append_now(job.job_id, Message(level="info", text=text))
        return changed

    async def _require_room(self, owner: str, more: Mapping[str, int], what: str) -> None:
        """Let pass that so many bytes of a user's jobs, by job id, are kept from now on. Raises QuotaExceeded."""
        kept_bytes = await asyncio.to_thread(lambda: self.jobs.folders.checkpoint_bytes(kept_only=True))
        owners = await self.jobs.journal.store.owners(kept_bytes)
        num_bytes, ended, limits = await self._kept()
        if (limit := limits.get(owner)) is None:
            return
        sizes = {job_id: kept_bytes[job_id] for job_id, its_owner in owners.items() if its_owner == owner} | {**more}
        sizes |= {job.job_id: num_bytes[job.job_id] for job in ended if job.owner == owner and job.keep_files}
        if (all_bytes := sum(sizes.values())) > limit:
            raise QuotaExceeded(
                f"with {what}, the jobs that {owner} keeps take {size_text(all_bytes)} of {size_text(limit)} that "
                f"{owner} may keep of ended jobs; delete other checkpoints, or ask an admin for more: horizond user "
                f"set {owner} --max-retained-bytes SIZE"
            )

    async def garbage(self) -> list[Garbage]:
        """Return what `apply` would delete now."""
        now_s = time.time()
        num_bytes, ended, due = await self._due(now_s)
        return [
            Garbage(
                kind="checkpoints",
                place=f"jobs/{job.job_id}/checkpoints",
                size_bytes=num_bytes[job.job_id],
                why=due[job.job_id].why,
            )
            for job in ended
            if job.job_id in due and job.deletion_s is not None and job.deletion_s <= now_s
        ]

    async def apply(self) -> None:
        """Warn of deletions, take back those that have become needless, and delete what was announced and is due."""
        now_s = time.time()
        num_bytes, ended, due = await self._due(now_s)
        for job in ended:
            try:
                await self._settle(job, due.get(job.job_id), num_bytes[job.job_id], now_s)
            except (NotFound, WrongJobState, InUse) as error:  # deleted, resumed or downloaded meanwhile
                log.info("checkpoints are not deleted now", job_id=job.job_id, why=error.message)

    async def _due(self, now_s: float) -> tuple[dict[str, int], list[JobRecord], dict[str, Due]]:
        """The bytes that deletions would free by job, the ended jobs that have checkpoints, and what is due when."""
        num_bytes, ended, limits = await self._kept()
        kept_bytes = await asyncio.to_thread(lambda: self.jobs.folders.checkpoint_bytes(kept_only=True))
        due = due_deletions(ended, num_bytes, limits, kept_bytes=kept_bytes, now_s=now_s, notice_s=self.notice_s)
        return {job_id: size - kept_bytes.get(job_id, 0) for job_id, size in num_bytes.items()}, ended, due

    async def _settle(self, job: JobRecord, due: Due | None, num_bytes: int, now_s: float) -> None:
        append = self.jobs.journal.append_now
        if due is None:
            if job.deletion_s is not None:
                text = "the deletion of its checkpoints is cancelled: the owner is within the limit again"
                await append(job.job_id, Message(level="info", text=text), deletion_s=None)
        elif job.deletion_s is None:
            day = datetime.fromtimestamp(due.at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")
            text = (
                f"its checkpoints ({size_text(num_bytes)}) will be deleted on {day}, because {due.why}; to keep them: "
                f"horizon job keep {job.job_id}, or pull what you need: horizon checkpoint pull {job.job_id}"
            )
            await append(job.job_id, Message(level="warning", text=text), deletion_s=due.at_s)
            log.info("deletion announced", job_id=job.job_id, owner=job.owner, num_bytes=num_bytes, on=day, why=due.why)
        elif job.deletion_s <= now_s:
            await self.delete_checkpoints(job.job_id, why=due.why)

    async def delete_checkpoints(self, job_id: str, *, why: str) -> None:
        """Delete the checkpoints of an ended job but those that are kept. Raises InUse while one of them is being
        downloaded; the others are gone then."""
        store, checkpoints = self.jobs.journal.store, self.jobs.folders.checkpoints(job_id)
        # While it is marked, nobody can resume the job: it would begin from the start without an error.
        await store.begin_deletion(job_id, CHECKPOINTS_BEING_DELETED)
        steps, deleted, num_bytes = await asyncio.to_thread(checkpoints.all), 0, 0
        try:
            for record in [record for record in steps if not record.kept]:
                await asyncio.to_thread(checkpoints.delete, record.step)
                deleted, num_bytes = deleted + 1, num_bytes + record.size_bytes
        except HorizonError:
            await store.end_deletion(job_id)
            raise
        await store.end_deletion(job_id)
        text = f"its {deleted} checkpoints ({size_text(num_bytes)}) were deleted as announced, because {why}"
        await self.jobs.journal.append_now(job_id, Message(level="warning", text=text))
        log.warning("checkpoints deleted", job_id=job_id, number=deleted, num_bytes=num_bytes, why=why)

    async def useless_optimizers(self) -> list[tuple[str, int, int]]:
        """Return job, step and bytes of trainer state that is of no more use: of succeeded jobs, but for the newest and
        the best."""
        _, ended, _ = await self._kept()
        found: list[tuple[str, int, int]] = []
        for job in ended:
            if job.job_state is JobState.SUCCEEDED and job.spec.checkpoint.keep_optimizer == "last":
                checkpoints = self.jobs.folders.checkpoints(job.job_id)
                sizes = await asyncio.to_thread(checkpoints.useless_optimizer_files)
                found += [(job.job_id, step, size) for step, size in sizes.items()]
        return found

    async def _kept(self) -> tuple[dict[str, int], list[JobRecord], dict[str, int]]:
        """The bytes of checkpoints by job, the ended jobs that have any, and the limits of their owners."""
        num_bytes = await asyncio.to_thread(self.jobs.folders.checkpoint_bytes)
        ended = [job for job in await self.jobs.journal.store.ended_among(num_bytes) if (job.deletion_s or 0) >= 0]
        limits = {
            allowance.name: allowance.quota.retained_bytes
            for allowance in await self.sharing.allowances()
            if allowance.holder == "user" and allowance.quota.retained_bytes is not None
        }
        return num_bytes, ended, limits
