"""What is made of a record for the wire, once: fifty watchers of a job get one event, and a list is mostly the jobs of
the last list."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

Made = TypeVar("Made")


def cached_on(record: object, name: str, make: Callable[[], Made]) -> Made:
    """Return what `make` gives for a frozen record. It is cached on the record under that name, and so goes when the
    record goes."""
    made = vars(record).get(name)
    if made is None:
        made = vars(record)[name] = make()
    return cast(Made, made)
