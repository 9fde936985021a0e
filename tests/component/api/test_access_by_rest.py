"""Who may call what by REST: every route, for every kind of caller. A route without a case fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx
from fastapi.routing import APIRoute
from starlette.routing import Route
from tests.access_scene import CALLERS, REFUSED, Scene
from tests.component.api.access_cases import ALL, CASES, SEE_JOB, SEE_PUSHED, Row, expected
from tests.daemon_parts import chat_rows

from horizon_server.api.http.server import make_app
from horizon_server.api.http.web_page import ADDRESSES, WebPage

WEB_FILES = "/web/{digest}/{path:path}"
OPEN_ROUTES = (*ADDRESSES, WEB_FILES, "/version", "/openapi.json", "/healthz", "/readyz")
ROUTES: Mapping[str, Row] = {
    "/horizon/v1/me": ALL,
    "/horizon/v1/job-schema": ALL,
    "/horizon/v1/stream": SEE_JOB,
    "/horizon/v1/jobs/{job_id}/series": SEE_JOB,
    "/horizon/v1/jobs/{job_id}/log": SEE_JOB,
    "/horizon/v1/jobs/{job_id}/answers": SEE_JOB,
    "/horizon/v1/node": ALL,
    "/horizon/v1/queue": ALL,
    "/horizon/v1/usage": ALL,
    "/horizon/v1/quota": ALL,
    "/horizon/v1/projects": ALL,
    "/horizon/v1/jobs": ALL,
    "/horizon/v1/jobs/{job_id}": SEE_JOB,
    "/horizon/v1/jobs/{job_id}/events": SEE_JOB,
    "/horizon/v1/jobs/{job_id}/metrics": SEE_JOB,
    "/horizon/v1/jobs/{job_id}/checkpoints": SEE_JOB,
    "/horizon/v1/datasets": ALL,
    "/horizon/v1/datasets/{name}/preview": SEE_PUSHED,
    "/horizon/v1/models": ALL,
    "/v1/files": ALL,
    "/v1/files/{file_id}": SEE_PUSHED,
    "/v1/files/{file_id}/content": SEE_PUSHED,
    "/v1/fine_tuning/jobs": ALL,
    "/v1/fine_tuning/jobs/{job_id}": SEE_JOB,
    "/v1/fine_tuning/jobs/{job_id}/events": SEE_JOB,
    "/v1/fine_tuning/jobs/{job_id}/checkpoints": SEE_JOB,
    "/v1/models": ALL,
    "/v1/models/{model:path}": SEE_PUSHED,
}
# Each answers whom the call of gRPC answers.
CHANGES: Mapping[tuple[str, str], tuple[str, Callable[[Any, Scene], Any]]] = {
    ("POST", "/horizon/v1/jobs"): (
        "JobService/SubmitJob",
        lambda r, scene: {**_spec_body(scene), "request_id": r.request_id},
    ),
    ("POST", "/horizon/v1/jobs/plan"): ("JobService/PlanJob", lambda _, scene: _spec_body(scene)),
    ("POST", "/horizon/v1/jobs/{job_id}/pause"): ("JobService/PauseJob", lambda *_: None),
    ("POST", "/horizon/v1/jobs/{job_id}/resume"): ("JobService/ResumeJob", lambda *_: None),
    ("POST", "/horizon/v1/jobs/{job_id}/cancel"): ("JobService/CancelJob", lambda *_: None),
    ("POST", "/horizon/v1/jobs/{job_id}/keep"): ("HousekeepingService/KeepJob", lambda *_: None),
    ("PATCH", "/horizon/v1/jobs/{job_id}"): ("JobService/UpdateJob", lambda r, _: {"priority": r.priority}),
    ("DELETE", "/horizon/v1/jobs/{job_id}/checkpoints/{step}"): (
        "CheckpointService/DeleteCheckpoint",
        lambda *_: None,
    ),
    ("POST", "/horizon/v1/jobs/{job_id}/checkpoints/{step}/keep"): (
        "CheckpointService/KeepCheckpoint",
        lambda r, _: {"kept": r.kept},
    ),
    ("POST", "/v1/files"): (
        "DatasetService/CreateDataset",
        lambda r, _: Form(data={"purpose": "fine-tune"}, files={"file": (f"{r.name}.jsonl", chat_rows(2))}),
    ),
    ("DELETE", "/v1/files/{file_id}"): ("DatasetService/DeleteDataset", lambda *_: None),
    ("POST", "/v1/fine_tuning/jobs"): (
        "JobService/SubmitJob",
        lambda _, scene: {
            "model": str(scene.daemon.model_folder),
            "training_file": "public",
            "horizon": {"project": "ann"},
        },
    ),
    ("POST", "/v1/fine_tuning/jobs/{job_id}/pause"): ("JobService/PauseJob", lambda *_: None),
    ("POST", "/v1/fine_tuning/jobs/{job_id}/resume"): ("JobService/ResumeJob", lambda *_: None),
    ("POST", "/v1/fine_tuning/jobs/{job_id}/cancel"): ("JobService/CancelJob", lambda *_: None),
    ("DELETE", "/v1/models/{model:path}"): ("CheckpointService/DeleteCheckpoint", lambda *_: None),
    ("POST", "/v1/completions"): (
        "CheckpointService/SampleCheckpoint",
        lambda r, _: {"model": f"{r.job_id}@{r.step}", "prompt": "hello", "max_tokens": 1},
    ),
    ("POST", "/v1/chat/completions"): (
        "CheckpointService/SampleCheckpoint",
        lambda r, _: {"model": f"{r.job_id}@{r.step}", "messages": [{"role": "user", "content": "hello"}]},
    ),
}


class Form(dict[str, Any]):
    """A body that is no JSON: arguments of httpx."""


_HTTP = {"OK": 200, "PERMISSION_DENIED": 403, "NOT_FOUND": 404, "FAILED_PRECONDITION": 409, "INVALID_ARGUMENT": 400}


def _spec_body(scene: Scene) -> dict[str, Any]:
    return {"spec": scene.daemon.spec("theirs", dataset="public", project="ann").to_mapping()}


async def test_every_route_answers_every_caller_as_it_should(scene: Scene) -> None:
    app = make_app(scene.services, scene.world.metrics, metrics_open=False, ready=lambda: None)
    app.state.streams.end()  # so that they end at once for those who may open one
    served = _served(app)
    routes = {path for method, path in served if method == "GET"}
    assert routes == {*ROUTES, *OPEN_ROUTES, "/metrics"}, "every route needs a case"
    wrong = []
    web_file = f"/web/{WebPage.load().digest}/app.js"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://node") as client:
        for template in routes:
            path = web_file if template == WEB_FILES else template.replace("{job_id}", scene.job.job_id)
            path = path.replace("{name}", "chats").replace("{file_id}", "chats").replace("{model:path}", "tiny")
            for caller in CALLERS:
                token = scene.tokens[caller]
                headers = {"Authorization": f"Bearer {token}"} if token else {}
                query = {"model": "tiny"} if path.endswith("/preview") else {}
                query = {"jobs": scene.job.job_id} if path.endswith("/stream") else query
                code = (await client.get(path, headers=headers, params=query)).status_code
                if template == "/metrics":
                    should = 401 if caller in REFUSED else 200
                elif template in OPEN_ROUTES:
                    should = 200
                else:
                    should = 401 if caller in REFUSED else _HTTP[expected(ROUTES[template], caller)]
                if code != should:
                    wrong.append(f"{template} {caller}: {code}, not {should}")
    assert not wrong, "\n".join(wrong)


async def test_every_change_by_rest_answers_every_caller_as_that_by_grpc(scene: Scene) -> None:
    app = make_app(scene.services, scene.world.metrics, metrics_open=False, ready=lambda: None)
    served = _served(app)
    assert {one for one in served if one[0] not in ("GET", "HEAD")} == CHANGES.keys(), "every change needs a case"
    wrong = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://node") as client:
        for (method, template), (call, body) in CHANGES.items():
            for caller in CALLERS:
                case = CASES[call][0]
                request = await case.make(scene)
                job_id, step = getattr(request, "job_id", ""), getattr(request, "step", 0)
                path = template.replace("{model:path}", f"{job_id}@{step}")
                path = path.format(job_id=job_id, step=step, file_id=getattr(request, "name", ""))
                given = body(request, scene)
                kind = given if isinstance(given, Form) else {"json": given}
                headers = {"Authorization": f"Bearer {scene.tokens[caller]}"} if scene.tokens[caller] else {}
                answer = await client.request(method, path, headers=headers, **kind)
                outcome = expected(case.outcomes, caller)
                should = 401 if caller in REFUSED else _HTTP[case.instead if outcome == "OK" else outcome]
                if answer.status_code != should and not (should == 200 and answer.status_code == 204):
                    wrong.append(f"{method} {template} {caller}: {answer.status_code}, not {should}: {answer.text}")
    assert not wrong, "\n".join(wrong)


def _served(app: Any) -> set[tuple[str, str]]:
    """The methods and paths, without those of `test_access_by_tinker.py`."""
    found = {(method, route.path) for route in routes_of(app) for method in route.methods or ()}
    return {(method, path) for method, path in found if not path.startswith("/api/v1/")}


def routes_of(app: Any) -> list[Route]:
    """The routes of an app and of the routers that it includes."""
    found: list[Route] = []
    for route in app.routes:
        found += [route] if isinstance(route, Route | APIRoute) else routes_of(route.original_router)
    return found
