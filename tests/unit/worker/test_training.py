"""What an attempt refuses before it trains, and that what it uses is reported by the components of its plan."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_server.children.entry import EventWriter
from horizon_server.errors import InvalidSpec
from horizon_server.figures import StepFigures
from horizon_server.records.plan import Plan
from horizon_server.spec import parse_job_spec
from horizon_server.worker.host_use import host_components, process_bytes
from horizon_server.worker.training import Training
from horizon_server.worker_link.orders import Orders
from horizon_server.worker_link.request import WorkerRequest

MPT: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "n_heads": 2, "n_layers": 2, "max_seq_len": 64}


PLAN = Plan(host_bytes={}, device_bytes={}, host_limit_bytes=1 << 30, num_parameters=1, device="host")


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
        checkpoints=folder.parent / "checkpoints",
        plan=PLAN,
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
        Training(request, events=EventWriter(), orders=Orders())

    assert [violation.field for violation in caught.value.violations] == ["train.sequence_length"]


FIGURES = StepFigures(
    step=1,
    loss=1.0,
    grad_norm=1.0,
    learning_rate=0.1,
    num_tokens=8,
    duration_s=1.0,
    host_memory_bytes={"weights": 10, "moments": 20, "gradients": 5, "staging": 3},
    device_memory_bytes={"weights": 100, "gradients": 50, "activations": 30, "workspace": 7},
)


@pytest.mark.parametrize(
    ("device", "activations", "staging"),
    [("host", 30, 153), ("cuda:0", 0, 3)],
)
def test_the_components_are_those_of_the_plan(device: str, activations: int, staging: int) -> None:
    used = host_components(FIGURES, device=device, process_bytes=1000)
    assert used == {
        "weights": 10,
        "moments": 20,
        "gradients": 5,
        "activations": activations,
        "staging": staging,
        "other": 1000 - activations - staging,
    }
    assert host_components(FIGURES, device=device, process_bytes=0)["other"] == 0


def test_the_process_counts_its_heap_and_not_what_is_shared() -> None:
    before = process_bytes()
    assert before > 2**20
    with mmap.mmap(-1, 64 * 2**20) as shared:
        shared.write(b"x" * len(shared))
        assert process_bytes() - before < 32 * 2**20
    heap = bytearray(b"x") * (128 * 2**20)
    assert process_bytes() - before > len(heap) // 2
