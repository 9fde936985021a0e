"""The tools whose configs are read: how to tell them apart, and what they do where a config says nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizon_client.errors import BadFile, InvalidRequest
from horizon_client.job_spec import load_spec_file


@dataclass(frozen=True, kw_only=True)
class Tool:
    """One tool. `defaults` are its own, by its own names, where they differ from what a job file does by default."""

    name: str
    signs: frozenset[str]
    """Names that only its configs have."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


_TRAINER = {
    "num_train_epochs": 3.0,
    "per_device_train_batch_size": 8,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "seed": 42,
}
"""Of transformers.TrainingArguments."""

TOOLS: Mapping[str, Tool] = {
    tool.name: tool
    for tool in (
        Tool(
            name="axolotl",
            signs=frozenset({"base_model", "micro_batch_size", "sequence_len", "datasets", "adapter", "val_set_size"}),
            defaults={"micro_batch_size": 1, "sequence_len": 512, "num_epochs": 1.0, "lr_scheduler": "cosine"},
        ),
        Tool(
            name="llama-factory",
            signs=frozenset(
                {"finetuning_type", "stage", "cutoff_len", "template", "dataset_dir", "lora_rank", "val_size"}
            ),
            defaults={**_TRAINER, "cutoff_len": 2048, "finetuning_type": "lora", "lora_rank": 8},
        ),
        Tool(
            name="trl",
            signs=frozenset(
                {
                    "dataset_name",
                    "max_length",
                    "max_seq_length",
                    "use_peft",
                    "lora_r",
                    "assistant_only_loss",
                    "completion_only_loss",
                    "packing",
                    "beta",
                    "loss_type",
                    "num_generations",
                }
            ),
            defaults={**_TRAINER, "learning_rate": 2e-5, "max_length": 1024},
        ),
        Tool(name="transformers", signs=frozenset({"per_device_train_batch_size"}), defaults=_TRAINER),
    )
}
_TRAINER_NAMES = frozenset({"num_train_epochs", "per_device_train_batch_size", "output_dir", "model_name_or_path"})


def read_config(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file of at most 1 MiB, read without constructing anything but plain data."""
    return load_spec_file(path)


def tool_of(config: Mapping[str, Any], *, named: str = "", file: str = "the file") -> Tool:
    """Return the tool that a config is of, by the names that it has.

    Raises:
        InvalidRequest: when `named` is not a known tool.
        BadFile: when the names are those of no tool, or of two alike.
    """
    if named:
        if named not in TOOLS:
            raise InvalidRequest.of("tool", f"tool is {named!r}; it must be one of {', '.join(TOOLS)}")
        return TOOLS[named]
    found = {name: sorted(tool.signs & config.keys()) for name, tool in TOOLS.items()}
    if found["axolotl"] and found["llama-factory"]:
        axolotl, factory = (", ".join(found[name][:3]) for name in ("axolotl", "llama-factory"))
        both = f"{axolotl} of Axolotl and {factory} of LLaMA-Factory"
        raise BadFile(f"{file} has names of two tools: {both}; say which with --from")
    for name in ("axolotl", "llama-factory", "trl"):
        if found[name]:
            return TOOLS[name]
    if _TRAINER_NAMES & config.keys():
        return TOOLS["transformers"]
    names = json.dumps(sorted(map(str, config))[:5])
    raise BadFile(
        f"{file} is not a config of {', '.join(TOOLS)} that this version knows: it has {names}; a job file of horizon "
        "needs no import, and for another tool's file say whose names it uses with --from"
    )
