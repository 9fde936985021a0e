"""What an attempt refuses before it trains."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_server.children.entry import EventWriter, Orders
from horizon_server.errors import InvalidSpec
from horizon_server.spec import parse_job_spec
from horizon_server.worker.request import WorkerRequest
from horizon_server.worker.training import Training

MPT: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mpt", **MPT))  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def request_for(folder: Path, **train: Any) -> WorkerRequest:
    spec = {"name": "job", "model": "m", "dataset": "d", "train": {"max_steps": 3, **train}}
    return WorkerRequest(
        job_id="job_1",
        attempt=1,
        spec=parse_job_spec(spec),
        model=folder,
        prepared=folder.parent / "prepared",
        evaluation=None,
        checkpoints=folder.parent / "checkpoints",
        resume_from=None,
        planes={},
        grad_dtype_bytes=4,
        num_threads=1,
        device="host",
        device_limit_bytes=1 << 30,
        activation_placement="device",
        trace=None,
    )


@pytest.mark.parametrize("named", [True, False])
def test_documents_beyond_the_positions_of_the_model_are_refused_by_field(named: bool, folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    if not named:
        # The model's class then brings its own limit.
        del config["max_seq_len"]
        (folder / "config.json").write_text(json.dumps(config))
    limit = 64 if named else 2048
    request = request_for(folder, sequence_length=limit + 1, tokens_per_step=4096)

    with pytest.raises(InvalidSpec, match=rf"^train\.sequence_length is {limit + 1}; .* at most {limit} ") as caught:
        Training(request, events=EventWriter(os.open(os.devnull, os.O_WRONLY)), orders=Orders())

    assert [violation.field for violation in caught.value.violations] == ["train.sequence_length"]
