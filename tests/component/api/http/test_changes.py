"""Changes by REST: the same rights, limits and entries of the audit log as by gRPC, none for another site's page."""

from __future__ import annotations

import json
import uuid
from typing import Any

import httpx
import pytest
from google.protobuf.message import Message

from horizon_proto.v1 import checkpoint_pb2, housekeeping_pb2, job_pb2
from horizon_server.api.effects import EFFECTS
from horizon_server.api.grpc.audited import asked_by
from horizon_server.errors import Draining
from horizon_server.records.account import Principal
from horizon_server.records.audit import AuditEntry
from horizon_server.records.job import JobState

# Method, path below /horizon/v1, and body of every change, with the call of gRPC that it is.
CHANGES = {
    "JobService/SubmitJob": (
        "POST",
        "jobs",
        {"spec": {"name": "a", "model": "m", "dataset": "d"}, "request_id": str(uuid.UUID(int=1))},
    ),
    "JobService/PauseJob": ("POST", "jobs/{job}/pause", None),
    "JobService/ResumeJob": ("POST", "jobs/{job}/resume", None),
    "JobService/CancelJob": ("POST", "jobs/{job}/cancel", None),
    "JobService/UpdateJob": ("PATCH", "jobs/{job}", {"priority": 3}),
    "HousekeepingService/KeepJob": ("POST", "jobs/{job}/keep", None),
    "CheckpointService/DeleteCheckpoint": ("DELETE", "jobs/{job}/checkpoints/5", None),
    "CheckpointService/KeepCheckpoint": ("POST", "jobs/{job}/checkpoints/5/keep", {"kept": True}),
}
OF_A_JOB = [call for call, (_, path, _) in CHANGES.items() if "{job}" in path]


async def make(client: httpx.AsyncClient, call: str, job: str, **headers: str) -> httpx.Response:
    method, path, body = CHANGES[call]
    return await client.request(method, f"/horizon/v1/{path.format(job=job)}", json=body, headers=headers)


async def entries(world: Any) -> list[tuple[str, str, str, str]]:
    found = await world.services.audit.entries(limit=100)
    assert all((entry.origin, entry.token_id != "") == ("127.0.0.1", True) for entry in found)
    return [(entry.user, entry.action, entry.resource, entry.outcome) for entry in found]


def spec(world: Any, **fields: Any) -> dict[str, Any]:
    return {"name": "new", "model": str(world.daemon.model_folder), "dataset": "chats", **fields}


REQUESTS: dict[str, Message] = {
    "JobService/SubmitJob": job_pb2.SubmitJobRequest(request_id="x", spec=job_pb2.JobSpec(name="a")),
    "JobService/PauseJob": job_pb2.PauseJobRequest(job_id="none"),
    "JobService/ResumeJob": job_pb2.ResumeJobRequest(job_id="none"),
    "JobService/CancelJob": job_pb2.CancelJobRequest(job_id="none"),
    "JobService/UpdateJob": job_pb2.UpdateJobRequest(job_id="none", priority=3),
    "HousekeepingService/KeepJob": housekeeping_pb2.KeepJobRequest(job_id="none"),
    "CheckpointService/DeleteCheckpoint": checkpoint_pb2.DeleteCheckpointRequest(job_id="none", step=5),
    "CheckpointService/KeepCheckpoint": checkpoint_pb2.KeepCheckpointRequest(job_id="none", step=5, kept=True),
}


async def test_the_audit_log_has_what_it_has_of_the_same_call_of_grpc(
    ann: httpx.AsyncClient, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, str, str]] = []

    async def begin(caller: Principal, *, origin: str, action: str, resource: str, detail: str = "") -> AuditEntry:
        begun.append((action, resource, detail))
        raise Draining("not now")

    monkeypatch.setattr(world.services.audit, "begin", begin)
    for call in CHANGES:
        assert EFFECTS[call].is_audited
        assert (await make(ann, call, "none")).status_code == 503
    asked = {call: asked_by(request) for call, request in REQUESTS.items()}
    assert begun == [(call.replace("/", "."), one.resource, one.detail(one.resource)) for call, one in asked.items()]


