"""What the plan knows of families by name is what transformers says of their classes."""

from __future__ import annotations

from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from horizon_server.planning.model_folder import UNFUSED_ATTENTION, WITHOUT_ATTENTION, ModelShape

# Encoders and encoder-decoders, models whose scores are capped, and forms that are refused for other reasons.
NOT_TRAINED = {
    "big_bird", "bigbird_pegasus", "cpmant", "git", "got_ocr2", "megatron-bert", "mvp", "prophetnet", "reformer", "rembert",
    "roformer", "trocr", "xlm", "xlnet",
}  # fmt: skip
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
        ({"model_type": "llama", "attn_implementation": "eager"}, 4, 4),
        ({"model_type": "gemma2", "attn_logit_softcapping": 50.0}, 0, 0),
        ({"model_type": "deepseek_v3", "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}, 4, 0),
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
