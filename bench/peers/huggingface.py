"""Hugging Face's Trainer, and TRL's SFTTrainer and DPOTrainer.

    python -m bench.peers.huggingface trainer|sft|qlora|dpo TASK.json

They run their own loops; a callback waits for the bench's turns between steps. In bf16 they compute by autocast from
weights in fp32. Rows are tokenised before, of one length, so that packing and padding change nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    default_data_collator,
)

from bench.peers.plain import held_out_loss, synchronize
from bench.peers.protocol import Line, Rows, Task


class Turns(TrainerCallback):
    """Waits for the next turn where one has ended."""

    def __init__(self, line: Line, rows: Rows, task: Task) -> None:
        self._line, self._rows, self._task = line, rows, task
        self._left = 0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Before the first step."""
        if state.global_step == 0 and not self._left:
            self._line.ready()
            self._wait(control, kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count it."""
        self._left -= 1
        if not self._left:
            synchronize(self._task.device)
            self._line.turn_ended()
            self._wait(control, kwargs["model"])

    def _wait(self, control: TrainerControl, model: Any) -> None:
        self._left = self._line.next_turn(lambda: held_out_loss(model, self._rows, self._task.device))
        control.should_training_stop = self._left == 0


def arguments_of(task: Task, *, rows_of_example: int = 1) -> dict[str, Any]:
    """What all trainers are given. An example of DPO is two rows."""
    return {
        "output_dir": task.scratch,
        "per_device_train_batch_size": task.rows_at_once // rows_of_example,
        "gradient_accumulation_steps": task.rows_per_step // task.rows_at_once,
        "max_steps": task.num_steps,
        "learning_rate": task.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "optim": "adamw_torch_fused",
        "bf16": task.dtype == "bfloat16",
        "use_cpu": task.device == "cpu",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": task.device == "cuda",
        # As they come, for all alike.
        "train_sampling_strategy": "sequential",
    }


def model_of(task: Task, **options: Any) -> Any:
    """The model, with weights in fp32 unless `options` say otherwise."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        task.model, **{"dtype": torch.float32, "attn_implementation": "sdpa", **options}
    )
    model.config.use_cache = False
    return model


def trainer_of(name: str, task: Task, rows: Rows) -> Trainer:
    """The trainer of that name, over the rows of the task."""
    ids = rows.training.tolist()
    if name == "trainer":
        dataset = Dataset.from_dict({"input_ids": ids, "labels": ids})
        arguments = TrainingArguments(**arguments_of(task))
        return Trainer(model_of(task), arguments, train_dataset=dataset, data_collator=default_data_collator)
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    if name == "dpo":
        from trl import DPOConfig, DPOTrainer

        options_of_dpo = DPOConfig(
            **arguments_of(task, rows_of_example=2),
            beta=task.beta,
            max_length=None,
            # The same as here: no second model in memory, and one pass before the first step.
            precompute_ref_log_probs=True,
            precompute_ref_batch_size=max(1, task.rows_at_once // 2),
        )
        dataset = Dataset.from_list(pairs_of(rows, tokenizer))
        return DPOTrainer(model_of(task), args=options_of_dpo, train_dataset=dataset, processing_class=tokenizer)
    from trl import SFTConfig, SFTTrainer

    dataset = Dataset.from_dict({"input_ids": ids})
    config = SFTConfig(**arguments_of(task), max_length=None)
    if name == "qlora":
        from peft import LoraConfig
        from transformers import BitsAndBytesConfig

        packing: Any = BitsAndBytesConfig
        packed = packing(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "quantization_config": packed, "device_map": {"": 0}}
        adapters = LoraConfig(r=task.lora_rank, lora_alpha=task.lora_alpha, target_modules="all-linear")  # type: ignore[arg-type]
        return SFTTrainer(
            model_of(task, **options), config, train_dataset=dataset, processing_class=tokenizer, peft_config=adapters
        )
    return SFTTrainer(model_of(task), config, train_dataset=dataset, processing_class=tokenizer)


def pairs_of(rows: Rows, tokenizer: Any) -> list[dict[str, str]]:
    """The answers as texts, which the trainer tokenises again."""
    answers, prompt = rows.answers(), rows.num_prompt_tokens

    def text(ids: Any) -> str:
        return " ".join(tokenizer.convert_ids_to_tokens(ids.tolist()))

    return [
        {"prompt": text(chosen[:prompt]), "chosen": " " + text(chosen[prompt:]), "rejected": " " + text(other[prompt:])}
        for chosen, other in zip(answers[::2], answers[1::2], strict=True)
    ]


def main() -> None:
    """Serve the bench."""
    name, task = sys.argv[1], Task.read(Path(sys.argv[2]))
    line, rows = Line(), Rows(task)
    torch.set_num_threads(task.num_threads)
    trainer = trainer_of(name, task, rows)
    trainer.add_callback(Turns(line, rows, task))
    trainer.train()


if __name__ == "__main__":
    main()
