"""A program that takes some steps of a run, prints the bits of each as JSON and may save a checkpoint after it."""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from horizon_server.engine.data import PreparedDataset, StepPlan
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution
from horizon_server.store.checkpoint import load_checkpoint, save_checkpoint
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model

NUM_STEPS = 6
MAX_DOCUMENT_TOKENS = 250
_PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class StepBits:
    """All a step leaves behind: exact loss and gradient norm, and a digest of every tensor's master weight and
    moments."""

    loss: str
    grad_norm: str
    tensors: dict[str, str]


def checkpoint_of(work: Path, step: int) -> Path:
    """Where the checkpoint after a step is, or was."""
    return work / "checkpoints" / f"step-{step}"


def take_steps(work: Path, *, first: int, count: int, num_threads: int, save: bool) -> None:
    """Continue after step `first`, from its checkpoint unless it is 0, and take `count` steps."""
    template = Template.from_folder(work / "model")
    store = HostStore.allocate(template.layout, num_threads=num_threads)
    dataset = PreparedDataset.open(work / "data")
    plan = StepPlan(
        dataset, sequence_length=MAX_DOCUMENT_TOKENS, tokens_per_step=MAX_DOCUMENT_TOKENS, seed=3, max_steps=NUM_STEPS
    )
    recipe, execution = Recipe(learning_rate=3e-4, seed=5), Execution(optimizer_threads=num_threads)
    device = HostDevice(num_threads=num_threads)
    trainer = Trainer(template, store, device, recipe, execution, num_steps=NUM_STEPS)
    if first:
        trainer.restore(load_checkpoint(store, checkpoint_of(work, first)))
    else:
        load_model(store, work / "model")
    for step in range(first, first + count):
        report = trainer.train_step(plan.step(step))
        trainer.flush()
        tensors = {place.name: _digest(store, place.name) for _, place in store.layout.tensors()}
        bits = StepBits(loss=report.loss.hex(), grad_norm=report.grad_norm.hex(), tensors=tensors)
        print(json.dumps(vars(bits)), flush=True)
        if save:
            save_checkpoint(
                store, checkpoint_of(work, report.step), source=work / "model", trainer_state=trainer.state()
            )
    trainer.close()
    device.close()
    store.close()


def _digest(store: HostStore, name: str) -> str:
    digest = hashlib.sha256()
    for plane in _PLANES:
        digest.update(store.tensor(name, plane).contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    parser.add_argument("--save", action="store_true")
    take_steps(**vars(parser.parse_args()))
