"""How long packed rows may be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.packing_limit import split_row
from horizon_server.engine.template import Template

from .test_template import config_of

_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 5.0, 9.0],
    "original_max_position_embeddings": 4096,
}


@pytest.mark.parametrize(
    ("model_type", "changes", "limit"),
    [
        ("llama", {}, None),
        ("gpt2", {"n_positions": 64}, None),
        ("mixtral", {"num_local_experts": 4}, None),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}, None),
        (
            "phi3",
            {
                "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_parameters": _LONG_ROPE,
            },
            4096,
        ),
        ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 24, "no_rope_layers": [1, 1, 1, 0]}, 8191),
        ("llama4_text", {"num_local_experts": 4, "intermediate_size_mlp": 24, "no_rope_layers": [1, 1, 1, 1]}, None),
    ],
)
def test_the_limit_is_where_positions_begin_to_count_otherwise(
    model_type: str, changes: dict[str, Any], limit: int | None
) -> None:
    assert Template.from_config(config_of(model_type, **changes)).packing_limit == limit


def _row(*lengths: int) -> MicroBatch:
    count = torch.arange(sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])
    return MicroBatch(input_ids_T=count, position_ids_T=positions, labels_T=count + 1, document_lengths=lengths)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "split"),
    [
        ((5, 3), None, [(5, 3)]),
        ((5, 3), 8, [(5, 3)]),
        ((5, 3), 7, [(5,), (3,)]),
        ((9,), 7, [(9,)]),
        ((2, 9, 3, 4, 1), 7, [(2,), (9,), (3, 4), (1,)]),
        ((2, 3), 0, [(2,), (3,)]),
    ],
)
def test_a_long_row_is_split_between_documents(
    lengths: tuple[int, ...], max_tokens: int | None, split: list[tuple[int, ...]]
) -> None:
    whole = _row(*lengths)
    rows = split_row(whole, max_tokens=max_tokens)

    assert [row.document_lengths for row in rows] == split

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(row, name) for row in rows])

    for name in ("input_ids_T", "position_ids_T", "labels_T"):
        assert torch.equal(joined(name), getattr(whole, name)), name
