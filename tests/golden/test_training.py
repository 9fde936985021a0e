"""Whole runs against a plain PyTorch loop, across restarts, and through a step that must not count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.double import check_numbers, plain_and_exact
from torch import Tensor
from transformers import get_cosine_schedule_with_warmup

from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.errors import Diverged, InvalidData
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import with_decay

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

Pack = Callable[[list[Tensor]], MicroBatch]
MAX_GRAD_NORM = 1.8
"""Clips some steps of these models; 1.0 would clip them all, as it does in `test_tiny_base`."""
WEIGHTS_AND_MOMENTS = ("hi", "lo", "exp_avg", "exp_avg_sq")


@pytest.fixture
def step_rows(engine: Engine) -> Callable[[int], list[MicroBatch]]:
    """Step -> its micro-batches: four documents in two rows, the same tokens again every five steps."""

    def rows(step: int) -> list[MicroBatch]:
        four = engine.documents(11, 20, 16, 9, seed=step % 5)
        return [engine.pack(four[:2]), engine.pack(four[2:])]

    return rows


def copy_planes(store: HostStore) -> dict[str, Tensor]:
    return {plane: store.plane(plane).clone() for plane in WEIGHTS_AND_MOMENTS}


def assert_same_planes(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for plane in WEIGHTS_AND_MOMENTS:
        assert torch.equal(one[plane], other[plane]), f"plane {plane} differs"


def plain_loop(
    model: TinyModel,
    step_rows: Callable[[int], list[MicroBatch]],
    plain_loss: Callable[..., Tensor],
    num_steps: int,
    reference: torch.nn.Module,
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of torch.optim.AdamW with clipping and a cosine schedule."""
    decayed = {tensor.name: tensor.decay for unit in model.template.layout.units for tensor in unit.tensors}
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in reference.named_parameters() if decayed[n]], "weight_decay": 0.1},
        {"params": [p for n, p in reference.named_parameters() if not decayed[n]], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.99), eps=1e-8)
    schedule = get_cosine_schedule_with_warmup(optimizer, 3, num_steps)
    losses, norms = [], []
    for step in range(num_steps):
        rows = step_rows(step)
        loss = sum((plain_loss(reference, row) for row in rows), torch.zeros(())) / sum(r.num_targets for r in rows)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(reference.parameters(), MAX_GRAD_NORM)))
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_twenty_steps_follow_a_plain_loop(
    architecture: str,
    engine: Engine,
    step_rows: Callable[[int], list[MicroBatch]],
) -> None:
    model = engine.tiny_model(architecture)
    plain, (losses, norms) = plain_and_exact(
        model.reference, partial(plain_loop, model, step_rows, engine.plain_loss, 20)
    )
    run = engine.start(
        model, learning_rate=3e-3, betas=(0.9, 0.99), weight_decay=0.1, warmup_steps=3, max_grad_norm=MAX_GRAD_NORM
    )

    reports = [run.trainer.train_step(step_rows(step)) for step in range(20)]

    check_numbers([report.loss for report in reports], plain[0], losses, "the losses")
    check_numbers([report.grad_norm for report in reports], plain[1], norms, "the norms")
    assert min(norms) < MAX_GRAD_NORM < max(norms), "the test is about clipping that is active in some steps only"
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("updates_in_backward", [False, True])
@pytest.mark.parametrize("architecture", ["deepseek_v32", "ernie4_5_moe"])
def test_what_gets_no_gradient_is_left_alone_as_by_adamw(
    architecture: str,
    updates_in_backward: bool,
    engine: Engine,
    step_rows: Callable[[int], list[MicroBatch]],
) -> None:
    model = engine.tiny_model(architecture)
    reference = model.reference()
    torch.autograd.backward(engine.plain_loss(reference, step_rows(0)[0]))
    without = {name for name, parameter in reference.named_parameters() if parameter.grad is None}
    without |= {name for name, _ in reference.named_buffers() if name in model.weights}
    assert without
    # On every tensor, so that only the missing gradient can spare one.
    layout = with_decay(model.template.layout, "all")
    template = Template.from_config(model.config, layout=layout)
    model = dataclasses.replace(model, template=template)
    store = model.store(grad_dtype=None if updates_in_backward else torch.float32)
    run = engine.start(model, store=store, weight_decay=0.5, max_grad_norm=None, lr_schedule="constant")
    before = {name: [store.tensor(name, plane).clone() for plane in ("hi", "lo")] for name in model.weights}

    for step in range(2):
        run.trainer.train_step(step_rows(step))
    run.trainer.flush()

    unchanged = {
        name
        for name, planes in before.items()
        if all(torch.equal(store.tensor(name, plane), kept) for plane, kept in zip(("hi", "lo"), planes, strict=True))
    }
    assert unchanged == without


