from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from horizon_server.planning.flops import FlopsCount

TABLE, PROJECTION = "model.embed_tokens.weight", "lm_head.weight"


def config(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 3, **changes})


def test_six_per_matrix_parameter_and_token_plus_causal_attention() -> None:
    shapes = {TABLE: (100, 8), "model.layers.0.w": (8, 16), "model.norm.weight": (8,), PROJECTION: (100, 8)}
    untied = FlopsCount(shapes, config(), tied=False, embedding_name=TABLE)

    pairs = (4 * 5 // 2) + (6 * 7 // 2)
    assert untied.of([4, 6]) == 6 * (128 + 800) * 10 + 12 * 3 * 8 * pairs
    assert untied.of_attention([4, 6]) == 12 * 3 * 8 * pairs


def test_a_tied_table_counts_once_as_projection() -> None:
    shapes = {TABLE: (100, 8), "model.layers.0.w": (8, 16)}
    tied = FlopsCount(shapes, config(num_hidden_layers=0), tied=True, embedding_name=TABLE)

    assert tied.of([10]) == 6 * (128 + 800) * 10


def test_a_window_bounds_the_pairs_of_sliding_layers() -> None:
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    count = FlopsCount({}, config(layer_types=layer_types, sliding_window=3), tied=True, embedding_name=TABLE)

    sliding, full = 1 + 2 + 3 + 3 + 3, 1 + 2 + 3 + 4 + 5
    assert count.of([5]) == 12 * 8 * (2 * sliding + full)


def test_only_the_visited_share_of_experts_counts() -> None:
    shapes = {"model.layers.0.experts": (4, 8, 8)}
    count = FlopsCount(
        shapes, config(num_hidden_layers=0, num_experts=4, num_experts_per_tok=1), tied=True, embedding_name=TABLE
    )

    assert count.of([1]) == 6 * 64


def test_experts_count_the_same_stacked_and_one_by_one() -> None:
    choice = config(num_hidden_layers=0, num_experts=4, num_experts_per_tok=2)
    stacked = FlopsCount({"model.layers.0.mlp.experts.up": (4, 8, 8)}, choice, tied=True, embedding_name=TABLE)
    names = [f"model.layers.0.mlp.experts.{i}.up_proj.weight" for i in range(4)]
    one_by_one = FlopsCount(dict.fromkeys(names, (8, 8)), choice, tied=True, embedding_name=TABLE)

    assert stacked.of([3]) == one_by_one.of([3]) == 6 * 2 * 64 * 3
