"""Weights & Biases: a run whose id is the job's, so that a resume continues it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import wandb

from horizon_formats.trackers.figures import Ending, Point, TrackedJob
from horizon_formats.trackers.follower import Target, Written, WrittenFile, add_to

# The axis that the Trainer of transformers has too.
_STEP = "train/global_step"
_MAX_TAG_CHARS = 64
_EXIT_CODES = {Ending.FINISHED: 0, Ending.FAILED: 1, Ending.KILLED: 255}


class _Run:
    def __init__(self, job: TrackedJob, target: Target) -> None:
        # W&B takes WANDB_PROJECT itself where none is named.
        project = target.project or os.environ.get("WANDB_PROJECT") or target.project_of(job)
        target.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=project,
            id=job.job_id,
            name=job.name,
            dir=target.folder,
            config=job.config,
            tags=[text[:_MAX_TAG_CHARS] for text in job.labels.values()],
            resume="allow",
            # Its figures of the machine would be those of whoever follows, not of the node.
            settings=wandb.Settings(
                silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False
            ),
        )
        # The server knows how far a run is; without it a file does.
        self._file = WrittenFile(target.folder / "wandb", project, job.job_id) if self._run.offline else None
        if self._file is not None:
            self.written: Written = self._file.read()
        else:
            last = self._run.summary.get(_STEP) if self._run.resumed else None
            self.written = {} if last is None else {"train": int(last), "eval": int(last)}
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)
        self.where = self._run.url or f"wandb sync {self._run.dir.removesuffix('/files')}"

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({**point.figures, _STEP: point.step})
        add_to(self.written, points)
        if self._file is not None:
            self._file.keep(self.written)

    def close(self, ending: Ending | None) -> None:
        if ending is None:
            # Else the run would be shown as finished.
            self._run.mark_preempting()
        self._run.finish(exit_code=1 if ending is None else _EXIT_CODES[ending])


def open_run(job: TrackedJob, target: Target) -> _Run:
    """Open the job's run, or create it. With WANDB_MODE=offline it is written to the folder, for `wandb sync`."""
    return _Run(job, target)
