"""Jobs, logs and checkpoints over the wire."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import uuid
from typing import Any

import grpc
import pytest

from horizon_proto.v1 import checkpoint_pb2, job_pb2
from horizon_server.api.grpc.convert import enum_number, enum_text, to_message
from horizon_server.records.job import JobState


@pytest.fixture
def state(state_with_chats: Any) -> Any:
    return state_with_chats


def spec_of(world: Any) -> job_pb2.JobSpec:
    model = str(world.daemon.model_folder)
    return job_pb2.JobSpec(name="a", model=model, dataset="chats", train=job_pb2.TrainSpec(max_steps=7))


async def test_a_job_is_submitted_with_every_default_filled_in(world: Any) -> None:
    request = job_pb2.SubmitJobRequest(request_id=str(uuid.uuid4()), spec=spec_of(world))
    submitted = (await world.ann.call("jobs", "SubmitJob", request)).job
    assert (await world.ann.call("jobs", "SubmitJob", request)).job == submitted, "the same request, the same job"
    assert submitted.state == job_pb2.JOB_STATE_QUEUED
    assert (submitted.owner, submitted.queue_position) == ("ann", 1)
    assert (submitted.spec.train.max_steps, submitted.spec.train.sequence_length) == (7, 1024)
    assert not submitted.spec.train.HasField("epochs")
    assert submitted.plan.fits
    assert submitted.plan.host_total_bytes == sum(submitted.plan.host_bytes.values()) > 0
    assert submitted.create_time.seconds > 0
    assert not submitted.HasField("start_time")
    assert not submitted.HasField("eta")


async def test_a_wrong_spec_names_its_fields(world: Any) -> None:
    request = job_pb2.SubmitJobRequest(spec=job_pb2.JobSpec(name="a", model="m"))
    with pytest.raises(grpc.aio.AioRpcError, match="dataset is required") as caught:
        await world.ann.call("jobs", "SubmitJob", request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    with pytest.raises(grpc.aio.AioRpcError, match="dataset is required"):
        await world.ann.call("jobs", "PlanJob", job_pb2.PlanJobRequest(spec=request.spec))


async def test_a_plan_comes_with_the_whole_spec(world: Any) -> None:
    answer = await world.ann.call("jobs", "PlanJob", job_pb2.PlanJobRequest(spec=spec_of(world)))
    assert (answer.plan.device, answer.plan.fits, answer.plan.num_parameters > 0) == ("host", True, True)
    assert answer.spec.train.lr_schedule == job_pb2.LR_SCHEDULE_COSINE


async def test_a_plan_for_another_machine_predicts_without_anything_measured(world: Any) -> None:
    spec, machine = spec_of(world), job_pb2.PlannedMachine(gpu="h100", host_gbps=200)
    spec.train.sequence_length, spec.train.tokens_per_step = 64, 4096
    request = job_pb2.PlanJobRequest(spec=spec, machine=machine)
    plan = (await world.ann.call("jobs", "PlanJob", request)).plan
    assert (plan.device, plan.fits, plan.prediction.machine, plan.prediction.measured) == ("cuda", True, "h100", False)
    assert plan.prediction.step_s > 0
    assert {"gemm", "adamw", "exposed"} <= set(plan.prediction.parts_s)
    assert not plan.HasField("references")
    # Of a dataset that is not there, only the speed of the pass before the first step is known.
    request.spec.method, request.spec.dataset = job_pb2.METHOD_DPO, "not-pushed"
    plan = (await world.ann.call("jobs", "PlanJob", request)).plan
    assert plan.references.tokens_per_second > plan.prediction.tokens_per_second
    assert not plan.references.HasField("num_tokens") and not plan.references.HasField("total_s")
    pairs = b'{"prompt": "why?", "chosen": "so", "rejected": "no"}\n' * 9
    await world.ann.push("pairs", {"pairs.jsonl": pairs})
    request.spec.dataset = "pairs"
    plan = (await world.ann.call("jobs", "PlanJob", request)).plan
    assert plan.references.tokens_estimated
    assert plan.references.num_tokens == len(pairs) * 3 // 8
    assert plan.prediction.total_s == pytest.approx(7 * plan.prediction.step_s + plan.references.total_s)
    request.machine.gpu = "abacus"
    with pytest.raises(grpc.aio.AioRpcError, match="gpu is 'abacus', which is not known; known GPUs: h100") as caught:
        await world.ann.call("jobs", "PlanJob", request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("method", "kind", "becomes"),
    [
        ("GetJob", job_pb2.GetJobRequest, JobState.QUEUED),
        ("CancelJob", job_pb2.CancelJobRequest, JobState.CANCELLED),
        ("PauseJob", job_pb2.PauseJobRequest, JobState.PAUSED),
    ],
)
async def test_a_call_reaches_the_service_and_is_the_owners_only(
    world: Any, method: str, kind: Any, becomes: JobState
) -> None:
    job = await world.job()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.bob.call("jobs", method, kind(job_id=job.job_id))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    answer = (await world.ann.call("jobs", method, kind(job_id=job.job_id))).job
    assert (answer.job_id, enum_text(job_pb2.JobState.DESCRIPTOR, answer.state)) == (job.job_id, becomes)


async def test_a_paused_job_is_resumed(world: Any) -> None:
    job = await world.job()
    await world.ann.call("jobs", "PauseJob", job_pb2.PauseJobRequest(job_id=job.job_id))
    resumed = (await world.ann.call("jobs", "ResumeJob", job_pb2.ResumeJobRequest(job_id=job.job_id))).job
    assert resumed.state == job_pb2.JOB_STATE_QUEUED


async def test_a_priority_is_changed_by_its_owner_and_raised_above_all_by_admins(world: Any) -> None:
    job = await world.job()

    def update(**fields: int) -> job_pb2.UpdateJobRequest:
        return job_pb2.UpdateJobRequest(job_id=job.job_id, **fields)

    changed = (await world.ann.call("jobs", "UpdateJob", update(priority=-3))).job
    assert (changed.priority, changed.spec.priority) == (-3, 0), "the spec stays as it was submitted"
    assert (await world.root_user.call("jobs", "UpdateJob", update(priority=500))).job.priority == 500
    for caller, request, code in (
        (world.ann, update(priority=101), grpc.StatusCode.PERMISSION_DENIED),
        (world.ann, update(priority=-101), grpc.StatusCode.INVALID_ARGUMENT),
        (world.ann, update(), grpc.StatusCode.INVALID_ARGUMENT),
        (world.bob, update(priority=1), grpc.StatusCode.NOT_FOUND),
        (world.eve, update(priority=1), grpc.StatusCode.PERMISSION_DENIED),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await caller.call("jobs", "UpdateJob", request)
        assert caught.value.code() is code


async def test_listing_passes_page_and_states_on(world: Any) -> None:
    jobs = [await world.job(name=f"j{i}") for i in range(3)]
    await world.ann.call("jobs", "CancelJob", job_pb2.CancelJobRequest(job_id=jobs[0].job_id))
    names, token = [], ""
    for _ in range(3):
        request = job_pb2.ListJobsRequest(page_size=1, page_token=token)
        page = await world.ann.call("jobs", "ListJobs", request)
        names += [job.spec.name for job in page.jobs]
        token = page.next_page_token
    assert (names, token) == (["j2", "j1", "j0"], "")
    request = job_pb2.ListJobsRequest(page_size=5000, states=[job_pb2.JOB_STATE_CANCELLED])
    assert [job.spec.name for job in (await world.ann.call("jobs", "ListJobs", request)).jobs] == ["j0"]
    for bad in ({"states": [0]}, {"states": [99]}, {"page_size": -1}, {"page_token": "?"}):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.ann.call("jobs", "ListJobs", job_pb2.ListJobsRequest(**bad))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_watch_continues_from_a_number_and_ends_with_the_job(world: Any, make_step: Any) -> None:
    job = await world.job(make_step(3), state=JobState.SUCCEEDED)
    stream = world.ann.call("jobs", "WatchJob", job_pb2.WatchJobRequest(job_id=job.job_id, after_sequence=4))
    events = [response.event async for response in stream]
    assert [(event.sequence, event.WhichOneof("event")) for event in events] == [(5, "step"), (6, "state")]
    assert (events[0].step.h2d.exposed_s, events[0].step.num_tokens) == (0.125, 1)
    assert world.num_watching(job) == 0
    for caller, request in (
        (world.bob, job_pb2.WatchJobRequest(job_id=job.job_id)),
        (world.ann, job_pb2.WatchJobRequest(job_id=job.job_id, after_sequence=-1)),
    ):
        with pytest.raises(grpc.aio.AioRpcError):
            await caller.call("jobs", "WatchJob", request).read()


async def test_long_logs_come_in_pieces(world: Any) -> None:
    job = await world.job(state=JobState.RUNNING)
    log = bytes(range(256)) * 10_000
    world.write_log(job, log)
    stream = world.ann.call("jobs", "GetJobLogs", job_pb2.GetJobLogsRequest(job_id=job.job_id, offset=5))
    pieces = [piece async for piece in stream]
    assert all(0 < len(piece.data) <= 2**20 for piece in pieces)
    assert b"".join(piece.data for piece in pieces) == log[5:]
    assert pieces[0].offset == 5


def read(world: Any, job: Any, **fields: Any) -> Any:
    request = checkpoint_pb2.ReadCheckpointFileRequest(job_id=job.job_id, **{"step": 20, **fields})
    return world.ann.call("checkpoints", "ReadCheckpointFile", request)


async def test_checkpoints_are_listed_and_read_in_ranges(world: Any) -> None:
    weights = bytes(range(256)) * 9000
    job = await world.job(state=JobState.SUCCEEDED)
    world.write_checkpoint(job, 20, {"model.safetensors": weights, "trainer/state.json": b"{}", "empty": b""})
    listed = await world.ann.call(
        "checkpoints", "ListCheckpoints", checkpoint_pb2.ListCheckpointsRequest(job_id=job.job_id)
    )
    (checkpoint,) = listed.checkpoints
    assert {f.path: f.sha256 for f in checkpoint.files}["model.safetensors"] == hashlib.sha256(weights).hexdigest()
    assert (checkpoint.last, checkpoint.HasField("eval_loss")) == (True, False)
    assert checkpoint.size_bytes == len(weights) + 2
    for offset, length in ((0, 0), (1, 0), (2**20, 2**20 + 1), (len(weights) - 1, 5), (len(weights), 0), (7, 3)):
        pieces = [piece async for piece in read(world, job, path="model.safetensors", offset=offset, length=length)]
        assert b"".join(piece.data for piece in pieces) == weights[offset:][: length or None]
        assert all(len(piece.data) <= 2**20 for piece in pieces)
        assert [piece.offset for piece in pieces][:1] == [offset][: len(pieces)]
    assert [piece async for piece in read(world, job, path="empty")] == []
    delete = checkpoint_pb2.DeleteCheckpointRequest(job_id=job.job_id, step=20)
    await world.ann.call("checkpoints", "DeleteCheckpoint", delete)
    with pytest.raises(grpc.aio.AioRpcError, match="no checkpoint of step 20"):
        await read(world, job, path="model.safetensors").read()


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
async def test_only_listed_files_can_be_read(world: Any, fields: Any, code: str) -> None:
    job = await world.job()
    folder = world.write_checkpoint(job, 20, {"a": b"abc"})
    (folder.parent / "secret").write_bytes(b"secret")
    (folder / "unlisted").write_bytes(b"secret")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(world, job, **fields).read()
    assert caught.value.code().name == code


async def test_a_file_that_is_cut_while_it_is_read_is_not_handed_out_as_whole(world: Any) -> None:
    job = await world.job()
    folder = world.write_checkpoint(job, 20, {"a": bytes(20 * 2**20)})
    pieces = aiter(read(world, job, path="a"))
    await anext(pieces)
    (folder / "a").write_bytes(b"abc")
    with pytest.raises(grpc.aio.AioRpcError, match="damaged"):
        [piece async for piece in pieces]


def test_states_have_the_same_names_on_both_sides() -> None:
    enum = job_pb2.JobState.DESCRIPTOR
    assert {enum_text(enum, enum_number(enum, state)) for state in JobState} == set(JobState)
    assert len(job_pb2.JobState.values()) == len(JobState) + 1


async def test_a_running_job_has_an_eta_and_odd_numbers_pass(world: Any, make_step: Any) -> None:
    running = await world.job(make_step(3), state=JobState.RUNNING)
    running = dataclasses.replace(running, last_step=make_step(3))
    ended = dataclasses.replace(running, job_state=JobState.SUCCEEDED)
    assert to_message(running, job_pb2.Job).eta.ToTimedelta().total_seconds() == 2.5
    assert not to_message(ended, job_pb2.Job).HasField("eta")
    odd = dataclasses.replace(make_step(3), loss=math.nan, grad_norm=math.inf, eta_s=math.inf)
    wire = to_message(dataclasses.replace(running, last_step=odd), job_pb2.Job)
    assert math.isnan(wire.last_step.loss)
    assert not wire.HasField("eta")
