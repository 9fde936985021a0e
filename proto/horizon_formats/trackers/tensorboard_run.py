"""TensorBoard: event files in a folder a job, by tensorboardX, which needs neither TensorFlow nor torch.

Its SummaryWriter writes in a thread of its own and cannot say when it has: the writer below it does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

from horizon_formats.trackers.figures import Ending, Point, TrackedJob
from horizon_formats.trackers.follower import Target, WrittenFile, add_to, local_name


class _Run:
    def __init__(self, job: TrackedJob, target: Target) -> None:
        runs, project = target.folder / "runs", target.project_of(job)
        folder = runs / project / local_name(job)
        folder.mkdir(parents=True, exist_ok=True)
        self.where = f"tensorboard --logdir {runs}"
        self._file = WrittenFile(folder, project, job.job_id)
        self.written = self._file.read()
        # Files are named by the second, and the second one of a name would replace the first.
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        if "train" in self.written:
            # What was written and not recorded, by a follower that was killed in between, is taken back by readers.
            start = SessionLog(status=SessionLog.START)
            self._writer.write_event(Event(wall_time=time.time(), step=self.written["train"] + 1, session_log=start))
        if not self.written:
            config = json.dumps(job.config, indent=1, default=str)
            self._add_text("job", "\n".join(f"    {line}" for line in config.splitlines()), 0)

    def _add_text(self, name: str, text: str, step: int) -> None:
        self._writer.write_event(Event(wall_time=time.time(), step=step, summary=summary.text(name, text)))

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            for name, value in point.figures.items():
                scalar = summary.scalar(name, value)
                self._writer.write_event(Event(wall_time=point.time_s, step=point.step, summary=scalar))
        self._writer.flush()
        add_to(self.written, points)
        self._file.keep(self.written)

    def close(self, ending: Ending | None) -> None:
        if ending is not None:
            self._add_text("state", ending.value, max(self.written.values(), default=0))
        self._writer.close()


def open_run(job: TrackedJob, target: Target) -> _Run:
    """Open the job's folder of event files, to go on behind what is in it."""
    return _Run(job, target)
