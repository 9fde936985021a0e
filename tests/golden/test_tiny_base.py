"""A real model on real chats, 200 steps: the same losses and the same weights as plain PyTorch on the same batches."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from horizon_server.datasets.preparation import PrepareOptions, PrepareRequest
from horizon_server.datasets.prepare import prepare
from horizon_server.datasets.rows import DataFile
from horizon_server.engine.data import PreparedDataset, StepPlan
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import TrainConfig, Trainer
from horizon_server.store.checkpoint import load_model
from horizon_server.store.host_store import HostStore

SHARED = Path(__file__).parents[3] / "shared"
MODEL, CHATS = SHARED / "models" / "tiny-base", SHARED / "data" / "gsm8k_train.jsonl"
NUM_STEPS, NUM_CHATS, MAX_CHARACTERS = 200, 400, 300
MAX_GRAD_NORM = 5.0
CONFIG = TrainConfig(
    num_steps=NUM_STEPS,
    learning_rate=2e-4,
    lr_schedule="cosine",
    warmup_steps=10,
    weight_decay=0.1,
    max_grad_norm=MAX_GRAD_NORM,
    optimizer_threads=2,
)

pytestmark = pytest.mark.skipif(
    not (MODEL.is_dir() and CHATS.is_file()), reason=f"needs {MODEL.name} and {CHATS.name} in ../shared"
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> StepPlan:
    """The batches: questions and answers as chats, trained on the answers."""
    folder = tmp_path_factory.mktemp("chats")
    with CHATS.open(encoding="utf-8") as lines, (folder / "chats.jsonl").open("w", encoding="utf-8") as chats:
        rows = (row for row in map(json.loads, lines) if len(row["question"]) + len(row["answer"]) <= MAX_CHARACTERS)
        for row in itertools.islice(rows, NUM_CHATS):
            turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            chats.write(json.dumps({"messages": turns}) + "\n")
    request = PrepareRequest(
        dataset_files=(DataFile(path=folder / "chats.jsonl", name="chats.jsonl"),),
        model_dir=MODEL,
        output_dir=folder / "prepared",
        options=PrepareOptions(sequence_length=160),
    )
    prepare(request, on_progress=lambda rows: None)
    dataset = PreparedDataset.open(folder / "prepared")
    return StepPlan(dataset, sequence_length=160, tokens_per_step=160, seed=1, max_steps=NUM_STEPS)


def plain_loop(
    plan: StepPlan, decayed: dict[str, bool], plain_loss: Callable[..., Tensor]
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, gradient norms and last weights of torch.optim.AdamW in fp32, the whole model in memory."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).train(False)
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in model.named_parameters() if decayed[n]], "weight_decay": CONFIG.weight_decay},
        {"params": [p for n, p in model.named_parameters() if not decayed[n]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=CONFIG.learning_rate, betas=CONFIG.betas, eps=CONFIG.eps)
    schedule = get_cosine_schedule_with_warmup(optimizer, CONFIG.warmup_steps, NUM_STEPS)
    losses, norms = [], []
    for step in range(NUM_STEPS):
        rows: list[MicroBatch] = plan.step(step)
        num_targets = sum(row.num_targets for row in rows)
        optimizer.zero_grad()
        loss = 0.0
        for row in rows:
            part = plain_loss(model, row) / num_targets
            torch.autograd.backward(part)
            loss += part.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)))
        optimizer.step()
        schedule.step()
        losses.append(loss)
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def masters(store: HostStore) -> dict[str, Tensor]:
    weights = {}
    for unit in store.layout.units:
        merged = torch.empty(unit.num_elements)
        store.merge_master(unit.index, merged)
        for tensor in unit.tensors:
            weights[tensor.name] = merged[tensor.offset : tensor.offset + tensor.num_elements].view(tensor.shape)
    return weights


def test_two_hundred_steps_on_real_chats_follow_a_plain_loop(plan: StepPlan, plain_loss: Callable[..., Tensor]) -> None:
    template = Template.from_folder(MODEL)
    store = HostStore.allocate(template.layout, num_threads=2)
    load_model(store, MODEL)
    device = HostDevice(num_threads=2)
    trainer = Trainer(template, store, device, CONFIG)
    reports = [trainer.train_step(plan.step(step)) for step in range(NUM_STEPS)]
    trainer.close()
    got = masters(store)
    decayed = {tensor.name: tensor.decay for _, tensor in template.layout.tensors()}
    device.close()
    store.close()

    losses, norms, weights = plain_loop(plan, decayed, plain_loss)

    assert [report.skipped for report in reports] == [None] * NUM_STEPS
    assert [report.loss for report in reports] == pytest.approx(losses, rel=1e-5)
    assert min(norms) < MAX_GRAD_NORM < max(norms), "clipping is to be active in some steps only"
    assert sum(losses[-20:]) < 0.97 * sum(losses[:20])
    for name, weight in weights.items():
        error = float((got[name] - weight).norm() / weight.norm())
        assert error <= 1e-5, f"{name} is off by {error:.1e}"
