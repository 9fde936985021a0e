"""Runs, checkpoints, sessions and samplers by Tinker's RestClient."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from peft import PeftModel
from tests.component.tinker.conftest import PATIENCE_S, TEXTS, Connect, data, datum, logprobs_of
from tests.support.daemon_process import DaemonProcess
from tests.support.pushed_state import MODEL, PushedState
from tinker import (
    BadRequestError,
    NotFoundError,
    PermissionDeniedError,
    RequestFailedError,
    RestClient,
    SamplingClient,
    ServiceClient,
    TrainingClient,
    types,
)
from tinker.types import RequestErrorCategory
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def training(kept: ServiceClient) -> TrainingClient:
    """A run with two checkpoints."""
    client = kept.create_lora_training_client(MODEL, rank=4, user_metadata={"team": "blue"}).result(PATIENCE_S)
    client.forward_backward(data(), "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-3))
    client.save_state("state", ttl_seconds=7200).result(PATIENCE_S)
    client.save_weights_for_sampler("answers").result(PATIENCE_S)
    return client


def test_what_the_server_has_is_listed(rest: RestClient) -> None:
    models = {model.model_name: model for model in rest.get_server_capabilities().result(60).supported_models}
    found = models[MODEL]
    assert (found.trainable, found.sampleable, found.max_context_length) == (True, True, 1024)


def test_a_run_is_shown(rest: RestClient, training: TrainingClient) -> None:
    run = rest.get_training_run(training.model_id).result(60)
    assert (run.training_run_id, run.base_model, run.model_owner) == (training.model_id, MODEL, "ada")
    assert (run.is_lora, run.lora_rank, run.corrupted) == (True, 4, False)
    assert run.user_metadata == {"team": "blue"}
    assert run.last_checkpoint is not None and run.last_checkpoint.checkpoint_id == "weights/state"
    assert run.last_sampler_checkpoint is not None
    assert run.last_sampler_checkpoint.checkpoint_id == "sampler_weights/answers"
    by_path = rest.get_training_run_by_tinker_path(run.last_checkpoint.tinker_path).result(60)
    assert by_path.training_run_id == run.training_run_id


def test_runs_are_listed_in_pages(rest: RestClient, training: TrainingClient) -> None:
    whole = rest.list_training_runs(limit=100).result(60)
    ids = [run.training_run_id for run in whole.training_runs]
    assert training.model_id in ids
    assert whole.cursor.total_count == len(ids)
    for offset in (0, len(ids)):
        page = rest.list_training_runs(limit=1, offset=offset).result(60)
        assert [run.training_run_id for run in page.training_runs] == ids[offset : offset + 1]
        assert (page.cursor.offset, page.cursor.limit, page.cursor.total_count) == (offset, 1, len(ids))


def test_checkpoints_are_listed(rest: RestClient, training: TrainingClient) -> None:
    found = {one.checkpoint_id: one for one in rest.list_checkpoints(training.model_id).result(60).checkpoints}
    assert found.keys() >= {"weights/state", "sampler_weights/answers"}
    state, answers = found["weights/state"], found["sampler_weights/answers"]
    assert (state.checkpoint_type, answers.checkpoint_type) == ("training", "sampler")
    assert state.tinker_path == f"tinker://{training.model_id}/weights/state"
    assert state.size_bytes is not None and state.size_bytes > 0
    assert (state.public, state.expires_at) == (False, None)
    mine = rest.list_user_checkpoints(limit=100).result(60)
    assert {one.tinker_path for one in found.values()} <= {one.tinker_path for one in mine.checkpoints}
    assert mine.cursor is not None and mine.cursor.total_count == len(mine.checkpoints)


def test_what_is_needed_to_load_a_checkpoint_is_shown(rest: RestClient, training: TrainingClient) -> None:
    for path in ("weights/state", "sampler_weights/answers"):
        info = rest.get_weights_info_by_tinker_path(f"tinker://{training.model_id}/{path}").result(60)
        assert (info.base_model, info.is_lora, info.lora_rank) == (MODEL, True, 4)


def test_a_checkpoint_is_deleted(rest: RestClient, training: TrainingClient) -> None:
    path = training.save_state("doomed").result(PATIENCE_S).path
    again = training.save_state("doomed-too").result(PATIENCE_S).path
    rest.delete_checkpoint(training.model_id, "weights/doomed").result(60)
    rest.delete_checkpoint_from_tinker_path(again).result(60)
    left = [one.tinker_path for one in rest.list_checkpoints(training.model_id).result(60).checkpoints]
    assert path not in left and again not in left
    with pytest.raises(NotFoundError):
        rest.delete_checkpoint_from_tinker_path(path).result(60)


def test_it_is_an_ordinary_job(daemon: DaemonProcess, training: TrainingClient) -> None:
    with daemon.client(daemon.user("ada")) as ours:
        sessions = [job for job in ours.jobs.list() if job.spec["method"] == "session"]
        assert any(job.state == "RUNNING" for job in sessions)


def test_sessions_and_samplers_are_shown(rest: RestClient, kept: ServiceClient, training: TrainingClient) -> None:
    sampler = kept.create_sampling_client(base_model=MODEL).result(PATIENCE_S)
    session_id = kept.holder.get_session_id()
    found = rest.get_session(session_id).result(60)
    assert training.model_id in found.training_run_ids
    assert session_id in rest.list_sessions(limit=100).result(60).sessions
    shown = rest.get_sampler(sampler._sampling_session_id).result(60)
    assert shown.base_model == MODEL


def test_what_a_checkpoint_cannot_be(rest: RestClient, training: TrainingClient) -> None:
    path = f"tinker://{training.model_id}/weights/state"
    with pytest.raises(PermissionDeniedError, match="cannot be published"):
        rest.publish_checkpoint_from_tinker_path(path).result(60)
    with pytest.raises(BadRequestError, match="stays until it is deleted"):
        rest.set_checkpoint_ttl_from_tinker_path(path, 86400).result(60)
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result(60)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_a_checkpoint_is_downloaded_by_addresses_that_need_no_key(
    rest: RestClient, training: TrainingClient, pushed: PushedState, tmp_path: Path
) -> None:
    path = training.save_weights_external("whole").result(PATIENCE_S).path
    assert path == f"tinker://{training.model_id}/external_weights/whole"
    found = rest.get_external_weights_urls(path).result(60)
    assert {"adapter_model.safetensors", "adapter_config.json"} <= found.urls.keys()
    for name, address in found.urls.items():
        (tmp_path / name).write_bytes(httpx.get(address, timeout=240).raise_for_status().content)
    base: Any = AutoModelForCausalLM.from_pretrained(pushed.model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, str(tmp_path))
    tokens = torch.tensor([TEXTS[0]])
    with torch.no_grad():
        logprobs = torch.log_softmax(adapted(tokens[:, :-1]).logits[0].float(), -1)
    wanted = logprobs.gather(1, tokens[0, 1:, None])[:, 0].tolist()
    (here,) = logprobs_of(training.forward([datum(TEXTS[0])], "cross_entropy").result(PATIENCE_S))
    assert here == pytest.approx(wanted, abs=1e-5)
    wrong = next(iter(found.urls.values())).replace("/downloads/", "/downloads/x")
    assert httpx.get(wrong, timeout=240).status_code == 404


def test_a_client_of_the_base_has_no_run(rest: RestClient, service: ServiceClient) -> None:
    client: SamplingClient = service.create_sampling_client(base_model=MODEL).result(PATIENCE_S)
    with pytest.raises(NotFoundError):
        rest.get_training_run(client._sampling_session_id).result(60)


def test_errors_are_classes_of_the_sdk(
    rest: RestClient, training: TrainingClient, service: ServiceClient, connect: Connect, url: str
) -> None:
    # In a process of its own, as the SDK leaves a connection open then.
    program = f"import tinker; tinker.ServiceClient(base_url={url!r}, api_key='tml-hzn_wrong').holder"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=240)
    assert "tinker.AuthenticationError: " in done.stderr
    with pytest.raises(NotFoundError, match="does not exist"):
        service.create_sampling_client(base_model="nobodys").result(60)
    with pytest.raises(NotFoundError, match="not yours"):
        connect("bob").create_training_client_from_state(f"tinker://{training.model_id}/weights/state").result(60)
    with pytest.raises(PermissionDeniedError):
        connect("vic", "viewer").create_lora_training_client(MODEL).result(60)
    with pytest.raises(NotFoundError, match="is not served here"):
        rest.copy_weights(f"tinker://{training.model_id}/weights/state", destination_project_id="lab").result(60)
    wrong: Any = {"target_tokens": types.TensorData(data=[6.0, 7.0], dtype="float32", shape=[2])}
    batch = [types.Datum(model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs=wrong)]
    with pytest.raises(BadRequestError, match="must be int64"):
        training.forward(batch, "cross_entropy").result(60)
    with pytest.raises(BadRequestError, match="the losses here are"):
        training.forward(data(), "gspo").result(60)
    with pytest.raises(BadRequestError, match="clip_hihg"):
        training.forward([datum(TEXTS[0], logprobs=[0.0] * 7, advantages=[1.0] * 7)], "ppo", {"clip_hihg": 1.0}).result(
            60
        )
    # A token that no vocabulary has is found by who computes.
    with pytest.raises(RequestFailedError, match="100000") as caught:
        training.forward([datum([5, 100_000, 7])], "cross_entropy").result(PATIENCE_S)
    assert caught.value.category is RequestErrorCategory.User
    # None of them has changed anything, and the client goes on.
    assert len(training.forward(data(), "cross_entropy").result(PATIENCE_S).loss_fn_outputs) == len(TEXTS)
