"""What a job that trains adapters leaves: PEFT and transformers compute from it what the store computes, and the node
answers with it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.support.further import further
from tests.support.tiny_models import micro_batch
from tests.support.worker_attempts import worker_request, write_inputs
from torch import Tensor
from transformers import AutoModelForCausalLM

from horizon_server.children.entry import EventWriter
from horizon_server.codec import from_plain
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.trainable import open_for_training
from horizon_server.spec import JobSpec, parse_job_spec
from horizon_server.store.base_digest import model_digest
from horizon_server.store.checkpoint import load_checkpoint
from horizon_server.store.host_store import HostStore
from horizon_server.worker.training import Training
from horizon_server.worker_link.orders import Orders
from horizon_server.worker_link.request import WorkerRequest

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

BASE_CLASS = "gpt2, saved by its base class"
DOCUMENTS = [torch.arange(start, start + 12) * 5 % 32 for start in (0, 3, 7)]


def spec_of(**lora: Any) -> JobSpec:
    return parse_job_spec(
        {
            "name": "job",
            "model": "tiny",
            "dataset": "d",
            "checkpoint": {"export": "both", "dtype": "fp32"},
            "train": {
                "max_steps": 4,
                "sequence_length": 32,
                "tokens_per_step": 64,
                "trainable": "lora",
                "learning_rate": 0.03,
                "warmup_steps": 0,
                "lora": {"rank": 4, "alpha": 16, **lora},
            },
        }
    )


def trained(folder: Path, spec: JobSpec) -> Path:
    """Run a job to its end; returns its checkpoint."""
    events = EventWriter(os.open(folder / "events", os.O_WRONLY | os.O_CREAT))
    with worker_request(folder, spec) as request:
        training = Training(from_plain(WorkerRequest, request), events=events, orders=Orders())
        try:
            assert training.run().outcome == "succeeded"
        finally:
            training.close()
    return folder / "checkpoints/step-00000004"


@pytest.fixture
def of_store() -> Iterator[Any]:
    """Gives the log-probabilities of all documents' tokens as the engine computes them from a checkpoint."""
    opened: list[Any] = []

    def compute(folder: Path, spec: JobSpec, checkpoint: Path) -> Tensor:
        layout = open_for_training(folder / "model", spec.train).layout
        template = Template.from_folder(folder / "model", layout=layout)
        store, device = HostStore.allocate(template.layout, num_threads=1), HostDevice(num_threads=1)
        opened.extend((device, store))
        load_checkpoint(store, checkpoint, base=folder / "model", base_sha256=lambda: model_digest(folder / "model"))
        with worker_request(folder, spec) as request:
            execution = from_plain(WorkerRequest, request).plan.execution
        trainer = Trainer(template, store, device, spec.train.recipe, execution, num_steps=4)
        return torch.cat(trainer.log_probabilities([micro_batch([document]) for document in DOCUMENTS]))

    yield compute
    for one in opened:
        one.close()


def of_model(model: Any) -> Tensor:
    with torch.no_grad():
        logits = [model.eval()(document[None]).logits[0, :-1].log_softmax(-1) for document in DOCUMENTS]
    return torch.cat([logp.gather(1, doc[1:, None])[:, 0] for logp, doc in zip(logits, DOCUMENTS, strict=True)])


@pytest.mark.parametrize("model_type", ["gpt2", "llama", BASE_CLASS, *further("qwen3", "phi3")])
@pytest.mark.parametrize("lora", [{}, {"rslora": True}, {"dora": True}], ids=["lora", "rslora", "dora"])
def test_peft_and_transformers_compute_what_the_store_computes(
    tmp_path: Path, of_store: Any, model_type: str, lora: dict[str, bool]
) -> None:
    write_inputs(tmp_path, model_type.partition(",")[0])
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    if model_type == BASE_CLASS:
        shutil.rmtree(tmp_path / "model")
        base.transformer.save_pretrained(tmp_path / "model")
    # A square projection of Conv1D is one that no shape tells from its transpose.
    spec = spec_of(**lora)
    checkpoint = trained(tmp_path, spec)
    wanted = of_store(tmp_path, spec, checkpoint)

    before = of_model(base)
    assert (wanted - before).abs().max() > 0.05, "the adapter says something"
    adapted = of_model(PeftModel.from_pretrained(base, str(checkpoint)))
    merged = of_model(AutoModelForCausalLM.from_pretrained(checkpoint / "merged"))
    assert (adapted - wanted).abs().max() <= 1e-5
    assert (merged - wanted).abs().max() <= 1e-5


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], [r"layers\.1\..*o_proj", "down_proj"]])
def test_some_modules_alone_are_those_that_peft_adapts(tmp_path: Path, of_store: Any, targets: list[str]) -> None:
    write_inputs(tmp_path, "llama")
    spec = spec_of(targets=targets)
    checkpoint = trained(tmp_path, spec)
    base: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = PeftModel.from_pretrained(base, str(checkpoint))
    layout = open_for_training(tmp_path / "model", spec.train).layout
    adapted = {
        name.split(".lora_")[0].removeprefix("base_model.model.")
        for name, _ in model.named_parameters()
        if "lora_" in name
    }
    assert adapted == {place.adapts.removesuffix(".weight") for _, place in layout.tensors() if place.adapts}
    assert (of_model(model) - of_store(tmp_path, spec, checkpoint)).abs().max() <= 1e-5
