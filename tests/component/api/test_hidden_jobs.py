"""Who asks for another user's job gets exactly the answer for none: the same words, the same ending, and as many
searches."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.message_factory import GetMessageClass
from sqlalchemy import Engine, event
from tests.access_scene import Scene

from horizon_proto.v1 import checkpoint_pb2, housekeeping_pb2, job_pb2, session_pb2
from horizon_server.api.grpc.calls import SERVICES
from horizon_server.api.grpc.server import start_grpc_server
from horizon_server.api.http.server import make_app
from horizon_server.records.job import JobState

NONE = "job_0123456789ab"

Make = Callable[[Scene, str], Any]


def _named(kind: Any, **more: Any) -> Make:
    return lambda _, job_id: kind(job_id=job_id, **more)


def _delete(kind: Any, ending: str = "") -> Make:
    return lambda _, job_id: housekeeping_pb2.DeleteRequest(kind=kind, keys=[job_id + ending])


def _from(scene: Scene, job_id: str) -> job_pb2.JobSpec:
    spec = scene.spec()
    spec.project, spec.model, spec.init_from = "bob", "bobs", f"{job_id}@last"
    return spec


METHODS = {f"{service.name}/{method.name}": (service, method) for service in SERVICES for method in service.methods}
NAMING_A_JOB: dict[str, Make] = {
    name: _named(GetMessageClass(method.input_type))
    for name, (_, method) in METHODS.items()
    if "job_id" in method.input_type.fields_by_name
}
CALLS: dict[str, Make] = NAMING_A_JOB | {
    # With what is checked before the job is looked for.
    "JobService/UpdateJob": _named(job_pb2.UpdateJobRequest, priority=1),
    "JobService/PlanJob": lambda scene, job_id: job_pb2.PlanJobRequest(spec=_from(scene, job_id)),
    "JobService/SubmitJob": lambda scene, job_id: job_pb2.SubmitJobRequest(
        request_id=str(uuid.uuid4()), spec=_from(scene, job_id)
    ),
    "CheckpointService/ReadCheckpointFile": _named(
        checkpoint_pb2.ReadCheckpointFileRequest, step=3, path="model/config.json"
    ),
    "CheckpointService/SampleCheckpoint": _named(
        checkpoint_pb2.SampleCheckpointRequest, step=3, prompts=[checkpoint_pb2.SamplePrompt(text="hello")]
    ),
    "CheckpointService/EvaluateCheckpoint": _named(checkpoint_pb2.EvaluateCheckpointRequest, step=3),
    "CheckpointService/MergeCheckpoint": _named(checkpoint_pb2.MergeCheckpointRequest, step=3),
    "CheckpointService/DeleteCheckpoint": _named(checkpoint_pb2.DeleteCheckpointRequest, step=3),
    "SessionService/CallSession": _named(
        session_pb2.CallSessionRequest, optim_step=session_pb2.SessionOptimStep(learning_rate=0.1)
    ),
    "SessionService/GetSessionResult": _named(session_pb2.GetSessionResultRequest, number=1),
    "HousekeepingService/Delete": _delete(housekeeping_pb2.RESOURCE_KIND_JOB),
    "HousekeepingService/Delete checkpoint": _delete(housekeeping_pb2.RESOURCE_KIND_CHECKPOINT, "@3"),
}


@pytest.mark.parametrize("ends", ["queued", "ended", "deleted"])
async def test_anothers_job_is_answered_like_none(scene: Scene, ends: str) -> None:
    bob = scene.world.principal("bob")
    await scene.daemon.model(bob, "bobs")
    server = await start_grpc_server(scene.services, address="127.0.0.1:0", tls=None)
    wrong = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        for name, make in CALLS.items():
            service, method = METHODS[name.partition(" ")[0]]
            answers = []
            for job_id in (await _job(scene, ends), NONE):
                with _Statements() as statements:
                    answer = await _refusal(channel, service, method, make(scene, job_id), scene.tokens["other"])
                answers.append((answer[0], answer[1].replace(job_id, "JOB"), statements.number))
            if answers[0] != answers[1] or answers[0][0] != "NOT_FOUND" or "JOB" not in answers[0][1]:
                wrong.append(f"{name}: {answers[0]}, not {answers[1]}")
    await server.stop(0)
    assert not wrong, "\n".join(wrong)


async def test_anothers_job_is_answered_like_none_by_rest(scene: Scene) -> None:
    app = make_app(scene.services, scene.world.metrics, metrics_open=False, ready=lambda: None)
    headers = {"Authorization": f"Bearer {scene.tokens['other']}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://node") as client:
        for path in ("", "/events", "/metrics", "/checkpoints"):
            seen = []
            for job_id in (scene.job.job_id, NONE):
                answer = await client.get(f"/horizon/v1/jobs/{job_id}{path}", headers=headers)
                seen.append((answer.status_code, answer.text.replace(job_id, "JOB")))
            assert seen[0] == seen[1]
            assert seen[0][0] == 404


async def _job(scene: Scene, state: str) -> str:
    job_id = (await scene.new_job(JobState.QUEUED if state == "queued" else JobState.SUCCEEDED)).job_id
    if state == "deleted":
        await scene.services.jobs.delete(scene.world.principal("ann"), job_id)
    return job_id


class _Statements:
    """Counts how often the database searches for jobs during the block."""

    number = 0

    def __enter__(self) -> _Statements:
        event.listen(Engine, "before_cursor_execute", self._count)
        return self

    def __exit__(self, *_: object) -> None:
        event.remove(Engine, "before_cursor_execute", self._count)

    def _count(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        # Those by id are answered on the event loop, or are known already; the others go through a thread, which takes
        # far longer.
        self.number += "ORDER BY jobs.number DESC" in statement


async def _refusal(channel: grpc.aio.Channel, service: Any, method: Any, request: Any, token: str) -> tuple[str, str]:
    kinds: dict[str, Any] = {
        "request_serializer": GetMessageClass(method.input_type).SerializeToString,
        "response_deserializer": GetMessageClass(method.output_type).FromString,
    }
    path = f"/{service.full_name}/{method.name}"
    options: dict[str, Any] = {"metadata": [("authorization", f"Bearer {token}")], "timeout": 60}
    try:
        if method.server_streaming:
            async for _ in channel.unary_stream(path, **kinds)(request, **options):
                pass
        else:
            await channel.unary_unary(path, **kinds)(request, **options)
    except grpc.aio.AioRpcError as error:
        return str(error.code().name), str(error.details())
    return "OK", ""
