"""Rows that layers compute in chunks, against the same rows as a whole: loss, gradients and weights, by family."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.plans import ledger_of
from tests.support.tiny_models import ARCHITECTURES, MIXES_DOCUMENTS
from torch import Tensor

from horizon_server.errors import InvalidModel
from horizon_server.planning.model_folder import ModelShape

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run

    from horizon_server.figures import StepFigures
    from horizon_server.records.plan import Ledger

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


@pytest.mark.parametrize("options", [{}, {"lanes": 4}, {"lanes": 4, "activation_placement": "host"}], ids=str)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt_oss", "gpt2"])
def test_hidden_states_that_come_by_chunk_give_the_same_bits(
    architecture: str, options: dict[str, Any], engine: Engine
) -> None:
    model = engine.tiny_model(architecture)
    rows = [engine.pack(engine.documents(5, 31, 3, 9)), *(engine.pack([d]) for d in engine.documents(7, 50, seed=1))]
    kept, streamed = (
        engine.start(model, chunk_tokens=8, head_chunk_tokens=16, **{"activation_placement": place, **options})
        for place in ("device", "host")
    )
    whole = engine.start(model, eps=EPS, **options)
    for _ in range(2):
        one, other = kept.trainer.train_step(rows), streamed.trainer.train_step(rows)
        assert other.loss == one.loss
        assert torch.equal(streamed.gradients(), kept.gradients())
    assert whole.trainer.train_step(rows).loss > 0


def step_over_one_document(engine: Engine, tokens: int, chunk_tokens: int) -> tuple[Ledger, StepFigures]:
    """What is planned, and what a step measures."""
    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1 << 17}
    model = engine.tiny_model("qwen3", num_hidden_layers=2, **sizes)
    settings: dict[str, Any] = {
        "tokens_per_step": tokens,
        "sequence_length": tokens,
        "micro_batch_tokens": chunk_tokens,
        "chunk_tokens": chunk_tokens,
        "activation_placement": "host",
    }
    names = [tensor.name for _, tensor in model.template.layout.tensors()]
    shape = ModelShape.from_config(model.config.to_dict(), names=names)
    run = engine.start(model, **settings)
    report = run.trainer.train_step([engine.pack(engine.documents(tokens))])
    return ledger_of(model.template.layout, shape, **settings), report


@pytest.mark.parametrize(
    ("chunk_tokens", "first"), [(256, 1 << 11), pytest.param(2048, 1 << 14, marks=pytest.mark.further)]
)
def test_only_keys_values_and_their_gradients_grow_with_a_row(chunk_tokens: int, first: int, engine: Engine) -> None:
    found = {}
    for tokens in (first, 2 * first, 4 * first):
        ledger, report = step_over_one_document(engine, tokens, chunk_tokens)
        planned, measured = ledger.device_bytes, report.device_memory_bytes
        assert measured["activations"] == planned["activations"]
        assert sum(measured.values()) == pytest.approx(ledger.device_total_bytes, rel=0.05)
        # On the host device, its activations are host memory too.
        assert report.host_memory_bytes["activations"] + measured["activations"] == ledger.host_bytes["activations"]
        found[tokens] = measured
    for component in ("weights", "gradients", "workspace"):
        assert found[4 * first][component] == found[first][component]
    head_dim, fp32_bytes = 8, 4
    grown = found[4 * first]["activations"] - found[first]["activations"]
    assert grown == 3 * first * 2 * head_dim * (fp32_bytes + fp32_bytes)