def test_an_evaluation_sees_the_last_update_and_changes_nothing(
    engine: Engine, step_rows: Callable[[int], list[MicroBatch]]
) -> None:
    run = engine.start(engine.tiny_model("qwen3"), lr_schedule="constant")
    rows = step_rows(0)
    before = run.trainer.evaluate(rows)
    first = run.trainer.train_step(rows)
    after = run.trainer.evaluate(rows + step_rows(1) + rows)
    planes = copy_planes(run.store)
    again = run.trainer.evaluate(rows)
    second = run.trainer.train_step(rows)

    assert before.eval_loss == pytest.approx(first.loss, rel=1e-6)
    assert again.eval_loss == pytest.approx(second.loss, rel=1e-6)
    assert again.eval_loss < before.eval_loss
    assert after.num_targets == 3 * again.num_targets
    run.trainer.flush()
    assert not torch.equal(planes["lo"], run.store.plane("lo"))


def test_a_restored_run_continues_bit_for_bit(engine: Engine, step_rows: Callable[[int], list[MicroBatch]]) -> None:
    model = engine.tiny_model("qwen3")
    straight = engine.start(model, warmup_steps=2)
    losses = [straight.trainer.train_step(step_rows(step)).loss for step in range(6)]
    straight.trainer.flush()

    first = engine.start(model, warmup_steps=2)
    for step in range(3):
        first.trainer.train_step(step_rows(step))
    state, planes = first.trainer.state(), copy_planes(first.store)
    store = model.store()
    for name, plane in planes.items():
        store.plane(name).copy_(plane)
    second = engine.start(model, store=store, warmup_steps=2)
    second.trainer.restore(state)
    resumed = [second.trainer.train_step(step_rows(step)).loss for step in range(3, 6)]
    second.trainer.flush()

    assert resumed == losses[3:]
    assert_same_planes(copy_planes(second.store), copy_planes(straight.store))


def test_a_step_with_an_infinite_gradient_and_a_finite_loss_touches_nothing(
    engine: Engine, step_rows: Callable[[int], list[MicroBatch]]
) -> None:
    # Embeddings this small make every norm multiply the gradient by 1e15: it overflows on its way down, the loss does
    # not.
    model = engine.tiny_model("llama", rms_norm_eps=1e-30)
    good = dict(model.weights)
    model.weights["model.embed_tokens.weight"] = 1e-30 * good["model.embed_tokens.weight"]
    run = engine.start(model, lr_schedule="constant")
    before = copy_planes(run.store)

    report = run.trainer.train_step(step_rows(0))
    run.trainer.flush()

    assert report.skipped == "non_finite_gradient"
    assert report.loss == pytest.approx(4.56, abs=0.2)
    assert_same_planes(before, copy_planes(run.store))
    assert run.trainer.state()["num_skipped"] == 1

    # The next good step is the first update, with the bias correction of a first update.
    model.weights.update(good)
    for name, weight in good.items():
        run.store.write_master(name, weight)
    fresh = engine.start(model, lr_schedule="constant")
    for each in (run, fresh):
        assert each.trainer.train_step(step_rows(1)).skipped == ""
        each.trainer.flush()
    assert_same_planes(copy_planes(run.store), copy_planes(fresh.store))


def test_a_nan_among_the_weights_skips_the_step(engine: Engine, step_rows: Callable[[int], list[MicroBatch]]) -> None:
    model = engine.tiny_model("llama")
    model.weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    run = engine.start(model)
    before = copy_planes(run.store)

    report = run.trainer.train_step(step_rows(0))
    run.trainer.flush()

    assert report.skipped == "non_finite_gradient"
    for plane in WEIGHTS_AND_MOMENTS:
        assert torch.equal(before[plane].view(torch.uint8), run.store.plane(plane).view(torch.uint8))


def test_in_backward_a_loss_that_is_not_finite_touches_nothing(
    engine: Engine, step_rows: Callable[[int], list[MicroBatch]]
) -> None:
    model = engine.tiny_model("llama")
    good = model.weights["model.layers.1.mlp.up_proj.weight"].clone()
    model.weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    store = model.store(grad_dtype=None)
    run = engine.start(model, store=store, max_grad_norm=None)
    before = copy_planes(store)

    report = run.trainer.train_step(step_rows(0))
    run.trainer.flush()

    assert report.skipped == "non_finite_gradient"
    for plane in WEIGHTS_AND_MOMENTS:
        assert torch.equal(before[plane].view(torch.uint8), store.plane(plane).view(torch.uint8))
    assert run.trainer.state()["num_updates"] == 0
    store.write_master("model.layers.1.mlp.up_proj.weight", good)
    assert run.trainer.train_step(step_rows(0)).skipped == ""


