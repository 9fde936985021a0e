"""The checkpoints of one job on disk: which are complete, which is the best, and which may go."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

from horizon_server.errors import NotFound
from horizon_server.records.job import CheckpointFile, CheckpointRecord
from horizon_server.store.manifest import MANIFEST_FILE, TRAINER_FOLDER, is_complete, read_manifest

_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_TRAINER_STATE = f"{TRAINER_FOLDER}/trainer_state.json"


class CheckpointFolder:
    """One job's checkpoints below `path`. A partially written or deleted one has another name and is never seen."""

    def __init__(self, path: Path, job_id: str) -> None:
        self.path = path
        self._job_id = job_id

    def of_step(self, step: int) -> Path:
        """Return the folder of a step's checkpoint, whether or not it exists."""
        return self.path / f"step-{step:08d}"

    def all(self) -> list[CheckpointRecord]:
        """Return the complete checkpoints, oldest first. Without evaluations the newest counts as the best."""
        found = [self._record(step) for step in self._steps()]
        if not found:
            return []
        judged = [record for record in found if record.eval_loss is not None]
        best = min(judged, key=lambda record: record.eval_loss or 0.0) if judged else found[-1]
        return [replace(record, last=record is found[-1], best=record is best) for record in found]

    def newest(self) -> Path | None:
        """Return the folder to resume from."""
        steps = self._steps()
        return self.of_step(steps[-1]) if steps else None

    def file(self, step: int, path: str) -> Path:
        """Return one file of a checkpoint; only files that its manifest lists can be reached.

        Raises:
            NotFound: when there is no such checkpoint or file.
        """
        self._require(step)
        if path not in read_manifest(self.of_step(step)).files:
            raise NotFound(f"checkpoint {self._job_id}@{step} has no file {path!r}")
        return self.of_step(step) / path

    def delete(self, step: int) -> None:
        """Remove one checkpoint: first its name, so that a cut leaves nothing that looks complete.

        Raises:
            NotFound: when there is no such checkpoint.
        """
        self._require(step)
        self._remove(step)

    def apply_retention(self, *, keep_last: int, keep_best: bool) -> None:
        """Remove complete checkpoints that are neither among the newest `keep_last` nor the best by eval loss."""
        assert keep_last >= 1, "the newest is what a job resumes from"
        records = self.all()
        kept = {record.step for record in records[-keep_last:]}
        kept |= {record.step for record in records if keep_best and record.best}
        for record in records:
            if record.step not in kept:
                self._remove(record.step)
        for leftover in self.path.glob(".deleted-*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _steps(self) -> list[int]:
        if not self.path.is_dir():
            return []
        found = [(match, entry) for entry in self.path.iterdir() if (match := _STEP_FOLDER.fullmatch(entry.name))]
        return sorted(int(match.group(1)) for match, entry in found if is_complete(entry))

    def _record(self, step: int) -> CheckpointRecord:
        folder = self.of_step(step)
        manifest = read_manifest(folder)
        return CheckpointRecord(
            job_id=self._job_id,
            step=step,
            files=tuple(
                CheckpointFile(path=path, sha256=record.sha256, size_bytes=record.size_bytes)
                for path, record in sorted(manifest.files.items())
            ),
            created_s=(folder / MANIFEST_FILE).stat().st_mtime,
            eval_loss=_eval_loss(folder, step),
        )

    def _require(self, step: int) -> None:
        if step not in self._steps():
            raise NotFound(
                f"job {self._job_id} has no checkpoint of step {step}; see: horizon checkpoint list {self._job_id}"
            )

    def _remove(self, step: int) -> None:
        folder = self.of_step(step)
        doomed = folder.with_name(f".deleted-{folder.name}")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _eval_loss(folder: Path, step: int) -> float | None:
    """Return the loss of the evaluation made at exactly this step."""
    last_eval = json.loads((folder / _TRAINER_STATE).read_bytes()).get("last_eval")
    return float(last_eval[1]) if last_eval and last_eval[0] == step else None
