"""TensorBoard: event files in a folder a job, by the tensorboard package, which needs neither TensorFlow nor torch.

Its writer of events, like those of others, writes in a thread of its own and cannot say when it has: the writer of
records below it does.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.record_writer import RecordWriter

from horizon_formats.trackers.figures import Ending, Point, TrackedJob
from horizon_formats.trackers.follower import Target, WrittenFile, add_to, local_name

_TEXT = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))


class _Run:
    def __init__(self, job: TrackedJob, target: Target) -> None:
        runs, project = target.folder / "runs", target.project_of(job)
        folder = runs / project / local_name(job)
        folder.mkdir(parents=True, exist_ok=True)
        self.where = f"tensorboard --logdir {runs}"
        self._file = WrittenFile(folder, project, job.job_id)
        self.written = self._file.read()
        # Readers take files in the order of their names; of the same second, a second one has another name.
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{time.time_ns()}"
        self._records = RecordWriter((folder / name).open("xb"))
        self._add(Event(file_version="brain.Event:2"))
        if "train" in self.written:
            # What was written and not recorded, by a follower that was killed in between, is taken back by readers.
            self._add(Event(step=self.written["train"] + 1, session_log=SessionLog(status=SessionLog.START)))
        if not self.written:
            config = json.dumps(job.config, indent=1, default=str)
            self._add_text("job", "\n".join(f"    {line}" for line in config.splitlines()), 0)

    def _add(self, event: Event, time_s: float | None = None) -> None:
        event.wall_time = time.time() if time_s is None else time_s
        self._records.write(event.SerializeToString())

    def _add_text(self, name: str, text: str, step: int) -> None:
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        value = Summary.Value(tag=name, metadata=_TEXT, tensor=tensor)
        self._add(Event(step=step, summary=Summary(value=[value])))

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in point.figures.items()]
            self._add(Event(step=point.step, summary=Summary(value=values)), point.time_s)
        self._records.flush()
        add_to(self.written, points)
        self._file.keep(self.written)

    def close(self, ending: Ending | None) -> None:
        if ending is not None:
            self._add_text("state", ending.value, max(self.written.values(), default=0))
        self._records.close()


def open_run(job: TrackedJob, target: Target) -> _Run:
    """Open the job's folder of event files, to go on behind what is in it."""
    return _Run(job, target)
