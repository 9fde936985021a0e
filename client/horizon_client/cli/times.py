"""Durations and moments as people write them in options, for `type=`: `90m`, `7d`, `2026-11-23T18:00`."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

import click

_DURATION = re.compile(r"(\d+(?:\.\d+)?)([mhdw])")
_UNITS = {"m": timedelta(minutes=1), "h": timedelta(hours=1), "d": timedelta(days=1), "w": timedelta(weeks=1)}
_LONGEST = timedelta(weeks=520)


def duration(text: str) -> timedelta:
    """Return a duration that is written as a number with m, h, d or w."""
    found = _DURATION.fullmatch(text)
    number = float(found[1]) if found else 0.0
    if found is None or not 0 < number <= _LONGEST / _UNITS[found[2]]:
        raise click.BadParameter(
            f"{text!r} is not a duration: write a number above 0 with m, h, d or w, such as 90m or 7d, up to 10 years"
        )
    return number * _UNITS[found[2]]


def length_text(length: timedelta) -> str:
    """Return a duration as `duration` takes it."""
    for name, unit in reversed(_UNITS.items()):
        if length >= unit and not length % unit:
            return f"{length // unit}{name}"
    return f"{length / _UNITS['m']:g}m"


def moment(text: str) -> datetime:
    """Return a moment in ISO 8601, with its offset; without one it is local time."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{text!r} is not a time: write it as 2026-11-23T18:00, in local time, or with an offset such as +01:00"
        ) from None
