"""Every route: what it answers, to whom, and how it refuses."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import time
import uuid
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from horizon_server.api.http.bodies import JobBody
from horizon_server.api.http.server import make_app
from horizon_server.db.sharing import SharingStore
from horizon_server.errors import Draining, InvalidSpec
from horizon_server.events import EvalAnswer, EvalDone
from horizon_server.figures import EvalSetFigures
from horizon_server.planning.machine import Accelerator
from horizon_server.records.blob import BlobFile
from horizon_server.records.job import JobFilter, JobRecord, JobState
from horizon_server.records.plan import Plan, ReferencePass, StepPrediction
from horizon_server.records.sharing import NodeCondition, Outlook
from horizon_server.services.jobs import MAX_EVALUATIONS
from horizon_server.spec import parse_job_spec

_OF_A_JOB = [
    "jobs/j-1",
    *(f"jobs/j-1/{part}" for part in ("events", "metrics", "series", "log", "answers", "checkpoints")),
]
GUARDED = [
    *_OF_A_JOB,
    "me",
    "job-schema",
    "stream",
    "node",
    "queue",
    "usage",
    "quota",
    "projects",
    "jobs",
    "datasets",
    "datasets/chats/preview",
    "models",
]


@pytest.mark.parametrize("path", GUARDED)
async def test_every_resource_asks_for_a_token(connect: Any, path: str) -> None:
    answer = await connect().get(f"/horizon/v1/{path}")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["reason"] == "UNAUTHENTICATED"
    assert (await connect("hzn_stolen").get(f"/horizon/v1/{path}")).status_code == 401


@pytest.mark.parametrize("header", ["hzn_x", "Basic hzn_x", "Bearer", "Bearer "])
async def test_only_bearer_tokens_count(connect: Any, header: str) -> None:
    answer = await connect().get("/horizon/v1/node", headers={"Authorization": header})
    assert answer.status_code == 401


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/metrics", "/version", "/openapi.json"])
async def test_open_on_loopback(connect: Any, path: str) -> None:
    assert (await connect().get(path)).status_code == 200


async def test_metrics_can_be_put_behind_a_token_and_health_never_needs_one(connect: Any, world: Any) -> None:
    app = make_app(world.services, world.metrics, metrics_open=False, ready=lambda: None)
    assert (await connect(None, app).get("/metrics")).status_code == 401
    assert (await connect("eve", app).get("/metrics")).status_code == 200
    for path in ("/healthz", "/readyz"):
        assert (await connect(None, app).get(path)).status_code == 200


async def test_readiness_says_why_not(connect: Any, readiness: list[str]) -> None:
    assert (await connect().get("/readyz")).json() == {"ready": True, "message": ""}
    readiness.append("the daemon drains and takes no new work")
    answer = await connect().get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "message": "the daemon drains and takes no new work"}
    assert (await connect().get("/healthz")).status_code == 200


async def test_version_and_node(ann: httpx.AsyncClient, world: Any) -> None:
    assert (await ann.get("/version")).json() == {"version": "9.9"}
    node = (await ann.get("/horizon/v1/node")).json()
    assert (node["user"], node["role"], node["draining"], node["accelerators"]) == ("ann", "user", False, [])
    assert node["num_jobs"]["RUNNING"] == 0
    assert node["disk_free_bytes"] > 0
    world.services.node.accelerators = (Accelerator(index=0, name="GPU", memory_bytes=8),)
    node = (await ann.get("/horizon/v1/node")).json()
    assert node["accelerators"] == [{"index": 0, "name": "GPU", "memory_bytes": 8}]


async def test_a_job_in_full(ann: httpx.AsyncClient, world: Any, make_step: Any) -> None:
    made = await world.job(state=JobState.RUNNING)
    await world.append(made, make_step(5, math.nan))
    job = (await ann.get(f"/horizon/v1/jobs/{made.job_id}")).json()
    assert (job["job_id"], job["name"], job["state"], job["progress"]) == (made.job_id, "job", "RUNNING", 0.5)
    assert job["create_time"] == datetime.fromtimestamp(made.created_s, UTC).isoformat().replace("+00:00", "Z")
    assert job["end_time"] is None
    assert job["eta_s"] == 2.5
    assert job["last_step"]["loss"] is None  # JSON has no NaN
    assert job["last_step"]["grad_norm"] == 0.5
    assert job["last_step"]["h2d"] == {"bytes": 7, "busy_s": 0.5, "exposed_s": 0.125}
    assert job["plan"]["host_total_bytes"] == sum(job["plan"]["host_bytes"].values()) > 0
    assert job["plan"]["fits"] is True
    assert job["spec"]["train"]["learning_rate"] == 1e-5
    assert str(world.root) not in str(job)
    queued = await world.job()
    assert (await ann.get(f"/horizon/v1/jobs/{queued.job_id}")).json()["last_step"] is None


def test_before_the_first_step_the_plan_gives_the_time_left() -> None:
    prediction = StepPrediction(step_s=2.0, tokens_per_second=5.0, bound="h2d", peak_flops_per_s=1e12)
    plan = Plan(
        host_bytes={},
        device_bytes={},
        host_limit_bytes=1,
        num_parameters=1,
        device="host",
        prediction=prediction,
        references=ReferencePass(tokens_per_second=8.0, num_tokens=40, total_s=5.0),
    )
    spec = parse_job_spec({"name": "a", "model": "m", "dataset": "d", "train": {"max_steps": 10}})
    job = JobRecord(
        job_id="j",
        owner="ann",
        spec=spec,
        model_id="m",
        dataset_id="d",
        eval_dataset_id="",
        plan=plan,
        num_steps=10,
        job_state=JobState.RUNNING,
    )
    assert job_json(job)["eta_s"] == 10 * 2.0
    assert job_json(dataclasses.replace(job, num_steps=0))["eta_s"] == 10 * 2.0 + 5.0
    assert job_json(job)["plan"]["references"] == {
        "tokens_per_second": 8.0,
        "num_tokens": 40,
        "tokens_estimated": False,
        "total_s": 5.0,
        "done_share": 0.0,
    }
    assert job_json(job)["plan"]["prediction"]["tokens_per_second"] == 5.0
    ended = job_json(dataclasses.replace(job, job_state=JobState.FAILED, ended_s=1e9 + 90))
    assert (ended["eta_s"], ended["end_time"]) == (None, "2001-09-09T01:48:10Z")


def job_json(job: JobRecord) -> Any:
    return JobBody.model_validate(job).model_dump(mode="json")


async def test_other_users_learn_nothing(connect: Any, world: Any) -> None:
    job = await world.job()
    for path in _OF_A_JOB:
        anns = await connect("bob").get(f"/horizon/v1/{path.replace('j-1', job.job_id)}")
        nobodys = await connect("bob").get(f"/horizon/v1/{path}")
        assert (anns.status_code, nobodys.status_code) == (404, 404)
        assert anns.json()["error"]["reason"] == nobodys.json()["error"]["reason"] == "NOT_FOUND"
    for user in ("root", "eve"):
        assert (await connect(user).get(f"/horizon/v1/jobs/{job.job_id}")).status_code == 200


async def test_the_answers_of_the_last_evaluations_are_shown(ann: httpx.AsyncClient, world: Any) -> None:
    answer = EvalAnswer(
        document=3, prompt="1+1?", answer="it is 2", reference="2", found="2", expected="2", matches=True
    )
    gsm = EvalSetFigures(name="gsm", loss=1.0, num_targets=4, num_correct=1)

    def evaluated(step: int, *answers: EvalAnswer) -> EvalDone:
        return EvalDone(step=step, eval_loss=1.0, num_targets=4, sets=(gsm,), answers=answers)

    many = [evaluated(step, answer) for step in range(5, 5 + MAX_EVALUATIONS)]
    job = await world.job(
        evaluated(1, answer), evaluated(2), *many, dataclasses.replace(many[-1], answers=(answer,) * 2)
    )
    found = (await ann.get(f"/horizon/v1/jobs/{job.job_id}/answers")).json()["evaluations"]
    assert [one["step"] for one in found] == list(range(6, 5 + MAX_EVALUATIONS)), "the last 50, one of each step"
    assert (found[0]["set_names"], len(found[-1]["answers"])) == (["gsm"], 2)
    assert found[0]["answers"] == [{**dataclasses.asdict(answer)}]


async def test_a_log_is_read_in_parts_of_whole_lines(ann: httpx.AsyncClient, world: Any) -> None:
    job = await world.job(state=JobState.RUNNING)
    url = f"/horizon/v1/jobs/{job.job_id}/log"
    assert (await ann.get(url)).json()["text"] == ""
    world.write_log(job, b"first\x1b[31m line\nsecond\xff line\nthird")
    whole = (await ann.get(url)).json()
    assert whole["text"] == "first[31m line\nsecond\ufffd line\nthird"
    assert (whole["attempt"], whole["attempts"], whole["complete"]) == (job.attempt, [job.attempt], False)
    read, offset = [], 0
    for _ in range(3):
        part = (await ann.get(url, params={"offset": offset, "limit": 17})).json()
        assert part["offset"] == offset
        read.append(part["text"])
        offset = part["next_offset"]
    assert read == ["first[31m line\n", "second\ufffd line\n", "third"]
    end = (await ann.get(url, params={"offset": -1, "limit": 10})).json()
    assert (end["text"], end["next_offset"]) == ("third", offset)
    assert (await ann.get(url, params={"offset": 10**6})).json()["text"] == ""
    assert (await ann.get(url, params={"attempt": 7})).json()["complete"] is True
    assert (await ann.get(url, params={"limit": 65537})).status_code == 422


async def test_who_calls_and_what_they_may_do(connect: Any, world: Any) -> None:
    assert (await connect("ann").get("/horizon/v1/me")).json() == {
        "name": "ann",
        "role": "user",
        "scope": "full",
        "project": "ann",
        "projects": [{"name": "ann", "role": "admin"}],
        "may_change": True,
    }
    assert (await connect("eve").get("/horizon/v1/me")).json()["may_change"] is False
    _, reading = await world.services.accounts.create_token("ann", lifetime_s=None, scope="read")
    me = (await connect(reading).get("/horizon/v1/me")).json()
    assert (me["scope"], me["may_change"]) == ("read", False)
    schema = (await connect(reading).get("/horizon/v1/job-schema")).json()
    assert {"name", "model", "dataset", "train"} <= schema["properties"].keys()


async def test_pages_of_jobs(ann: httpx.AsyncClient, world: Any) -> None:
    made = [(await world.job(name=f"j-{number}")).job_id for number in range(5)]
    seen, token = [], ""
    while True:
        page = (await ann.get("/horizon/v1/jobs", params={"page_size": 2, "page_token": token})).json()
        seen += [job["job_id"] for job in page["jobs"]]
        token = page["next_page_token"]
        if not token:
            break
    assert seen == made[::-1]


async def test_jobs_by_state(ann: httpx.AsyncClient, world: Any) -> None:
    for state in (JobState.RUNNING, JobState.QUEUED, JobState.SUCCEEDED):
        await world.job(state=state)
    answer = await ann.get("/horizon/v1/jobs?state=RUNNING&state=QUEUED")
    assert {job["state"] for job in answer.json()["jobs"]} == {"RUNNING", "QUEUED"}
    refused = await ann.get("/horizon/v1/jobs?state=ASLEEP")
    assert refused.status_code == 422
    (violation,) = refused.json()["error"]["violations"]
    assert violation["field"] == "state.0"
    assert "ASLEEP" in violation["description"]
    assert "QUEUED" in violation["description"]


async def test_a_list_of_jobs_is_filtered(connect: Any, world: Any) -> None:
    ann = connect("ann")
    first, second = await world.job(name="gsm-first"), await world.job(name="second", state=JobState.RUNNING)
    bobs = dataclasses.replace(first, job_id="job_bobs", owner="bob", project="shared")
    await world.journal.create(bobs, request_id=str(uuid.uuid4()))

    async def found(user: Any, **query: str) -> list[str]:
        answer = await user.get("/horizon/v1/jobs", params=query)
        return [job["job_id"] for job in answer.json()["jobs"]]

    assert await found(ann, search="GSM") == [first.job_id]
    assert await found(ann, search=second.job_id[4:]) == [second.job_id]
    assert await found(ann, search="chats") == [second.job_id, first.job_id]  # the dataset of both
    for nothing in ("%", "_%", "no such", '"method"', "bob"):
        assert await found(ann, search=nothing) == [], nothing
    assert await found(ann, owner="bob") == []
    root = connect("root")
    assert await found(root, owner="bob") == ["job_bobs"]
    assert await found(root, project="shared", search="gsm") == ["job_bobs"]
    assert await found(root, owner="ann", state="RUNNING") == [second.job_id]
    page = (await root.get("/horizon/v1/jobs?search=gsm&page_size=1")).json()
    assert [job["job_id"] for job in page["jobs"]] == ["job_bobs"]
    assert await found(root, search="gsm", page_token=page["next_page_token"]) == [first.job_id]
    assert (await ann.get("/horizon/v1/jobs", params={"search": "x" * 201})).status_code == 422
    with pytest.raises(InvalidSpec, match="the maximum is 200"):
        await world.services.jobs.list(await world.caller("ann"), only=JobFilter(search="x" * 201))


@pytest.mark.parametrize(
    "query", ["page_size=0", "page_size=1001", "page_size=many", f"page_token={'x' * 201}", "page_token=%3F"]
)
async def test_malformed_parameters_are_named(ann: httpx.AsyncClient, query: str) -> None:
    answer = await ann.get(f"/horizon/v1/jobs?{query}")
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["reason"] == "INVALID_SPEC"
    assert error["violations"][0]["field"] == query.split("=")[0]


async def test_a_wrong_page_token_is_the_services_refusal(ann: httpx.AsyncClient) -> None:
    answer = await ann.get("/horizon/v1/jobs?page_token=bad")
    assert answer.status_code == 400
    assert "next_page_token" in answer.json()["error"]["message"]


async def test_binary_input_is_never_echoed(ann: httpx.AsyncClient) -> None:
    answer = await ann.get("/horizon/v1/jobs?page_size=%00%FF%FE%1B%5B31m")
    assert answer.status_code == 422
    description = answer.json()["error"]["violations"][0]["description"]
    assert description.isprintable()
    assert "31m" not in description


async def test_the_queue_shows_other_users_jobs_without_detail(connect: Any, world: Any) -> None:
    await world.job(name="first")
    queued = await world.job(name="second")
    theirs = dataclasses.replace(queued, job_id="job_bobs", owner="bob", project="bob")
    await world.journal.create(theirs, request_id=str(uuid.uuid4()))
    outlook = Outlook(why="waiting for 3 GiB of host memory; job first frees it", estimated_start_s=86400.0)
    world.daemon.parts.scheduler.runtime.view.outlooks = dict.fromkeys((queued.job_id, "job_bobs"), outlook)
    first, second, bobs = (await connect("ann").get("/horizon/v1/queue")).json()["jobs"]
    shown = {"job_id", "owner", "state", "position", "outlook"}
    assert {name for name, value in bobs.items() if value is not None} == shown
    times = {"share": 0.0, "estimated_start_time": "1970-01-02T00:00:00Z", "estimated_end_time": None, "place": 0}
    assert (bobs["outlook"], second["outlook"]) == ({"why": "", **times}, {"why": outlook.why, **times})
    assert first["outlook"] is None
    assert (bobs["owner"], bobs["position"], first["position"]) == ("bob", 3, 1)
    assert (second["name"], second["position"], second["num_steps"]) == ("second", 2, 0)
    everything = (await connect("eve").get("/horizon/v1/queue")).json()["jobs"]
    assert [entry["name"] for entry in everything] == ["first", "second", "second"]


async def test_usage_is_counted_since_a_time(ann: httpx.AsyncClient, world: Any) -> None:
    job = await world.job(state=JobState.SUCCEEDED)
    store = SharingStore(world.daemon.database)
    await store.charge("ann", "ann", job_id=job.job_id, device_s=60.0, num_tokens=7, now_s=time.time())
    body = (await ann.get("/horizon/v1/usage")).json()
    (usage,) = body["usages"]
    assert (usage["project"], usage["user"], usage["device_s"], usage["jobs"]) == ("ann", "ann", 60.0, {"SUCCEEDED": 1})
    since = datetime.fromisoformat(body["since_time"])
    assert 7 * 86400 <= time.time() - since.timestamp() < 7 * 86400 + 600
    assert (await ann.get("/horizon/v1/usage", params={"since": "2001-02-03"})).json()[
        "since_time"
    ] == "2001-02-03T00:00:00Z"
    assert (await ann.get("/horizon/v1/usage", params={"since": "2999-01-01T00:00:00+01:00"})).status_code == 400
    for wrong in ("yesterday", "0.5", "1767225600", "nan"):
        answer = await ann.get("/horizon/v1/usage", params={"since": wrong})
        assert answer.status_code == 422, wrong


async def test_the_schema_says_what_is_refused_with_400(ann: httpx.AsyncClient) -> None:
    paths = (await ann.get("/openapi.json")).json()["paths"]
    for path, parameter, bounds in (
        ("/horizon/v1/jobs", "page_token", {"maxLength"}),
        ("/horizon/v1/datasets", "page_token", {"maxLength"}),
        ("/horizon/v1/models", "page_token", {"maxLength"}),
        ("/horizon/v1/usage", "since", {"anyOf"}),
        ("/horizon/v1/datasets/{name}/preview", "sequence_length", {"minimum", "maximum"}),
        ("/horizon/v1/datasets/{name}/preview", "offset", {"minimum", "maximum"}),
        ("/horizon/v1/datasets/{name}/preview", "method", {"enum"}),
        ("/horizon/v1/datasets/{name}/preview", "train_on", {"enum"}),
    ):
        call = paths[path]["get"]
        assert "400" in call["responses"], path
        [schema] = [one["schema"] for one in call["parameters"] if one["name"] == parameter]
        assert bounds <= schema.keys(), (path, parameter)


async def test_quotas_are_those_of_user_and_project(ann: httpx.AsyncClient) -> None:
    allowances = (await ann.get("/horizon/v1/quota")).json()["allowances"]
    assert [(one["holder"], one["name"], one["weight"]) for one in allowances] == [
        ("user", "ann", 1.0),
        ("project", "ann", 1.0),
    ]
    assert allowances[0]["quotas"][0] == {
        "quota": "queued_jobs",
        "limit": None,
        "used": 0.0,
        "frees": "a queued job starts, or: horizon job cancel JOB",
    }


async def test_projects_are_listed_with_their_members(connect: Any, world: Any) -> None:
    await world.services.accounts.add_member("ann", "bob", "viewer")
    (project,) = (await connect("ann").get("/horizon/v1/projects")).json()["projects"]
    assert (project["name"], project["role"]) == ("ann", "admin")
    assert [(one["project"], one["user"], one["role"]) for one in project["members"]] == [
        ("ann", "ann", "admin"),
        ("ann", "bob", "viewer"),
    ]
    assert all(datetime.fromisoformat(one["add_time"]).tzinfo for one in project["members"])
    bobs = (await connect("bob").get("/horizon/v1/projects")).json()["projects"]
    assert [(one["name"], one["role"]) for one in bobs] == [("ann", "viewer"), ("bob", "admin")]


async def test_the_node_says_how_it_is_shared(ann: httpx.AsyncClient, world: Any) -> None:
    await SharingStore(world.daemon.database).set_condition(NodeCondition(mode="cordoned", message="new driver"))
    node = (await ann.get("/horizon/v1/node")).json()
    nothing: dict[str, Any] = {"window_start_time": None, "window_end_time": None, "withdrawn": []}
    assert (node["mode"], node["condition"]) == ("cordoned", {"mode": "cordoned", "message": "new driver", **nothing})
    in_service = {"name": "host", "holder": "", "num_residents": 0, "holder_name": "", "out_of_service": ""}
    assert node["devices"] == [in_service]


async def test_who_may_see_the_job_whose_turn_it_is_gets_its_name(connect: Any, world: Any) -> None:
    job = await world.job(name="night", state=JobState.RUNNING)
    holder = SimpleNamespace(job=SimpleNamespace(job_id=job.job_id))
    world.daemon.parts.scheduler.turns["host"].holder = holder
    for user, name in (("ann", "night"), ("eve", "night"), ("bob", "")):
        (device,) = (await connect(user).get("/horizon/v1/node")).json()["devices"]
        assert (device["holder"], device["holder_name"]) == (job.job_id, name)


async def test_checkpoints(ann: httpx.AsyncClient, world: Any) -> None:
    job = await world.job()
    world.write_checkpoint(job, 10, {"model.safetensors": b"123456789"})
    (listed,) = (await ann.get(f"/horizon/v1/jobs/{job.job_id}/checkpoints")).json()["checkpoints"]
    assert (listed["step"], listed["size_bytes"], listed["last"], listed["eval_loss"]) == (10, 9, True, None)
    digest = hashlib.sha256(b"123456789").hexdigest()
    assert listed["files"] == [{"path": "model.safetensors", "sha256": digest, "size_bytes": 9}]


async def test_datasets_and_models(ann: httpx.AsyncClient, connect: Any, world: Any) -> None:
    (dataset,) = (await ann.get("/horizon/v1/datasets")).json()["datasets"]
    assert (dataset["name"], dataset["state"], dataset["num_rows"], dataset["format"]) == (
        "chats",
        "READY",
        8,
        "messages",
    )
    assert dataset["size_bytes"] > 0
    files = [BlobFile(path=path, sha256="ab" * 32, size_bytes=7) for path in ("config.json", "model.safetensors")]
    ann_herself = world.principal("ann")
    await world.services.models.create(ann_herself, request_id=str(uuid.uuid4()), name="tiny", files=files)
    (model,) = (await ann.get("/horizon/v1/models")).json()["models"]
    assert (model["name"], model["state"], model["size_bytes"]) == ("tiny", "UPLOADING", 14)
    assert (await connect("bob").get("/horizon/v1/datasets")).json()["datasets"] == []


@pytest.mark.parametrize("path", ["/nowhere", "/v1", "/v2/models", "/horizon/v1/job", "/docs", "/horizon/v1/jobs/"])
async def test_unknown_routes_are_json(connect: Any, path: str) -> None:
    answer = await connect("ann").get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["reason"] == "NOT_FOUND"
    assert path in answer.json()["error"]["message"]


async def test_what_a_path_does_not_take_is_said(ann: httpx.AsyncClient) -> None:
    answer = await ann.put("/horizon/v1/jobs", json={"name": "x"})
    assert answer.status_code == 405
    assert answer.json()["error"]["reason"] == "METHOD_NOT_ALLOWED"
    assert "GET /openapi.json lists what is" in answer.json()["error"]["message"]


@pytest.mark.parametrize("length", ["65537", "-1", "9" * 40, "many"])
async def test_large_bodies_are_refused_unread(ann: httpx.AsyncClient, length: str) -> None:
    answer = await ann.request("GET", "/horizon/v1/node", headers={"Content-Length": length})
    assert answer.status_code == 413
    assert answer.json()["error"]["reason"] == "TOO_LARGE"


@pytest.fixture
def failing(world: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make every look at a job fail."""

    def fail(error: Exception) -> None:
        async def raising(*_: object) -> None:
            raise error

        monkeypatch.setattr(world.journal.store, "get", raising)

    return fail


