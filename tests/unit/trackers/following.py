"""A follower from its start to its end."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

from horizon_formats.trackers import Ending, Follower, Point, Target, TrackedJob

LONG_S = 240.0


def follow(
    tracker: str, job: TrackedJob, target: Target, batches: Sequence[Sequence[Point]], ending: Ending | None
) -> None:
    """Write the batches, and end the run or leave it to be continued."""
    follower = Follower(tracker, job, target)
    for batch in batches:
        follower.write(batch)
    follower.close(ending)


def follow_apart(
    tracker: str, job: TrackedJob, target: Target, batches: Sequence[Sequence[Point]], ending: Ending | None
) -> None:
    """Follow in a new process, as the daemon and the command do."""
    process = multiprocessing.get_context("spawn").Process(target=follow, args=(tracker, job, target, batches, ending))
    process.start()
    process.join(LONG_S)
    assert process.exitcode == 0
