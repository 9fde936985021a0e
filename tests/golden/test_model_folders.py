"""Folders as transformers writes them: planned from their headers, loaded, trained, exported, and read by transformers
again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.double import check_numbers, plain_and_exact
from torch import Tensor
from transformers import AutoModelForCausalLM

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import InvalidModel
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.recipe import Recipe
from horizon_server.records.execution import Execution
from horizon_server.store.checkpoint import load_checkpoint, save_checkpoint
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import plane_sizes
from horizon_server.store.model_load import load_model

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine

Pack = Callable[[list[Tensor]], MicroBatch]
OTHERWISE_ON_DISK = {
    "qwen3_moe": "model.layers.1.mlp.experts.2.gate_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.2.w3.weight",
    "deepseek_v3": "model.layers.1.mlp.gate.e_score_correction_bias",
    "qwen3_next": "model.layers.1.mlp.experts.2.down_proj.weight",
    "gpt_oss": "model.layers.1.mlp.experts.gate_up_proj",
    "gpt_neox": "embed_out.weight",
    "olmo_hybrid": "model.layers.1.linear_attn.q_conv1d.weight",
    "gpt2": "transformer.wpe.weight",
    "mamba": "backbone.layers.1.mixer.A_log",
    "falcon_mamba": "backbone.layers.1.mixer.A_log",
    "mamba2": "backbone.layers.1.mixer.A_log",
    "xlstm": "backbone.blocks.1.mlstm_layer.q.weight",
}
EXPERT = OTHERWISE_ON_DISK["qwen3_moe"]


@pytest.fixture
def folder_of(engine: Engine, tmp_path: Path) -> Callable[[str], Path]:
    """A folder with a tiny model of an architecture, written by save_pretrained."""

    def write(architecture: str) -> Path:
        folder = tmp_path / architecture
        reference: Any = engine.tiny_model(architecture).reference()
        reference.save_pretrained(folder)
        return folder

    return write


@pytest.fixture
def load() -> Iterator[Callable[[Path], tuple[Template, HostStore]]]:
    """Template and filled store of a folder, as a worker has them."""
    stores: list[HostStore] = []

    def begin(folder: Path) -> tuple[Template, HostStore]:
        template = Template.from_folder(folder)
        store = HostStore.allocate(template.layout, num_threads=1)
        stores.append(store)
        load_model(store, folder)
        return template, store

    yield begin
    for store in stores:
        store.close()


@pytest.fixture
def trainer_of() -> Iterator[Callable[[Template, HostStore], Trainer]]:
    """A trainer on a device of its own."""
    devices: list[HostDevice] = []

    def begin(template: Template, store: HostStore) -> Trainer:
        devices.append(HostDevice(num_threads=1))
        recipe = Recipe(learning_rate=1e-2, weight_decay=0.1)
        return Trainer(template, store, devices[-1], recipe, Execution(optimizer_threads=1), num_steps=4)

    yield begin
    for device in devices:
        device.close()


def plain(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.train(False)


@pytest.mark.parametrize("architecture", OTHERWISE_ON_DISK)
def test_a_folder_is_planned_loaded_trained_exported_and_read_again(
    architecture: str,
    folder_of: Callable[[str], Path],
    load: Callable[[Path], tuple[Template, HostStore]],
    trainer_of: Callable[[Template, HostStore], Trainer],
    engine: Engine,
    tmp_path: Path,
) -> None:
    folder = folder_of(architecture)
    names = load_file(folder / "model.safetensors")
    assert OTHERWISE_ON_DISK[architecture] in names
    template, store = load(folder)
    planned = open_model_folder(folder).layout
    assert plane_sizes(planned, grad_dtype_bytes=4) == plane_sizes(template.layout, grad_dtype_bytes=4)
    assert planned.num_parameters == sum(tensor.numel() for tensor in names.values())

    rows = [engine.pack([document]) for document in engine.documents(14, 22)]
    trainer = trainer_of(template, store)
    report = trainer.train_step(rows)

    def autograd(reference: torch.nn.Module) -> tuple[float, float]:
        loss = sum(engine.plain_loss(reference, row) for row in rows) / sum(row.num_targets for row in rows)
        assert isinstance(loss, Tensor)
        torch.autograd.backward(loss)
        total = sum(float(p.grad.double().square().sum()) for p in reference.parameters() if p.grad is not None)
        return loss.item(), total**0.5

    in_fp32, exact = plain_and_exact(partial(plain, folder), autograd)
    check_numbers(report.loss, in_fp32[0], exact[0])
    check_numbers(report.grad_norm, in_fp32[1], exact[1], "the norm")

    trainer.train_step(rows)
    trainer.flush()
    exported = tmp_path / "exported"
    save_checkpoint(store, exported, source=folder, trainer_state={})
    again = load_file(exported / "model.safetensors")
    assert {name: tensor.shape for name, tensor in again.items()} == {name: t.shape for name, t in names.items()}
    ours = trainer_of(*load(exported)).evaluate(rows)

    def evaluated(reference: torch.nn.Module) -> float:
        with torch.no_grad():
            return float(sum(engine.plain_loss(reference, row) for row in rows) / sum(row.num_targets for row in rows))

    check_numbers(ours.eval_loss, *plain_and_exact(partial(plain, exported), evaluated))
    assert ours.eval_loss < report.loss


@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_fused_experts_are_views_of_what_the_checkpoint_stores(
    architecture: str, folder_of: Callable[[str], Path], load: Callable[[Path], tuple[Template, HostStore]]
) -> None:
    folder = folder_of(architecture)
    template, store = load(folder)
    reference = dict(plain(folder).named_parameters())
    unit = torch.empty(template.layout.units[2].num_elements)
    store.merge_master(2, unit)

    places = {place.name: place for place in template.places[2]}
    for name in ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        view = places[name].piece.read(unit)
        assert view.untyped_storage().data_ptr() == unit.untyped_storage().data_ptr()
        assert torch.equal(view, reference[f"model.layers.1.{name}"])


def test_a_buffer_of_the_checkpoint_is_kept_to_the_bit(
    folder_of: Callable[[str], Path],
    load: Callable[[Path], tuple[Template, HostStore]],
    trainer_of: Callable[[Template, HostStore], Trainer],
    engine: Engine,
) -> None:
    name = OTHERWISE_ON_DISK["deepseek_v3"]
    template, store = load(folder_of("deepseek_v3"))
    before = {plane: store.tensor(name, plane).clone() for plane in ("hi", "lo")}
    trainer = trainer_of(template, store)
    for _ in range(2):
        trainer.train_step([engine.pack(engine.documents(20))])
    trainer.flush()

    for plane, bits in before.items():
        assert torch.equal(store.tensor(name, plane), bits)
    assert bool(before["lo"].count_nonzero())


def test_a_checkpoint_of_experts_resumes(
    folder_of: Callable[[str], Path], load: Callable[[Path], tuple[Template, HostStore]], tmp_path: Path
) -> None:
    folder = folder_of("mixtral")
    _, store = load(folder)
    save_checkpoint(store, tmp_path / "checkpoint", source=folder, trainer_state={"step": 3})
    _, other = load(tmp_path / "checkpoint")
    other.plane("hi").zero_()

    assert load_checkpoint(other, tmp_path / "checkpoint") == {"step": 3}
    assert torch.equal(other.plane("hi"), store.plane("hi"))
    assert torch.equal(other.plane("lo"), store.plane("lo"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(EXPERT), rf"tensor {EXPERT} is missing"),
        (lambda w: w.update({EXPERT: torch.ones(5, 32)}), rf"tensor {EXPERT} has shape \[5, 32\], the others"),
        (
            lambda w: w.pop("model.layers.0.self_attn.q_proj.weight"),
            r"tensor model\.layers\.0\.self_attn\.q_proj\.weight is mis",
        ),
        (
            lambda w: w.update({"model.layers.0.extra.weight": torch.ones(4)}),
            r"tensor model\.layers\.0\.extra\.weight is in",
        ),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_by_the_name_of_a_tensor(
    change: Callable[[dict[str, Tensor]], object], message: str, folder_of: Callable[[str], Path]
) -> None:
    folder = folder_of("qwen3_moe")
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")

    with pytest.raises(InvalidModel, match=message):
        Template.from_folder(folder)


def test_fewer_experts_than_the_config_says_are_refused(folder_of: Callable[[str], Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folder_of("mixtral"), tmp_path / "more")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 8}))

    with pytest.raises(InvalidModel, match=r"experts\.\d\.\w+\.weight .*together have shape \[4, .*asks for \[8, "):
        Template.from_folder(folder)


def test_layers_that_predict_further_tokens_are_left_out(
    folder_of: Callable[[str], Path], load: Callable[[Path], tuple[Template, HostStore]]
) -> None:
    folder = folder_of("deepseek_v3")
    weights = load_file(folder / "model.safetensors")
    extra = {n.replace("layers.2.", "layers.3."): w.clone() for n, w in weights.items() if "layers.2." in n}
    extra |= {"model.layers.3.eh_proj.weight": torch.ones(32, 64), "mtp.norm.weight": torch.ones(32)}
    save_file(weights | extra, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))

    template, _ = load(folder)

    assert template.num_layers == 3
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(InvalidModel, match="num_hidden_layers = 3, but the tensors form no list of that length"):
        Template.from_folder(folder)


def test_names_without_the_prefix_and_stored_masks_are_understood(
    engine: Engine, load: Callable[[Path], tuple[Template, HostStore]], tmp_path: Path
) -> None:
    reference: Any = engine.tiny_model("gpt2").reference()
    reference.save_pretrained(tmp_path)
    weights = {n.removeprefix("transformer."): w for n, w in load_file(tmp_path / "model.safetensors").items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 128, 128).tril() for i in range(3)}
    save_file(weights | masks, tmp_path / "model.safetensors")

    template, store = load(tmp_path)

    assert template.embedding_name == "wte.weight"
    assert {tensor.name for _, tensor in store.layout.tensors()} == set(weights)
    assert torch.equal(plain(tmp_path).state_dict()["transformer.h.2.mlp.c_fc.weight"], weights["h.2.mlp.c_fc.weight"])
