"""What is refused below /api/v1, and how; and what is taken twice and done once."""

from __future__ import annotations

from typing import Any

import pytest
from tests.component.api.tinker.conftest import Api
from tinker.types import Datum, ModelInput, TensorData

from horizon_server.api.tinker import futures


def datum(**inputs: Any) -> Datum:
    given: dict[str, Any] = {"target_tokens": [6, 7, 8], **inputs}
    return Datum(model_input=ModelInput.from_ints([5, 6, 7]), loss_fn_inputs=given)


def numbers(dtype: Any = "float32", shape: list[int] | None = None) -> TensorData:
    return TensorData(data=[6, 7, 8] if dtype == "int64" else [6.0, 7.0, 8.0], dtype=dtype, shape=shape or [3])


async def test_a_field_that_is_not_known_is_refused(ann: Api) -> None:
    model = await ann.model()
    for call, body in (
        ("create_session", {"nmae": "x"}),
        ("create_model", {"session_id": ann.session, "model_seq_id": 1, "base_model": "tiny", "lora_config": {"r": 1}}),
        ("optim_step", {"model_id": model, "seq_id": 1, "adam_params": {"lr": 1.0}}),
        ("save_weights", {"model_id": model, "seq_id": 1, "path": "a", "name": "a"}),
        ("asample", {"base_model": "tiny", "prompt": {"chunks": []}, "sampling_params": {"top_q": 1}}),
    ):
        refused = await ann.post(call, **body)
        assert (refused.status_code, refused.json()["category"]) == (400, "user"), call
        assert refused.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ([datum(target_tokens=numbers())], "has the dtype float32; it must be int64 or int32"),
        ([datum(weights=numbers("int64"))], "has the dtype int64; it must be float32"),
        ([datum(clip_low_threshold=numbers())], "clip_low_threshold is no input of a loss here"),
        ([datum(mask=numbers())], "mask is no input of a loss here"),
        ([datum(weights=numbers(shape=[1, 3]))], "has the shape [1, 3]"),
        ([datum(weights=TensorData(data=[1.0], dtype="float32", shape=[1]))], "weights has 1 numbers for 3 tokens"),
        ([datum(), datum(target_tokens=[6, 7])], "data[1]"),
        ([], "data"),
    ],
    ids=["targets", "weights", "thresholds", "a mask", "a shape", "too few", "the second", "none"],
)
async def test_documents_that_cannot_be_used_are_refused_by_field(ann: Api, batch: list[Datum], why: str) -> None:
    refused = await ann.forward_backward(await ann.model(), batch)
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_data")
    assert why in refused.json()["error"]


async def test_a_body_that_is_no_protobuf_is_refused(ann: Api) -> None:
    for content, kind in ((b"\xff" * 9, "application/x-protobuf"), (b"{}", "application/json")):
        refused = await ann.ask("POST", "forward_backward", content=content, headers={"Content-Type": kind})
        assert refused.status_code == 400


