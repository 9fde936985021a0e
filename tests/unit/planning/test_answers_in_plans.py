"""What generated answers add to a job's memory plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from horizon_server.demo.recipe import write_demo_model
from horizon_server.planning.model_folder import ModelFolder, open_model_folder
from horizon_server.planning.sampling import CACHE_BYTES, cache_limit_bytes, with_answers
from horizon_server.records.plan import Ledger
from horizon_server.spec import JobSpec, parse_job_spec

LEDGER = Ledger(host_bytes={"weights": 5}, device_bytes={"weights": 7})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return open_model_folder(write_demo_model(Path(tmp_path_factory.mktemp("model")) / "demo"))


def spec_of(sequence_length: int = 64, **generate: Any) -> JobSpec:
    evaluation = {"sets": {"a": "d"}, "generate": {"set": "a", **generate}} if generate else {}
    train = {"sequence_length": sequence_length}
    return parse_job_spec({"name": "j", "model": "m", "dataset": "d", "train": train, "eval": evaluation})


def test_a_job_without_answers_has_the_plan_that_it_had(folder: ModelFolder) -> None:
    assert with_answers(LEDGER, spec_of(), folder) is LEDGER
    assert cache_limit_bytes(spec_of(), folder) == 0


def test_the_cache_of_all_prompts_is_planned_up_to_its_limit(folder: ModelFolder) -> None:
    shape = folder.shape
    per_token = shape.num_hidden_layers * 2 * shape.num_key_value_heads * shape.head_dim * 4
    spec = spec_of(prompts=3, max_new_tokens=16)
    assert cache_limit_bytes(spec, folder) == 3 * (64 + 16) * per_token
    planned = with_answers(LEDGER, spec, folder)
    assert (planned.host_bytes["weights"], planned.device_bytes) == (5, LEDGER.device_bytes)
    assert planned.host_bytes["generation"] > cache_limit_bytes(spec, folder)
    # Beyond that they are answered in batches.
    assert cache_limit_bytes(spec_of(2**16, prompts=256, max_new_tokens=4096), folder) == CACHE_BYTES
