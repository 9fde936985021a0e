"""The engine as a job runs it: compiled layers from a library folder, on planes loaded from the model folder.

    python -m bench.peers.ours compile full|lora TASK.json
    python -m bench.peers.ours full|lora|dpo TASK.json

A job's layers are compiled in a process of their own; so does the bench, which then starts the one that it measures.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.peers.protocol import Line, Rows, Task
from horizon_server.engine.compiled.build import build_missing
from horizon_server.engine.compiled.layers import CompiledLayers
from horizon_server.engine.compiled.library import CodeLibrary, Target
from horizon_server.engine.device import TORCH_DTYPE, device_for
from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
from horizon_server.engine.objectives import DPO, Documents, StepObjective
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.ledger import micro_batch_tokens
from horizon_server.planning.trainable import open_for_training
from horizon_server.recipe import Recipe
from horizon_server.records.execution import DeviceKind, Execution
from horizon_server.spec import LORA, LoraSpec, TrainSpec
from horizon_server.store.cpus import update_threads
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a job of a kind is made of."""

    template: Template
    recipe: Recipe
    execution: Execution
    library: CodeLibrary
    target: Target

    @classmethod
    def of(cls, kind: str, task: Task, row_tokens: int) -> Parts:
        """As a plan decides them."""
        folder = Path(task.model)
        lora = LoraSpec(rank=task.lora_rank, alpha=task.lora_alpha)
        train = TrainSpec(trainable=LORA, lora=lora) if kind == "lora" else TrainSpec()
        recipe = Recipe(
            learning_rate=task.learning_rate,
            lr_schedule="constant",
            tokens_per_step=task.rows_per_step * row_tokens,
            sequence_length=row_tokens,
            adapter_scale=task.lora_alpha / task.lora_rank,
        )
        layout = open_for_training(folder, train).layout
        template = Template.from_folder(folder, layout=layout, recipe=recipe)
        device: DeviceKind = "cuda" if task.device == "cuda" else "host"
        together = micro_batch_tokens(template.hidden_size, device)
        execution = Execution(
            device_kind=device,
            compute_dtype="bfloat16" if task.dtype == "bfloat16" else "float32",
            num_threads=task.num_threads,
            optimizer_threads=update_threads(task.num_threads, device_kind=device),
            micro_batch_tokens=together,
        )
        target = Target(
            dtype=TORCH_DTYPE[execution.compute_dtype],
            device=torch.device(task.device),
            num_threads=task.num_threads,
            num_tokens=max(row_tokens, together),
        )
        library = CodeLibrary(Path(task.library))
        return cls(template=template, recipe=recipe, execution=execution, library=library, target=target)


def micro_batch(ids_T: torch.Tensor, *, first_target: int = 1) -> MicroBatch:
    """A row of one document, trained from `first_target` on."""
    labels_T = ids_T.roll(-1)
    labels_T[: first_target - 1] = IGNORED_LABEL
    labels_T[-1] = IGNORED_LABEL
    length = len(ids_T)
    return MicroBatch(
        input_ids_T=ids_T, position_ids_T=torch.arange(length), labels_T=labels_T, document_lengths=(length,)
    )


def serve(kind: str, task: Task) -> None:
    """Load, and take the bench's turns."""
    line, data = Line(), Rows(task)
    torch.set_num_threads(task.num_threads)
    parts = Parts.of(kind, task, data.training.shape[1])
    device = device_for(
        parts.execution.device_kind, compute_dtype=parts.execution.compute_dtype, num_threads=task.num_threads
    )
    store = HostStore.allocate(parts.template.layout, grad_dtype=device.gradient_dtype)
    load_model(store, Path(task.model))
    compiled = CompiledLayers.load(parts.template, parts.library, parts.target)
    trainer = Trainer(
        parts.template, store, device, parts.recipe, parts.execution, num_steps=task.num_steps, compiled=compiled
    )
    first_target = data.num_prompt_tokens if kind == "dpo" else 1
    answers = data.answers() if kind == "dpo" else data.training
    rows = [micro_batch(row, first_target=first_target) for row in torch.from_numpy(answers)]
    held_out = [micro_batch(row) for row in torch.from_numpy(data.held_out)]
    # One pass before the first step, as the job makes it.
    references = trainer.log_probabilities(rows) if kind == "dpo" else []

    def step(number: int) -> None:
        own = slice(number * task.rows_per_step, (number + 1) * task.rows_per_step)
        objective = None
        if kind == "dpo":
            documents = Documents.of(rows[own], pairs_P2=torch.arange(task.rows_per_step).view(-1, 2))
            objective = StepObjective(
                objective=DPO(beta=task.beta), documents=documents, references_S=torch.cat(references[own])
            )
        trainer.train_step(rows[own], objective)

    line.serve(step, trainer.flush, lambda: trainer.evaluate(held_out).eval_loss)
    trainer.close()
    device.close()
    store.close()


def main() -> None:
    """Compile, or serve the bench."""
    *kinds, path = sys.argv[1:]
    task = Task.read(Path(path))
    if kinds[0] == "compile":
        parts = Parts.of(kinds[1], task, Rows(task).training.shape[1])
        torch.set_num_threads(task.num_threads)
        print("\n".join(build_missing(parts.template, parts.library, parts.target, print)))
    else:
        serve(kinds[0], task)


if __name__ == "__main__":
    main()
