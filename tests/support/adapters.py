"""Checkpoints of adapters, as a job's worker writes them, and adapter folders, as PEFT does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from horizon_server.planning.trainable import open_for_training
from horizon_server.spec import TrainSpec
from horizon_server.store.adapter_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE, AdapterConfig
from horizon_server.store.adapters import LORA_B, MAGNITUDE
from horizon_server.store.base_digest import model_digest
from horizon_server.store.checkpoint import AdapterExport, save_checkpoint
from horizon_server.store.checkpoint_parts import Export, MergeBase
from horizon_server.store.exported import ExportDtype
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_card import BaseFacts, ResultFacts
from horizon_server.store.model_load import load_model

RANK, ALPHA = 4, 12.0
LORA: dict[str, Any] = {"trainable": "lora", "lora": {"rank": RANK, "alpha": ALPHA, "targets": ["q_proj", "down_proj"]}}
"""`train` of a job with adapters as they are written here."""


def lora_on(base: str) -> dict[str, Any]:
    """`train` of a job with adapters whose base is kept in fewer bits."""
    return {**LORA, "lora": {**LORA["lora"], "base": base}}


def store_of_adapters(model: Path, *, base: str = "source") -> HostStore:
    """A store of a model with adapters whose lo halves and moments are not zero, as after training."""
    store = HostStore.allocate(open_for_training(model, TrainSpec.model_validate(lora_on(base))).layout, num_threads=1)
    load_model(store, model)
    generator = torch.Generator().manual_seed(5)
    for _, place in store.layout.tensors():
        if place.adapts:
            store.write_master(place.name, torch.randn(place.shape, generator=generator) * 0.3)
            store.tensor(place.name, "exp_avg").normal_(generator=generator)
            store.tensor(place.name, "exp_avg_sq").uniform_(generator=generator)
    return store


def write_adapter_checkpoint(
    target: Path,
    model: Path,
    *,
    export: Export = "adapter",
    base: str = "source",
    merge_base: MergeBase = "trained",
    dtype: ExportDtype = "source",
) -> Path:
    """Write a checkpoint of adapters for a model folder."""
    config = AdapterConfig(rank=RANK, alpha=ALPHA, base="tiny")
    adapter = AdapterExport(
        config=config, base_sha256=lambda: model_digest(model), export=export, merge_base=merge_base
    )
    store = store_of_adapters(model, base=base)
    save_checkpoint(
        store,
        target,
        source=model,
        trainer_state={"last_eval": None},
        dtype=dtype,
        adapter=adapter,
        facts=ResultFacts(
            job_id="job_1",
            job_name="adapted",
            step=3,
            num_steps=3,
            num_parameters=100,
            num_trained_parameters=10,
            spec={"name": "adapted", "model": "tiny", "dataset": "chats"},
            method="sft",
            base=BaseFacts(name="tiny"),
            data=[],
        ),
    )
    store.close()
    return target


def write_adapter(folder: Path, model: Path, **options: Any) -> Path:
    """Write a folder with an adapter as PEFT does; `options` are of its config."""
    folder.mkdir()
    store = store_of_adapters(model)
    tensors = {
        f"base_model.model.{place.name}": torch.full(place.shape, 0.01)
        for _, place in store.layout.tensors()
        if place.adapts
    }
    if options.get("use_dora"):
        outputs = {name: tensor for name, tensor in tensors.items() if name.endswith(LORA_B)}
        tensors |= {name.removesuffix(LORA_B) + MAGNITUDE: tensor[:, 0].clone() for name, tensor in outputs.items()}
    store.close()
    save_file(tensors, folder / ADAPTER_FILE)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "down_proj"]}
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(config | options))
    return folder
