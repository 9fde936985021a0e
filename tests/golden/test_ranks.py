"""Steps in lanes have the same bits on any number of ranks; these are threads with a device each, joined by gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.golden.test_lora import adapted
from tests.support.device_steps import with_lora
from tests.support.plans import ledger_of
from tests.support.ranks import (
    LANES,
    STEP,
    SharedStore,
    StoresOfNodes,
    UnevenDevice,
    numbers_of,
    results,
    rows_of,
    trained,
    whole_life,
)
from tests.support.tiny_models import Engine, compressed

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.objectives import DPO, Documents, StepObjective, WeightedSFT
from horizon_server.engine.trainer import Trainer
from horizon_server.figures import StepFigures
from horizon_server.planning.model_folder import ModelShape
from horizon_server.records.execution import Parallel


@pytest.mark.parametrize(
    ("model_type", "max_grad_norm", "gathers", "ranks"),
    [
        ("qwen3", 0.5, False, (1, 2, 3, 8)),
        ("qwen3", None, True, (1, 2, 3)),
        ("llama", 0.5, True, (1, 2, 4)),
        ("llama", None, False, (1, 3)),
        ("gpt2", 0.5, True, (1, 3)),
        ("gpt2", None, False, (1, 2)),
        ("mixtral", 0.5, False, (1, 4)),
        ("mixtral", None, True, (1, 2)),
    ],
)
def test_any_number_of_ranks_gives_the_same_bits(
    engine: Engine, model_type: str, max_grad_norm: float | None, gathers: bool, ranks: tuple[int, ...]
) -> None:
    """A tied table, one of its own, learned positions next to it, experts that some lanes do not reach."""
    grad_dtype = None if max_grad_norm is None else torch.float32
    first, *others = results(
        engine.tiny_model(model_type),
        whole_life(rows_of(engine)),
        ranks=ranks,
        gathers=gathers,
        max_grad_norm=max_grad_norm,
        grad_dtype=grad_dtype,
    )
    for num_ranks, other in zip(ranks[1:], others, strict=True):
        assert other == first, num_ranks


@pytest.mark.parametrize(
    ("model_type", "max_grad_norm", "is_compressed"),
    [("qwen3", 0.5, False), ("mixtral", None, False), ("qwen3", None, True)],
)
def test_ranks_that_gather_need_no_memory_in_common(
    engine: Engine, model_type: str, max_grad_norm: float | None, is_compressed: bool
) -> None:
    """As on two machines with two devices each: a rank reads and writes what it owns, and nothing else of a store."""
    how: dict[str, Any] = {"max_grad_norm": max_grad_norm}
    grad_dtype = None if max_grad_norm is None else torch.float32
    model, work = engine.tiny_model(model_type), whole_life(rows_of(engine))
    model = compressed(model) if is_compressed else model
    (alone,) = results(model, work, ranks=(1,), grad_dtype=grad_dtype, **how)
    stores = StoresOfNodes(model, 4, grad_dtype=grad_dtype)
    said = trained(stores, work, num_ranks=4, lanes=LANES, gathers=True, **STEP, **how)
    assert (said, stores.bits()) == alone


@pytest.mark.parametrize(
    "case",
    ["adapters", "bfloat16", "offloaded", "one row at a time", "packed weights that stay", "long", "compressed states"],
)
def test_so_does_whatever_else_decides_how_a_step_is_computed(case: str, engine: Engine, tmp_path: Path) -> None:
    model, how = engine.tiny_model("llama"), dict[str, Any]()
    rows = rows_of(engine, num_steps=2)
    match case:
        case "adapters":
            model = adapted(model, tmp_path)
            how = {"adapter_scale": 1.5}
        case "bfloat16":
            how = {
                "compute_dtype": "bfloat16",
                "grad_dtype": torch.bfloat16,
                "make_device": lambda _: HostDevice(num_threads=1, compute_dtype=torch.bfloat16),
            }
        case "compressed states":
            model = compressed(model)
        case "offloaded":
            how = {"activation_placement": "host"}
        case "one row at a time":
            how = {"micro_batch_tokens": 0}
        case "packed weights that stay":
            model = with_lora(model, "nf4")
            how = {"packed_layers": 2, "resident_layers": 1, "gathers": True}
        case "long":
            # One document: most lanes, and with them a rank, have nothing to compute.
            rows = [[engine.pack(engine.documents(60, seed=step))] for step in range(2)]
    first, *others = results(model, whole_life(rows), ranks=(1, 2, 3), **how)
    assert others == [first, first]


def pairs(rows: Sequence[MicroBatch]) -> StepObjective:
    num_documents = sum(len(row.document_lengths) for row in rows)
    num_targets = sum(row.num_targets for row in rows)
    return StepObjective(
        objective=DPO(),
        documents=Documents.of(rows, pairs_P2=torch.arange(num_documents).view(-1, 2)),
        references_S=-4 * torch.rand(num_targets, generator=torch.Generator().manual_seed(7)),
    )


def weighted(rows: Sequence[MicroBatch]) -> StepObjective:
    weights_S = torch.rand(sum(row.num_targets for row in rows), generator=torch.Generator().manual_seed(8))
    return StepObjective(objective=WeightedSFT(), documents=Documents.of(rows), weights_S=weights_S)


@pytest.mark.parametrize("objective", [pairs, weighted])
def test_objectives_are_asked_about_the_tokens_of_all_ranks(
    engine: Engine, objective: Callable[[Sequence[MicroBatch]], StepObjective]
) -> None:
    rows = rows_of(engine)
    # An even number of documents: pairs are cut between lanes, and between ranks.
    rows = [[*step, engine.pack(engine.documents(6, 5))] for step in rows]

    def work(trainer: Trainer) -> list[Any]:
        return [numbers_of(trainer.train_step(step, objective(step))) for step in rows]

    first, *others = results(engine.tiny_model("qwen3"), work, ranks=(1, 2, 3))
    assert others == [first, first]


def test_a_step_that_is_not_finite_is_skipped_by_all_ranks(engine: Engine) -> None:
    model, rows = engine.tiny_model("llama"), rows_of(engine)
    name = "model.layers.1.mlp.down_proj.weight"

    def work_on(shared: SharedStore) -> Callable[[Trainer], list[Any]]:
        def work(trainer: Trainer) -> list[Any]:
            store, figures = shared.attach(0), [trainer.train_step(rows[0])]
            trainer.flush()
            before = store.exact_rows(name, torch.arange(32)).clone()
            store.write_master(name, torch.full_like(before, 3e38))
            trainer.forget_weights()
            figures.append(trainer.train_step(rows[1]))
            store.write_master(name, before)
            trainer.forget_weights()
            figures.append(trainer.train_step(rows[2]))
            trainer.flush()
            return [one.skipped for one in figures]

        return work

    found = []
    for num_ranks in (1, 2):
        shared = SharedStore(model)
        said = trained(shared, work_on(shared), num_ranks=num_ranks, lanes=LANES, **STEP)
        found.append((said, shared.bits()))
    assert found[0] == found[1]
    assert found[0][0] == ["", "non_finite_gradient", ""]


def test_another_number_of_ranks_continues_with_the_same_bits(engine: Engine) -> None:
    model, rows = engine.tiny_model("llama"), rows_of(engine, num_steps=4)
    whole = SharedStore(model)
    trained(whole, whole_life(rows), num_ranks=1, lanes=LANES, **STEP)
    changing = SharedStore(model)
    state: dict[str, Any] = {}
    for number, num_ranks in enumerate((4, 1, 2, 3)):

        def work(trainer: Trainer, step: Sequence[MicroBatch] = rows[number]) -> bool:
            nonlocal state
            if state:
                trainer.restore(state)
            trainer.train_step(step)
            state = trainer.state()
            return True

        trained(changing, work, num_ranks=num_ranks, lanes=LANES, **STEP)
    assert changing.bits() == whole.bits()


def test_lanes_differ_from_one_lane_by_rounding_alone(engine: Engine) -> None:
    model, rows = engine.tiny_model("qwen3"), rows_of(engine, num_steps=1)
    losses, weights = [], []
    for lanes in (1, 2, 8):
        shared = SharedStore(model)

        def work(trainer: Trainer) -> tuple[float, float]:
            figures = trainer.train_step(rows[0])
            trainer.flush()
            return figures.loss, figures.grad_norm

        losses.append(torch.tensor(trained(shared, work, num_ranks=1, lanes=lanes, **STEP), dtype=torch.float64))
        weights.append(shared.attach(0).plane("exp_avg").double())
    for loss, first_moment in zip(losses[1:], weights[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=1e-6, atol=0)
        # The first moment is the step's gradient, clipped.
        assert float((first_moment - weights[0]).norm() / weights[0].norm()) < 1e-6


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_plan_knows_the_memory_of_lanes_and_ranks(model_type: str, num_ranks: int, engine: Engine) -> None:
    model, rows = engine.tiny_model(model_type), rows_of(engine, num_steps=1)
    shared = SharedStore(model)

    def work(trainer: Trainer) -> StepFigures:
        trainer.train_step(rows[0])
        return trainer.train_step(rows[0])

    found = trained(shared, work, num_ranks=num_ranks, lanes=LANES, **STEP)
    shape = ModelShape.from_config(model.config.to_dict())
    planned = ledger_of(
        model.template.layout,
        shape,
        num_ranks=num_ranks,
        lanes=LANES,
        longest_document=21,
        sequence_length=21,
        **STEP,
    )
    assert found.device_memory_bytes["gradients"] == planned.device_bytes["gradients"]
    for part in ("weights", "activations"):
        assert found.device_memory_bytes[part] <= planned.device_bytes[part], part
    assert found.device_memory_bytes["activations"] > 0.6 * planned.device_bytes["activations"]
    on_devices = num_ranks * sum(planned.device_bytes[part] for part in ("weights", "gradients"))
    assert found.host_memory_bytes["staging"] == planned.host_bytes["staging"] - on_devices


@pytest.mark.parametrize("parallel", ["rows", "layers"])
def test_a_step_says_what_the_ranks_sent_each_other(parallel: Parallel, engine: Engine) -> None:
    model, rows = engine.tiny_model("llama"), rows_of(engine, num_steps=1)

    def work(trainer: Trainer) -> StepFigures:
        return trainer.train_step(rows[0])

    found = trained(SharedStore(model), work, num_ranks=2, lanes=LANES, parallel=parallel, **STEP).ranks
    assert [rank.path for rank in found] == ["gloo", "gloo"] and all(rank.wait_s > 0 for rank in found)
    _, *layers, head = model.template.layout.units
    # Each rank has one sum of each unit, of which the other one gets its part; of layers that go round, nobody does.
    exchanged = [*layers, head] if parallel == "rows" else [head]
    collectives = [one for rank in found for one in rank.collectives]
    num_bytes = sum(one.bytes for one in collectives if one.kind == "gradients")
    assert num_bytes == 4 * sum(unit.trained_elements for unit in exchanged)
    assert {one.kind for one in collectives} == {"rows", "gradients", "numbers"}
    assert all(one.exposed_s <= one.busy_s for one in collectives)
    alone = trained(SharedStore(model), work, num_ranks=1, lanes=LANES, **STEP)
    assert alone.ranks == ()


@pytest.mark.parametrize(
    ("speeds", "wanted"),
    [((1.0, 0.5), [6, 2]), ((1.0, 0.6), [5, 3]), ((1.0, 1.0), [4, 4]), ((0.1, 1.0, 1.0), [1, 4, 3])],
)
def test_faster_ranks_get_more_lanes_and_no_bit_changes(
    speeds: tuple[float, ...], wanted: list[int], engine: Engine
) -> None:
    model = engine.tiny_model("qwen3")
    # Each document is a micro-batch, and each lane has as many tokens.
    rows = [[engine.pack(engine.documents(8, seed=8 * step + index)) for index in range(8)] for step in range(10)]
    how = {**STEP, "micro_batch_tokens": 8}
    even = SharedStore(model)
    trained(even, whole_life(rows), num_ranks=1, lanes=LANES, **how)

    def work(trainer: Trainer) -> tuple[list[int], dict[str, int]]:
        whole_life(rows)(trainer)
        return [len(lanes) for lanes in trainer._ranks.lanes(LANES)], dict(trainer._device.peak_bytes())

    shared = SharedStore(model)
    sizes, held = trained(
        shared,
        work,
        num_ranks=len(speeds),
        lanes=LANES,
        deals_lanes=True,
        make_device=lambda rank: UnevenDevice(1.0 / speeds[rank]),
        **how,
    )
    assert sizes == wanted
    assert shared.bits() == even.bits()
    shape = ModelShape.from_config(model.config.to_dict())
    planned = ledger_of(
        model.template.layout,
        shape,
        num_ranks=len(speeds),
        lanes=LANES,
        deals_lanes=True,
        longest_document=8,
        sequence_length=8,
        **how,
    )
    for part in ("weights", "gradients", "activations"):
        assert held[part] <= planned.device_bytes[part], part
