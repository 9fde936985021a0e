"""The losses of a job's steps as a file, which `result_files` of a job that has succeeded names.

Nothing is kept for it: it is written when it is asked for, from the job's events.
"""

from __future__ import annotations

import csv
import io
from typing import Any

from horizon_server.api.services import Services
from horizon_server.errors import NotFound
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState

_BEGINNING = "file-"
_COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
"""As OpenAI names them. No job measures `train_accuracy`, so it stays empty."""
# The file of a longer job has every n-th step: the daemon builds it in memory, and a curve needs no more points.
_MOST_STEPS = 100_000


def result_file_id(job: JobRecord) -> str:
    """Return the id of a job's file."""
    return f"{_BEGINNING}{job.job_id}"


async def job_of_result(services: Services, caller: Principal, file_id: str) -> JobRecord | None:
    """Return the job whose file has this id; None where it is the id of no such file.

    Raises NotFound when the caller has no such job, or it has not succeeded.
    """
    key = file_id.removeprefix(_BEGINNING)
    if key == file_id or not key.startswith("job_"):
        return None
    job = await services.jobs.get(caller, key)
    if job.job_id != key or job.job_state is not JobState.SUCCEEDED:
        raise NotFound(f"job {key:.100} has no file of results: it has one once it has succeeded")
    return job


async def result_of(services: Services, job: JobRecord) -> bytes:
    """Return the file's content."""
    rows: dict[int, dict[str, Any]] = {}

    def visit(_number: int, _time_s: float, event: dict[str, Any]) -> None:
        # A step that was done again, after a worker was killed, is told of again.
        row = rows.setdefault(event["step"], {"step": event["step"]})
        if event["kind"] == "step":
            row["train_loss"] = event["loss"]
        else:
            row["valid_loss"] = event["eval_loss"]
            row["valid_mean_token_accuracy"] = next((one["accuracy"] for one in event["sets"]), None)

    every = 1 + job.last_sequence // _MOST_STEPS
    await services.jobs.visit_events(
        job, kinds=("step", "eval"), after=0, limit=2 * _MOST_STEPS, visit=visit, every=every
    )
    text = io.StringIO()
    writer = csv.DictWriter(text, _COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[step] for step in sorted(rows))
    return text.getvalue().encode()


def result_object(job: JobRecord, content: bytes) -> dict[str, Any]:
    """Return the file as OpenAI's."""
    return {
        "id": result_file_id(job),
        "object": "file",
        "bytes": len(content),
        "created_at": int(job.ended_s),
        "expires_at": None,
        "filename": "step_metrics.csv",
        "purpose": "fine-tune-results",
        "status": "processed",
        "status_details": None,
    }
