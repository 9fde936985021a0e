"""Checkpoints of adapters: small, exact, of a base that they name; and the merged model next to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.qwen3_folders import MakeModel
from transformers import AutoModelForCausalLM

from horizon_server.errors import DiskFull, InvalidModel
from horizon_server.planning.trainable import open_for_training
from horizon_server.spec import TrainSpec
from horizon_server.store.adapter_files import AdapterConfig
from horizon_server.store.base_digest import model_digest
from horizon_server.store.checkpoint import AdapterExport, load_checkpoint, save_checkpoint
from horizon_server.store.checkpoint_parts import Export, adapter_part, model_part
from horizon_server.store.host_store import HostStore
from horizon_server.store.manifest import is_complete, read_manifest
from horizon_server.store.model_load import load_model

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

STATE = {"step": 17}
IDS = torch.arange(24).reshape(2, 12) * 5 % 120
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")


def trained_store(folder: Path) -> HostStore:
    """A store with adapters whose lo halves and moments are not zero, as after training."""
    train = TrainSpec.model_validate({"trainable": "lora", "lora": {"rank": 4, "targets": ["q_proj", "down_proj"]}})
    store = HostStore.allocate(open_for_training(folder, train).layout, num_threads=1)
    load_model(store, folder)
    generator = torch.Generator().manual_seed(5)
    for _, place in store.layout.tensors():
        if place.adapts:
            store.write_master(place.name, torch.randn(place.shape, generator=generator) * 0.3)
            store.tensor(place.name, "exp_avg").normal_(generator=generator)
            store.tensor(place.name, "exp_avg_sq").uniform_(generator=generator)
    return store


def export_of(folder: Path, export: Export = "adapter") -> AdapterExport:
    config = AdapterConfig(rank=4, alpha=12.0, base="tiny")
    return AdapterExport(config=config, base_sha256=lambda: model_digest(folder), export=export)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS).logits
    return found


@pytest.mark.parametrize("export", ["adapter", "merged", "both"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_bit_comes_back(make_model: MakeModel, tmp_path: Path, export: Export, dtype: torch.dtype) -> None:
    base = make_model(dtype=dtype)
    store, target = trained_store(base), tmp_path / "step-17"
    manifest = save_checkpoint(
        store, target, source=base, trainer_state=STATE, adapter=export_of(base, export), shard_bytes=8192
    )
    assert is_complete(target) and read_manifest(target) == manifest
    assert manifest.base is not None and manifest.base.model == "tiny"

    restored = HostStore.allocate(store.layout, num_threads=1)
    assert load_checkpoint(restored, target, base=base, base_sha256=lambda: model_digest(base)) == STATE
    for plane in PLANES:
        assert torch.equal(store.plane(plane).view(torch.uint8), restored.plane(plane).view(torch.uint8)), plane


def test_it_holds_the_adapters_and_nothing_of_the_base(make_model: MakeModel, tmp_path: Path) -> None:
    base = make_model()
    store = trained_store(base)
    manifest = save_checkpoint(store, tmp_path / "c", source=base, trainer_state=STATE, adapter=export_of(base))
    tensors = {name for name in manifest.files if ".safetensors" in name}
    assert tensors == {"adapter_model.safetensors", "trainer/exp_avg.safetensors", "trainer/exp_avg_sq.safetensors"}
    assert "config.json" not in manifest.files, "transformers would take it for a model"
    held = 12 * store.layout.num_trained_parameters
    assert held <= sum(manifest.files[name].size_bytes for name in tensors) <= held + 8192


@pytest.mark.parametrize(
    ("export", "adapter", "merged"),
    [("adapter", "", None), ("both", "", "merged/"), ("merged", "trainer/adapter/", "")],
)
def test_peft_and_transformers_load_its_parts(
    make_model: MakeModel, tmp_path: Path, export: Export, adapter: str, merged: str | None
) -> None:
    base, target = make_model(dtype=torch.float32), tmp_path / "c"
    manifest = save_checkpoint(
        trained_store(base), target, source=base, trainer_state=STATE, adapter=export_of(base, export)
    )
    assert (adapter_part(manifest.files), model_part(manifest.files)) == (adapter, merged)
    plain: Any = AutoModelForCausalLM.from_pretrained(base)
    before = logits(plain)
    wanted = logits(PeftModel.from_pretrained(plain, target / adapter))
    assert (wanted - before).abs().max() > 0.01
    if merged is not None:
        got = logits(AutoModelForCausalLM.from_pretrained(target / merged))
        assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_another_base_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    base, other = make_model(), make_model(tied=False)
    save_checkpoint(trained_store(base), tmp_path / "c", source=base, trainer_state=STATE, adapter=export_of(base))
    with pytest.raises(
        InvalidModel, match="the model tiny is not the one that the checkpoint's adapter was trained on"
    ):
        load_checkpoint(trained_store(base), tmp_path / "c", base=base, base_sha256=lambda: model_digest(other))


def test_a_checkpoint_of_the_other_kind_is_refused(make_model: MakeModel, tmp_path: Path) -> None:
    base = make_model()
    full = HostStore.allocate(open_for_training(base, TrainSpec()).layout, num_threads=1)
    load_model(full, base)
    save_checkpoint(full, tmp_path / "full", source=base, trainer_state=STATE)
    save_checkpoint(trained_store(base), tmp_path / "c", source=base, trainer_state=STATE, adapter=export_of(base))

    with pytest.raises(InvalidModel, match="is a checkpoint of adapters only, which this job does not train"):
        load_checkpoint(full, tmp_path / "c")
    with pytest.raises(InvalidModel, match="is a checkpoint of the whole model, which this job does not train"):
        load_checkpoint(trained_store(base), tmp_path / "full", base=base, base_sha256=lambda: model_digest(base))


def test_other_adapters_and_damage_are_named(make_model: MakeModel, tmp_path: Path) -> None:
    base, target = make_model(), tmp_path / "c"
    save_checkpoint(trained_store(base), target, source=base, trainer_state=STATE, adapter=export_of(base))
    train = TrainSpec.model_validate({"trainable": "lora", "lora": {"rank": 4, "targets": ["q_proj"]}})
    other = HostStore.allocate(open_for_training(base, train).layout, num_threads=1)
    how = {"base": base, "base_sha256": lambda: model_digest(base)}
    with pytest.raises(InvalidModel, match="is a checkpoint of another model"):
        load_checkpoint(other, target, **how)  # type: ignore[arg-type]
    file = target / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(InvalidModel, match=r"adapter_model\.safetensors does not match its checksum"):
        load_checkpoint(trained_store(base), target, **how)  # type: ignore[arg-type]


def test_the_space_of_a_merged_model_is_asked_for_first(make_model: MakeModel, tmp_path: Path) -> None:
    base = make_model()
    store, needed = trained_store(base), {}
    for export in ("adapter", "both"):
        with pytest.raises(DiskFull, match=r"needs \d+ bytes") as refused:
            save_checkpoint(
                store,
                tmp_path / "c",
                source=base,
                trainer_state=STATE,
                adapter=export_of(base, export),
                min_free_bytes=1 << 60,
            )
        needed[export] = int(refused.value.message.split(" needs ")[1].split()[0])
    weights = (base / "model.safetensors").stat().st_size
    assert needed["both"] - needed["adapter"] >= weights - 8192
    config = json.loads((base / "config.json").read_text())
    assert config["model_type"] == "qwen3" and not (tmp_path / "c").exists()
