from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig

from horizon_server.engine.meta_model import build_meta_model, load_config
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


LATENT_EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
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

    assert [place.name for place in template.places[head.index]] == ["model.norm.weight", "lm_head.weight"]
    flat = torch.arange(template.head_elements, dtype=torch.float32)
    table = template.places[head.index][1].piece.read(flat)
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
    with pytest.raises(InvalidModel, match="model_type is 'from-elsewhere', which transformers"):
        Template.from_folder(tmp_path)
    for config, words in (({}, "model_type is None"), ({"model_type": ["llama"]}, r"model_type is \['llama'\]")):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(InvalidModel, match=words):
            Template.from_folder(tmp_path)


def test_a_config_of_the_wrong_types_is_refused_by_field_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))

    with pytest.raises(InvalidModel, match=r"is not the config of a llama model: .*'hidden_size'") as caught:
        Template.from_folder(tmp_path)

    assert "\n" not in caught.value.message


def test_a_model_that_is_no_language_model_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"'vit' cannot be trained: .* has no causal language model for it$"):
        Template.from_config(AutoConfig.for_model("vit"))


def test_parameters_that_transformers_ties_stay_tied() -> None:
    model = build_meta_model(config_of("bert", is_decoder=True))

    assert model.get_parameter("cls.predictions.decoder.bias") is model.get_parameter("cls.predictions.bias")


def test_the_pad_token_is_remembered_and_taken_from_the_module() -> None:
    template = Template.from_config(config_of("llama"))
    rows, ids = torch.randn(8, 16), torch.tensor([5, 0, 7, 5])

    hidden, calls = template.embed({template.table_place.name: rows}, ids, torch.arange(4))

    assert template.padding_id == 5
    assert torch.equal(hidden[0], rows[ids])
    assert len(calls) == 4


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(InvalidModel, match=r"'bart' is an encoder-decoder .* only decoder-only"):
        Template.from_config(AutoConfig.for_model("bart"))


def test_a_router_loss_is_refused_and_without_it_the_plain_forward_is_followed() -> None:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    with pytest.raises(InvalidModel, match=r"config\.json sets output_router_logits"):
        Template.from_config(config_of("mixtral", output_router_logits=True, **experts))
    assert Template.from_config(config_of("mixtral", output_router_logits=True, router_aux_loss_coef=0.0, **experts))


@pytest.mark.parametrize(
    "choice", ["flash_attention_2", "flash_attention_3", "kernels-community/flash-attn", "flex_attention"]
)
def test_attention_that_needs_other_packages_is_not_asked_for(choice: str, tmp_path: Path) -> None:
    config = {**config_of("llama").to_dict(), "attn_implementation": choice}
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert build_meta_model(load_config(tmp_path)).config._attn_implementation == "sdpa"


def test_eager_attention_is_kept_where_the_folder_names_it(tmp_path: Path) -> None:
    config = {**config_of("llama").to_dict(), "attn_implementation": "eager"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert build_meta_model(load_config(tmp_path)).config._attn_implementation == "eager"


@pytest.mark.parametrize("model_type", ["opt", "biogpt", "xglm"])
def test_layers_skipped_at_random_are_refused_by_the_name_of_the_setting(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, layerdrop=0.1)
    with pytest.raises(InvalidModel, match=r"config\.json sets layerdrop to 0\.1, .*; set it to 0$"):
        Template.from_config(config)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        (
            "gemma4_text",
            {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 8},
            r"tensor model\.embed_tokens_per_layer\.weight is used before the layers in addition to the token",
        ),
        (
            "glm_moe_dsa",
            {
                **LATENT_EXPERTS,
                "index_topk": 4,
                "index_n_heads": 2,
                "index_head_dim": 8,
                "indexer_types": ["full", "shared", "full", "full"],
            },
            "layer 1 uses a result of the layer before it besides the hidden state, which is not supported",
        ),
        (
            "rwkv",
            {"attention_hidden_size": 16},
            "its layers cannot be run one at a time, because its code passes more than the hidden state from layer to "
            "layer$",
        ),
        (
            "opt",
            {"word_embed_proj_dim": 8, "ffn_dim": 24},
            "its token embedding is 8 wide and its layers 16; a projection between them is not supported",
        ),
        ("hy_v4", {}, r"its layers take hidden states of shape \[1, 4, 4, 16\] instead of \[1, 4, 16\]"),
        (
            "hrm_text",
            {},
            r"its decoder layers must be in one list, and this model has 2 lists .*: model\.L_module\.layers, ",
        ),
        ("bert", {"is_decoder": True}, r"tensor bert\.embeddings\.LayerNorm\.weight is used before the layers"),
    ],
)
def test_a_model_that_the_schedule_would_get_wrong_is_refused(
    model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidModel, match=f"model_type '{model_type}': {message}"):
        Template.from_config(config_of(model_type, **changes))


def test_learned_positions_travel_with_the_table() -> None:
    template = Template.from_config(config_of("gpt2", n_embd=16, n_layer=2, n_head=2, n_positions=32))

    assert not template.embeds_by_rows
    assert template.embedding_name == "transformer.wte.weight"
    assert [place.name for place in template.places_besides_table] == ["wpe.weight"]
    assert template.max_document_tokens == 32
    assert Template.from_config(config_of("llama")).embeds_by_rows


def test_buffers_of_the_checkpoint_have_a_place_and_are_not_trained() -> None:
    template = Template.from_config(config_of("minimax", num_local_experts=4, num_experts_per_tok=2))
    untrained = {place.name for place in template.places[2] if not place.trained}

    assert untrained == {f"self_attn.{name}" for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay")}
