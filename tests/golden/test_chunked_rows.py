"""Rows that layers compute in chunks, against the same rows as a whole: loss, gradients and weights, family by family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.tiny_models import ARCHITECTURES, MIXES_DOCUMENTS
from torch import Tensor

from horizon_server.errors import InvalidModel

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run

MOST = 1e-6
"""Relative, of all gradients together."""
EPS = 1e-3
"""AdamW moves an element whose gradient is rounding alone by its whole rate; with this one, by what it is worth."""
REFUSED = ["gptj", "llama4_text", *MIXES_DOCUMENTS]


def difference(found: Tensor, wanted: Tensor) -> float:
    """Relative, by the norm."""
    return float((found - wanted).norm() / wanted.norm())


def weights_of(run: Run) -> Tensor:
    """All weights after the update."""
    run.trainer.flush()
    units = []
    for unit in run.store.layout.units:
        units.append(torch.zeros(unit.num_elements))
        run.store.merge_master(unit.index, units[-1])
    return torch.cat(units)


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in REFUSED])
def test_chunks_give_what_whole_rows_give(architecture: str, engine: Engine) -> None:
    model = engine.tiny_model(architecture)
    # Boundaries inside chunks, a document over four of them, short ones, and a row that is not divided.
    rows = [engine.pack(engine.documents(5, 31, 3, 9)), engine.pack(engine.documents(7, seed=1))]
    whole = engine.start(model, eps=EPS)
    report = whole.trainer.train_step(rows)
    for chunk_tokens in (8, 13, 40):
        run = engine.start(model, eps=EPS, chunk_tokens=chunk_tokens)
        found = run.trainer.train_step(rows)
        assert found.loss == pytest.approx(report.loss, rel=MOST)
        assert difference(run.gradients(), whole.gradients()) <= MOST
        assert difference(weights_of(run), weights_of(whole)) <= MOST
        assert run.trainer.evaluate(rows).eval_loss == pytest.approx(whole.trainer.evaluate(rows).eval_loss, rel=MOST)


@pytest.mark.parametrize("architecture", REFUSED)
def test_models_whose_tokens_meet_elsewhere_are_refused_by_name(architecture: str, engine: Engine) -> None:
    with pytest.raises(InvalidModel, match=f"model_type '{architecture}'.*train.chunk_tokens"):
        engine.start(engine.tiny_model(architecture), chunk_tokens=8)
