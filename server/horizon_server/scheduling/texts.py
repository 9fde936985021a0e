"""Times and lists as people read them in reasons."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta


def time_text(time_s: float, now_s: float) -> str:
    """A time in UTC: 14:20 UTC today, Tuesday 14:20 UTC within a week, else 24 November 14:20 UTC."""
    time, now = datetime.fromtimestamp(time_s, UTC), datetime.fromtimestamp(now_s, UTC)
    if time.date() == now.date():
        return f"{time:%H:%M} UTC"
    if now < time < now + timedelta(days=6):
        return f"{time:%A %H:%M} UTC"
    return f"{time.day} {time:%B %H:%M} UTC" if time.year == now.year else f"{time.day} {time:%B %Y %H:%M} UTC"


def jobs_text(job_ids: Sequence[str], most: int = 3) -> str:
    """Some jobs by id: "job a", "jobs a and b", "jobs a, b, c and 4 more"."""
    if len(job_ids) == 1:
        return f"job {job_ids[0]}"
    if len(job_ids) > most:
        return f"jobs {', '.join(job_ids[:most])} and {len(job_ids) - most} more"
    return f"jobs {', '.join(job_ids[:-1])} and {job_ids[-1]}"
