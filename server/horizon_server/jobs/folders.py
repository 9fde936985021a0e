"""The paths of a job's files below the state folder."""

from __future__ import annotations

from pathlib import Path

from horizon_server.jobs.checkpoint_folder import CheckpointFolder


class JobFolders:
    """The folders of all jobs. Knows the layout on disk and nothing of the jobs themselves."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._jobs = state_dir / "jobs"

    def attempt(self, job_id: str, attempt: int) -> Path:
        """Return the folder of one attempt, made when missing."""
        folder = self._jobs / job_id / f"attempt-{attempt}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def without_state_dir(self, message: str) -> str:
        """Return a message without the path of the state folder, which a job's owner need not know."""
        return message.replace(f"{self._state_dir}/", "")

    def log(self, job_id: str, attempt: int) -> Path:
        """Return where an attempt logs, whether or not it has begun."""
        return self._jobs / job_id / f"attempt-{attempt}" / "worker.log"

    def checkpoints(self, job_id: str) -> CheckpointFolder:
        """Return a job's checkpoints, whether or not there are any."""
        return CheckpointFolder(self._jobs / job_id / "checkpoints", job_id)
