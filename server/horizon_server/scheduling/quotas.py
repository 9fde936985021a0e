"""What keeps a user or project from taking more: the limit, what is used of it, and what would free it. "" where
nothing does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from horizon_server.records.plan import HeldMemory
from horizon_server.records.sharing import Allowance
from horizon_server.scheduling.state import Job, Resident
from horizon_server.scheduling.texts import jobs_text, time_text
from horizon_server.texts import size_text

WEEK_S = 7 * 86400.0
# Of one user, unless an admin sets another limit.
MAX_QUEUED_JOBS = 2000


def with_defaults(allowance: Allowance, *, max_resident_jobs: int | None) -> Allowance:
    """Return what a holder may take where no admin has set another limit: `max_resident_jobs` is that of each user."""
    if allowance.holder != "user" or allowance.quota.max_resident_jobs is not None:
        return allowance
    return replace(allowance, quota=replace(allowance.quota, max_resident_jobs=max_resident_jobs))


def why_not_queued(allowance: Allowance, queued: Sequence[str]) -> str:
    """Why no job may be submitted while the holder's jobs `queued` (ids) are waiting."""
    limit = allowance.quota.max_queued_jobs
    if limit is None and allowance.holder == "user":
        # Where no admin has set any: more is a script that runs wild, and every look at the queue would cost all users.
        limit = MAX_QUEUED_JOBS
    if limit is None or len(queued) < limit:
        return ""
    free = f"cancel or wait for {_one_of(queued)}" if queued else _ask_admin(allowance)
    return f"quota: {len(queued)} of {limit} queued jobs of {_name(allowance)} (--max-queued-jobs); {free}"


def why_not_stored(allowance: Allowance, stored_bytes: int, new_bytes: int) -> str:
    """Why datasets, models or checkpoints of `new_bytes` may not be added."""
    limit = allowance.quota.max_stored_bytes
    if limit is None or stored_bytes + new_bytes <= limit:
        return ""
    used = f"quota: {size_text(stored_bytes)} of {size_text(limit)} stored by {_name(allowance)} (--max-stored)"
    used = f"{used}, and this needs {size_text(new_bytes)} more"
    if new_bytes > limit:
        return f"{used}; {_ask_admin(allowance)}"
    return f"{used}; delete datasets, models or checkpoints of at least {size_text(stored_bytes + new_bytes - limit)}"


def why_not_resident(
    allowance: Allowance,
    job: Job,
    residents: Sequence[Resident],
    *,
    device_s: float = 0.0,
    now_s: float,
    ends: Mapping[str, float | None] | None = None,
) -> str:
    """Why a job of the holder may not be loaded next to the holder's own resident jobs.

    `residents` are the holder's only, `device_s` the device seconds that the holder has used in the last 7 days, `ends`
    when resident jobs are predicted to end.
    """
    quota, name = allowance.quota, _name(allowance)
    if quota.max_resident_jobs is not None and len(residents) >= quota.max_resident_jobs:
        used = f"quota: {len(residents)} of {quota.max_resident_jobs} running jobs of {name} (--max-resident-jobs)"
        return f"{used}; {_freed_by(allowance, residents, now_s, ends or {})}"
    memory = HeldMemory(one.held for one in residents)
    host_bytes, needed_bytes = memory.num_bytes, memory.needed_bytes(*job.held)
    if quota.max_host_bytes is not None and host_bytes + needed_bytes > quota.max_host_bytes:
        used = (
            f"quota: {size_text(host_bytes)} of {size_text(quota.max_host_bytes)} host memory of {name} "
            "(--max-host-memory)"
        )
        used = f"{used}, and this job needs {size_text(needed_bytes)}"
        fitting = residents if job.host_bytes <= quota.max_host_bytes else ()
        return f"{used}; {_freed_by(allowance, fitting, now_s, ends or {})}"
    hours, limit = device_s / 3600, quota.device_hours_per_week
    if limit is not None and hours >= limit:
        time = (
            f"{hours:.3g} of {limit:g} device hours"
            if limit >= 0.1 or limit <= 0
            else f"{device_s:.3g} s of {3600 * limit:.3g} s on devices"
        )
        used = f"quota: {time} of {name} in the last 7 days (--device-hours-per-week)"
        if limit <= 0:
            return f"{used}; {_ask_admin(allowance)}"
        # What was used leaves the last 7 days as it came: on average 1/168 of it an hour.
        free_s = now_s + WEEK_S * (hours - limit) / hours
        return f"{used}; at the present rate free again at about {time_text(free_s, now_s)}"
    return ""


def _freed_by(
    allowance: Allowance, residents: Sequence[Resident], now_s: float, ends: Mapping[str, float | None]
) -> str:
    """The resident job that is predicted to end first, or all of them."""
    if not residents:
        return _ask_admin(allowance)
    known = [(end_s, one.job_id) for one in residents if (end_s := ends.get(one.job_id)) is not None]
    if known:
        end_s, job_id = min(known)
        return f"job {job_id} ends at about {time_text(max(end_s, now_s), now_s)}"
    return f"cancel or wait for {_one_of([one.job_id for one in residents])}"


def _one_of(job_ids: Sequence[str]) -> str:
    return jobs_text(job_ids) if len(job_ids) == 1 else f"one of: {jobs_text(job_ids).removeprefix('jobs ')}"


def _ask_admin(allowance: Allowance) -> str:
    return f"an admin can raise it: horizond {allowance.holder} set {allowance.name}"


def _name(allowance: Allowance) -> str:
    return f"{allowance.holder} {allowance.name}"
