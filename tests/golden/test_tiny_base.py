"""A real model on real chats, 200 steps: the same losses and the same weights as plain PyTorch on the same batches."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny_models import Engine
from torch import Tensor
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from horizon_server.datasets.preparing import prepare
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import PrepareOptions, PrepareRequest
from horizon_server.engine.data import PreparedDataset, StepPlan
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model

SHARED = Path(__file__).parents[3] / "shared"
MODEL, CHATS = SHARED / "models" / "tiny-base", SHARED / "data" / "gsm8k_train.jsonl"
NUM_STEPS, NUM_CHATS, MAX_CHARACTERS = 200, 400, 300

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
        dataset_files=(StoredFile(path=folder / "chats.jsonl", name="chats.jsonl"),),
        model_dir=MODEL,
        output_dir=folder / "prepared",
        options=PrepareOptions(sequence_length=160),
    )
    prepare(request, on_progress=lambda rows: None)
    dataset = PreparedDataset.open(folder / "prepared")
    return StepPlan(dataset, sequence_length=160, tokens_per_step=160, seed=1, max_steps=NUM_STEPS)


def recipe_of(*, max_grad_norm: float) -> Recipe:
    return Recipe(learning_rate=2e-4, warmup_steps=10, weight_decay=0.1, max_grad_norm=max_grad_norm)


@dataclass(frozen=True, kw_only=True)
class Course:
    """What a run went through, and where it ended."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def plain_course(
    plan: StepPlan, num_steps: int, recipe: Recipe, decayed: dict[str, bool], plain_loss: Callable[..., Tensor]
) -> Course:
    """torch.optim.AdamW in fp32, the whole model in memory."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).train(False)
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in model.named_parameters() if decayed[n]], "weight_decay": recipe.weight_decay},
        {"params": [p for n, p in model.named_parameters() if not decayed[n]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas, eps=recipe.eps)
    schedule = get_cosine_schedule_with_warmup(optimizer, recipe.warmup_steps, num_steps)
    losses, norms = [], []
    for step in range(num_steps):
        rows: list[MicroBatch] = plan.step(step)
        num_targets = sum(row.num_targets for row in rows)
        optimizer.zero_grad()
        loss = 0.0
        for row in rows:
            part = plain_loss(model, row) / num_targets
            torch.autograd.backward(part)
            loss += part.item()
        assert recipe.max_grad_norm is not None
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)))
        optimizer.step()
        schedule.step()
        losses.append(loss)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Course(losses=losses, norms=norms, weights=weights)


def masters(store: HostStore) -> dict[str, Tensor]:
    weights = {}
    for unit in store.layout.units:
        merged = torch.empty(unit.num_elements)
        store.merge_master(unit.index, merged)
        for tensor in unit.tensors:
            weights[tensor.name] = merged[tensor.offset : tensor.offset + tensor.num_elements].view(tensor.shape)
    return weights


def streamed_course(plan: StepPlan, num_steps: int, recipe: Recipe) -> tuple[Course, dict[str, bool]]:
    """The engine, and which tensors decay."""
    template = Template.from_folder(MODEL)
    store = HostStore.allocate(template.layout, num_threads=2)
    load_model(store, MODEL)
    device = HostDevice(num_threads=2)
    trainer = Trainer(template, store, device, recipe, Execution(optimizer_threads=2), num_steps=num_steps)
    reports = [trainer.train_step(plan.step(step)) for step in range(num_steps)]
    trainer.close()
    weights = masters(store)
    device.close()
    store.close()
    assert [report.skipped for report in reports] == [""] * num_steps
    losses, norms = [report.loss for report in reports], [report.grad_norm for report in reports]
    decayed = {tensor.name: tensor.decay for _, tensor in template.layout.tensors()}
    return Course(losses=losses, norms=norms, weights=weights), decayed


def assert_same_course(got: Course, wanted: Course) -> None:
    assert got.losses == pytest.approx(wanted.losses, rel=1e-5)
    assert got.norms == pytest.approx(wanted.norms, rel=1e-4)
    for name, weight in wanted.weights.items():
        error = float((got.weights[name] - weight).norm() / weight.norm())
        assert error <= 1e-5, f"{name} is off by {error:.1e}"


def num_clipped(course: Course, max_grad_norm: float) -> int:
    return sum(norm > max_grad_norm for norm in course.norms)


def test_two_hundred_steps_on_real_chats_follow_a_plain_loop(plan: StepPlan, engine: Engine) -> None:
    recipe = recipe_of(max_grad_norm=1.0)
    got, decayed = streamed_course(plan, NUM_STEPS, recipe)

    wanted = plain_course(plan, NUM_STEPS, recipe, decayed, engine.plain_loss)

    assert_same_course(got, wanted)
    # Norms of 3 to 12: at the usual bound, fine-tuning a small model on short answers is clipped all along.
    assert num_clipped(got, 1.0) == num_clipped(wanted, 1.0) == NUM_STEPS
    assert sum(wanted.losses[-20:]) < 0.97 * sum(wanted.losses[:20])


def test_clipping_that_is_active_in_some_steps_only_follows_a_plain_loop(plan: StepPlan, engine: Engine) -> None:
    recipe = recipe_of(max_grad_norm=5.0)
    got, decayed = streamed_course(plan, 40, recipe)

    wanted = plain_course(plan, 40, recipe, decayed, engine.plain_loss)

    assert_same_course(got, wanted)
    assert 0 < num_clipped(got, 5.0) == num_clipped(wanted, 5.0) < 40