async def test_the_schema_has_exactly_these_changes(connect: Any) -> None:
    paths = (await connect().get("/openapi.json")).json()["paths"]
    documented = {
        (method.upper(), path.removeprefix("/horizon/v1/"))
        for path, of in paths.items()
        for method in of
        if method != "get"
    }
    expected = {(method, path.format(job="{job_id}").replace("/5", "/{step}")) for method, path, _ in CHANGES.values()}
    assert documented == {*expected, ("POST", "jobs/plan")}


async def test_a_job_is_paused_continued_and_cancelled(ann: httpx.AsyncClient, world: Any) -> None:
    job = await world.job(name="night")
    for call, state in (
        ("JobService/PauseJob", "PAUSED"),
        ("JobService/ResumeJob", "QUEUED"),
        ("JobService/CancelJob", "CANCELLED"),
    ):
        answer = await make(ann, call, "night")
        assert (answer.status_code, answer.json()["state"]) == (200, state)
    assert await entries(world) == [
        ("ann", f"JobService.{name}", job.job_id, "OK") for name in ("PauseJob", "ResumeJob", "CancelJob")
    ]


async def test_a_priority_is_set_and_a_wrong_one_is_named(ann: httpx.AsyncClient, world: Any) -> None:
    job = await world.job()
    url = f"/horizon/v1/jobs/{job.job_id}"
    assert (await ann.patch(url, json={"priority": 3})).json()["priority"] == 3
    refused = await ann.patch(url, json={"priority": 5000})
    assert refused.status_code == 400
    assert refused.json()["error"]["violations"][0]["field"] == "priority"
    assert (await ann.patch(url, json={"priority": 500})).json()["error"]["reason"] == "NOT_ALLOWED"
    malformed: tuple[Any, ...] = ({}, {"priority": "3"}, {"priority": 10**30}, {"priority": None}, [], "3")
    for wrong in malformed:
        assert (await ann.patch(url, json=wrong)).status_code == 422, wrong


async def test_a_job_is_submitted_once_for_each_request_id(ann: httpx.AsyncClient, world: Any) -> None:
    body = {"spec": spec(world), "request_id": str(uuid.uuid4())}
    first, again = [await ann.post("/horizon/v1/jobs", json=body) for _ in range(2)]
    assert first.status_code == again.status_code == 200, first.text
    assert first.json()["job_id"] == again.json()["job_id"]
    assert first.json()["spec"]["train"]["learning_rate"] == 1e-5
    assert (await entries(world))[-1] == ("ann", "JobService.SubmitJob", first.json()["job_id"], "OK")
    wrong = await ann.post(
        "/horizon/v1/jobs", json={"spec": spec(world, train={"epochs": -1}), "request_id": str(uuid.uuid4())}
    )
    assert wrong.status_code == 400
    assert [one["field"] for one in wrong.json()["error"]["violations"]] == ["train.epochs"]
    assert (await entries(world))[-1][1:] == ("JobService.SubmitJob", "new", "INVALID_SPEC")
    plan = await ann.post("/horizon/v1/jobs/plan", json={"spec": spec(world)})
    assert plan.json()["plan"]["fits"] is True, plan.text
    assert plan.json()["spec"]["train"]["learning_rate"] == 1e-5
    assert len(await entries(world)) == 3  # a plan changes nothing


async def test_checkpoints_are_kept_and_deleted(ann: httpx.AsyncClient, world: Any) -> None:
    job = await world.job(state=JobState.SUCCEEDED)
    for step in (5, 10):
        world.write_checkpoint(job, step, {"model.safetensors": b"x"})
    url = f"/horizon/v1/jobs/{job.job_id}/checkpoints"
    for kept in (True, False):
        assert (await ann.post(f"{url}/5/keep", json={"kept": kept})).json()["kept"] is kept
        assert [one["kept"] for one in (await ann.get(url)).json()["checkpoints"]] == [kept, False]
    assert (await ann.delete(f"{url}/10")).status_code == 204
    assert (await ann.delete(f"{url}/10")).status_code == 404
    assert [one["step"] for one in (await ann.get(url)).json()["checkpoints"]] == [5]
    assert (await make(ann, "HousekeepingService/KeepJob", job.job_id)).json()["keep_files"] is True


