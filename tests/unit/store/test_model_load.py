"""Loading: every value exact, every mismatch named, nothing of a pickle touched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from horizon_server.errors import InvalidModel
from horizon_server.planning.model_folder import ModelShape, open_model_folder
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import STAGING_ELEMENTS, load_model

MakeModel = Callable[..., Path]
UP = "model.layers.1.mlp.up_proj.weight"


def store_for(folder: Path) -> HostStore:
    return HostStore.allocate(open_model_folder(folder).layout, num_threads=1)


def master(store: HostStore, name: str) -> torch.Tensor:
    unit, place = store.layout.find(name)
    out = torch.empty(unit.num_elements)
    store.merge_master(unit.index, out)
    return out.narrow(0, place.offset, place.num_elements).view(place.shape)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def changed_copy(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    shutil.copytree(folder, target, dirs_exist_ok=True)
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors")
    return target


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_every_master_is_the_value_in_the_file(
    make_model: MakeModel, tied: bool, dtype: torch.dtype, shard: str
) -> None:
    folder = make_model(tied=tied, dtype=dtype, shard=shard)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (shard == "20KB")
    store = store_for(folder)
    store.plane("exp_avg").fill_(1)
    load_model(store, folder)
    weights = weights_of(folder)
    assert set(weights) == {place.name for _, place in store.layout.tensors()}
    for name, weight in weights.items():
        assert weight.dtype == dtype
        assert torch.equal(master(store, name), weight.float()), name
    assert int(store.plane("exp_avg").count_nonzero()) == 0


def test_a_store_in_use_is_loaded_as_exactly_as_a_fresh_one(make_model: MakeModel) -> None:
    folder = make_model(dtype=torch.bfloat16)
    used, fresh = store_for(folder), store_for(folder)
    for plane in ("hi", "lo", "exp_avg", "exp_avg_sq"):
        used.plane(plane).fill_(3)
    again = HostStore.attach(used.layout, used.fds)
    assert not again.blank and fresh.blank == {"hi", "lo", "exp_avg", "exp_avg_sq", "grad"}
    for store in (again, fresh):
        load_model(store, folder)
    for _, place in fresh.layout.tensors():
        for plane in ("hi", "lo", "exp_avg", "exp_avg_sq"):
            assert torch.equal(again.tensor(place.name, plane), fresh.tensor(place.name, plane)), (place.name, plane)


def test_tensors_larger_than_the_staging_buffer_arrive_whole(tmp_path: Path) -> None:
    rows = STAGING_ELEMENTS // 1024 + 3
    weights = {"embed_tokens.weight": torch.randn(rows, 1024), "layers.0.a.weight": torch.ones(2, 2)}
    save_file(weights, tmp_path / "model.safetensors")
    sizes = {"num_hidden_layers": 1, "vocab_size": rows, "hidden_size": 1024}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | sizes | {"tie_word_embeddings": True}))
    store = store_for(tmp_path)
    load_model(store, tmp_path)
    assert torch.equal(master(store, "embed_tokens.weight"), weights["embed_tokens.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop(UP), f"lacks {UP}"),
        (lambda w: w.update({UP: torch.ones(3, 3)}), rf"{UP} has shape \[3, 3\], the model needs \[48, 32\]"),
        (lambda w: w.update(extra=torch.ones(1)), "holds extra, which the model in its config.json does not have"),
        (lambda w: w.update({UP: torch.ones(48, 32, dtype=torch.int8)}), f"{UP} is I8; weights must be"),
        (lambda w: w[UP][3, 4].fill_(torch.nan), f"{UP} holds NaN"),
        (lambda w: w[UP][3, 4].fill_(torch.inf), f"{UP} holds NaN or infinite"),
    ],
)
def test_a_tensor_that_does_not_belong_is_named(
    make_model: MakeModel, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    folder = make_model()
    store = store_for(folder)
    with pytest.raises(InvalidModel, match=message):
        load_model(store, changed_copy(folder, tmp_path, change))


def test_names_are_checked_before_anything_is_written(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model()
    store = store_for(folder)
    with pytest.raises(InvalidModel):
        load_model(store, changed_copy(folder, tmp_path, lambda w: w.pop(UP)))
    assert int(store.plane("hi").count_nonzero()) == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}),
        lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1}),
        lambda w: w.update({"lm_head.weight": torch.ones(2, 2)}),
        lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}),
    ],
)
def test_a_projection_tied_to_the_embedding_and_buffers_of_old_checkpoints_are_left_out(
    make_model: MakeModel, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    source = make_model()
    store = store_for(source)
    load_model(store, changed_copy(source, tmp_path, change))
    for name, weight in weights_of(source).items():
        assert torch.equal(master(store, name), weight.float()), name


CONFIG = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 128,
    "intermediate_size": 48,
}


def test_shape_is_read_under_the_names_of_other_families() -> None:
    gpt2 = {"n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 9, "n_inner": None, "n_positions": 77}
    shape = ModelShape.from_config(gpt2, names=["wte.weight"])
    assert (shape.hidden_size, shape.num_hidden_layers, shape.intermediate_size) == (32, 3, 128)
    assert (shape.head_dim, shape.num_key_value_heads, shape.max_position_embeddings) == (8, 4, 77)
    assert shape.tied
    assert not ModelShape.from_config({"text_config": CONFIG}, names=["lm_head.weight"]).tied
    assert not ModelShape.from_config(CONFIG | {"tie_word_embeddings": False}, names=[]).tied


@pytest.mark.parametrize("value", [0, -3, 2.5, "32", True])
def test_a_size_that_is_no_positive_integer_is_named(value: object) -> None:
    with pytest.raises(InvalidModel, match="hidden_size is"):
        ModelShape.from_config(CONFIG | {"hidden_size": value})


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"num_local_experts": 8, "num_experts_per_tok": 2}, (8, 2, 40, 0)),
        ({"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 12}, (16, 4, 12, 0)),
        ({"num_experts": 4, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}, (4, 1, 12, 20)),
        ({"n_routed_experts": 4, "n_shared_experts": 2, "moe_intermediate_size": 12}, (4, 1, 12, 24)),
        ({"num_experts": 0, "moe_intermediate_size": 12}, None),
        ({"n_routed_experts": None}, None),
    ],
)
def test_experts_are_read_under_the_names_of_their_families(
    config: dict[str, object], wanted: tuple[int, ...] | None
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "num_attention_heads": 4}
    experts = ModelShape.from_config({**sizes, "intermediate_size": 40, **config}).experts

    assert (None if experts is None else astuple(experts)[:4]) == wanted


@pytest.mark.parametrize(
    ("sizes", "narrow"),
    [
        ({"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}, True),
        ({"qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 128}, False),
        ({"v_head_dim": 128}, False),
        ({}, False),
    ],
)
def test_values_of_another_size_than_queries_are_noticed(sizes: dict[str, int], narrow: bool) -> None:
    # Of a family with masks: attention without them keeps no scores, whatever its sizes.
    shape = ModelShape.from_config(CONFIG | {"model_type": "llama4_text"} | sizes, names=["lm_head.weight"])
    assert shape.num_score_planes == 4 * narrow


def test_a_missing_size_is_named() -> None:
    with pytest.raises(InvalidModel, match="vocab_size is missing"):
        ModelShape.from_config({name: value for name, value in CONFIG.items() if name != "vocab_size"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "holds no config.json"),
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object, not a list"),
        (json.dumps(CONFIG | {"quantization_config": {}}), "quantised"),
        (json.dumps(CONFIG | {"tie_word_embeddings": False}), r"output projection \(lm_head.weight\)"),
    ],
)
def test_a_folder_that_cannot_be_trained_says_why(
    make_model: MakeModel, tmp_path: Path, config: str | None, message: str
) -> None:
    shutil.copy(make_model() / "model.safetensors", tmp_path)
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(InvalidModel, match=message):
        open_model_folder(tmp_path)