async def test_what_is_anothers_is_answered_like_nothing(
    ann: Api, bob: Api, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(futures, "MAX_WAIT_S", 0.01)
    model = await ann.model()
    job = await ann.job(model)
    world.write_checkpoint(job, 1, {"config.json": b"{}"})
    checkpoints = world.services.jobs.folders.checkpoints(job.job_id)
    for kind in ("weights", "sampler", "external"):
        checkpoints.set_kept(1, kept=True, name=f"{kind}.mine")
    future = (await ann.step(model, 1)).json()["request_id"]
    await bob.model(base_model=str(world.daemon.model_folder))

    async def asked(of: str) -> list[tuple[int, str]]:
        saved, session = f"tinker://{of}/weights/mine", of.partition(":")[0]
        bodies: list[tuple[str, dict[str, Any]]] = [
            ("get_info", {"model_id": of}),
            ("optim_step", {"model_id": of, "seq_id": 2, "adam_params": {}}),
            ("save_weights", {"model_id": of, "seq_id": 2, "path": "a"}),
            ("retrieve_future", {"request_id": future.replace(model, of)}),
            ("weights_info", {"tinker_path": saved}),
            ("load_weights", {"session_id": bob.session, "model_seq_id": 5, "path": saved, "optimizer": True}),
            ("create_model", {"session_id": session, "model_seq_id": 1, "base_model": "tiny"}),
            ("session_heartbeat", {"session_id": session}),
            ("create_sampling_session", {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}),
            ("asample", {"model_path": saved, "prompt": {"chunks": [{"tokens": [5]}]}, "sampling_params": {}}),
        ]
        answers = [await bob.post(call, **body) for call, body in bodies]
        run, named = f"training_runs/{of}", f"training_runs/{of}/checkpoints"
        answers += [await bob.ask("DELETE", f"{named}/{kind}/mine") for kind in ("weights", "sampler_weights")]
        urls = f"{named}/external_weights/mine/external_weights_urls"
        answers += [await bob.ask("GET", path) for path in (run, named, urls, f"sessions/{session}")]
        return [(one.status_code, one.text.replace(of, "OF").replace(session, "SESSION")) for one in answers]

    found = await asked(model)
    assert found == await asked(f"{'0' * 24}:train:0")
    assert {status for status, _ in found} == {404}
    assert (await bob.ask("GET", "training_runs")).json()["cursor"]["total_count"] == 1


async def test_who_may_only_look_makes_nothing(ann: Api, eve: Api, world: Any) -> None:
    model = await ann.model()
    seen = await eve.post("get_info", model_id=model)
    assert seen.json()["model_data"]["model_name"] == "tiny"
    assert (await eve.step(model, 1)).status_code == 403
    session = (await eve.post("create_session")).json()["session_id"]
    refused = await eve.post("create_model", session_id=session, model_seq_id=0, base_model="tiny")
    assert (refused.status_code, refused.json()["code"]) == (403, "not_allowed")
    _, secret = await world.services.accounts.create_token("ann", lifetime_s=None, scope="read")
    ann.headers["X-API-Key"] = f"tml-{secret}"
    assert (await ann.step(model, 1)).status_code == 403
    assert (await ann.post("get_info", model_id=model)).status_code == 200


@pytest.mark.parametrize("key", ["", "tml-hzn_wrong", "tml-"])
async def test_a_wrong_key_is_not_accepted(ann: Api, key: str) -> None:
    ann.headers["X-API-Key"] = key
    refused = await ann.post("create_session")
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated")


async def test_a_key_may_be_a_bearer_too(ann: Api, world: Any) -> None:
    ann.headers.clear()
    ann.headers["Authorization"] = f"Bearer tml-{world.tokens['ann']}"
    assert (await ann.post("create_session")).status_code == 200


@pytest.mark.parametrize(
    "path", ["audit", "auth/token", "billing/usage/events", "copy_weights", "create_custom_loss", "sessions/search"]
)
async def test_what_is_not_served_says_so(ann: Api, path: str) -> None:
    refused = await ann.post(path)
    assert refused.status_code == 404
    assert f"/api/v1/{path} is not served here" in refused.json()["error"]


async def test_a_model_that_does_not_fit_is_refused_with_the_numbers(ann: Api) -> None:
    session = (await ann.post("create_session")).json()["session_id"]
    notes = {"horizon.tokens_per_step": "60000000"}
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "user_metadata": notes}
    refused = await ann.post("create_model", **body)
    assert (refused.status_code, refused.json()["code"]) == (400, "does_not_fit")
    assert "GiB" in refused.json()["error"]
    for name, text in (("horizon.colour", "blue"), ("horizon.idle_minutes", "soon")):
        refused = await ann.post("create_model", **{**body, "user_metadata": {name: text}})
        assert refused.status_code == 400
        assert name in refused.json()["error"]


async def test_notes_that_begin_with_horizon_are_options_of_the_job(ann: Api) -> None:
    notes = {"horizon.sequence_length": "64", "horizon.idle_minutes": "2.5", "team": "blue"}
    job = await ann.job(await ann.model(user_metadata=notes))
    assert (job.spec.train.sequence_length, job.spec.session.idle_minutes) == (64, 2.5)
    assert dict(job.spec.metadata) == {"team": "blue"}


async def test_a_model_is_made_once(ann: Api, world: Any) -> None:
    assert await ann.model() == await ann.model()
    jobs, _ = await world.services.jobs.list(await world.caller("ann"), page_size=10)
    assert len(jobs) == 1


async def test_telemetry_is_taken_and_dropped(ann: Api) -> None:
    assert (await ann.post("telemetry", session_id="x", events=[{"a": 1}])).json() == {"status": "accepted"}


async def test_who_calls_too_often_is_told_when_to_call_again(
    ann: Api, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = world.services.limits._calls
    monkeypatch.setattr(type(rate), "reserve", lambda self, *_: None if self is rate else 0.0)
    refused = await ann.post("create_session")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.headers["x-should-retry"] == "true"
