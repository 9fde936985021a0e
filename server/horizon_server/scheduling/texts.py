"""Times and lists as people read them in reasons."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta

ITS_SHARE = ", its share "
_JOB_ID = re.compile(r"\bjob_[0-9a-f]+\b")


def time_text(time_s: float, now_s: float) -> str:
    """A time in UTC: 14:20 UTC today, Tuesday 14:20 UTC within a week, else 24 November 14:20 UTC."""
    time, now = datetime.fromtimestamp(time_s, UTC), datetime.fromtimestamp(now_s, UTC)
    if time.date() == now.date():
        return f"{time:%H:%M} UTC"
    if now < time < now + timedelta(days=6):
        return f"{time:%A %H:%M} UTC"
    return f"{time.day} {time:%B %H:%M} UTC" if time.year == now.year else f"{time.day} {time:%B %Y %H:%M} UTC"


def span_text(start_s: float, end_s: float, now_s: float) -> str:
    """Two times: 13:40 to 15:40 UTC."""
    start, end = time_text(start_s, now_s), time_text(end_s, now_s)
    return f"{start.removesuffix(' UTC')} to {end}" if start.count(" ") == end.count(" ") == 1 else f"{start} to {end}"


def with_names(why: str, name_of: Callable[[str], str | None]) -> str:
    """A reason with the names of jobs in place of their ids, where `name_of` an id gives one."""
    return _JOB_ID.sub(lambda found: name_of(found[0]) or found[0], why)


def to_owner(why: str) -> str:
    """A reason as the job's owner reads it; to everybody else it speaks of the job."""
    return why.replace(ITS_SHARE, ", your share ")


def jobs_text(job_ids: Sequence[str], most: int = 3) -> str:
    """Some jobs by id: "job a", "jobs a and b", "jobs a, b, c and 4 more"."""
    if len(job_ids) == 1:
        return f"job {job_ids[0]}"
    if len(job_ids) > most:
        return f"jobs {', '.join(job_ids[:most])} and {len(job_ids) - most} more"
    return f"jobs {', '.join(job_ids[:-1])} and {job_ids[-1]}"
