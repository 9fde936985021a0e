"""TensorBoard: event files in a folder a job, by tensorboardX, which needs neither TensorFlow nor torch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from tensorboardX import SummaryWriter

from horizon_formats.trackers.figures import Ending, Point, TrackedJob
from horizon_formats.trackers.follower import Target, WrittenFile, add_to, local_name


class _Run:
    def __init__(self, job: TrackedJob, target: Target) -> None:
        runs, project = target.folder / "runs", target.project_of(job)
        folder = runs / project / local_name(job)
        self.where = f"tensorboard --logdir {runs}"
        self._file = WrittenFile(folder, project, job.job_id)
        self.written = self._file.read()
        # What was written and not recorded, when the last follower was killed in between, is taken back by readers.
        after = self.written["train"] + 1 if "train" in self.written else None
        # Files are named by the second, and the second one of a name would replace the first.
        suffix = f".{time.time_ns()}"
        self._writer = SummaryWriter(logdir=str(folder), purge_step=after, filename_suffix=suffix)
        if not self.written:
            config = json.dumps(job.config, indent=1, default=str)
            self._writer.add_text("job", "\n".join(f"    {line}" for line in config.splitlines()), 0)

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.figures.items():
                self._writer.add_scalar(name, value, point.step, walltime=point.time_s)
        self._writer.flush()
        add_to(self.written, points)
        self._file.keep(self.written)

    def close(self, ending: Ending | None) -> None:
        if ending is not None:
            self._writer.add_text("state", ending.value, max(self.written.values(), default=0))
        self._writer.close()


def open_run(job: TrackedJob, target: Target) -> _Run:
    """Open the job's folder of event files, to go on behind what is in it."""
    return _Run(job, target)
