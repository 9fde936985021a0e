"""Jobs, events, plans, checkpoints and the node on the wire: from the server's records to messages."""

from __future__ import annotations

import dataclasses

from google.protobuf.duration_pb2 import Duration

from horizon_proto.v1 import checkpoint_pb2, job_pb2, node_pb2
from horizon_server.api.grpc.wire_blob import to_files
from horizon_server.api.grpc.wire_spec import to_wire
from horizon_server.api.grpc.wire_time import to_timestamp
from horizon_server.events import (
    CheckpointWritten,
    EvalDone,
    JobEvent,
    Message,
    PrepareProgress,
    StateChanged,
    StepDone,
)
from horizon_server.figures import TransferFigures
from horizon_server.jobs.node import NodeStatus
from horizon_server.records.blob import BlobFile
from horizon_server.records.job import CheckpointRecord, JobRecord, JobState
from horizon_server.records.plan import JobPlan

_STEP_FIELDS = (
    "step", "num_steps", "loss", "grad_norm", "learning_rate", "epoch", "num_input_tokens_seen", "tokens_per_second", "duration_s",
    "compute_s", "optimizer_s", "optimizer_exposed_s", "host_memory_bytes", "device_memory_bytes", "skipped", "eta_s", "overlap_ratio",
    "model_flops",
)  # fmt: skip
_PLAN_FIELDS = (
    "host_bytes", "device_bytes", "host_total_bytes", "device_total_bytes", "host_limit_bytes", "device_limit_bytes", "fits",
    "message", "num_parameters", "device",
)  # fmt: skip


def to_job(job: JobRecord) -> job_pb2.Job:
    """Return a job for an answer."""
    return job_pb2.Job(
        job_id=job.job_id,
        spec=to_wire(job.spec),
        owner=job.owner,
        state=to_job_state(job.job_state),
        reason=job.reason,
        message=job.message,
        step=job.step,
        num_steps=job.num_steps,
        attempt=job.attempt,
        create_time=to_timestamp(job.created_s),
        start_time=to_timestamp(job.started_s),
        end_time=to_timestamp(job.ended_s),
        last_step=_to_step(job.last_step) if job.last_step else None,
        queue_position=job.queue_position,
        plan=to_plan(job.plan) if job.plan else None,
        last_sequence=job.last_sequence,
        eta=_eta(job),
        data_report=job.data_report,
    )


def to_job_state(job_state: str) -> job_pb2.JobState.ValueType:
    """Return a state's number."""
    return job_pb2.JobState.Value(f"JOB_STATE_{job_state}")


def from_job_state(number: int) -> JobState | None:
    """Return the state of a number, or None for one that is not a state."""
    if number not in job_pb2.JobState.values():
        return None
    name = job_pb2.JobState.Name(job_pb2.JobState.ValueType(number)).removeprefix("JOB_STATE_")
    return JobState(name) if name in JobState.__members__ else None


def to_plan(plan: JobPlan) -> job_pb2.MemoryPlan:
    """Return a memory plan for an answer."""
    prediction = None if plan.prediction is None else job_pb2.StepPrediction(**dataclasses.asdict(plan.prediction))
    return job_pb2.MemoryPlan(**{name: getattr(plan, name) for name in _PLAN_FIELDS}, prediction=prediction)


def to_event(event: JobEvent) -> job_pb2.JobEvent:
    """Return an event for an answer."""
    wire = job_pb2.JobEvent(sequence=event.sequence, time=to_timestamp(event.time_s))
    match event.payload:
        case StateChanged(job_state=job_state, reason=reason, message=message, attempt=attempt):
            state = to_job_state(job_state)
            wire.state.CopyFrom(job_pb2.StateEvent(state=state, reason=reason, message=message, attempt=attempt))
        case StepDone() as step:
            wire.step.CopyFrom(_to_step(step))
        case PrepareProgress(done_rows=done, total_rows=total, report=report):
            wire.prepare.CopyFrom(job_pb2.PrepareEvent(done_rows=done, total_rows=total, report=report))
        case EvalDone() as done:
            wire.eval.CopyFrom(_to_eval(done))
        case CheckpointWritten(step=number, duration_s=duration_s, size_bytes=size_bytes):
            wire.checkpoint.CopyFrom(job_pb2.CheckpointEvent(step=number, duration_s=duration_s, size_bytes=size_bytes))
        case Message(level=level, text=text):
            wire.message.CopyFrom(job_pb2.MessageEvent(level=level, text=text))
    return wire


def _to_eval(done: EvalDone) -> job_pb2.EvalEvent:
    return job_pb2.EvalEvent(
        step=done.step,
        eval_loss=done.eval_loss,
        num_targets=done.num_targets,
        num_tokens=done.num_tokens,
        duration_s=done.duration_s,
    )


def to_checkpoint(checkpoint: CheckpointRecord) -> checkpoint_pb2.Checkpoint:
    """Return a checkpoint for an answer."""
    files = [BlobFile(path=f.path, sha256=f.sha256, size_bytes=f.size_bytes) for f in checkpoint.files]
    return checkpoint_pb2.Checkpoint(
        job_id=checkpoint.job_id,
        step=checkpoint.step,
        files=to_files(files),
        size_bytes=checkpoint.size_bytes,
        create_time=to_timestamp(checkpoint.created_s),
        eval_loss=checkpoint.eval_loss,
        last=checkpoint.last,
        best=checkpoint.best,
    )


def to_node(node: NodeStatus) -> node_pb2.Node:
    """Return the node for an answer."""
    return node_pb2.Node(
        hostname=node.hostname,
        version=node.version,
        host_memory_limit_bytes=node.host_memory_limit_bytes,
        host_memory_available_bytes=node.host_memory_available_bytes,
        num_cpus=node.num_cpus,
        accelerators=[
            node_pb2.Accelerator(index=one.index, name=one.name, memory_bytes=one.memory_bytes)
            for one in node.accelerators
        ],
        disk_free_bytes=node.disk_free_bytes,
        num_jobs=node.num_jobs,
        draining=node.draining,
        user=node.user,
        role=node.role,
    )


def _to_step(step: StepDone) -> job_pb2.StepEvent:
    figures = {name: getattr(step, name) for name in _STEP_FIELDS}
    return job_pb2.StepEvent(**figures, h2d=_to_transfer(step.h2d), d2h=_to_transfer(step.d2h))


def _to_transfer(figures: TransferFigures) -> job_pb2.TransferFigures:
    return job_pb2.TransferFigures(bytes=figures.bytes, busy_s=figures.busy_s, exposed_s=figures.exposed_s)


def _eta(job: JobRecord) -> Duration | None:
    if job.eta_s is None or not 0 < job.eta_s < 1e9:
        return None
    eta = Duration()
    eta.FromMilliseconds(round(job.eta_s * 1000))
    return eta
