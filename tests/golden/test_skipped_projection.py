"""Leaving out the product that backward never looks at changes no bit of any gradient, whatever is answered in its
place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from tests.support.tiny_models import ARCHITECTURES, MIXES_DOCUMENTS
from torch import Tensor, nn

from horizon_server.engine import linear
from horizon_server.engine.layer_stubs import LayerCall
from horizon_server.engine.skipped_projection import find_skipped_projection

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine

NONE_SKIPPED = {
    *("gemma2", "gemma3_text", "olmo2", "glm4"),  # a norm reads what the last projection gives
    *("mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "minimax"),  # experts, chosen by values
    "gpt2",  # its projections are no linear modules
}


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES, *MIXES_DOCUMENTS} - NONE_SKIPPED))
def test_gradients_keep_their_bits(
    architecture: str,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def not_numbers(like: Tensor, num_outputs: int) -> Tensor:
        return torch.full((*like.shape[:-1], num_outputs), torch.nan, dtype=like.dtype)

    model, rows = engine.tiny_model(architecture), [engine.pack([document]) for document in engine.documents(14, 9)]
    assert model.template.num_skipped_parameters > 0
    monkeypatch.setattr(linear, "any_values", not_numbers)
    left_out = engine.start(model)
    left_out.trainer.train_step(rows)

    monkeypatch.setattr(model.template, "_skipped_projections", {})
    computed = engine.start(model)
    computed.trainer.train_step(rows)

    assert torch.equal(left_out.gradients(), computed.gradients())
    assert bool(torch.isfinite(left_out.gradients()).all())


@pytest.mark.parametrize("architecture", sorted(NONE_SKIPPED))
def test_a_product_that_is_looked_at_is_computed(architecture: str, engine: Engine) -> None:
    assert engine.tiny_model(architecture).template.num_skipped_parameters == 0


class _Layer(nn.Module):
    def __init__(self, behind: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.projection = nn.Linear(4, 4, device="meta")
        self._behind = behind

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self._behind(self.projection(hidden))


@pytest.mark.parametrize(
    ("behind", "is_skipped"),
    [
        (lambda product: product, True),
        (lambda product: 0.7 * product.to(torch.bfloat16).float(), True),
        (lambda product: torch.tanh(product), False),
        (lambda product: product * product, False),
        (lambda product: product if bool(product.isfinite().all()) else product.clamp(-1, 1), False),
    ],
)
def test_what_follows_the_projection_decides(behind: Callable[[Tensor], Tensor], is_skipped: bool) -> None:
    layer = _Layer(behind)

    found = find_skipped_projection(layer, LayerCall(args=(), kwargs={}), hidden_size=4)

    assert (found is not None) == is_skipped