def test_in_backward_units_from_the_first_infinite_gradient_on_keep_their_weights_and_the_report_says_so(
    engine: Engine, step_rows: Callable[[int], list[MicroBatch]]
) -> None:
    model = engine.tiny_model("llama", rms_norm_eps=1e-30)
    model.weights["model.embed_tokens.weight"] *= 1e-30
    store = model.store(grad_dtype=None)
    run = engine.start(model, store=store, max_grad_norm=None, lr_schedule="constant")
    before = copy_planes(store)

    report = run.trainer.train_step(step_rows(0))
    run.trainer.flush()

    assert report.skipped == "partly_non_finite_gradient"
    assert report.loss == pytest.approx(4.56, abs=0.2)
    units = model.template.layout.units
    touched = []
    for unit in units:
        part = slice(unit.offset, unit.offset + unit.num_elements)
        touched.append(not torch.equal(before["exp_avg"][part], store.plane("exp_avg")[part]))
        for plane in WEIGHTS_AND_MOMENTS:
            assert touched[-1] or torch.equal(before[plane][part], store.plane(plane)[part])
        assert store.plane("exp_avg")[part].isfinite().all()
    assert touched[-1] and not touched[0]
    assert touched == sorted(touched), "units are updated from the head down to the first that is not finite"
    counts = {"step": 1, "num_updates": 1, "num_skipped": 1, "num_skipped_in_a_row": 1}
    assert run.trainer.state() == {"version": 1, **counts}


def test_a_restored_run_that_updates_in_backward_continues_bit_for_bit(
    engine: Engine, step_rows: Callable[[int], list[MicroBatch]]
) -> None:
    model = engine.tiny_model("qwen3")
    straight = engine.start(model, store=model.store(grad_dtype=None), max_grad_norm=None)
    losses = [straight.trainer.train_step(step_rows(step)).loss for step in range(4)]
    straight.trainer.flush()

    first = engine.start(model, store=model.store(grad_dtype=None), max_grad_norm=None)
    for step in range(2):
        first.trainer.train_step(step_rows(step))
    state, planes = first.trainer.state(), copy_planes(first.store)
    store = model.store(grad_dtype=None)
    for name, plane in planes.items():
        store.plane(name).copy_(plane)
    second = engine.start(model, store=store, max_grad_norm=None, activation_placement="host")
    second.trainer.restore(state)
    resumed = [second.trainer.train_step(step_rows(step)).loss for step in range(2, 4)]
    second.trainer.flush()

    assert resumed == losses[2:]
    assert_same_planes(copy_planes(second.store), copy_planes(straight.store))


@pytest.mark.parametrize("max_grad_norm", [1.0, None])
def test_a_batch_without_a_trained_token_is_refused_before_anything_is_touched(
    max_grad_norm: float | None,
    engine: Engine,
    step_rows: Callable[[int], list[MicroBatch]],
) -> None:
    untrained = [engine.pack(engine.documents(10)), engine.pack(engine.documents(3, 4))]
    for row in untrained:
        row.labels_T.fill_(-100)
    model = engine.tiny_model("llama")
    stores = [model.store(grad_dtype=torch.float32 if max_grad_norm else None) for _ in range(2)]
    run, undisturbed = (engine.start(model, store=store, max_grad_norm=max_grad_norm) for store in stores)
    for each in (run, undisturbed):
        each.trainer.train_step(step_rows(0))
    before, state = copy_planes(run.store), run.trainer.state()

    for attempt in (run.trainer.train_step, run.trainer.evaluate):
        with pytest.raises(InvalidData, match=r"micro_batches\.labels_T hold no trained token") as caught:
            attempt(untrained)
        assert caught.value.violations[0].field == "micro_batches.labels_T"

    assert run.trainer.state() == state
    reports = [each.trainer.train_step([untrained[0], *step_rows(1)]) for each in (run, undisturbed)]
    assert (reports[0].loss, reports[0].learning_rate) == (reports[1].loss, reports[1].learning_rate)
    for each in (run, undisturbed):
        each.trainer.flush()
    assert_same_planes(copy_planes(run.store), copy_planes(undisturbed.store))
    assert not torch.equal(before["lo"], run.store.plane("lo"))


