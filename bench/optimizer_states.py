"""Held-out loss with compressed optimizer states against exact ones, on the demo's model and chats.

Three methods: the demo's recipe from its random weights; LoRA and DPO from what the demo's recipe has learned in a run
of its own. Each with both forms for every seed, which decides the order of the data and, of adapters, their start. One
chat of eight is held out. Asked: each pair differs by at most 0.3 %, and by less than the seeds do.

python -m bench.optimizer_states            # prints a table for bench/RESULTS.md
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from horizon_server.demo.recipe import DEMO_SPEC, demo_chats, write_demo_model
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
from horizon_server.engine.objectives import DPO, Documents, StepObjective
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.ledger import micro_batch_tokens
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import Execution
from horizon_server.spec import LORA, TrainSpec
from horizon_server.store.checkpoint import save_checkpoint
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model

WANTED = 0.003
_HELD_OUT = 8
_FORMS = ("exact", "compressed")
# Their own learning rates: what each method is usually trained with, relative to the demo's.
_CHANGES: dict[str, dict[str, Any]] = {
    "demo recipe": {},
    "LoRA": {"trainable": LORA, "learning_rate": 2e-3},
    "DPO": {"learning_rate": 5e-5},
}


@dataclass(frozen=True, kw_only=True)
class Data:
    """Chats as rows of one document; for DPO a chosen answer before another chat's."""

    trained: list[MicroBatch]
    held_out: list[MicroBatch]
    pairs: bool = False
    references: dict[int, Tensor] = field(default_factory=dict)
    """Of pairs, by the identity of their first row, the log-probabilities of the model that training starts from."""

    def steps(self, num_steps: int, tokens: int, seed: int) -> Iterator[list[MicroBatch]]:
        """Rows of up to that many tokens, in the order of the seed, again and again."""
        generator, size = torch.Generator().manual_seed(seed), 2 if self.pairs else 1
        order: list[int] = []
        for _ in range(num_steps):
            rows: list[MicroBatch] = []
            while True:
                order = order or torch.randperm(len(self.trained) // size, generator=generator).tolist()
                more = self.trained[size * order[-1] :][:size]
                if rows and sum(row.num_tokens for row in [*rows, *more]) > tokens:
                    break
                rows += more
                order.pop()
            yield rows

    def objective(self, rows: Sequence[MicroBatch]) -> StepObjective | None:
        """What is learned from these rows; None is the loss of their targets."""
        if not self.pairs:
            return None
        documents = Documents.of(rows, pairs_P2=torch.arange(len(rows)).view(-1, 2))
        references = torch.cat([self.references[id(row)] for row in rows[::2]])
        return StepObjective(objective=DPO(), documents=documents, references_S=references)


def chat_rows(model: Path) -> list[MicroBatch]:
    """The demo's chats; targets are the tokens of the assistant."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    rows = []
    for chat in demo_chats():
        found = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        rows.append(row_of(found["input_ids"], found["assistant_masks"]))
    return rows


def row_of(ids: Sequence[int], mask: Sequence[int]) -> MicroBatch:
    """One document whose marked tokens are targets."""
    tokens, is_target = torch.tensor(ids), torch.tensor(mask).bool()
    labels = torch.full_like(tokens, IGNORED_LABEL)
    labels[:-1] = torch.where(is_target[1:], tokens[1:], IGNORED_LABEL)
    return MicroBatch(
        input_ids_T=tokens,
        position_ids_T=torch.arange(len(tokens)),
        labels_T=labels,
        document_lengths=(len(tokens),),
    )


def preference_rows(model: Path) -> list[MicroBatch]:
    """Of each question its answer, and the answer to the one after the next."""
    chats = [chat[:2] for chat in demo_chats()]
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    rows = []
    for index, chat in enumerate(chats):
        for answer in (chat[1], chats[(index + 2) % len(chats)][1]):
            found = tokenizer.apply_chat_template(
                [chat[0], answer], return_dict=True, return_assistant_tokens_mask=True
            )
            rows.append(row_of(found["input_ids"], found["assistant_masks"]))
    return rows


def divided(rows: list[MicroBatch], *, size: int = 1, **more: Any) -> Data:
    """Every eighth chat, or pair of rows, held out."""
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    held_out = [row for index, group in enumerate(groups) if index % _HELD_OUT == 0 for row in group]
    trained = [row for index, group in enumerate(groups) if index % _HELD_OUT for row in group]
    return Data(trained=trained, held_out=held_out, **more)


def with_trainer(model: Path, train: TrainSpec, work: Callable[[Trainer, HostStore], Any], *, num_steps: int) -> Any:
    """What `work` returns, given a trainer on the weights of a folder and its store."""
    folder = open_for_training(model, train)
    template = Template.from_folder(model, layout=folder.layout, recipe=train.recipe)
    store, device = HostStore.allocate(folder.layout, num_threads=1), HostDevice(num_threads=1)
    load_model(store, model, seed=train.seed)
    execution = Execution(optimizer_threads=1, micro_batch_tokens=micro_batch_tokens(template.hidden_size, "host"))
    trainer = Trainer(template, store, device, train.recipe, execution, num_steps=num_steps)
    try:
        return work(trainer, store)
    finally:
        trainer.close()
        device.close()
        store.close()


def held_out_loss(trainer: Trainer, data: Data) -> float:
    """The loss of the method, over all that was held out."""
    if not data.pairs:
        return trainer.evaluate(data.held_out).eval_loss
    sums = [found.sum() for found in trainer.log_probabilities(data.held_out)]
    before = [data.references[id(row)] for row in data.held_out[::2]]
    halves = [
        torch.split(reference, [row.num_targets for row in rows])
        for reference, rows in zip(before, pairs_of(data.held_out), strict=True)
    ]
    margins = [
        (sums[2 * index] - chosen.sum()) - (sums[2 * index + 1] - rejected.sum())
        for index, (chosen, rejected) in enumerate(halves)
    ]
    return float(-torch.nn.functional.logsigmoid(DPO().beta * torch.stack(margins)).mean())


def pairs_of(rows: list[MicroBatch]) -> list[list[MicroBatch]]:
    """Two and two."""
    return [rows[start : start + 2] for start in range(0, len(rows), 2)]


def run(model: Path, train: TrainSpec, data: Data, *, num_steps: int, saved: Path | None = None) -> float:
    """The held-out loss after some steps; with `saved`, the weights are written there."""

    def work(trainer: Trainer, store: HostStore) -> float:
        for rows in data.steps(num_steps, train.tokens_per_step, train.seed):
            trainer.train_step(rows, data.objective(rows))
        loss = held_out_loss(trainer, data)
        if saved is not None:
            trainer.flush()
            save_checkpoint(store, saved, source=model, trainer_state={}, min_free_bytes=0)
        return loss

    return float(with_trainer(model, train, work, num_steps=num_steps))


def referenced(model: Path, train: TrainSpec) -> Data:
    """Pairs with the log-probabilities of a model."""
    data = divided(preference_rows(model), size=2, pairs=True)

    def work(trainer: Trainer, _: HostStore) -> None:
        for rows in (data.trained, data.held_out):
            found = trainer.log_probabilities(rows)
            for index, row in enumerate(rows[::2]):
                data.references[id(row)] = torch.cat([found[2 * index], found[2 * index + 1]])

    with_trainer(model, train, work, num_steps=1)
    return data


def main() -> int:
    """Train, and print a table; 1 where a figure is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=DEMO_SPEC["train"]["max_steps"])
    parser.add_argument("--methods", nargs="*", choices=list(_CHANGES), default=list(_CHANGES))
    options = parser.parse_args()
    is_missed = False
    print(f"Asked: each pair within {WANTED:.1%}, and by less than the exact runs of the seeds are apart.\n")
    print("| method | exact, by seed | compressed, by seed | largest difference | mean difference | apart by seed |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as place:
        start, learned = write_demo_model(Path(place) / "model"), Path(place) / "learned"
        first = TrainSpec(**{**DEMO_SPEC["train"], "seed": 1000, "max_steps": options.steps})
        if set(options.methods) != {"demo recipe"}:
            run(start, first, divided(chat_rows(start)), num_steps=options.steps, saved=learned)
        for method in options.methods:
            model = start if method == "demo recipe" else learned
            spec = {**DEMO_SPEC["train"], "max_steps": options.steps, **_CHANGES[method]}
            data = referenced(model, TrainSpec(**spec)) if method == "DPO" else divided(chat_rows(model))
            losses = {
                form: [
                    run(
                        model,
                        TrainSpec(**{**spec, "seed": seed, "optimizer_states": form}),
                        data,
                        num_steps=options.steps,
                    )
                    for seed in range(options.seeds)
                ]
                for form in _FORMS
            }
            exact, compressed = (losses[form] for form in _FORMS)
            changes = [theirs / ours - 1 for ours, theirs in zip(exact, compressed, strict=True)]
            largest, mean = max(changes, key=abs), statistics.mean(changes)
            apart = max(exact) / min(exact) - 1
            is_missed |= abs(largest) > min(WANTED, apart)
            cells = [" ".join(f"{loss:.4f}" for loss in losses[form]) for form in _FORMS]
            print(f"| {method} | {' | '.join(cells)} | {largest:+.2%} | {mean:+.2%} | {apart:.2%} |", flush=True)
    return int(is_missed)


if __name__ == "__main__":
    sys.exit(main())
