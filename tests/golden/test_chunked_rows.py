"""Rows that layers compute in chunks, against the same rows as a whole: loss, gradients and weights, by family."""

from __future__ import annotations

import dataclasses
import re
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.plans import ledger_of
from tests.support.tiny_models import ARCHITECTURES, CHANGES, MIXES_DOCUMENTS
from tests.support.worker_attempts import LONG_ROPE
from torch import Tensor

from horizon_server.engine.attention import chunked
from horizon_server.engine.attention.kernels import attention
from horizon_server.engine.objectives import DPO, Documents, StepObjective
from horizon_server.engine.template import Template
from horizon_server.errors import InvalidModel
from horizon_server.planning.model_folder import ModelShape
from horizon_server.planning.trainable import open_for_training
from horizon_server.spec import LoraSpec, TrainSpec
from horizon_server.store.layout import with_trained

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.tiny_models import Engine, Run, TinyModel

    from horizon_server.engine.micro_batch import MicroBatch
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
def test_chunks_give_what_whole_rows_give(architecture: str, engine: Engine, rows: list[MicroBatch]) -> None:
    model = engine.tiny_model(architecture)
    whole = engine.start(model, eps=EPS)
    report = whole.trainer.train_step(rows)
    for chunk_tokens in (8, 13, 40):
        run = engine.start(model, eps=EPS, chunk_tokens=chunk_tokens)
        found = run.trainer.train_step(rows)
        assert found.loss == pytest.approx(report.loss, rel=MOST)
        assert difference(run.gradients(), whole.gradients()) <= MOST
        assert difference(weights_of(run), weights_of(whole)) <= MOST
        assert run.trainer.evaluate(rows).eval_loss == pytest.approx(whole.trainer.evaluate(rows).eval_loss, rel=MOST)


@pytest.mark.parametrize(
    "architecture", ["qwen3", "llama", "gemma2", "gpt_oss", "gpt2", "mistral", "mixtral", "deepseek_v3"]
)
def test_chunks_of_all_sizes_give_the_same(architecture: str, engine: Engine, rows: list[MicroBatch]) -> None:
    """Among each other: families with windows, soft caps and sinks, on packed rows."""
    model = engine.tiny_model(architecture)
    found = []
    for chunk_tokens in (5, 8, 13, 40):
        run = engine.start(model, eps=EPS, chunk_tokens=chunk_tokens)
        losses = [run.trainer.train_step(rows).loss for _ in range(2)]
        found.append((losses, run.gradients(), weights_of(run)))
    for one, other in combinations(found, 2):
        assert other[0] == pytest.approx(one[0], rel=MOST)
        assert difference(other[1], one[1]) <= MOST
        assert difference(other[2], one[2]) <= MOST


@pytest.fixture
def rows(engine: Engine) -> list[MicroBatch]:
    """Boundaries inside chunks, a document over several of them, short ones, and a row that is not divided."""
    return [engine.pack(engine.documents(5, 31, 3, 9)), engine.pack(engine.documents(7, seed=1))]


def check_equal(engine: Engine, model: TinyModel, rows: list[MicroBatch], **options: Any) -> tuple[Run, Run]:
    """Two steps of chunks, against two of whole rows."""
    whole, chunked = (engine.start(model, eps=EPS, chunk_tokens=size, **options) for size in (0, 8))
    for _ in range(2):
        one, other = whole.trainer.train_step(rows), chunked.trainer.train_step(rows)
        assert other.loss == pytest.approx(one.loss, rel=MOST)
    assert difference(weights_of(chunked), weights_of(whole)) <= MOST
    return whole, chunked


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": None},
        {"lanes": 4},
        {"micro_batch_tokens": 24},
        {"label_smoothing": 0.1},
        {"activation_placement": "host", "head_chunk_tokens": 3},
    ],
    ids=str,
)
def test_chunks_go_with_other_settings(options: dict[str, Any], engine: Engine, rows: list[MicroBatch]) -> None:
    whole, chunked = check_equal(engine, engine.tiny_model("qwen3"), rows, **options)
    for one, other in zip(whole.trainer.log_probabilities(rows), chunked.trainer.log_probabilities(rows), strict=True):
        assert difference(other, one) <= MOST


