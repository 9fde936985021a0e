"""Who may call what below /api/v1: every route, for every kind of caller. A route without a case fails."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from tests.access_scene import CALLERS, REFUSED, Scene
from tests.component.api.access_cases import ALL, CHANGE_JOB, SAMPLE, SEE_JOB, Row, expected, row
from tests.component.api.test_access_by_rest import routes_of
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.types import Datum, ForwardBackwardInput, ForwardBackwardRequest, ModelInput

from horizon_server.api.http.server import make_app
from horizon_server.api.tinker import futures

#                  read other watcher member manager granted viewer admin owner admin_read
OWN = row("          y    0      0      0      0       0      0     0     y     0")
CHANGE_OWN = row("   -    0      0      0      0       0      0     0     y     0")
NONE = row("         0    0      0      0      0       0      0     0     0     0")
_HTTP = {"OK": 200, "PERMISSION_DENIED": 403, "NOT_FOUND": 404}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is sent, and what each caller is answered; `ok` is the status of who may."""

    outcomes: Row
    body: dict[str, Any] = field(default_factory=dict)
    content: bytes = b""
    ok: int = 200


class Made:
    """A model of ann's with checkpoints, and what is asked of it. Calls have numbers of their own."""

    def __init__(self) -> None:
        self.session = self.model = self.download = ""
        self._numbers = itertools.count(1)

    async def prepare(self, scene: Scene, client: httpx.AsyncClient) -> None:
        headers = {"X-API-Key": f"tml-{scene.tokens['owner']}"}

        async def post(call: str, **body: Any) -> Any:
            answer = await client.post(f"/api/v1/{call}", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
            return answer.json()

        self.session = (await post("create_session"))["session_id"]
        new = {"session_id": self.session, "model_seq_id": 0, "base_model": "tiny"}
        self.model = (await post("create_model", **new))["model_id"]
        job = await scene.services.tinker_models.find(scene.world.principal("ann"), self.model)
        scene.daemon.write_checkpoint(job, 3, {"config.json": b"{}"})
        self.folder = scene.services.jobs.folders.checkpoints(job.job_id)
        self.name()
        urls = await client.get(self.path("external_weights") + "/external_weights_urls", headers=headers)
        (self.download,) = urls.json()["urls"].values()

    def name(self) -> None:
        """Give the checkpoint the names that may have been taken from it."""
        for kind in ("weights", "sampler", "external"):
            self.folder.set_kept(3, kept=True, name=f"{kind}.mine")

    def path(self, kind: str) -> str:
        """The path of the checkpoint."""
        return f"/api/v1/training_runs/{self.model}/checkpoints/{kind}/mine"

    def call(self, **body: Any) -> dict[str, Any]:
        """A call of the model."""
        return {"model_id": self.model, "seq_id": next(self._numbers), **body}

    def documents(self) -> bytes:
        """A call of the model that carries a document."""
        tensors: dict[str, Any] = {"target_tokens": [6, 7]}
        batch = [Datum(model_input=ModelInput.from_ints([5, 6]), loss_fn_inputs=tensors)]
        inputs = ForwardBackwardInput(data=batch, loss_fn="cross_entropy")
        request = ForwardBackwardRequest(forward_backward_input=inputs, **self.call())
        return forward_backward_request_to_proto(request).SerializeToString()

    def cases(self) -> Mapping[tuple[str, str], Case]:
        """Every route."""
        run, named = "/api/v1/training_runs/{model_id}", "/api/v1/training_runs/{model_id}/checkpoints/{kind}/{name}"
        saved = f"tinker://{self.model}/weights/mine"
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
        new = {"session_id": self.session, "model_seq_id": 0, "base_model": "tiny"}
        loaded = {"session_id": self.session, "model_seq_id": next(self._numbers), "path": saved, "optimizer": True}
        sampler = {"session_id": self.session, "sampling_session_seq_id": 0, "model_path": saved}
        config = {"sdk_version": "0.38.0"}
        return {
            ("GET", "/api/v1/healthz"): Case(outcomes=ALL),
            ("GET", "/api/v1/get_server_capabilities"): Case(outcomes=ALL),
            ("POST", "/api/v1/client/config"): Case(outcomes=ALL, body=config),
            ("POST", "/api/v1/client/dynamic_config"): Case(outcomes=ALL, body=config),
            ("POST", "/api/v1/telemetry"): Case(outcomes=ALL),
            ("POST", "/api/v1/create_session"): Case(outcomes=ALL),
            ("POST", "/api/v1/session_heartbeat"): Case(outcomes=OWN, body={"session_id": self.session}),
            ("POST", "/api/v1/sessions/{session_id}/finish"): Case(
                outcomes=CHANGE_OWN, body={"reason": {"type": "success"}}
            ),
            ("GET", "/api/v1/sessions"): Case(outcomes=ALL),
            ("GET", "/api/v1/sessions/{session_id}"): Case(outcomes=OWN),
            ("POST", "/api/v1/create_model"): Case(outcomes=CHANGE_OWN, body=new),
            ("POST", "/api/v1/load_weights"): Case(outcomes=CHANGE_OWN, body=loaded),
            ("POST", "/api/v1/get_info"): Case(outcomes=SEE_JOB, body={"model_id": self.model}),
            ("POST", "/api/v1/forward_backward"): Case(outcomes=CHANGE_JOB, content=self.documents()),
            ("POST", "/api/v1/optim_step"): Case(outcomes=CHANGE_JOB, body=self.call(adam_params={})),
            ("POST", "/api/v1/save_weights"): Case(outcomes=CHANGE_JOB, body=self.call(path="a")),
            ("POST", "/api/v1/save_weights_for_sampler"): Case(outcomes=CHANGE_JOB, body=self.call(path="a")),
            ("POST", "/api/v1/save_weights_external"): Case(outcomes=CHANGE_JOB, body=self.call(path="a")),
            ("POST", "/api/v1/retrieve_future"): Case(
                outcomes=SEE_JOB, body={"request_id": f"stepped/{self.model}/1/"}
            ),
            ("POST", "/api/v1/cancel_future"): Case(outcomes=ALL, body={"request_id": "sample/none"}),
            ("POST", "/api/v1/create_sampling_session"): Case(outcomes=CHANGE_OWN, body=sampler),
            ("GET", "/api/v1/samplers/{sampler}"): Case(outcomes=NONE),
            ("POST", "/api/v1/asample"): Case(
                outcomes=SAMPLE, body={"model_path": saved, "prompt": prompt, "sampling_params": {"max_tokens": 1}}
            ),
            ("GET", "/api/v1/training_runs"): Case(outcomes=ALL),
            ("GET", run): Case(outcomes=SEE_JOB),
            ("GET", f"{run}/checkpoints"): Case(outcomes=SEE_JOB),
            ("GET", "/api/v1/checkpoints"): Case(outcomes=ALL),
            ("POST", "/api/v1/weights_info"): Case(outcomes=SEE_JOB, body={"tinker_path": saved}),
            ("GET", f"{run}/checkpoints/external_weights/{{name}}/external_weights_urls"): Case(outcomes=SEE_JOB),
            ("DELETE", named): Case(outcomes=CHANGE_JOB),
            # Nobody may, and who may not see it is told that it is not there.
            ("POST", f"{named}/publish"): Case(outcomes=SEE_JOB, ok=403),
            ("DELETE", f"{named}/publish"): Case(outcomes=SEE_JOB, ok=403),
            # That it never expires changes nothing.
            ("PUT", f"{named}/ttl"): Case(outcomes=SEE_JOB),
            **{(method, "/api/v1/{path:path}"): Case(outcomes=NONE) for method in ("GET", "POST", "PUT", "DELETE")},
        }


DOWNLOAD = ("GET", "/api/v1/downloads/{secret}/{file}")


async def test_every_route_answers_every_caller_as_it_should(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futures, "MAX_WAIT_S", 0.01)
    app = make_app(scene.services, scene.world.metrics, metrics_open=False, ready=lambda: None)
    found = {(method, route.path) for route in routes_of(app) for method in route.methods or ()}
    served = {(method, path) for method, path in found if path.startswith("/api/v1") and method != "HEAD"}
    wrong = []
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://node") as client:
        made = Made()
        await made.prepare(scene, client)
        assert served == {*made.cases(), DOWNLOAD}, "every route needs a case"
        # Finishing the session comes last: nothing can be called after it.
        for method, template in sorted(made.cases(), key=lambda one: "finish" in one[1]):
            for caller in CALLERS:
                made.name()
                case = made.cases()[method, template]
                path = template.replace("{path:path}", "nothing").format(
                    model_id=made.model, session_id=made.session, kind="weights", name="mine", sampler="none"
                )
                token = scene.tokens[caller]
                headers = {"X-API-Key": f"tml-{token}"} if token else {}
                sent: dict[str, Any] = {"json": case.body} if method in ("POST", "PUT") else {}
                if case.content:
                    sent = {"content": case.content}
                    headers["Content-Type"] = "application/x-protobuf"
                answer = await client.request(method, path, headers=headers, **sent)
                should = 401 if caller in REFUSED else _HTTP[expected(case.outcomes, caller)]
                should = case.ok if should == 200 else should
                if answer.status_code != should:
                    wrong.append(f"{method} {template} {caller}: {answer.status_code}, not {should}: {answer.text}")
        # An address with a secret is for everybody who has it.
        assert (await client.get(made.download)).status_code == 200
    assert not wrong, "\n".join(wrong)
