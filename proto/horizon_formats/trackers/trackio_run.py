"""trackio: a run in a local database, or in a Space where TRACKIO_SPACE_ID names one."""

from __future__ import annotations

from collections.abc import Sequence

import trackio

from horizon_formats.trackers.figures import Ending, Point, TrackedJob
from horizon_formats.trackers.follower import Target, WrittenFile, add_to, local_name


class _Run:
    def __init__(self, job: TrackedJob, target: Target) -> None:
        project, name = target.project_of(job), local_name(job)
        self._run = trackio.init(
            project=project,
            name=name,
            config=job.config,
            resume="allow",
            embed=False,
            # Its figures of the machine would be those of whoever follows, not of the node.
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._file = WrittenFile(target.folder / "trackio", project, job.job_id)
        self.written = self._file.read()
        self.where = f'trackio show --project "{project}"'

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(dict(point.figures), step=point.step)
        add_to(self.written, points)
        self._file.keep(self.written)

    def close(self, ending: Ending | None) -> None:
        # trackio has no states of a run.
        self._run.finish()


def open_run(job: TrackedJob, target: Target) -> _Run:
    """Open the job's run, or create it."""
    return _Run(job, target)