@pytest.mark.parametrize("call", CHANGES)
async def test_who_may_not_change_it_is_refused_and_that_is_in_the_audit_log(
    connect: Any, world: Any, call: str
) -> None:
    job = await world.job(state=JobState.FAILED)
    world.write_checkpoint(job, 5, {"model.safetensors": b"x"})
    before = await world.daemon.job(job.job_id)
    make_token = world.services.accounts.create_token
    _, reading = await make_token("ann", lifetime_s=None, scope="read")
    _, scraping = await make_token("root", lifetime_s=None, scope="metrics")
    assert (await make(connect(), call, job.job_id)).status_code == 401
    assert (await make(connect(scraping), call, job.job_id)).status_code == 403
    assert await entries(world) == []
    assert (await make(connect("eve"), call, job.job_id)).status_code == 403  # a viewer
    assert (await make(connect(reading), call, job.job_id)).status_code == 403
    for headers in (
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://node"},
        {"Sec-Fetch-Site": "same-site"},
    ):
        assert (await make(connect("ann"), call, job.job_id, **headers)).status_code == 403, headers
    logged = await entries(world)
    assert {(action, outcome) for _, action, _, outcome in logged} == {(call.replace("/", "."), "NOT_ALLOWED")}
    assert len(logged) == 6
    if call in OF_A_JOB:
        theirs = await make(connect("bob"), call, job.job_id)
        nobodys = await make(connect("bob"), call, "job_none")
        assert (theirs.status_code, nobodys.status_code) == (404, 404)
        assert theirs.text.replace(job.job_id, "job_none") == nobodys.text
    assert await world.daemon.job(job.job_id) == before
    assert world.daemon.parts.scheduler.runtime.folders.checkpoints(job.job_id).steps() == [5]


async def test_the_page_itself_and_programs_may_make_changes(ann: httpx.AsyncClient, world: Any) -> None:
    job = await world.job()
    for headers in (
        {},
        {"Origin": "http://node"},
        {"Sec-Fetch-Site": "same-origin", "Origin": "https://name.of.a.proxy"},
        {"Sec-Fetch-Site": "none"},
    ):
        assert (await make(ann, "JobService/PauseJob", job.job_id, **headers)).status_code == 200, headers


async def test_a_body_that_is_no_json_is_refused(ann: httpx.AsyncClient, world: Any) -> None:
    job = await world.job()
    url, body = f"/horizon/v1/jobs/{job.job_id}", json.dumps({"priority": 3})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = await ann.patch(url, content=body, headers={"Content-Type": kind})
        assert answer.status_code in (400, 422), kind
    forms = await ann.post(f"{url}/cancel", content="a=b", headers={"Content-Type": "text/plain"})
    assert forms.json()["error"]["violations"][0]["field"] == "Content-Type"
    assert (await world.daemon.job(job.job_id)).job_state is JobState.QUEUED
    for broken in ("{", "[" * 20_000, "nan", "\x00"):
        answer = await ann.patch(url, content=broken, headers={"Content-Type": "application/json"})
        assert answer.status_code in (400, 422), broken[:9]


async def test_changes_have_a_rate_of_their_own(
    ann: httpx.AsyncClient, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await world.job()
    monkeypatch.setattr(world.services.limits._changes, "reserve", lambda *_: None)
    answer = await make(ann, "JobService/PauseJob", job.job_id)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "5")
    assert (await ann.get("/horizon/v1/node")).status_code == 200


async def test_a_defect_is_in_the_audit_log_too(
    ann: httpx.AsyncClient, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr(world.services.jobs, "pause", broken)
    assert (await make(ann, "JobService/PauseJob", "j-1")).status_code == 500
    assert await entries(world) == [("ann", "JobService.PauseJob", "j-1", "INTERNAL")]