@pytest.mark.parametrize("updates_in_backward", [False, True])
def test_an_evaluation_accounts_for_itself_and_for_the_update_it_waits_for(
    updates_in_backward: bool,
    engine: Engine,
    step_rows: Callable[[int], list[MicroBatch]],
) -> None:
    model, rows = engine.tiny_model("llama"), step_rows(0)
    store = model.store(grad_dtype=None if updates_in_backward else torch.float32)
    run = engine.start(model, store=store, max_grad_norm=None if updates_in_backward else 1.0)
    assert run.trainer.supports_packing
    first = run.trainer.train_step(rows)

    twice = run.trainer.evaluate([*rows, *rows])
    second = run.trainer.train_step(rows)

    assert (twice.num_tokens, twice.num_targets) == (
        2 * first.num_tokens,
        2 * sum(row.num_targets for row in rows),
    )
    units, fp32_bytes = model.template.layout.units, 4
    embedded = torch.unique(torch.cat([row.input_ids_T for row in rows])).numel() * model.template.hidden_size
    one_pass_bytes = (sum(unit.num_elements for unit in units[1:]) + embedded) * fp32_bytes
    # No more tokens fit at once than in the step before, so the weights cross once for each half.
    assert twice.h2d.bytes == 2 * one_pass_bytes
    assert twice.d2h.bytes == 0
    assert 0 < twice.compute_s + twice.h2d.exposed_s <= twice.duration_s
    assert second.h2d.bytes == first.h2d.bytes
    assert second.compute_s <= second.duration_s
    if not updates_in_backward:
        assert twice.optimizer_s > 0, "the first step's update ran, and nobody else tells of it"


def test_training_stops_after_too_many_skipped_steps_in_a_row(
    engine: Engine, step_rows: Callable[[int], list[MicroBatch]]
) -> None:
    model = engine.tiny_model("llama")
    run = engine.start(model, max_skipped_steps=3)
    good = model.weights["model.norm.weight"].clone()
    broken = torch.full_like(good, torch.inf)
    before = copy_planes(run.store)

    run.store.write_master("model.norm.weight", broken)
    for step in range(2):
        assert run.trainer.train_step(step_rows(step)).skipped == "non_finite_gradient"
    run.store.write_master("model.norm.weight", good)
    assert run.trainer.train_step(step_rows(2)).skipped == ""
    run.trainer.flush()
    after = copy_planes(run.store)
    run.store.write_master("model.norm.weight", broken)
    for step in range(3, 5):
        run.trainer.train_step(step_rows(step))
    with pytest.raises(
        Diverged, match=r"3 steps in a row were skipped up to step 6 \(non_finite_gradient: .*learning_rate"
    ):
        run.trainer.train_step(step_rows(5))

    run.store.write_master("model.norm.weight", good)
    assert torch.equal(after["exp_avg"], run.store.plane("exp_avg"))
    assert not torch.equal(after["exp_avg"], before["exp_avg"])


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (
            lambda row: row.input_ids_T.__setitem__(3, 96),
            r"micro_batches\[1\]\.input_ids_T holds token 96; .* 96 tokens",
        ),
        (lambda row: row.input_ids_T.__setitem__(3, -1), r"micro_batches\[1\]\.input_ids_T holds token -1"),
        (lambda row: row.labels_T.__setitem__(3, 400), r"micro_batches\[1\]\.labels_T holds token 400"),
    ],
)
def test_tokens_that_are_not_the_models_are_refused_by_field_before_anything_is_touched(
    change: Callable[[MicroBatch], object],
    field: str,
    engine: Engine,
    step_rows: Callable[[int], list[MicroBatch]],
) -> None:
    run, rows = engine.start(engine.tiny_model("llama")), step_rows(0)
    change(rows[1])
    before = copy_planes(run.store)

    for attempt in (run.trainer.train_step, run.trainer.evaluate):
        with pytest.raises(InvalidData, match=field) as caught:
            attempt(rows)
        assert caught.value.violations[0].field.startswith("micro_batches[1].")

    assert run.trainer.step == 0
    assert_same_planes(before, copy_planes(run.store))
    assert run.trainer.train_step(step_rows(0)).skipped == ""


def test_a_document_beyond_the_models_positions_is_refused_and_many_short_ones_are_not(engine: Engine) -> None:
    run = engine.start(engine.tiny_model("gpt2"))
    with pytest.raises(InvalidData, match=r"micro_batches\[0\]\.document_lengths has a document of 129 tokens; .* 128"):
        run.trainer.train_step([engine.pack(engine.documents(129))])
    with pytest.raises(InvalidData, match="micro_batches is empty"):
        run.trainer.train_step([])
    assert run.trainer.train_step([engine.pack(engine.documents(100, 100))]).skipped == ""
