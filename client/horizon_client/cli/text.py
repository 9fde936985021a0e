"""Numbers, times and untrusted text in the form that people read."""

from __future__ import annotations

import math
import unicodedata
from datetime import UTC, datetime


def clean(text: str) -> str:
    """Return `text` on one line and without control characters, so that the server cannot control the terminal."""
    spaced = " ".join(text.split())
    return "".join(c for c in spaced if unicodedata.category(c) not in ("Cc", "Cf"))


def clean_block(text: str) -> str:
    """Return `text` without control characters other than line breaks and tabs."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def bytes_text(num_bytes: float) -> str:
    """Return a size with a binary unit."""
    from rich.filesize import pick_unit_and_suffix

    unit, suffix = pick_unit_and_suffix(int(abs(num_bytes)), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024)
    return f"{num_bytes:.0f} B" if unit == 1 else f"{num_bytes / unit:.1f} {suffix}"


def count_text(number: int) -> str:
    """Return a whole number with separators."""
    return f"{number:,}"


def duration_text(seconds: float | None) -> str:
    """Return a duration as H:MM:SS, with days if there are any; '-' when unknown."""
    if seconds is None or not math.isfinite(seconds) or seconds < 0:
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02d}:{second:02d}"
    return f"{days}d {clock}" if days else clock


def age_text(moment: datetime | None, now: datetime | None = None) -> str:
    """Return the time since `moment` in its largest unit; '-' when unknown."""
    if moment is None:
        return "-"
    seconds = max(((now or datetime.now(UTC)) - moment).total_seconds(), 0.0)
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)}{unit}"
    return f"{int(seconds)}s"


def time_text(moment: datetime | None) -> str:
    """Return a moment in local time; '-' when unknown."""
    return "-" if moment is None else moment.astimezone().strftime("%Y-%m-%d %H:%M:%S %z")
