"""What users and projects may take, and how much of it they have: set by an admin, checked when something is submitted
or pushed.

The quotas of resident jobs, host memory and device hours hold jobs back when they are admitted; that is the scheduler's
part.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from horizon_server.db.jobs import AdmitJob, JobStore
from horizon_server.db.pushed import AdmitPush
from horizon_server.db.sharing import SharingStore
from horizon_server.errors import BadSetting, QuotaExceeded
from horizon_server.jobs.folders import JobFolders
from horizon_server.records.account import Principal
from horizon_server.records.job import RESIDENT
from horizon_server.records.plan import HeldMemory, Plan
from horizon_server.records.sharing import Allowance, Holder, QuotaUse
from horizon_server.scheduling.quotas import WEEK_S, why_not_queued, why_not_stored
from horizon_server.spec import NAME_PATTERN, NAME_RULE
from horizon_server.texts import size_text

MAX_WEIGHT = 1e6


class Allowances(SharingStore):
    """The weights and quotas of the database, and what they may be."""

    async def of(self, holder: Holder, name: str) -> Allowance:
        """Return what a user or project may take; weight 1 and no limits where no admin has set any."""
        found = [a for a in await self.allowances() if (a.holder, a.name) == (holder, name)]
        return found[0] if found else Allowance(holder=holder, name=name)

    async def add_project(self, name: str) -> None:
        """Create a project, with weight 1 and no limits. Raises BadSetting for a malformed name."""
        _check_name("project", name)
        await self.set_allowance(Allowance(holder="project", name=name))

    async def change(self, holder: Holder, name: str, changes: Mapping[str, Any], weight: float | None) -> Allowance:
        """Set the weight, unless it is None, and those limits that `changes` names, where None removes one. Return the
        allowance.

        Raises BadSetting for a malformed name or a value out of range.
        """
        _check_name(holder, name)
        if weight is not None and not 0 < weight <= MAX_WEIGHT:
            raise BadSetting(f"weight is {weight:g}; it must be a number above 0 up to {MAX_WEIGHT:,.0f}")
        for limit, value in changes.items():
            if value is not None and not 0 <= value < math.inf:
                raise BadSetting(f"{limit} is {value}; it must be 0 or more, or none for no limit")
        present = await self.of(holder, name)
        changed = replace(
            present,
            weight=present.weight if weight is None else weight,
            quota=replace(present.quota, **changes),
        )
        await self.set_allowance(changed)
        return changed


def _check_name(holder: Holder, name: str) -> None:
    if not NAME_PATTERN.fullmatch(name):
        raise BadSetting(f"{holder} name {name!r} is not allowed: it must be {NAME_RULE}")


class Quotas:
    """Checks quotas, and counts what is used of them. Thread: belongs to one event loop; checkpoint folders are read in
    threads."""

    def __init__(self, sharing: SharingStore, jobs: JobStore, folders: JobFolders) -> None:
        self._sharing = sharing
        self._jobs = jobs
        self._folders = folders

    async def of(self, user: str, *projects: str) -> list[Allowance]:
        """Return what this user and these projects may take."""
        found = {(a.holder, a.name): a for a in await self._sharing.allowances()}
        keys: list[tuple[Holder, str]] = [("user", user), *(("project", project) for project in projects)]
        return [found.get(key, Allowance(holder=key[0], name=key[1])) for key in keys]

    async def admit_job(self, user: str, project: str, plan: Plan) -> AdmitJob:
        """Return what refuses a job where too many are queued. Raises QuotaExceeded when the job alone is larger than a
        quota."""
        allowances = await self.of(user, project)
        for allowance in allowances:
            limit = allowance.quota.max_host_bytes
            if limit is not None and plan.kept_host_bytes > limit:
                raise QuotaExceeded(
                    f"the job needs {size_text(plan.kept_host_bytes)} of host memory and {allowance.holder} "
                    f"{allowance.name} may have {size_text(limit)}; choose a smaller model, or ask an admin for more: "
                    f"horizond {allowance.holder} set {allowance.name} --max-host-memory SIZE"
                )

        return lambda of_user, of_project: _check_queued(allowances, (of_user, of_project))

    async def require_room(self, user: str, project: str) -> None:
        """Let one more job come into the queue. Raises QuotaExceeded when too many are queued."""
        _check_queued(await self.of(user, project), await self._jobs.queued_ids(user, project))

    async def admit_push(self, principal: Principal, num_bytes: int) -> tuple[AdmitPush | None, Collection[str]]:
        """Return what refuses a push of that many bytes where too many are stored, and the users whose bytes it
        needs."""
        allowances = [
            a for a in await self.of(principal.name, principal.project) if a.quota.max_stored_bytes is not None
        ]
        if not allowances:
            return None, ()
        projects = await self._sharing.projects()
        members = [_members(allowance, projects) for allowance in allowances]
        checkpoints = await self._checkpoint_bytes()

        def admit(pushed: Mapping[str, int]) -> None:
            for allowance, names in zip(allowances, members, strict=True):
                stored = sum(pushed.get(name, 0) + checkpoints.get(name, 0) for name in names)
                if why := why_not_stored(allowance, stored, num_bytes):
                    raise QuotaExceeded(why)

        return admit, frozenset[str]().union(*members)

    async def require_stored(self, owner: str, num_bytes: int) -> None:
        """Let a job of `owner` have that many bytes more with its checkpoints. Raises QuotaExceeded.

        It counts for the owner and for the owner's own project, whichever user made the call.
        """
        projects = await self._sharing.projects()
        found = [
            (allowance, names)
            for allowance in await self._sharing.allowances()
            if allowance.quota.max_stored_bytes is not None and owner in (names := _members(allowance, projects))
        ]
        if not found:
            return
        stored = await self.stored_bytes()
        for allowance, names in found:
            if why := why_not_stored(allowance, sum(stored.get(name, 0) for name in names), num_bytes):
                raise QuotaExceeded(why)

    async def used(self, user: str, *projects: str) -> list[QuotaUse]:
        """Return how much this user and these projects use now of what quotas limit."""
        residents = await self._jobs.in_states(sorted(RESIDENT))
        stored, retained = await self.stored_bytes(), await self._retained_bytes()
        members = await self._sharing.projects()
        device_s = await self._sharing.device_s_since(time.time() - WEEK_S)
        uses = []
        for allowance in await self.of(user, *projects):
            name, is_user = allowance.name, allowance.holder == "user"
            of_user, of_project = await self._jobs.queued_ids(user, "" if is_user else name)
            jobs = [job for job in residents if (job.owner if is_user else job.project) == name]
            names = _members(allowance, members)
            uses.append(
                QuotaUse(
                    queued_jobs=len(of_user if is_user else of_project),
                    resident_jobs=len(jobs),
                    host_bytes=HeldMemory(job.plan.held for job in jobs if job.plan).num_bytes,
                    stored_bytes=sum(stored.get(one, 0) for one in names),
                    retained_bytes=sum(retained.get(one, 0) for one in names),
                    device_hours=sum(s for key, s in device_s.items() if key[is_user] == name) / 3600,
                )
            )
        return uses

    async def stored_bytes(self) -> dict[str, int]:
        """Return the bytes that each user stores: datasets and models, READY or announced, and checkpoints."""
        pushed, checkpoints = await self._sharing.pushed_bytes(), await self._checkpoint_bytes()
        return {
            user: pushed.get(user, 0) + checkpoints.get(user, 0) for user in sorted(pushed.keys() | checkpoints.keys())
        }

    async def _retained_bytes(self) -> dict[str, int]:
        """The bytes of the checkpoints of ended jobs, by owner."""
        by_job = await asyncio.to_thread(self._folders.checkpoint_bytes)
        found: dict[str, int] = {}
        for job in await self._jobs.ended_among(by_job):
            found[job.owner] = found.get(job.owner, 0) + by_job[job.job_id]
        return found

    async def _checkpoint_bytes(self) -> dict[str, int]:
        by_job = await asyncio.to_thread(self._folders.checkpoint_bytes)
        found: dict[str, int] = {}
        for job_id, owner in (await self._jobs.owners(by_job)).items():
            found[owner] = found.get(owner, 0) + by_job[job_id]
        return found


def _check_queued(allowances: Iterable[Allowance], queued: Iterable[Sequence[str]]) -> None:
    for allowance, job_ids in zip(allowances, queued, strict=True):
        if why := why_not_queued(allowance, job_ids):
            raise QuotaExceeded(why)


def _members(allowance: Allowance, projects: Mapping[str, Iterable[str]]) -> frozenset[str]:
    # What is stored belongs to the user's own project: contents, unlike jobs, are pushed for no project in particular.
    return frozenset({allowance.name} if allowance.holder == "user" else projects.get(allowance.name, ()))
