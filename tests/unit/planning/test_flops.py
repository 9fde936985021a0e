"""What a step is worth: six operations per matrix parameter and token, and attention's pairs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from horizon_server.planning.flops import FlopsCount
from horizon_server.planning.model_folder import open_model_folder


@pytest.mark.parametrize("tied", [True, False])
def test_the_daemon_counts_what_the_engine_counts(make_model: Callable[..., Path], tied: bool) -> None:
    folder = open_model_folder(make_model(tied=tied))
    config = AutoConfig.from_pretrained(folder.path)
    shapes = {tensor.name: tensor.shape for _, tensor in folder.layout.tensors()}
    engine = FlopsCount(shapes, config.to_dict(), tied=tied, embedding_name="model.embed_tokens.weight")
    assert FlopsCount.of_folder(folder).of([7, 64]) == engine.of([7, 64])


EMBEDDING, PROJECTION = "model.embed_tokens.weight", "lm_head.weight"


def config_of(**changes: Any) -> dict[str, Any]:
    return {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, "vocab_size": 100, **changes}


def of_matrices(count: FlopsCount, num_tokens: int) -> float:
    return count.of([num_tokens]) - count.of_attention([num_tokens])


def test_six_per_matrix_parameter_and_token_plus_causal_attention() -> None:
    shapes = {EMBEDDING: (100, 8), "model.layers.0.w": (8, 16), "model.norm.weight": (8,), PROJECTION: (100, 8)}
    untied = FlopsCount(shapes, config_of(), tied=False, embedding_name=EMBEDDING)

    pairs = (4 * 5 // 2) + (6 * 7 // 2)
    assert untied.of([4, 6]) == 6 * (128 + 800) * 10 + 12 * 3 * 8 * pairs
    assert untied.of_attention([4, 6]) == 12 * 3 * 8 * pairs


def test_a_tied_table_counts_once_as_projection() -> None:
    shapes = {EMBEDDING: (100, 8), "model.layers.0.w": (8, 16)}
    tied = FlopsCount(shapes, config_of(), tied=True, embedding_name=EMBEDDING)

    assert of_matrices(tied, 10) == 6 * (128 + 800) * 10


def test_a_window_bounds_the_pairs_of_sliding_layers() -> None:
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    count = FlopsCount({}, config_of(layer_types=layer_types, sliding_window=3), tied=True, embedding_name=EMBEDDING)

    sliding, full = 1 + 2 + 3 + 3 + 3, 1 + 2 + 3 + 4 + 5
    assert count.of([5]) == 12 * 8 * (2 * sliding + full)


def test_only_the_visited_share_of_experts_counts() -> None:
    shapes = {"model.layers.0.experts": (4, 8, 8)}
    count = FlopsCount(shapes, config_of(num_experts=4, num_experts_per_tok=1), tied=True, embedding_name=EMBEDDING)

    assert of_matrices(count, 1) == 6 * 64


def test_experts_count_the_same_stacked_and_one_by_one() -> None:
    choice = config_of(num_experts=4, num_experts_per_tok=2)
    stacked = FlopsCount({"model.layers.0.mlp.experts.up": (4, 8, 8)}, choice, tied=True, embedding_name=EMBEDDING)
    names = [f"model.layers.0.mlp.experts.{i}.up_proj.weight" for i in range(4)]
    one_by_one = FlopsCount(dict.fromkeys(names, (8, 8)), choice, tied=True, embedding_name=EMBEDDING)

    assert of_matrices(stacked, 3) == of_matrices(one_by_one, 3) == 6 * 2 * 64 * 3


@pytest.mark.parametrize(
    "names",
    [
        {"num_local_experts": 8, "num_experts_per_tok": 2},
        {"n_routed_experts": 8, "num_experts_per_tok": 2},
        {"n_routed_experts": 8, "moe_topk": 2},
        {"moe_num_experts": 8, "moe_k": 2},
        {"ffn_config": {"moe_num_experts": 8, "moe_top_k": 2}},
    ],
)
def test_experts_count_under_every_name_that_configs_have_for_them(names: dict[str, Any]) -> None:
    shapes = {"model.layers.0.mlp.experts.up": (8, 8, 8)}
    assert of_matrices(FlopsCount(shapes, config_of(**names), tied=True, embedding_name=EMBEDDING), 1) == 6 * 2 * 64
