"""Jobs, logs and checkpoints over the wire, with a fake at the port of the job service."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from horizon_proto.v1 import checkpoint_pb2, job_pb2
from horizon_server.api.grpc.convert import enum_number, enum_text, to_message
from horizon_server.events import (
    StateChanged,
    StepDone,
)
from horizon_server.figures import TransferFigures
from horizon_server.records.job import JobRecord, JobState

SPEC = job_pb2.JobSpec(name="a", model="m", dataset="d", train=job_pb2.TrainSpec(max_steps=7))
STEP = StepDone(
    step=3,
    num_steps=10,
    loss=1.5,
    grad_norm=0.25,
    learning_rate=1e-5,
    epoch=0.3,
    num_input_tokens_seen=3000,
    num_tokens=1000,
    tokens_per_second=500.0,
    duration_s=2.0,
    h2d=TransferFigures(bytes=7, busy_s=0.5, exposed_s=0.125),
    host_memory_bytes={"weights": 2**40},
    eta_s=14.0,
)


@pytest.fixture
async def submitted(world: Any) -> job_pb2.Job:
    request = job_pb2.SubmitJobRequest(request_id="8a6e0804-2bd0-4672-b79d-d97027f9071a", spec=SPEC)
    job: job_pb2.Job = (await world.ann.call("jobs", "SubmitJob", request)).job
    return job


async def test_a_job_is_submitted_with_every_default_filled_in(world: Any, submitted: job_pb2.Job) -> None:
    assert world.jobs.asked["request_id"] == "8a6e0804-2bd0-4672-b79d-d97027f9071a"
    assert submitted.state == job_pb2.JOB_STATE_QUEUED
    assert (submitted.owner, submitted.queue_position) == ("ann", 1)
    assert (submitted.spec.train.max_steps, submitted.spec.train.sequence_length) == (7, 1024)
    assert not submitted.spec.train.HasField("epochs")
    assert submitted.plan.host_total_bytes == 12 * 2**30
    assert not submitted.plan.fits
    assert submitted.create_time.ToNanoseconds() == 1_750_000_000 * 10**9
    assert not submitted.HasField("start_time")
    assert not submitted.HasField("eta")


async def test_a_wrong_spec_names_its_fields(world: Any) -> None:
    request = job_pb2.SubmitJobRequest(spec=job_pb2.JobSpec(name="a", model="m"))
    with pytest.raises(grpc.aio.AioRpcError, match="dataset is required") as caught:
        await world.ann.call("jobs", "SubmitJob", request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="dataset is required"):
        await world.ann.call("jobs", "PlanJob", job_pb2.PlanJobRequest(spec=request.spec))


@pytest.mark.usefixtures("submitted")
async def test_the_calls_reach_the_service(world: Any) -> None:
    plan = await world.ann.call("jobs", "PlanJob", job_pb2.PlanJobRequest(spec=SPEC))
    assert plan.plan.message == "12 GiB are needed, 10 GiB are there"
    predicted = plan.plan.prediction
    assert (predicted.step_s, predicted.tokens_per_second, predicted.bound) == (2.0, 500.0, "h2d")
    assert (predicted.total_s, predicted.peak_flops_per_s) == (40.0, 1e12)
    assert plan.spec.train.lr_schedule == job_pb2.LR_SCHEDULE_COSINE
    for method, request in (
        ("GetJob", job_pb2.GetJobRequest(job_id="job_1")),
        ("CancelJob", job_pb2.CancelJobRequest(job_id="job_1")),
        ("PauseJob", job_pb2.PauseJobRequest(job_id="job_1")),
        ("ResumeJob", job_pb2.ResumeJobRequest(job_id="job_1")),
    ):
        assert (await world.ann.call("jobs", method, request)).job.job_id == "job_1"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.bob.call("jobs", method, request)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.aio.AioRpcError, match="cancel it and submit it again") as caught:
        await world.ann.call("jobs", "UpdateJob", job_pb2.UpdateJobRequest(job_id="job_1", priority=3))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_listing_passes_page_and_states_on(world: Any, submitted: job_pb2.Job) -> None:
    request = job_pb2.ListJobsRequest(page_size=5000, page_token="t", states=[job_pb2.JOB_STATE_QUEUED])
    page = await world.ann.call("jobs", "ListJobs", request)
    assert (list(page.jobs), page.next_page_token) == ([submitted], "more")
    assert world.jobs.asked["page_size"] == 1000
    assert world.jobs.asked["states"] == {JobState.QUEUED}
    await world.ann.call("jobs", "ListJobs", job_pb2.ListJobsRequest())
    assert (world.jobs.asked["page_size"], world.jobs.asked["states"]) == (100, frozenset())
    for bad in ({"states": [0]}, {"states": [99]}, {"page_size": -1}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.ann.call("jobs", "ListJobs", job_pb2.ListJobsRequest(**bad))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.usefixtures("submitted")
async def test_a_watch_goes_on_from_a_number_and_ends_with_the_job(world: Any) -> None:
    world.jobs.tell(StateChanged(job_state="RUNNING"), STEP, StateChanged(job_state="SUCCEEDED"))
    world.jobs.over = True
    stream = world.ann.call("jobs", "WatchJob", job_pb2.WatchJobRequest(job_id="job_1", after_sequence=1))
    events = [response.event async for response in stream]
    assert [event.sequence for event in events] == [2, 3]
    assert events[0].step.h2d.exposed_s == 0.125
    assert world.jobs.num_watching == 0
    for caller, request in (
        (world.bob, job_pb2.WatchJobRequest(job_id="job_1")),
        (world.ann, job_pb2.WatchJobRequest(job_id="job_1", after_sequence=-1)),
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await caller.call("jobs", "WatchJob", request).read()


@pytest.mark.usefixtures("submitted")
async def test_long_logs_come_in_pieces(world: Any) -> None:
    world.jobs.log = bytes(range(256)) * 10_000
    stream = world.ann.call("jobs", "GetJobLogs", job_pb2.GetJobLogsRequest(job_id="job_1", offset=5))
    pieces = [piece async for piece in stream]
    assert len(pieces) == 3
    assert all(len(piece.data) <= 2**20 for piece in pieces)
    assert b"".join(piece.data for piece in pieces) == world.jobs.log[5:]
    assert [piece.offset for piece in pieces] == [5, 5 + 2**20, 5 + 2 * 2**20]


def read(world: Any, **fields: Any) -> Any:
    request = checkpoint_pb2.ReadCheckpointFileRequest(job_id="job_1", **{"step": 20, **fields})
    return world.ann.call("checkpoints", "ReadCheckpointFile", request)


@pytest.mark.usefixtures("submitted")
async def test_checkpoints_are_listed_and_read_in_ranges(world: Any, tmp_path: Path) -> None:
    weights = bytes(range(256)) * 9000
    folder = tmp_path / "step-00000020"
    world.jobs.keep_checkpoint(folder, {"model.safetensors": weights, "trainer/state.json": b"{}", "empty": b""})
    listed = await world.ann.call(
        "checkpoints", "ListCheckpoints", checkpoint_pb2.ListCheckpointsRequest(job_id="job_1")
    )
    (checkpoint,) = listed.checkpoints
    assert checkpoint.files[0].sha256 == hashlib.sha256(weights).hexdigest()
    assert (checkpoint.last, checkpoint.HasField("eval_loss")) == (True, False)
    for offset, length in ((0, 0), (1, 0), (2**20, 2**20 + 1), (len(weights) - 1, 5), (len(weights), 0), (7, 3)):
        pieces = [piece async for piece in read(world, path="model.safetensors", offset=offset, length=length)]
        assert b"".join(piece.data for piece in pieces) == weights[offset:][: length or None]
        assert all(len(piece.data) <= 2**20 for piece in pieces)
        assert [piece.offset for piece in pieces][:1] == [offset][: len(pieces)]
    assert [piece async for piece in read(world, path="empty")] == []
    await world.ann.call(
        "checkpoints", "DeleteCheckpoint", checkpoint_pb2.DeleteCheckpointRequest(job_id="job_1", step=20)
    )
    with pytest.raises(grpc.aio.AioRpcError, match="no checkpoint of step 20"):
        await read(world, path="model.safetensors").read()


@pytest.mark.usefixtures("submitted")
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"path": "../secret"}, "NOT_FOUND"),
        ({"path": "/etc/passwd"}, "NOT_FOUND"),
        ({"path": "unlisted"}, "NOT_FOUND"),
        ({"path": ""}, "NOT_FOUND"),
        ({"path": "a", "step": 21}, "NOT_FOUND"),
        ({"path": "a", "offset": -1}, "INVALID_ARGUMENT"),
        ({"path": "a", "offset": 4}, "INVALID_ARGUMENT"),
        ({"path": "a", "length": -1}, "INVALID_ARGUMENT"),
    ],
)
async def test_only_listed_files_can_be_read(world: Any, tmp_path: Path, fields: Any, code: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    world.jobs.keep_checkpoint(tmp_path / "step", {"a": b"abc"})
    (tmp_path / "step" / "unlisted").write_bytes(b"secret")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(world, **fields).read()
    assert caught.value.code().name == code


@pytest.mark.usefixtures("submitted")
async def test_a_file_that_lost_bytes_is_not_handed_out_as_whole(world: Any, tmp_path: Path) -> None:
    world.jobs.keep_checkpoint(tmp_path / "step", {"a": b"abcdef"})
    (tmp_path / "step" / "a").write_bytes(b"abc")
    with pytest.raises(grpc.aio.AioRpcError, match="damaged"):
        [piece async for piece in read(world, path="a")]


def test_states_have_the_same_names_on_both_sides() -> None:
    enum = job_pb2.JobState.DESCRIPTOR
    assert {enum_text(enum, enum_number(enum, state)) for state in JobState} == set(JobState)
    assert len(job_pb2.JobState.values()) == len(JobState) + 1


@pytest.mark.usefixtures("submitted")
async def test_a_running_job_has_an_eta_and_odd_numbers_pass(world: Any) -> None:
    job: JobRecord = world.jobs.jobs["job_1"]
    running = dataclasses.replace(job, job_state=JobState.RUNNING, last_step=STEP)
    ended = dataclasses.replace(running, job_state=JobState.SUCCEEDED)
    assert to_message(running, job_pb2.Job).eta.ToTimedelta().total_seconds() == 14.0
    assert not to_message(ended, job_pb2.Job).HasField("eta")
    odd = dataclasses.replace(STEP, loss=math.nan, grad_norm=math.inf, eta_s=math.inf)
    wire = to_message(dataclasses.replace(running, last_step=odd), job_pb2.Job)
    assert math.isnan(wire.last_step.loss)
    assert not wire.HasField("eta")
