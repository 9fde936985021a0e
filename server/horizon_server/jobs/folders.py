"""A job's files below the state folder: where they are, which checkpoints are complete, and a log that may still grow."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from horizon_server.errors import NotFound
from horizon_server.records.job import CheckpointFile, CheckpointRecord
from horizon_server.store.manifest import MANIFEST_FILE, TRAINER_FOLDER, is_complete, read_manifest

LOG_PIECE_BYTES = 64 * 1024
_LOG_POLL_S = 0.3
_STEP_FOLDER = re.compile(r"step-(\d{8,})")


class JobFolders:
    """The folders of all jobs. Knows the layout on disk and nothing of the jobs themselves."""

    def __init__(self, state_dir: Path) -> None:
        self.state_dir = state_dir
        self._jobs = state_dir / "jobs"
        self.compiled = state_dir / "compiled"
        """The library of compiled layers, which all jobs share."""

    def log(self, job_id: str, attempt: int) -> Path:
        """Return where an attempt logs, whether or not it has begun; its other files are next to it."""
        return self._jobs / job_id / f"attempt-{attempt}" / "worker.log"

    def checkpoints(self, job_id: str) -> CheckpointFolder:
        """Return a job's checkpoints, whether or not there are any."""
        return CheckpointFolder(self._jobs / job_id / "checkpoints", job_id)


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
        """Return one file of a checkpoint; only those that its manifest lists can be reached. Raises NotFound."""
        self._require(step)
        if path not in read_manifest(self.of_step(step)).files:
            raise NotFound(
                f"the checkpoint of step {step} of job {self._job_id} has no file {path!r:.200}; list it to see its files"
            )
        return self.of_step(step) / path

    def delete(self, step: int) -> None:
        """Remove one checkpoint. Raises NotFound when there is no such one."""
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
        last_eval = json.loads((folder / TRAINER_FOLDER / "trainer_state.json").read_bytes()).get("last_eval")
        return CheckpointRecord(
            job_id=self._job_id,
            step=step,
            files=tuple(
                CheckpointFile(path=path, sha256=record.sha256, size_bytes=record.size_bytes)
                for path, record in sorted(read_manifest(folder).files.items())
            ),
            created_s=(folder / MANIFEST_FILE).stat().st_mtime,
            # The newest evaluation may be of an earlier step, with other weights.
            eval_loss=float(last_eval[1]) if last_eval and last_eval[0] == step else None,
        )

    def _require(self, step: int) -> None:
        steps = self._steps()
        if step not in steps:
            listed = ", ".join(map(str, steps)) or "none"
            raise NotFound(f"job {self._job_id} has no checkpoint of step {step}; it has: {listed}")

    def _remove(self, step: int) -> None:
        folder = self.of_step(step)
        # First its name, so that a cut leaves nothing that looks complete.
        shutil.rmtree(folder.rename(folder.with_name(f".deleted-{folder.name}")))


async def read_log(
    path: Path, *, offset: int, grows: Callable[[], Awaitable[bool]] | None
) -> AsyncIterator[tuple[int, bytes]]:
    """Yield (offset, bytes) from `offset` to the end; with `grows`, wait for more as long as it returns true."""

    def read() -> bytes:
        try:
            with path.open("rb") as file:
                # Before the seek, which some file systems refuse far beyond the end.
                if offset >= os.fstat(file.fileno()).st_size:
                    return b""
                file.seek(offset)
                return file.read(LOG_PIECE_BYTES)
        except FileNotFoundError:
            return b""

    while True:
        # Asked before the read, so that what is written until the end is read too.
        more = grows is not None and await grows()
        while piece := await asyncio.to_thread(read):
            yield offset, piece
            offset += len(piece)
        if not more:
            return
        await asyncio.sleep(_LOG_POLL_S)
