"""Small real models on disk, made by transformers: a fixture for the tests of the store and of the plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """`make_model(tied=..., dtype=..., shard=...)` gives a folder written by save_pretrained; one per choice."""
    made: dict[tuple[object, ...], Path] = {}

    def make(*, tied: bool = True, dtype: torch.dtype = torch.bfloat16, shard: str = "5GB") -> Path:
        key = (tied, dtype, shard)
        if key not in made:
            torch.manual_seed(0)
            config = Qwen3Config(
                vocab_size=128,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                tie_word_embeddings=tied,
                max_position_embeddings=64,
            )
            made[key] = tmp_path_factory.mktemp("model")
            model = Qwen3ForCausalLM(config)
            torch.nn.Module.to(model, dtype)
            model.save_pretrained(made[key], max_shard_size=shard)
        return made[key]

    return make
