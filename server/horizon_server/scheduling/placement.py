"""Which machine of a fleet a job is sent to."""

from __future__ import annotations

import math
from collections.abc import Sequence

from horizon_server.records.boxes import Place


def best(places: Sequence[Place]) -> Place | None:
    """The place where the job ends first; None where no machine can have it.

    A known end comes before an unknown one. The first of equal ones wins: the machine that asks is first in the list,
    and nothing has to be copied to it.
    """
    able = [one for one in places if not one.why_not]
    return min(able, key=lambda one: math.inf if one.estimated_end_s is None else one.estimated_end_s, default=None)
