"""What gRPC and REST show of the queue and of quotas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.sharing import Allowance, Holder, Outlook, QuotaUse
from horizon_server.services.access import may_see

USAGE_OF_S = 7 * 86400.0
"""How far back usage goes where the caller does not say."""

# What a quota is called: the field of its limit, the field of what is used, and what makes room.
_QUOTAS = {
    "queued_jobs": ("max_queued_jobs", "queued_jobs", "a queued job starts, or: horizon job cancel JOB"),
    "resident_jobs": ("max_resident_jobs", "resident_jobs", "a resident job ends, or: horizon job pause JOB"),
    "host_bytes": ("max_host_bytes", "host_bytes", "a resident job ends, or: horizon job pause JOB"),
    "stored_bytes": (
        "max_stored_bytes",
        "stored_bytes",
        "horizon dataset delete, horizon model delete, horizon checkpoint delete",
    ),
    "device_hours_per_week": (
        "device_hours_per_week",
        "device_hours",
        "hours are not counted any more after 7 days",
    ),
    "retained_bytes": (
        "retained_bytes",
        "retained_bytes",
        "the oldest are deleted after a warning, or: horizon job delete, horizon checkpoint delete",
    ),
}


@dataclass(frozen=True, kw_only=True)
class QueueEntry:
    """One resident or queued job. What the caller may not see of other users' jobs is null, and `why` is empty."""

    job_id: str
    owner: str
    state: JobState
    position: int
    """From 1 while queued; 0 for a resident job."""
    name: str | None = None
    project: str | None = None
    priority: int | None = None
    step: int | None = None
    num_steps: int | None = None
    outlook: Outlook | None = None

    @classmethod
    def seen_by(cls, principal: Principal, job: JobRecord) -> Self:
        """Return the entry of a job: everything for those who may see it; who, where and when for the others."""
        entry = cls(
            job_id=job.job_id,
            owner=job.owner,
            state=job.job_state,
            position=job.queue_position,
            name=job.spec.name,
            project=job.project,
            priority=job.priority,
            step=job.step,
            num_steps=job.num_steps,
            outlook=job.outlook,
        )
        if may_see(principal, job.owner, project=job.project):
            return entry
        # The reason has sizes in it, and names of other jobs.
        outlook = dataclasses.replace(job.outlook, why="") if job.outlook else None
        return dataclasses.replace(
            entry, outlook=outlook, name=None, project=None, priority=None, step=None, num_steps=None
        )


@dataclass(frozen=True, kw_only=True)
class QuotaLimit:
    """One quota and how much of it is used."""

    quota: str
    """queued_jobs, resident_jobs, host_bytes, stored_bytes, device_hours_per_week or retained_bytes."""
    limit: float | None = None
    """Null: no limit."""
    used: float
    frees: str
    """What makes room when the limit is reached."""


@dataclass(frozen=True, kw_only=True)
class AllowanceUse:
    """The weight of a user or project, and how much of each of its quotas is used."""

    holder: Holder
    name: str
    weight: float
    quotas: tuple[QuotaLimit, ...]

    @classmethod
    def all_of(cls, found: Iterable[tuple[Allowance, QuotaUse]]) -> tuple[Self, ...]:
        """Return what the service says, quota by quota."""
        return tuple(
            cls(
                holder=allowance.holder,
                name=allowance.name,
                weight=allowance.weight,
                quotas=tuple(
                    QuotaLimit(quota=quota, limit=getattr(allowance.quota, limit), used=getattr(used, use), frees=frees)
                    for quota, (limit, use, frees) in _QUOTAS.items()
                ),
            )
            for allowance, used in found
        )
