"""Every route: what it answers, to whom, and how it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from horizon_server.api.http.app import make_app
from horizon_server.errors import Draining
from horizon_server.records.job import CheckpointRecord, JobState
from horizon_server.telemetry.metrics import Metrics

_OF_A_JOB = ["jobs/j-1", "jobs/j-1/events", "jobs/j-1/metrics", "jobs/j-1/checkpoints"]
GUARDED = [*_OF_A_JOB, "node", "queue", "jobs", "datasets", "datasets/chats/preview", "models"]


@pytest.mark.parametrize("path", GUARDED)
async def test_every_resource_asks_for_a_token(connect: Any, path: str) -> None:
    answer = await connect().get(f"/horizon/v1/{path}")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["reason"] == "UNAUTHENTICATED"
    assert (await connect("token-stolen").get(f"/horizon/v1/{path}")).status_code == 401


@pytest.mark.parametrize("header", ["token-ada", "Basic token-ada", "Bearer", "Bearer "])
async def test_only_bearer_tokens_count(connect: Any, header: str) -> None:
    answer = await connect().get("/horizon/v1/node", headers={"Authorization": header})
    assert answer.status_code == 401


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/metrics", "/version", "/openapi.json"])
async def test_open_on_loopback(connect: Any, path: str) -> None:
    assert (await connect().get(path)).status_code == 200


async def test_metrics_and_health_can_be_put_behind_a_token(connect: Any, services: Any, metrics: Metrics) -> None:
    app = make_app(services, metrics, metrics_open=False, health_open=False, ready=lambda: None)
    for path in ("/metrics", "/healthz", "/readyz"):
        assert (await connect(None, app).get(path)).status_code == 401
        assert (await connect("token-eve", app).get(path)).status_code == 200


async def test_readiness_says_why_not(connect: Any, readiness: list[str]) -> None:
    assert (await connect().get("/readyz")).json() == {"ready": True, "message": ""}
    readiness.append("the daemon drains and takes no new work")
    answer = await connect().get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"ready": False, "message": "the daemon drains and takes no new work"}
    assert (await connect().get("/healthz")).status_code == 200


async def test_version_and_node(ada: httpx.AsyncClient) -> None:
    assert (await ada.get("/version")).json() == {"version": "9.9"}
    node = (await ada.get("/horizon/v1/node")).json()
    assert (node["hostname"], node["user"], node["role"]) == ("box", "ada", "user")
    assert node["accelerators"] == [{"index": 0, "name": "GPU", "memory_bytes": 8}]


async def test_a_job_in_full(ada: httpx.AsyncClient, services: Any, make_job: Any, make_step: Any) -> None:
    services.jobs.add(dataclasses.replace(make_job(), last_step=make_step(5, math.nan)))
    job = (await ada.get("/horizon/v1/jobs/j-1")).json()
    assert (job["job_id"], job["name"], job["state"], job["progress"]) == ("j-1", "name-of-j-1", "RUNNING", 0.5)
    assert job["create_time"] == "2001-09-09T01:46:40Z"
    assert job["end_time"] is None
    assert job["eta_s"] == 2.5
    assert job["last_step"]["loss"] is None  # JSON has no NaN
    assert job["last_step"]["grad_norm"] == 0.5
    assert job["plan"]["host_total_bytes"] == 5
    assert job["plan"]["fits"] is True
    assert job["plan"]["prediction"]["tokens_per_second"] == 500.0
    assert job["spec"]["train"]["learning_rate"] == 1e-5


async def test_before_the_first_step_the_plan_tells_the_time_left(
    ada: httpx.AsyncClient, services: Any, make_job: Any
) -> None:
    services.jobs.add(make_job())
    assert (await ada.get("/horizon/v1/jobs/j-1")).json()["eta_s"] == 10 * 2.0


async def test_a_job_that_has_ended_has_no_time_left(
    ada: httpx.AsyncClient, services: Any, make_job: Any, make_step: Any
) -> None:
    services.jobs.add(
        dataclasses.replace(make_job(job_state=JobState.FAILED), last_step=make_step(5), ended_s=1e9 + 90)
    )
    job = (await ada.get("/horizon/v1/jobs/j-1")).json()
    assert job["eta_s"] is None
    assert job["end_time"] == "2001-09-09T01:48:10Z"


async def test_strangers_learn_nothing(connect: Any, services: Any, make_job: Any) -> None:
    services.jobs.add(make_job())
    for path in _OF_A_JOB:
        theirs = await connect("token-bob").get(f"/horizon/v1/{path}")
        nobodys = await connect("token-bob").get(f"/horizon/v1/{path.replace('j-1', 'j-2')}")
        assert (theirs.status_code, nobodys.status_code) == (404, 404)
        assert theirs.json()["error"]["message"].replace("j-1", "j-2") == nobodys.json()["error"]["message"]
    for token in ("token-root", "token-eve"):
        assert (await connect(token).get("/horizon/v1/jobs/j-1")).status_code == 200


async def test_pages_of_jobs(ada: httpx.AsyncClient, services: Any, make_job: Any) -> None:
    for number in range(5):
        services.jobs.add(make_job(f"j-{number}"))
    seen, token = [], ""
    while True:
        page = (await ada.get("/horizon/v1/jobs", params={"page_size": 2, "page_token": token})).json()
        seen += [job["job_id"] for job in page["jobs"]]
        token = page["next_page_token"]
        if not token:
            break
    assert seen == ["j-4", "j-3", "j-2", "j-1", "j-0"]


async def test_jobs_by_state(ada: httpx.AsyncClient, services: Any, make_job: Any) -> None:
    for job_state in (JobState.RUNNING, JobState.QUEUED, JobState.FAILED):
        services.jobs.add(make_job(f"j-{job_state}", job_state=job_state))
    answer = await ada.get("/horizon/v1/jobs?state=RUNNING&state=QUEUED")
    assert {job["state"] for job in answer.json()["jobs"]} == {"RUNNING", "QUEUED"}
    refused = await ada.get("/horizon/v1/jobs?state=ASLEEP")
    assert refused.status_code == 422
    (violation,) = refused.json()["error"]["violations"]
    assert violation["field"] == "state.0"
    assert "ASLEEP" in violation["description"]
    assert "QUEUED" in violation["description"]


@pytest.mark.parametrize("query", ["page_size=0", "page_size=1001", "page_size=many", f"page_token={'x' * 201}"])
async def test_malformed_parameters_are_named(ada: httpx.AsyncClient, query: str) -> None:
    answer = await ada.get(f"/horizon/v1/jobs?{query}")
    assert answer.status_code == 422
    error = answer.json()["error"]
    assert error["reason"] == "INVALID_SPEC"
    assert error["violations"][0]["field"] == query.split("=")[0]


async def test_a_wrong_page_token_is_the_services_refusal(ada: httpx.AsyncClient) -> None:
    answer = await ada.get("/horizon/v1/jobs?page_token=bad")
    assert answer.status_code == 400
    assert "next_page_token" in answer.json()["error"]["message"]


async def test_binary_input_is_never_echoed(ada: httpx.AsyncClient) -> None:
    answer = await ada.get("/horizon/v1/jobs?page_size=%00%FF%FE%1B%5B31m")
    assert answer.status_code == 422
    description = answer.json()["error"]["violations"][0]["description"]
    assert description.isprintable()
    assert "31m" not in description


async def test_the_queue_shows_strangers_jobs_without_detail(connect: Any, services: Any, make_job: Any) -> None:
    services.jobs.add(make_job("j-1", owner="bob"))
    services.jobs.add(dataclasses.replace(make_job("j-2", job_state=JobState.QUEUED), queue_position=1))
    theirs, mine = (await connect("token-ada").get("/horizon/v1/queue")).json()["jobs"]
    shown = {name for name, value in theirs.items() if value is not None}
    assert shown == {"job_id", "owner", "state", "position"}
    assert (mine["name"], mine["position"], mine["num_steps"]) == ("name-of-j-2", 1, 10)
    assert "name-of-j-1" in (await connect("token-eve").get("/horizon/v1/queue")).text


async def test_checkpoints(ada: httpx.AsyncClient, services: Any, make_job: Any, checkpoint: CheckpointRecord) -> None:
    services.jobs.add(make_job())
    services.jobs.kept.append(checkpoint)
    (listed,) = (await ada.get("/horizon/v1/jobs/j-1/checkpoints")).json()["checkpoints"]
    assert (listed["step"], listed["size_bytes"], listed["last"], listed["best"]) == (10, 9, True, False)
    assert listed["files"] == [{"path": "model.safetensors", "sha256": "f" * 64, "size_bytes": 9}]


async def test_datasets_and_models(ada: httpx.AsyncClient, connect: Any) -> None:
    (dataset,) = (await ada.get("/horizon/v1/datasets")).json()["datasets"]
    assert (dataset["name"], dataset["state"], dataset["num_rows"], dataset["size_bytes"]) == ("chats", "READY", 3, 7)
    (model,) = (await ada.get("/horizon/v1/models")).json()["models"]
    assert (model["name"], model["state"]) == ("tiny", "UPLOADING")
    assert (await connect("token-bob").get("/horizon/v1/datasets")).json()["datasets"] == []


@pytest.mark.parametrize(
    "path", ["/nowhere", "/v1/models", "/api/v1/jobs", "/horizon/v1/job", "/docs", "/horizon/v1/jobs/"]
)
async def test_unknown_routes_are_json(connect: Any, path: str) -> None:
    answer = await connect("token-ada").get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["reason"] == "NOT_FOUND"
    assert path in answer.json()["error"]["message"]


async def test_nothing_can_be_written(ada: httpx.AsyncClient) -> None:
    answer = await ada.post("/horizon/v1/jobs", json={"name": "x"})
    assert answer.status_code == 405
    assert answer.json()["error"]["reason"] == "METHOD_NOT_ALLOWED"
    assert "gRPC" in answer.json()["error"]["message"]


@pytest.mark.parametrize("length", ["65537", "-1", "9" * 40, "many"])
async def test_large_bodies_are_refused_unread(ada: httpx.AsyncClient, length: str) -> None:
    answer = await ada.request("GET", "/horizon/v1/node", headers={"Content-Length": length})
    assert answer.status_code == 413
    assert answer.json()["error"]["reason"] == "TOO_LARGE"


async def test_a_bug_shows_nothing_of_the_inside(ada: httpx.AsyncClient, services: Any, metrics: Metrics) -> None:
    services.jobs.bug = RuntimeError("/secret/path exploded")
    answer = await ada.get("/horizon/v1/jobs/j-1")
    assert answer.status_code == 500
    assert answer.json()["error"]["reason"] == "INTERNAL"
    assert "secret" not in answer.text
    assert "Traceback" not in answer.text
    assert answer.headers["x-content-type-options"] == "nosniff"
    labels = {"method": "GET", "route": "/horizon/v1/jobs/{job_id}", "code": "500"}
    assert metrics.registry.get_sample_value("http_request_duration_seconds_count", labels) == 1


async def test_a_domain_error_says_when_to_come_back(ada: httpx.AsyncClient, services: Any) -> None:
    services.jobs.bug = Draining("the daemon is shutting down", retry_after_s=1.5)
    answer = await ada.get("/horizon/v1/jobs/j-1")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "2"
    assert answer.json() == {
        "error": {"reason": "DRAINING", "message": "the daemon is shutting down", "violations": []}
    }


@pytest.mark.parametrize("path", ["/", "/metrics", "/horizon/v1/node", "/nowhere"])
async def test_security_headers_are_everywhere(ada: httpx.AsyncClient, path: str) -> None:
    headers = (await ada.get(path)).headers
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["x-frame-options"] == "DENY"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["cache-control"] == "no-store"


async def test_requests_are_measured_by_route(ada: httpx.AsyncClient, metrics: Metrics) -> None:
    for path in ("/horizon/v1/jobs/a", "/horizon/v1/jobs/b", "/nowhere", "/elsewhere", "/version"):
        await ada.get(path)
    count = metrics.registry.get_sample_value
    name = "http_request_duration_seconds_count"
    assert count(name, {"method": "GET", "route": "/horizon/v1/jobs/{job_id}", "code": "404"}) == 2
    assert count(name, {"method": "GET", "route": "unmatched", "code": "404"}) == 2
    assert count(name, {"method": "GET", "route": "/version", "code": "200"}) == 1


async def test_metrics_are_shown_as_text(connect: Any) -> None:
    answer = await connect().get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert 'horizon_build_info{version="9.9"} 1.0' in answer.text


async def test_the_schema_documents_every_route_and_error(app: FastAPI, connect: Any) -> None:
    schema = (await connect().get("/openapi.json")).json()
    paths = {
        path.removeprefix("/horizon/v1/").replace("{job_id}", "j-1").replace("{name}", "chats")
        for path in schema["paths"]
    }
    assert paths == {*GUARDED, "/healthz", "/readyz", "/metrics", "/version"}
    for path in (path for path in schema["paths"] if path.startswith("/horizon")):
        operation = schema["paths"][path]["get"]
        assert operation["security"] == [{"HTTPBearer": []}], path
        refusal = operation["responses"]["422"]["content"]["application/json"]["schema"]
        assert refusal == {"$ref": "#/components/schemas/ErrorBody"}, path


async def test_a_preview_in_full(ada: httpx.AsyncClient) -> None:
    query = {"model": "tiny", "n": "2", "offset": "4", "train_on": "all", "sequence_length": "64"}
    preview = (await ada.get("/horizon/v1/datasets/chats/preview", params=query)).json()
    assert len(preview["rows"]) == 2
    assert preview["rows"][0] == {
        "file": "a.jsonl", "unit": "line", "number": 1, "spans": [{"text": "tiny 4", "trained": True}], "num_tokens": 2,
        "num_trained_tokens": 1, "num_cut_tokens": 0, "num_documents": 0, "clipped": False, "problems": [],
    }  # fmt: skip
    options = {
        "num_rows": 50,
        "format": "messages",
        "method": "sft",
        "train_on": "all",
        "sequence_length": 64,
        "offset": 4,
    }
    assert {name: preview[name] for name in options} == options


@pytest.mark.parametrize(
    ("query", "code", "words"),
    [
        ("", 422, "model"),
        ("model=tiny&n=0", 422, "n"),
        ("model=tiny&n=101", 422, "n"),
        ("model=tiny&offset=-1", 422, "offset"),
        ("model=tiny&train_on=user", 400, "one of assistant, last-assistant, all"),
        ("model=tiny&sequence_length=7", 400, "8 to 1048576"),
    ],
)
async def test_a_preview_out_of_range_is_refused(ada: httpx.AsyncClient, query: str, code: int, words: str) -> None:
    answer = await ada.get(f"/horizon/v1/datasets/chats/preview?{query}")
    assert answer.status_code == code
    assert words in answer.json()["error"]["message"] + str(answer.json()["error"]["violations"])


async def test_anothers_dataset_is_previewed_like_none(connect: Any) -> None:
    anothers = await connect("token-bob").get("/horizon/v1/datasets/chats/preview?model=tiny")
    none = await connect("token-bob").get("/horizon/v1/datasets/other/preview?model=tiny")
    assert (anothers.status_code, none.status_code) == (404, 404)
    assert anothers.json() == {
        "error": {**none.json()["error"], "message": "dataset chats does not exist, or is not yours"}
    }
