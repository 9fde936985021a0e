"""What the plan knows of families by name is what transformers says of their classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from horizon_server.engine.template import Template
from horizon_server.errors import InvalidModel
from horizon_server.planning.model_folder import (
    NEVER_TIED,
    TIED_BY_DEFAULT,
    UNFUSED_ATTENTION,
    WITHOUT_ATTENTION,
    ModelShape,
    open_model_folder,
)
from horizon_server.store.layout import plane_sizes

# Encoders and encoder-decoders, models whose scores are capped, and forms that are refused for other reasons.
NOT_TRAINED = {
    "big_bird",
    "bigbird_pegasus",
    "cpmant",
    "git",
    "got_ocr2",
    "megatron-bert",
    "mvp",
    "prophetnet",
    "reformer",
    "rembert",
    "roformer",
    "trocr",
    "xlm",
    "xlnet",
}
CAPPED = {"gemma2", "vaultgemma"}
# They ask for fused attention with arguments for which a CPU has no fused kernel.
FUSED_BY_CLASS_ONLY = {"doge", "falcon"}


def test_unfused_families_are_those_whose_class_says_so() -> None:
    classes = {
        name: getattr(transformers, made)
        for name, made in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
        if isinstance(made, str)
    }
    unfused = {name for name, made in classes.items() if not getattr(made, "_supports_sdpa", False)}
    assert unfused - NOT_TRAINED - CAPPED == (UNFUSED_ATTENTION - FUSED_BY_CLASS_ONLY) | WITHOUT_ATTENTION


CONFIG: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("changes", "on_host", "on_gpu"),
    [
        ({"model_type": "llama"}, 0, 0),
        ({"model_type": "bloom"}, 4, 4),
        ({"model_type": "llama", "attn_implementation": "eager"}, 0, 0),
        ({"model_type": "llama", "attn_implementation": "eager", "attention_dropout": 0.1}, 4, 4),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, 0, 0),
        ({"model_type": "deepseek_v3", "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}, 0, 0),
        ({"model_type": "longcat_flash", "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}, 8, 0),
        (
            {
                "model_type": "deepseek_v32",
                "qk_nope_head_dim": 8,
                "qk_rope_head_dim": 8,
                "v_head_dim": 8,
                "index_n_heads": 3,
            },
            7,
            3,
        ),
        ({"model_type": "mamba"}, 0, 0),
    ],
)
def test_the_scores_that_a_layer_keeps(changes: dict[str, Any], on_host: int, on_gpu: int) -> None:
    shape = ModelShape.from_config(CONFIG | changes)
    assert (shape.num_score_planes, shape.num_score_planes_on_gpu) == (on_host, on_gpu)


def test_an_encoder_decoder_is_refused_as_one_before_its_sizes_are_read() -> None:
    # Its heads are called encoder_attention_heads and decoder_attention_heads.
    bart = {"model_type": "bart", "is_encoder_decoder": True, "d_model": 32, "vocab_size": 64, "decoder_layers": 2}
    with pytest.raises(InvalidModel, match="is_encoder_decoder; only decoder-only language models"):
        ModelShape.from_config(bart)


def test_llama_4_keeps_every_token_for_every_expert() -> None:
    text = {"model_type": "llama4_text", "num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size": 48}
    experts = ModelShape.from_config(CONFIG | text).experts
    assert experts is not None
    assert (experts.num_experts_per_token, experts.num_computed_per_token) == (1, 16)
    assert (experts.intermediate_size, experts.shared_intermediate_size) == (48, 48)


def test_experts_that_are_switched_off_do_not_count() -> None:
    assert ModelShape.from_config(CONFIG | {"num_experts": 16_384, "is_moe": False}).experts is None


@pytest.mark.parametrize("model_type", sorted(WITHOUT_ATTENTION))
def test_a_model_without_attention_needs_no_heads(model_type: str) -> None:
    sizes = {
        "model_type": model_type,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "num_heads": 8,
        "head_dim": 8,
    }
    shape = ModelShape.from_config(sizes)
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (0, 0, 0)


ENCODERS = {
    "bart",
    "bert",
    "bert-generation",
    "blenderbot",
    "blenderbot-small",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "gemma4_assistant",
    "gemma4_unified_assistant",
    "marian",
    "mbart",
    "moss_transcribe_diarize",
    "pegasus",
    "plbart",
    "roberta",
    "roberta-prelayernorm",
    "roc_bert",
    "whisper",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}


def test_the_default_of_tied_tables_is_that_of_transformers() -> None:
    families = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NOT_TRAINED - ENCODERS
    tied = {name for name in families if getattr(AutoConfig.for_model(name), "tie_word_embeddings", False)}
    assert tied == TIED_BY_DEFAULT


def test_classes_that_never_tie_are_those_of_transformers() -> None:
    made = {n: getattr(transformers, c) for n, c in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if isinstance(c, str)}
    never = {name for name, kind in made.items() if not getattr(kind, "_tied_weights_keys", None)}
    assert never - NOT_TRAINED - {"mllama", "musicgen", "musicgen_melody"} == NEVER_TIED


@pytest.mark.parametrize("model_type", ["nemotron_h", "xlstm"])
def test_a_config_cannot_tie_a_class_that_never_ties(model_type: str, tmp_path: Path) -> None:
    sizes: dict[str, dict[str, Any]] = {
        "nemotron_h": {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "hybrid_override_pattern": "M*-",
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 1,
            "ssm_state_size": 8,
            "num_hidden_layers": 3,
            "intermediate_size": 48,
        },
        "xlstm": {"num_heads": 4, "num_hidden_layers": 2},
    }
    config = AutoConfig.for_model(
        model_type, vocab_size=64, hidden_size=32, tie_word_embeddings=True, **sizes[model_type]
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True
    # It was refused when the job started: config and checkpoint were said to disagree.
    assert not Template.from_folder(tmp_path).tied


@pytest.mark.parametrize(
    ("model_type", "sizes", "words"),
    [
        # These were told that their files do not belong together.
        (
            "xlm",
            {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "causal": True},
            "transformer.layer_norm_emb.weight is used before",
        ),
        (
            "rembert",
            {"input_embedding_size": 24, "is_decoder": True},
            "input_embedding_size is 24 and the hidden size is 32",
        ),
        ("hrm_text", {}, "or the architecture has its layers in several lists, which is not supported"),
    ],
)
def test_a_whole_folder_of_an_architecture_that_is_not_supported_is_not_blamed(
    model_type: str, sizes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    usual: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    config = AutoConfig.for_model(model_type, vocab_size=64, **({} if model_type == "xlm" else usual), **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    with pytest.raises(InvalidModel, match=words):
        Template.from_folder(tmp_path)


@pytest.mark.parametrize("model_type", ["gpt2", "bloom", "opt", "gemma2", "falcon"])
def test_a_stored_projection_does_not_untie_a_family_that_ties_by_default(model_type: str, tmp_path: Path) -> None:
    sizes = (
        {"n_layer": 2, "n_head": 4}
        if model_type in ("gpt2", "bloom")
        else {"num_hidden_layers": 2, "num_attention_heads": 4}
    )
    if model_type == "gpt2":
        sizes["n_embd"] = 32
    if model_type == "opt":
        sizes |= {"word_embed_proj_dim": 32, "ffn_dim": 64}
    if model_type == "gemma2":
        sizes |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
    config = AutoConfig.for_model(model_type, vocab_size=64, hidden_size=32, pad_token_id=0, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    document = json.loads((tmp_path / "config.json").read_text())
    document.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(document))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros(64, 32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})

    folder = open_model_folder(tmp_path)
    template = Template.from_folder(tmp_path)

    assert folder.layout.tied and template.tied
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.tie_word_embeddings
    assert plane_sizes(folder.layout, grad_dtype_bytes=4) == plane_sizes(template.layout, grad_dtype_bytes=4)


def folder_of(tmp_path: Path, changes: dict[str, Any], tensors: dict[str, tuple[int, ...]]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **CONFIG, **changes}))
    shapes = {
        "model.embed_tokens.weight": (64, 32),
        **{f"model.layers.{i}.w.weight": (32, 32) for i in range(2)},
        **tensors,
    }
    save_file({name: torch.zeros(shape) for name, shape in shapes.items()}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "tensors", "reason"),
    [
        (
            {"tie_word_embeddings": False},
            {"decoder.weight": (64, 32)},
            "seems to be decoder.weight, .* not supported; supported are",
        ),
        ({"tie_word_embeddings": False}, {}, "no tensor is the output projection"),
        ({"word_embed_proj_dim": 16}, {}, "word_embed_proj_dim is 16 and the hidden size is 32; .* not supported"),
    ],
)
def test_a_refusal_gives_the_true_reason(
    changes: dict[str, Any], tensors: dict[str, tuple[int, ...]], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidModel, match=reason):
        open_model_folder(folder_of(tmp_path, changes, tensors))


def test_inner_sizes_of_each_layer_are_planned_by_the_largest() -> None:
    assert ModelShape.from_config(CONFIG | {"intermediate_size": [48, 96, 64]}).intermediate_size == 96
    with pytest.raises(InvalidModel, match="intermediate_size is 'x'"):
        ModelShape.from_config(CONFIG | {"intermediate_size": [48, "x"]})