async def test_a_bug_shows_nothing_of_the_inside(ann: httpx.AsyncClient, failing: Any, world: Any) -> None:
    failing(RuntimeError("/secret/path exploded"))
    answer = await ann.get("/horizon/v1/jobs/j-1")
    assert answer.status_code == 500
    assert answer.json()["error"]["reason"] == "INTERNAL"
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"
    labels = {"method": "GET", "route": "/horizon/v1/jobs/{job_id}", "code": "500"}
    assert world.metrics.registry.get_sample_value("http_request_duration_seconds_count", labels) == 1


async def test_a_domain_error_says_when_to_come_back(ann: httpx.AsyncClient, failing: Any) -> None:
    failing(Draining("the daemon is shutting down", retry_after_s=1.5))
    answer = await ann.get("/horizon/v1/jobs/j-1")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.json() == {
        "error": {"reason": "DRAINING", "message": "the daemon is shutting down", "violations": []}
    }


@pytest.mark.parametrize("path", ["/", "/metrics", "/horizon/v1/node", "/nowhere"])
async def test_security_headers_are_everywhere(ann: httpx.AsyncClient, path: str) -> None:
    headers = (await ann.get(path)).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    # The page shows nothing of the daemon's work by itself: a browser may keep it, and asks whether it is the same.
    assert headers["cache-control"] == ("no-cache" if path == "/" else "no-store")


