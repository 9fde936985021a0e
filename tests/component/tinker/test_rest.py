"""Runs, checkpoints, sessions and samplers by Tinker's RestClient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.component.tinker.conftest import data
from tests.support.daemon_process import DaemonProcess
from tests.support.pushed_state import MODEL
from tinker import (
    BadRequestError,
    NotFoundError,
    RestClient,
    SamplingClient,
    ServiceClient,
    TrainingClient,
    types,
)


@pytest.fixture(scope="module")
def training(service: ServiceClient) -> TrainingClient:
    """A run with two checkpoints."""
    client = service.create_lora_training_client(MODEL, rank=4, user_metadata={"team": "blue"}).result(240)
    client.forward_backward(data(), "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=1e-3))
    client.save_state("state", user_metadata={"why": "first"}).result(240)
    client.save_weights_for_sampler("answers").result(240)
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


def test_runs_are_listed_in_pages(rest: RestClient, training: TrainingClient, adapter: TrainingClient) -> None:
    whole = rest.list_training_runs(limit=100).result(60)
    ids = [run.training_run_id for run in whole.training_runs]
    assert {training.model_id, adapter.model_id} <= set(ids)
    assert whole.cursor.total_count == len(ids)
    page = rest.list_training_runs(limit=1, offset=1).result(60)
    assert [run.training_run_id for run in page.training_runs] == ids[1:2]
    assert (page.cursor.offset, page.cursor.limit, page.cursor.total_count) == (1, 1, len(ids))


def test_checkpoints_are_listed(rest: RestClient, training: TrainingClient) -> None:
    found = {one.checkpoint_id: one for one in rest.list_checkpoints(training.model_id).result(60).checkpoints}
    assert found.keys() >= {"weights/state", "sampler_weights/answers"}
    state, answers = found["weights/state"], found["sampler_weights/answers"]
    assert (state.checkpoint_type, answers.checkpoint_type) == ("training", "sampler")
    assert state.tinker_path == f"tinker://{training.model_id}/weights/state"
    assert state.size_bytes is not None and state.size_bytes > 0
    assert (state.public, state.user_metadata) == (False, {"why": "first"})
    mine = rest.list_user_checkpoints(limit=100).result(60)
    assert {one.tinker_path for one in found.values()} <= {one.tinker_path for one in mine.checkpoints}
    assert mine.cursor is not None and mine.cursor.total_count == len(mine.checkpoints)


def test_what_is_needed_to_load_a_checkpoint_is_shown(rest: RestClient, training: TrainingClient) -> None:
    for path in ("weights/state", "sampler_weights/answers"):
        info = rest.get_weights_info_by_tinker_path(f"tinker://{training.model_id}/{path}").result(60)
        assert (info.base_model, info.is_lora, info.lora_rank) == (MODEL, True, 4)


def test_a_checkpoint_is_deleted(rest: RestClient, training: TrainingClient) -> None:
    path = training.save_state("doomed").result(240).path
    again = training.save_state("doomed-too").result(240).path
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


def test_sessions_and_samplers_are_shown(rest: RestClient, service: ServiceClient, training: TrainingClient) -> None:
    sampler = service.create_sampling_client(base_model=MODEL).result(240)
    session_id = service.holder.get_session_id()
    found = rest.get_session(session_id).result(60)
    assert training.model_id in found.training_run_ids
    assert sampler._sampling_session_id in found.sampler_ids
    assert session_id in rest.list_sessions(limit=100).result(60).sessions
    shown = rest.get_sampler(sampler._sampling_session_id).result(60)
    assert (shown.base_model, shown.model_path) == (MODEL, None)


@pytest.mark.parametrize(
    "call",
    [
        lambda rest, path: rest.publish_checkpoint_from_tinker_path(path),
        lambda rest, path: rest.set_checkpoint_ttl_from_tinker_path(path, 86400),
    ],
    ids=["published", "given a lifetime"],
)
def test_what_a_checkpoint_cannot_be(
    rest: RestClient, training: TrainingClient, call: Callable[[RestClient, str], Any]
) -> None:
    with pytest.raises((BadRequestError, NotFoundError)):
        call(rest, f"tinker://{training.model_id}/weights/state").result(60)


def test_a_client_of_the_base_has_no_run(rest: RestClient, service: ServiceClient) -> None:
    client: SamplingClient = service.create_sampling_client(base_model=MODEL).result(240)
    with pytest.raises(NotFoundError):
        rest.get_training_run(client._sampling_session_id).result(60)