@pytest.mark.parametrize(
    "expression", [r"layers\.[12]\.", r"layers\.0\.", "embed_tokens", "lm_head|model.norm", "norm"]
)
@pytest.mark.parametrize("placement", ["device", "host"])
def test_what_is_frozen_has_no_backward(
    expression: str, placement: str, engine: Engine, rows: list[MicroBatch]
) -> None:
    model = engine.tiny_model("qwen3")
    names = {t.name for _, t in model.template.layout.tensors() if re.search(expression, t.name)}
    layout = with_trained(model.template.layout, names.__contains__, is_bfloat16=lambda _: False)
    part = dataclasses.replace(model, template=Template.from_config(model.config, layout=layout))
    check_equal(engine, part, rows, activation_placement=placement)


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_adapters_are_trained_on_chunks(
    architecture: str, engine: Engine, rows: list[MicroBatch], tmp_path: Path
) -> None:
    model = engine.tiny_model(architecture)
    reference: Any = model.reference()
    reference.save_pretrained(tmp_path)
    layout = open_for_training(tmp_path, TrainSpec(trainable=("lora",), lora=LoraSpec(rank=4, alpha=6.0))).layout
    generator = torch.Generator().manual_seed(3)
    adapters = {t.name: 0.1 * torch.randn(t.shape, generator=generator) for _, t in layout.tensors() if t.adapts}
    template = Template.from_config(model.config, layout=layout)
    adapted = dataclasses.replace(model, template=template, weights={**model.weights, **adapters})
    check_equal(engine, adapted, rows)
    # Dropped inputs are others than in whole rows; forward and recompute of a chunk drop the same.
    kept, streamed = (
        engine.start(adapted, chunk_tokens=8, adapter_dropout=0.3, activation_placement=placement)
        for placement in ("device", "host")
    )
    for _ in range(2):
        assert kept.trainer.train_step(rows).loss == streamed.trainer.train_step(rows).loss
        assert torch.equal(weights_of(kept), weights_of(streamed))


def test_preferences_are_learnt_from_chunks(engine: Engine) -> None:
    model = engine.tiny_model("qwen3")
    pairs = [engine.pack(engine.documents(31, 9)), engine.pack(engine.documents(12, 40, seed=2))]
    reports, weights = [], []
    for chunk_tokens in (0, 8):
        run = engine.start(model, eps=EPS, chunk_tokens=chunk_tokens, activation_placement="host")
        documents = Documents.of(pairs, pairs_P2=torch.tensor([[0, 1], [2, 3]]))
        references_S = torch.cat(run.trainer.log_probabilities(pairs)) - 0.1
        objective = StepObjective(objective=DPO(beta=0.3), documents=documents, references_S=references_S)
        reports.append(run.trainer.train_step(pairs, objective))
        weights.append(weights_of(run))
    assert reports[1].loss == pytest.approx(reports[0].loss, rel=MOST)
    assert difference(weights[1], weights[0]) <= MOST


def test_noise_is_that_of_the_whole_document(engine: Engine, rows: list[MicroBatch]) -> None:
    model = engine.tiny_model("llama")
    plain, noisy = (engine.start(model, chunk_tokens=8, neftune_noise_alpha=alpha) for alpha in (0.0, 5.0))
    again = engine.start(model, chunk_tokens=8, neftune_noise_alpha=5.0, activation_placement="host")
    losses = [run.trainer.train_step(rows).loss for run in (plain, noisy, again)]
    assert losses[0] != losses[1] == losses[2]
    assert torch.equal(noisy.gradients(), again.gradients())