async def test_requests_are_measured_by_route(ann: httpx.AsyncClient, world: Any) -> None:
    for path in ("/horizon/v1/jobs/a", "/horizon/v1/jobs/b", "/nowhere", "/elsewhere", "/version"):
        await ann.get(path)
    count = world.metrics.registry.get_sample_value
    name = "http_request_duration_seconds_count"
    assert count(name, {"method": "GET", "route": "/horizon/v1/jobs/{job_id}", "code": "404"}) == 2
    assert count(name, {"method": "GET", "route": "unmatched", "code": "404"}) == 2
    assert count(name, {"method": "GET", "route": "/version", "code": "200"}) == 1


async def test_metrics_are_shown_as_text(connect: Any) -> None:
    answer = await connect().get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "horizon_build_info{version=" in answer.text


async def test_the_schema_documents_every_route_and_error(app: FastAPI, connect: Any) -> None:
    schema = (await connect().get("/openapi.json")).json()
    paths = {
        path.removeprefix("/horizon/v1/").replace("{job_id}", "j-1").replace("{name}", "chats")
        for path in schema["paths"]
    }
    changes_only = {"jobs/plan", *(f"jobs/j-1/{what}" for what in ("pause", "resume", "cancel", "keep"))}
    changes_only |= {"jobs/j-1/checkpoints/{step}", "jobs/j-1/checkpoints/{step}/keep"}
    assert paths == {*GUARDED, *changes_only, "/healthz", "/readyz", "/metrics", "/version"}
    for path, operation in (
        (path, operation)
        for path, operations in schema["paths"].items()
        if path.startswith("/horizon")
        for operation in operations.values()
    ):
        assert operation["security"] == [{"HTTPBearer": []}], path
        if "page_token" in {parameter["name"] for parameter in operation.get("parameters", ())}:
            assert "400" in operation["responses"], path
        refusal = operation["responses"]["422"]["content"]["application/json"]["schema"]
        assert refusal == {"$ref": "#/components/schemas/ErrorBody"}, path


