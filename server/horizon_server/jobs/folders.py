"""Where a job's files live below the state folder, and which of its checkpoints are complete."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from horizon_server.errors import NotFound
from horizon_server.jobs.job import CheckpointFile, CheckpointRecord

_STEP_FOLDER = re.compile(r"step-(\d{8,})")
MANIFEST = "trainer/manifest.json"
"""Written last into a checkpoint; names every other file with size and sha256."""


class JobFolders:
    """The folders of all jobs. Knows the layout on disk and nothing of the jobs themselves."""

    def __init__(self, state_dir: Path) -> None:
        self._jobs = state_dir / "jobs"
        self.prepared = state_dir / "prepared"

    def attempt(self, job_id: str, attempt: int) -> Path:
        """Return the folder of one attempt, made when missing."""
        folder = self._jobs / job_id / f"attempt-{attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def log(self, job_id: str, attempt: int) -> Path:
        """Return where an attempt logs, whether or not it has begun."""
        return self._jobs / job_id / f"attempt-{attempt}" / "worker.log"

    def checkpoints(self, job_id: str) -> Path:
        """Return the folder of a job's checkpoints, made when missing."""
        folder = self._jobs / job_id / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def all(self, job_id: str) -> list[CheckpointRecord]:
        """Return the complete checkpoints, oldest first; half-written ones have another name and are not seen."""
        found = sorted(self._complete(job_id), key=lambda record: record.step)
        if not found:
            return []
        judged = [record for record in found if record.eval_loss is not None]
        best = min(judged, key=lambda record: record.eval_loss or 0.0).step if judged else found[-1].step
        last = found[-1].step
        return [_marked(record, last=record.step == last, best=record.step == best) for record in found]

    def newest(self, job_id: str) -> Path | None:
        """Return the folder to resume from."""
        found = self.all(job_id)
        return self._step_folder(job_id, found[-1].step) if found else None

    def file(self, job_id: str, step: int, path: str) -> Path:
        """Return one file of a checkpoint; only files that its manifest lists can be reached.

        Raises:
            NotFound: when there is no such checkpoint or file.
        """
        record = self._record(job_id, step)
        if path not in {file.path for file in record.files}:
            raise NotFound(f"checkpoint {job_id}@{step} has no file {path!r}")
        return self._step_folder(job_id, step) / path

    def delete(self, job_id: str, step: int) -> None:
        """Remove one checkpoint: first its name, so that a cut leaves nothing that looks complete.

        Raises:
            NotFound: when there is no such checkpoint.
        """
        self._record(job_id, step)
        folder = self._step_folder(job_id, step)
        doomed = folder.with_name(f".deleted-{folder.name}")
        folder.rename(doomed)
        shutil.rmtree(doomed)

    def _record(self, job_id: str, step: int) -> CheckpointRecord:
        for record in self._complete(job_id):
            if record.step == step:
                return record
        raise NotFound(f"job {job_id} has no checkpoint of step {step}; see: horizon checkpoint list {job_id}")

    def _step_folder(self, job_id: str, step: int) -> Path:
        return self._jobs / job_id / "checkpoints" / f"step-{step:08d}"

    def _complete(self, job_id: str) -> Iterator[CheckpointRecord]:
        folder = self._jobs / job_id / "checkpoints"
        for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
            match = _STEP_FOLDER.fullmatch(entry.name)
            manifest = entry / MANIFEST
            if match is None or not manifest.is_file():
                continue
            document = json.loads(manifest.read_text("utf-8"))
            files = [
                CheckpointFile(path=path, sha256=str(fact["sha256"]), size_bytes=int(fact["size_bytes"]))
                for path, fact in sorted(document["files"].items())
            ]
            yield CheckpointRecord(
                job_id=job_id,
                step=int(match.group(1)),
                files=tuple(files),
                created_s=manifest.stat().st_mtime,
                eval_loss=document.get("eval_loss"),
            )


def _marked(record: CheckpointRecord, *, last: bool, best: bool) -> CheckpointRecord:
    return CheckpointRecord(
        job_id=record.job_id,
        step=record.step,
        files=record.files,
        created_s=record.created_s,
        eval_loss=record.eval_loss,
        last=last,
        best=best,
    )
