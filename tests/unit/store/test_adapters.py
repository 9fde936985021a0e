"""What adapters begin with: A random by the seed and the tensor's name, B zero, or the values that are given."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_server.errors import InvalidModel
from horizon_server.planning.trainable import open_for_training
from horizon_server.spec import LoraSpec, TrainSpec
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import StoreLayout
from horizon_server.store.model_load import load_model
from horizon_server.store.safetensors_files import read_safetensors_headers

A, B = "model.layers.1.self_attn.k_proj.lora_A.weight", "model.layers.1.self_attn.k_proj.lora_B.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = AutoConfig.for_model(
        "llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=64, num_attention_heads=4
    )
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def layout_of(folder: Path, *targets: str) -> StoreLayout:
    return open_for_training(folder, TrainSpec(trainable=("lora",), lora=LoraSpec(rank=8, targets=targets))).layout


@pytest.fixture
def loaded(folder: Path) -> Iterator[Any]:
    stores = []

    def load(*targets: str, **options: Any) -> HostStore:
        store = HostStore.allocate(layout_of(folder, *(targets or ("all-linear",))))
        stores.append(store)
        load_model(store, folder, **options)
        return store

    yield load
    for store in stores:
        store.close()


def master(store: HostStore, name: str) -> torch.Tensor:
    unit, tensor = store.layout.find(name)
    end = tensor.offset + tensor.num_elements
    return store.exact(unit.index, lambda flat: flat[tensor.offset : end].view(tensor.shape))


def test_a_is_that_of_kaiming_uniform_and_b_is_zero(loaded: Any) -> None:
    store = loaded(seed=3)
    a, b = master(store, A), master(store, B)
    bound = 1 / math.sqrt(64)
    assert 0.95 * bound < a.abs().max() <= bound
    assert float(a.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert abs(float(a.mean())) < 0.1 * bound
    assert not b.any()


def test_an_adapter_begins_the_same_whatever_others_there_are(loaded: Any) -> None:
    wide, narrow, other = loaded(seed=3), loaded(r"1\.self_attn\.k_proj", seed=3), loaded(seed=4)
    assert torch.equal(master(wide, A), master(narrow, A))
    assert not torch.equal(master(wide, A), master(other, A))
    assert not torch.equal(master(wide, A), master(wide, A.replace("layers.1", "layers.0")))


def test_given_values_are_loaded_exactly_and_one_that_is_missing_is_named(
    loaded: Any, folder: Path, tmp_path: Path
) -> None:
    names = [tensor for _, tensor in layout_of(folder, "q_proj").tensors() if tensor.adapts]
    values = {tensor.name: torch.randn(tensor.shape) for tensor in names}
    (tmp_path / "adapter").mkdir()
    save_file(values, tmp_path / "adapter" / "model.safetensors")
    headers = read_safetensors_headers(tmp_path / "adapter")
    store = loaded("q_proj", adapters=headers)
    for name, value in values.items():
        assert torch.equal(master(store, name), value)
    missing = names[0].name
    with pytest.raises(InvalidModel, match=f"lacks {missing}"):
        loaded("q_proj", adapters={name: header for name, header in headers.items() if name != missing})


def test_a_tensor_of_the_model_may_not_be_missing(folder: Path) -> None:
    layout, model = layout_of(folder, "q_proj"), AutoModelForCausalLM.from_pretrained(folder)
    state = {n: w.contiguous() for n, w in model.state_dict().items() if "layers.0.mlp.up" not in n}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=r"lacks model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(HostStore.allocate(layout), folder)
