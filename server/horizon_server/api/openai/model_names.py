"""What the name of a model means: a base, or the checkpoint of a job.

BASE                                  a pushed model, or one of the hub, by its name or id
ft:BASE:OWNER:SUFFIX:JOB              the last checkpoint of a job; SUFFIX is the job's name
ft:BASE:OWNER:SUFFIX:JOB:ckpt-step-N  its checkpoint of step N
JOB@best, JOB@last, JOB@N             the same, as everywhere else in horizon
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from horizon_server.api.openai.errors import model_not_found
from horizon_server.api.services import Services
from horizon_server.errors import NotFound
from horizon_server.records.account import Principal
from horizon_server.records.job import CheckpointRecord, JobRecord

UNNAMED = "fine-tune"
"""Name of a job whose creator has given no suffix."""

_FINE_TUNED = re.compile(r"(?P<model>ft:.+:(?P<job>job_[0-9a-f]{1,32}))(:ckpt-step-(?P<step>[0-9]{1,9}))?", re.DOTALL)
_AT = re.compile(r"(?P<job>[A-Za-z0-9][A-Za-z0-9._-]{0,62})@(?P<which>last|best|[0-9]{1,9})")


@dataclass(frozen=True, kw_only=True)
class BaseName:
    """A model that is no checkpoint."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A checkpoint of a job."""

    job: JobRecord
    checkpoint: CheckpointRecord


def tuned_name(job: JobRecord, step: int | None = None) -> str:
    """Return the name of what a job makes of its model, or of one of its checkpoints."""
    suffix = "" if job.spec.name == UNNAMED else job.spec.name
    at = "" if step is None else f":ckpt-step-{step}"
    return f"ft:{job.spec.model}:{job.owner}:{suffix}:{job.job_id}{at}"


def is_tuned(name: str) -> bool:
    """Whether a name can only be that of a job's checkpoint."""
    return name.startswith("ft:") or _AT.fullmatch(name) is not None


async def named(services: Services, caller: Principal, name: str) -> BaseName | Tuned:
    """Return what a name means to the caller; whether there is such a base is not looked up.

    Raises NotFound where it names a job that the caller may not see, or that has no such checkpoint.
    """
    if not is_tuned(name):
        return BaseName(name=name)
    job, which = await job_of(services, caller, name)
    records = await services.jobs.checkpoints(caller, job.job_id)
    return Tuned(job=job, checkpoint=checkpoint_of(records, which or "last", name))


def checkpoint_of(records: Sequence[CheckpointRecord], which: str, name: str) -> CheckpointRecord:
    """Return the one that is meant: last, best, or that of a step. Raises NotFound, with the whole name."""
    for record in records:
        is_meant = (which == "last" and record.last) or (which == "best" and record.best)
        if is_meant or (which.isdecimal() and record.step == int(which)):
            return record
    raise model_not_found(name)


async def job_of(services: Services, caller: Principal, name: str) -> tuple[JobRecord, str]:
    """Return the job whose checkpoint a name means, and which one: last, best, or a step; empty where the name is that
    of all the job has made. Raises NotFound."""
    fine_tuned, at = _FINE_TUNED.fullmatch(name), _AT.fullmatch(name)
    found = fine_tuned or at
    if found is None:
        raise model_not_found(name)
    try:
        job = await services.jobs.get(caller, found["job"])
    except NotFound as error:
        raise model_not_found(name) from error
    if fine_tuned is None:
        return job, found["which"]
    # The whole name is meant: one with another owner or suffix names nothing.
    if fine_tuned["model"] != tuned_name(job):
        raise model_not_found(name)
    return job, fine_tuned["step"] or ""
