from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from horizon_server.engine.meta_model import build_meta_model
from horizon_server.engine.template import Template
from horizon_server.errors import InvalidModel
from horizon_server.store.layout import build_layout

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 5,
}


def config_of(model_type: str, **changes: Any) -> PretrainedConfig:
    config: PretrainedConfig = AutoConfig.for_model(model_type, **{**SIZES, **changes})
    return config


def test_nothing_of_a_huge_model_is_allocated_but_its_buffers_are_real() -> None:
    model = build_meta_model(config_of("llama", hidden_size=16384, intermediate_size=65536, vocab_size=500_000))

    assert all(parameter.is_meta for parameter in model.parameters())
    buffers = dict(model.named_buffers())
    assert set(buffers) == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}
    assert buffers["model.rotary_emb.inv_freq"][0] == 1.0
    assert not any(buffer.is_meta for buffer in buffers.values())


def test_layers_of_one_configuration_share_a_template() -> None:
    assert Template.from_config(config_of("llama")).layer_groups == [0, 0, 0, 0]


def test_sliding_and_full_layers_keep_their_own() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    for model_type in ("gemma2", "gemma3_text"):
        template = Template.from_config(config_of(model_type, layer_types=kinds))
        assert template.layer_groups == [0, 1, 0, 1], model_type


def test_a_layer_without_rotary_embedding_keeps_its_own() -> None:
    assert Template.from_config(config_of("smollm3")).layer_groups == [0, 0, 0, 3]


def test_a_tied_head_finds_the_table_behind_its_own_unit() -> None:
    template = Template.from_config(config_of("qwen3", tie_word_embeddings=True))
    head, embedding = template.layout.units[-1], template.layout.units[0]

    assert [place.local_name for place in template.places(head.index)] == ["model.norm.weight", "lm_head.weight"]
    flat = torch.arange(template.head_elements, dtype=torch.float32)
    table = template.places(head.index)[1].view(flat)
    assert table.shape == (64, 16)
    assert table[0, 0] == head.num_elements
    assert template.head_elements == head.num_elements + embedding.num_elements


def test_a_missing_tensor_is_named() -> None:
    shapes = Template.from_config(config_of("llama")).shapes
    missing = {name: shape for name, shape in shapes.items() if name != "model.layers.2.mlp.up_proj.weight"}

    with pytest.raises(InvalidModel, match=r"tensor model\.layers\.2\.mlp\.up_proj\.weight is missing"):
        Template.from_config(config_of("llama"), layout=build_layout(missing, num_layers=4, tied=False))


def test_a_misshapen_tensor_is_named_with_both_shapes() -> None:
    shapes = Template.from_config(config_of("llama")).shapes
    layout = build_layout({**shapes, "model.norm.weight": (17,)}, num_layers=4, tied=False)

    with pytest.raises(InvalidModel, match=r"model\.norm\.weight has shape \[17\], the model's config asks for \[16\]"):
        Template.from_config(config_of("llama"), layout=layout)


def test_an_unknown_tensor_is_named() -> None:
    shapes = Template.from_config(config_of("llama")).shapes
    layout = build_layout({**shapes, "model.adapter.weight": (4, 4)}, num_layers=4, tied=False)

    with pytest.raises(InvalidModel, match=r"tensor model\.adapter\.weight is in the checkpoint"):
        Template.from_config(config_of("llama"), layout=layout)


def test_a_folder_without_config_or_with_a_foreign_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"holds no config\.json"):
        Template.from_folder(tmp_path)
    foreign = {"model_type": "from-elsewhere", "auto_map": {"AutoConfig": "code.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(foreign))
    (tmp_path / "code.py").write_text("raise SystemExit('code of a model folder was run')")
    with pytest.raises(InvalidModel, match="not the config of a model that transformers knows"):
        Template.from_folder(tmp_path)


def test_a_model_that_is_no_language_model_is_refused() -> None:
    with pytest.raises(InvalidModel, match="cannot be trained as a causal language model"):
        Template.from_config(AutoConfig.for_model("vit"))


def test_the_pad_token_is_remembered_and_taken_from_the_module() -> None:
    template = Template.from_config(config_of("llama"))
    rows, ids = torch.randn(8, 16), torch.tensor([5, 0, 7, 5])

    hidden, calls = template.embed({template.table_place.local_name: rows}, ids, torch.arange(4))

    assert template.padding_id == 5
    assert torch.equal(hidden[0], rows[ids])
    assert len(calls) == 4
