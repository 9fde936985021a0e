"""TRL's SFTTrainer on chats, from the files to a saved model, in one go.

    python -m bench.peers.chats packed|padded CHATS.json

The settings, a JSON object, are what `end_to_end.py` writes. One line on stdout says what was done.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from bench.peers.protocol import Line


def held_out(trainer: SFTTrainer) -> tuple[float, int]:
    """The mean loss of the held-out answers' tokens, and how many they are."""
    assert trainer.model is not None and trainer.eval_dataset is not None
    model: Any = trainer.model.eval()
    rows: Any = trainer.eval_dataset
    total, number = 0.0, 0
    with torch.no_grad():
        for row in rows:
            logits_TV = model(input_ids=torch.tensor([row["input_ids"]], device=model.device)).logits[0, :-1].float()
            labels_T = torch.tensor(row["labels"][1:], device=model.device)
            total += float(functional.cross_entropy(logits_TV, labels_T, reduction="sum", ignore_index=-100))
            number += int((labels_T != -100).sum())
    return total / number, number


def main() -> None:
    """Train, save and report."""
    name, chosen = sys.argv[1], json.loads(Path(sys.argv[2]).read_text("utf-8"))
    line, packed = Line(), name == "packed"
    torch.set_num_threads(chosen["num_threads"])
    model = AutoModelForCausalLM.from_pretrained(chosen["model"], dtype=torch.float32, attn_implementation="sdpa")
    data = load_dataset("json", data_files={"train": chosen["training"], "held_out": chosen["held_out"]})
    config = SFTConfig(
        output_dir=chosen["output"],
        max_length=chosen["sequence_length"],
        packing=packed,
        eval_packing=False,
        assistant_only_loss=True,
        per_device_train_batch_size=chosen["rows_of_step"] if packed else chosen["chats_of_step"],
        max_steps=chosen["num_steps"],
        learning_rate=chosen["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=chosen["warmup_steps"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=False,
        use_cpu=chosen["device"] == "cpu",
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        # Chats of like length are padded least.
        train_sampling_strategy="random" if packed else "group_by_length",
        include_num_input_tokens_seen="non_padding",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=chosen["device"] == "cuda",
    )
    trainer = SFTTrainer(
        model,
        config,
        train_dataset=data["train"],
        eval_dataset=data["held_out"],
        processing_class=AutoTokenizer.from_pretrained(chosen["model"]),
    )
    started_s = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started_s
    trainer.save_model()
    loss, num_targets = held_out(trainer)
    line.answer(
        seconds=seconds, num_tokens=int(trainer.state.num_input_tokens_seen), loss=loss, num_held_out=num_targets
    )


if __name__ == "__main__":
    main()