async def test_a_preview_in_full(ann: httpx.AsyncClient, world: Any) -> None:
    query = {
        "model": str(world.daemon.model_folder),
        "n": "2",
        "offset": "4",
        "train_on": "all",
        "sequence_length": "64",
    }
    answer = await ann.get("/horizon/v1/datasets/chats/preview", params=query)
    preview = answer.json()
    assert [row["number"] for row in preview["rows"]] == [5, 6], preview
    assert (preview["rows"][0]["file"], preview["rows"][0]["unit"]) == ("chats.jsonl", "line")
    assert preview["rows"][0]["num_trained_tokens"] > 0
    assert {span["trained"] for span in preview["rows"][0]["spans"]} >= {True}
    options = {
        "num_rows": 8,
        "format": "messages",
        "method": "sft",
        "train_on": "all",
        "sequence_length": 64,
        "offset": 4,
    }
    assert {name: value for name, value in preview.items() if name != "rows"} == options


@pytest.mark.parametrize(
    ("query", "code", "words"),
    [
        ("", 422, "model"),
        ("model=tiny&n=0", 422, "n"),
        ("model=tiny&n=101", 422, "n"),
        ("model=tiny&offset=-1", 422, "offset"),
        ("model=tiny&train_on=user", 400, "one of assistant, last-assistant, all"),
        ("model=tiny&sequence_length=7", 400, "8 to 4194304"),
    ],
)
async def test_a_preview_out_of_range_is_refused(ann: httpx.AsyncClient, query: str, code: int, words: str) -> None:
    answer = await ann.get(f"/horizon/v1/datasets/chats/preview?{query}")
    assert answer.status_code == code
    assert words in answer.json()["error"]["message"] + str(answer.json()["error"]["violations"])


async def test_the_dataset_of_another_user_is_previewed_like_none(connect: Any) -> None:
    anns = await connect("bob").get("/horizon/v1/datasets/chats/preview?model=tiny")
    none = await connect("bob").get("/horizon/v1/datasets/other/preview?model=tiny")
    assert (anns.status_code, none.status_code) == (404, 404)
    assert anns.json()["error"]["message"].replace("chats", "other") == none.json()["error"]["message"]


async def test_refused_tokens_leave_one_line_a_minute(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            await connect("hzn_guessed").get("/horizon/v1/node")
    (line,) = [record.getMessage() for record in caplog.records]
    assert "refused 1 wrong" in line
    assert "guessed" not in line
