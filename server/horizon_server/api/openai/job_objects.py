"""Jobs, their events and their checkpoints, as OpenAI writes them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from horizon_server.api.openai.files import file_id
from horizon_server.api.openai.model_names import tuned_name
from horizon_server.api.openai.results import result_file_id
from horizon_server.api.openai.tuning import METHOD_NAMES, hyperparameters_of
from horizon_server.events import EvalDone
from horizon_server.figures import EvalSetFigures
from horizon_server.records.blob import DatasetRecord
from horizon_server.records.job import ENDED, CheckpointRecord, JobRecord, JobState

STATUSES: Mapping[JobState, str] = {
    JobState.QUEUED: "queued",
    JobState.PREPARING: "validating_files",
    JobState.STARTING: "running",
    JobState.RUNNING: "running",
    JobState.STOPPING: "running",
    # OpenAI's SDK knows no other word for a job that waits.
    JobState.PAUSED: "queued",
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "cancelled",
}
"""What OpenAI calls each state of a job."""
_LEVELS = {"info": "info", "warning": "warn", "error": "error"}


def job_object(job: JobRecord, training: DatasetRecord | None) -> dict[str, Any]:
    """Return a job as OpenAI's; `training` is its dataset, None where that is deleted."""
    spec, has_ended = job.spec, job.job_state in ENDED
    hyperparameters = hyperparameters_of(spec, training)
    method = METHOD_NAMES.get(spec.method)
    error = {"code": job.reason.lower(), "message": job.message, "param": None}
    expected_s = None if has_ended else _expected_end_s(job)
    return {
        "id": job.job_id,
        "object": "fine_tuning.job",
        "created_at": int(job.created_s),
        "error": error if job.job_state is JobState.FAILED else None,
        "fine_tuned_model": tuned_name(job) if job.job_state is JobState.SUCCEEDED else None,
        "finished_at": int(job.ended_s) if has_ended else None,
        "hyperparameters": {name: value for name, value in hyperparameters.items() if name != "beta"},
        "model": spec.model,
        "organization_id": job.project,
        "result_files": [result_file_id(job)] if job.job_state is JobState.SUCCEEDED else [],
        "seed": spec.train.seed,
        "status": STATUSES[job.job_state],
        # Of a job, a node counts what steps that were done again have taken too.
        "trained_tokens": job.last_step.num_input_tokens_seen if has_ended and job.last_step is not None else None,
        "training_file": file_id(job.dataset_id),
        "validation_file": file_id(job.eval_dataset_id) if job.eval_dataset_id else None,
        "estimated_finish": None if expected_s is None else int(expected_s),
        "integrations": [],
        "metadata": spec.metadata,
        # One of our other methods has no name there.
        "method": None if method is None else {"type": method, method: {"hyperparameters": hyperparameters}},
    }


def event_object(job_id: str, number: int, time_s: float, event: Mapping[str, Any]) -> dict[str, Any]:
    """Return an event of a job as OpenAI's; `event` is its payload as plain data with its kind."""
    level, message, data = _event(event)
    return {
        "id": event_id(job_id, number),
        "object": "fine_tuning.job.event",
        "created_at": int(time_s),
        "level": level,
        "message": message,
        "type": "message" if data is None else "metrics",
        "data": data,
    }


def event_id(job_id: str, number: int) -> str:
    """Return the id of an event."""
    return f"ftevent-{job_id}-{number}"


def checkpoint_object(job: JobRecord, checkpoint: CheckpointRecord, evaluated: EvalDone | None) -> dict[str, Any]:
    """Return a checkpoint of a job as OpenAI's; `evaluated` is the evaluation at its step, where there was one."""
    step = checkpoint.step
    last = job.last_step
    metrics: dict[str, Any] = {"step": float(step)}
    if last is not None and last.step == step:
        metrics["train_loss"] = _finite(last.loss)
    if evaluated is not None:
        metrics |= _valid(evaluated.eval_loss, evaluated.sets)
    elif checkpoint.eval_loss is not None:
        metrics |= _valid(checkpoint.eval_loss, ())
    return {
        "id": checkpoint_id(checkpoint),
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(checkpoint.created_s),
        "fine_tuned_model_checkpoint": tuned_name(job, step),
        "fine_tuning_job_id": job.job_id,
        "metrics": metrics,
        "step_number": step,
    }


def checkpoint_id(checkpoint: CheckpointRecord) -> str:
    """Return the id of a checkpoint."""
    return f"ftckpt-{checkpoint.job_id}-{checkpoint.step}"


def _expected_end_s(job: JobRecord) -> float | None:
    if job.outlook is not None and job.outlook.estimated_end_s:
        return job.outlook.estimated_end_s
    return None if job.eta_s is None else time.time() + job.eta_s


def _event(event: Mapping[str, Any]) -> tuple[str, str, dict[str, Any] | None]:
    """Return level and message of an event, and its figures where it has some."""
    match event["kind"]:
        case "state":
            level = "error" if event["job_state"] == JobState.FAILED else "info"
            said = f": {event['message']}" if event["message"] else ""
            return level, f"The job is {event['job_state']}{said}", None
        case "step":
            loss = _finite(event["loss"])
            data = {
                "step": event["step"],
                "total_steps": event["num_steps"],
                "train_loss": loss,
                "learning_rate": event["learning_rate"],
            }
            return "info", f"Step {event['step']}/{event['num_steps']}: training loss={loss}", data
        case "eval":
            loss = _finite(event["eval_loss"])
            accuracy = next((one["accuracy"] for one in event["sets"]), None)
            data = {"step": event["step"], "valid_loss": loss, "valid_mean_token_accuracy": accuracy}
            return "info", f"Step {event['step']}: validation loss={loss}", data
        case "checkpoint":
            return "info", f"Checkpoint created at step {event['step']}", None
        case "prepare":
            total = f" of {event['total_rows']}" if event["total_rows"] else ""
            return "info", f"Prepared {event['done_rows']}{total} examples", None
        case _:
            return _LEVELS.get(event["level"], "info"), event["text"], None


def _valid(loss: float, sets: tuple[EvalSetFigures, ...]) -> dict[str, Any]:
    accuracy = next((one.accuracy for one in sets), None)
    of_loss = {"valid_loss": _finite(loss), "full_valid_loss": _finite(loss)}
    if accuracy is None:
        return of_loss
    return of_loss | {"valid_mean_token_accuracy": accuracy, "full_valid_mean_token_accuracy": accuracy}


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
