"""Which box of a fleet a job is sent to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What one box says of a job."""

    box: str
    """Its name."""
    end_s: float | None
    """When the job is predicted to end there (Unix seconds), the copying of its files included; None where nothing is
    known."""
    why_not: str = ""
    """Why the job cannot run there; empty where it can."""


def best(offers: Sequence[Offer]) -> Offer | None:
    """The offer with which the job ends first; None where no box can run it.

    A known end comes before an unknown one. The first of equal offers wins: the head is first in the list, and nothing
    has to be copied to it.
    """
    able = [one for one in offers if not one.why_not]
    return min(able, key=lambda one: math.inf if one.end_s is None else one.end_s, default=None)