def test_a_resumed_run_and_one_that_gave_its_device_back_have_equal_bits(
    engine: Engine, rows: list[MicroBatch]
) -> None:
    model = engine.tiny_model("gemma2")

    def begin(**options: Any) -> Run:
        return engine.start(model, chunk_tokens=8, activation_placement="host", **options)

    straight, first = begin(), begin()
    losses = [straight.trainer.train_step(rows).loss for _ in range(4)]
    assert [first.trainer.train_step(rows).loss for _ in range(2)] == losses[:2]
    state, store = first.trainer.state(), model.store()
    for plane in ("hi", "lo", "exp_avg", "exp_avg_sq"):
        store.plane(plane).copy_(first.store.plane(plane))
    resumed = begin(store=store)
    resumed.trainer.restore(state)
    assert resumed.trainer.train_step(rows).loss == losses[2]
    resumed.trainer.release_device()
    assert not any(resumed.device.arena.held_bytes().values())
    assert resumed.trainer.train_step(rows).loss == losses[3]
    assert torch.equal(weights_of(resumed), weights_of(straight))


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "gpt_oss", "gpt2", "deepseek_v3"])
def test_outputs_of_attention_that_wait_on_the_host_give_the_same_bits(
    architecture: str, placement: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine.tiny_model(architecture)
    rows = [engine.pack(engine.documents(5, 31, 3, 9)), *(engine.pack([d]) for d in engine.documents(7, 50, seed=1))]
    num_layers = model.template.num_layers
    options: dict[str, Any] = {"chunk_tokens": 8, "activation_placement": placement}
    plain, some, every = (engine.start(model, attention_layers=number, **options) for number in (0, 1, num_layers))
    attended: list[int] = []

    def noted(*given: Any) -> Any:
        attended.append(1)
        return attention(*given)

    for step in range(2):
        wanted = plain.trainer.train_step(rows)
        monkeypatch.setattr(chunked, "attention", noted)
        for run in (some, every):
            attended.clear()
            found = run.trainer.train_step(rows)
            # 6 and 7 chunks: once in forward, and again in backward only where nothing was kept. The first step tries
            # the model.
            assert step == 0 or len(attended) == 13 * (2 * num_layers - (1 if run is some else num_layers))
            assert (found.loss, found.grad_norm) == (wanted.loss, wanted.grad_norm)
            assert torch.equal(run.gradients(), plain.gradients())
        monkeypatch.undo()
    every.trainer.release_device()
    assert not any(every.device.arena.held_bytes().values())
    assert every.trainer.train_step(rows).loss == plain.trainer.train_step(rows).loss
    assert every.trainer.evaluate(rows).eval_loss == plain.trainer.evaluate(rows).eval_loss
    assert torch.equal(weights_of(every), weights_of(plain))


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
    for _ in range(2):
        one, other = kept.trainer.train_step(rows), streamed.trainer.train_step(rows)
        assert other.loss == one.loss
        assert torch.equal(streamed.gradients(), kept.gradients())


def test_a_state_beside_attention_is_found_on_the_weights(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"d_ssm": 32, "n_heads": 4, "d_head": 8, "d_state": 8, "n_groups": 1, "chunk_size": 8}
    monkeypatch.setitem(CHANGES, "falcon_h1", {f"mamba_{name}": size for name, size in sizes.items()})
    # Every layer has attention of ours, and a state space next to it.
    run = engine.start(engine.tiny_model("falcon_h1"), chunk_tokens=8)
    with pytest.raises(InvalidModel, match=r"model_type 'falcon_h1': its layers compute something else in chunks"):
        run.trainer.train_step([engine.pack(engine.documents(31))])


def test_rows_whose_length_changes_positions_are_refused(engine: Engine) -> None:
    run = engine.start(engine.tiny_model("phi3", **LONG_ROPE), chunk_tokens=8)
    assert run.trainer.train_step([engine.pack(engine.documents(15))]).skipped == ""
    with pytest.raises(InvalidModel, match=r"model_type 'phi3': it counts positions otherwise in rows of more than 16"):
        run.trainer.train_step([engine.pack(engine.documents(31))])


def step_over_one_document(
    engine: Engine, tokens: int, chunk_tokens: int, attention_layers: int
) -> tuple[Ledger, StepFigures]:
    """What is planned, and what a step measures."""
    sizes: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 1 << 17}
    model = engine.tiny_model("qwen3", num_hidden_layers=2, **sizes)
    settings: dict[str, Any] = {
        "tokens_per_step": tokens,
        "sequence_length": tokens,
        "micro_batch_tokens": chunk_tokens,
        "chunk_tokens": chunk_tokens,
        "activation_placement": "host",
        "attention_layers": attention_layers,
    }
    names = [tensor.name for _, tensor in model.template.layout.tensors()]
    shape = ModelShape.from_config(model.config.to_dict(), names=names)
    run = engine.start(model, **settings)
    report = run.trainer.train_step([engine.pack(engine.documents(tokens))])
    return ledger_of(model.template.layout, shape, **settings), report


@pytest.mark.parametrize(
    ("chunk_tokens", "first", "attention_layers"),
    [(256, 1 << 11, 0), (256, 1 << 11, 1), pytest.param(2048, 1 << 14, 2, marks=pytest.mark.further)],
)
def test_only_keys_values_and_their_gradients_grow_with_a_row(
    chunk_tokens: int, first: int, attention_layers: int, engine: Engine
) -> None:
    found = {}
    for tokens in (first, 2 * first, 4 * first):
        ledger, report = step_over_one_document(engine, tokens, chunk_tokens, attention_layers)
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
