"""Optimizer states that stay on the device, which updates them: no bit depends on it, the store has them whenever it is
read, and the account is the plan's."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.golden.test_dora import loaded
from tests.golden.test_kept_on_device import PLANES, assert_same, device_of, grad_dtype_of
from tests.support.plans import ledger_of
from torch import Tensor

from horizon_server.engine.device_states import DeviceStates
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.objectives import DPO, Documents, StepObjective
from horizon_server.engine.template import Template
from horizon_server.planning.model_folder import ModelShape
from horizon_server.planning.residency import state_units
from horizon_server.records.execution import Residency
from horizon_server.store.generations import KeptState
from horizon_server.store.layout import with_lr_scales, with_trained

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run, TinyModel

KINDS = ["host", "host in bf16", "cuda"]
ALL: dict[str, Any] = {"resident_layers": 3, "state_layers": 3}
SOME: dict[str, Any] = {"resident_layers": 2, "state_layers": 1}
CLIPPING = [{"max_grad_norm": 0.05}, {"max_grad_norm": None}]


def started(engine: Engine, model: TinyModel, kind: str, **options: Any) -> Run:
    """A run on a device that shows a use after free and pauses at random. Without clipping, the store keeps no
    gradients."""
    switches: dict[str, Any] = {"poison_on_free": True, "max_delay_s": 0.0005, "delay_seed": len(options)}
    if kind == "host in bf16":
        kind, switches["compute_dtype"] = "host", torch.bfloat16
    device = device_of(kind, **switches)
    grad_dtype = grad_dtype_of(device) if options.get("max_grad_norm", 1.0) is not None else None
    store = options.pop("store", None) or model.store(grad_dtype=grad_dtype)
    return engine.start(model, store=store, device=device, **options)


def rows_of(engine: Engine, step: int) -> list[MicroBatch]:
    return [engine.pack(engine.documents(12, 7, seed=step)), engine.pack(engine.documents(21, seed=step + 50))]


def planes_of(run: Run) -> dict[str, Tensor]:
    return {plane: run.store.plane(plane).clone() for plane in PLANES}


def bits(planes: dict[str, Tensor]) -> dict[str, list[int]]:
    return {plane: values.view(torch.uint8).tolist() for plane, values in planes.items()}


def trained(engine: Engine, run: Run, *, between: Callable[[Run], object] = lambda _: None) -> Any:
    """All figures of three steps with an evaluation after each, and every plane."""
    numbers = []
    for step in range(3):
        rows = rows_of(engine, step)
        report = run.trainer.train_step(rows)
        assert report.skipped == ""
        numbers += [report.loss, report.grad_norm, run.trainer.evaluate(rows).eval_loss]
        between(run)
    run.trainer.flush()
    planes = planes_of(run)
    run.trainer.close()
    held = run.device.arena.held_bytes()
    assert held["weights"] == held.get("moments", 0) == held["activations"] == held["workspace"] == 0
    return numbers, planes


@pytest.mark.parametrize("options", CLIPPING, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt2", "gpt_oss", "deepseek_v3"])
def test_no_bit_depends_on_where_the_states_are(
    architecture: str, kind: str, options: dict[str, Any], engine: Engine
) -> None:
    model = engine.tiny_model(architecture)
    wanted = trained(engine, started(engine, model, kind, **options))
    for kept in (SOME, ALL):
        assert_same(wanted, trained(engine, started(engine, model, kind, **kept, **options)))


@pytest.mark.parametrize("options", CLIPPING, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_nor_with_lanes_joined_rows_offloaded_inputs_or_one_slot(
    kind: str, options: dict[str, Any], engine: Engine
) -> None:
    model = engine.tiny_model("llama")
    for how in (
        {"lanes": 4},
        {"micro_batch_tokens": 64},
        {"activation_placement": "host", "num_weight_slots": 1, "num_gradient_slots": 1},
    ):
        wanted = trained(engine, started(engine, model, kind, **how, **options))
        assert_same(wanted, trained(engine, started(engine, model, kind, **SOME, **how, **options)))


@pytest.mark.parametrize("kind", ["host", "cuda"])
@pytest.mark.parametrize("lora", [{"dora": False}, {"dora": True, "targets": ("o_proj", "down_proj")}], ids=str)
def test_nor_with_adapters(lora: dict[str, Any], kind: str, engine: Engine, tmp_path: Path) -> None:
    runs = []
    for number, kept in enumerate(({}, SOME, ALL)):
        model, store = loaded(engine.tiny_model("llama"), tmp_path / str(number), **lora)
        store.grad_dtype = torch.float32
        runs.append(trained(engine, started(engine, model, kind, store=store, **kept)))
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_nor_with_frozen_layers_and_rates_of_their_own(kind: str, engine: Engine) -> None:
    tiny = engine.tiny_model("qwen3")
    layout = with_trained(tiny.template.layout, lambda name: "layers.1." in name, is_bfloat16=lambda _: False)
    scales = {tensor.name: 3.0 for _, tensor in layout.tensors() if "mlp" in tensor.name}
    template = Template.from_config(tiny.config, layout=with_lr_scales(layout, scales))
    model = dataclasses.replace(tiny, template=template)
    options = {"weight_decay": 0.3, "betas": (0.8, 0.95)}
    wanted = trained(engine, started(engine, model, kind, **options))
    assert_same(wanted, trained(engine, started(engine, model, kind, **ALL, **options)))


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_nor_with_an_objective(kind: str, engine: Engine) -> None:
    model, runs = engine.tiny_model("qwen3"), []
    rows = [engine.pack(engine.documents(12, 7, seed=1)), engine.pack(engine.documents(21, 9, seed=2))]
    documents = Documents.of(rows, pairs_P2=torch.tensor([[0, 1], [2, 3]]))
    references_S = torch.full((sum(row.num_targets for row in rows),), -4.5)
    for kept in ({}, SOME, ALL):
        run = started(engine, model, kind, **kept)
        objective = StepObjective(objective=DPO(beta=0.5), documents=documents, references_S=references_S)
        numbers = [run.trainer.train_step(rows, objective).loss for _ in range(3)]
        run.trainer.flush()
        runs.append((numbers, planes_of(run)))
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])


@pytest.mark.parametrize("options", CLIPPING, ids=str)
@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_the_store_has_them_whenever_the_device_is_released_or_the_trainer_closed(
    kind: str, options: dict[str, Any], engine: Engine
) -> None:
    model = engine.tiny_model("llama")

    def release(run: Run) -> None:
        run.trainer.release_device()
        assert not any(run.device.arena.held_bytes().values())

    plain = started(engine, model, kind, **options)
    wanted = trained(engine, plain)
    assert_same(wanted, trained(engine, started(engine, model, kind, **SOME, **options), between=release))
    closed = started(engine, model, kind, **ALL, **options)
    for step in range(3):
        closed.trainer.train_step(rows_of(engine, step))
    closed.trainer.close()
    assert bits(planes_of(closed)) == bits(wanted[1])


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_a_run_continues_from_what_was_flushed_with_states_elsewhere(kind: str, engine: Engine) -> None:
    model = engine.tiny_model("qwen3")
    straight = started(engine, model, kind)
    wanted = [straight.trainer.train_step(rows_of(engine, step)).loss for step in range(4)]
    first = started(engine, model, kind, **ALL)
    found = [first.trainer.train_step(rows_of(engine, step)).loss for step in range(2)]
    state, planes = first.trainer.state(), planes_of(first)
    # What comes after it is not in it.
    first.trainer.train_step(rows_of(engine, 7))
    second = started(engine, model, kind, **SOME)
    for plane, values in planes.items():
        second.store.plane(plane).copy_(values)
    second.trainer.restore(state)
    found += [second.trainer.train_step(rows_of(engine, step)).loss for step in (2, 3)]
    assert found == wanted


def test_what_the_device_has_updated_is_not_taken_for_a_whole_step_until_it_is_at_home(engine: Engine) -> None:
    run = started(engine, engine.tiny_model("llama"), "host", **SOME)
    generations = run.store.generations
    run.trainer.on_update = lambda figures, _: f"step {figures.step}"
    generations.reset()
    for step in range(2):
        run.trainer.train_step(rows_of(engine, step))
    run.trainer._optimizer.finish().wait()
    assert generations.generation is None
    run.trainer.flush()
    assert generations.generation == 2
    generations.is_shared = True
    assert generations.find() == KeptState(text="step 2", reported=False)
    [unit] = state_units(run.store.layout, Residency(**SOME))
    generations.begin(unit.index, 2)
    found = generations.find()
    assert isinstance(found, str) and "while its device had newer ones" in found


def test_a_copy_home_that_fails_is_not_claimed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run = started(engine, engine.tiny_model("llama"), "host", **SOME)
    run.trainer.train_step(rows_of(engine, 0))

    def fail(*_: Any, **__: Any) -> None:
        def broken() -> None:
            raise RuntimeError("an illegal access")

        run.device.d2h.submit(broken)

    monkeypatch.setattr(run.device, "download", fail)
    with pytest.raises(RuntimeError, match="an illegal access"):
        run.trainer.flush()
    assert run.store.generations.generation is None
    run.trainer.close()
    assert run.store.generations.generation is None


@pytest.mark.parametrize("options", CLIPPING, ids=str)
@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_a_step_that_is_not_finite_leaves_them_as_they_are(kind: str, options: dict[str, Any], engine: Engine) -> None:
    # As in test_training: the gradient overflows on its way down, the loss does not.
    runs, verdicts = [], []
    for kept in ({}, SOME, ALL):
        model = engine.tiny_model("llama", rms_norm_eps=1e-30)
        model.weights["model.embed_tokens.weight"] *= 1e-30
        run = started(engine, model, kind, lr_schedule="constant", **kept, **options)
        reports = [run.trainer.train_step(rows_of(engine, step)) for step in range(2)]
        run.trainer.flush()
        verdicts.append([report.skipped for report in reports])
        runs.append(([report.loss for report in reports], planes_of(run)))
    assert verdicts[0][0] == ("non_finite_gradient" if options["max_grad_norm"] else "partly_non_finite_gradient")
    assert verdicts[1] == verdicts[2] == verdicts[0]
    assert [loss.hex() for loss in runs[1][0]] == [loss.hex() for loss in runs[0][0]]
    assert_same(([], runs[0][1]), ([], runs[1][1]))
    assert_same(([], runs[0][1]), ([], runs[2][1]))


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_a_layer_with_its_states_crosses_the_link_once_and_comes_home_once(kind: str, engine: Engine) -> None:
    model, rows = engine.tiny_model("llama", num_hidden_layers=6), [engine.pack(engine.documents(24))]
    runs = [started(engine, model, kind, resident_layers=6, state_layers=number) for number in (0, 4)]
    plain, kept = ([run.trainer.train_step(rows) for _ in range(3)] for run in runs)
    stay = state_units(model.template.layout, Residency(resident_layers=6, state_layers=4))
    elements, size = sum(unit.trained_elements for unit in stay), 4 if kind == "host" else 2
    states = 8 + (4 if kind == "host" else 2)
    assert kept[0].h2d.bytes - plain[0].h2d.bytes == states * elements
    for step in (1, 2):
        assert plain[step].h2d.bytes - kept[step].h2d.bytes == size * elements
    for step in range(3):
        assert plain[step].d2h.bytes - kept[step].d2h.bytes == size * elements
    sent = []
    for run in runs:
        run.device.take_use()
        run.trainer.flush()
        sent.append(run.device.take_use().d2h.bytes)
        run.trainer.flush()
        assert run.device.take_use().d2h.bytes == 0
    assert sent == [0, 12 * elements]


@pytest.mark.parametrize("kind", ["host", "cuda"])
@pytest.mark.parametrize("grad_bytes", [2, 0])
@pytest.mark.parametrize("kept", [SOME, ALL], ids=str)
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gpt_oss", "deepseek_v3"])
def test_the_account_is_the_plans(
    architecture: str, kept: dict[str, Any], grad_bytes: int, kind: str, engine: Engine
) -> None:
    model = engine.tiny_model(architecture)
    shape = ModelShape.from_config(model.config.to_dict(), names=model.weights)
    plan = ledger_of(
        model.template.layout,
        shape,
        tokens_per_step=220,
        sequence_length=110,
        device_kind=kind,
        grad_bytes=grad_bytes and (4 if kind == "host" else 2),
        compute_dtype="float32" if kind == "host" else "bfloat16",
        **kept,
    )
    run = started(engine, model, kind, tokens_per_step=220, max_grad_norm=1.0 if grad_bytes else None, **kept)
    report = run.trainer.train_step([engine.pack(engine.documents(60, 50)), engine.pack(engine.documents(100, 10))])
    for component in ("weights", "moments", "gradients", "activations"):
        assert report.device_memory_bytes[component] == plan.device_bytes[component]


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("options", CLIPPING, ids=str)
@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_a_slow_device_is_waited_for(
    kind: str, options: dict[str, Any], lanes: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = engine.tiny_model("llama")
    wanted = trained(engine, started(engine, model, kind, lanes=lanes, **options))
    update = DeviceStates.update

    def slow(*arguments: Any) -> None:
        # Long enough for the next layer's backward and the next step's forward.
        time.sleep(0.05)
        update(*arguments)

    monkeypatch.setattr(DeviceStates, "update", slow)
    assert_same(wanted, trained(engine, started(engine, model, kind, lanes=lanes, **ALL, **options)))


def test_without_states_nothing_is_there(engine: Engine) -> None:
    run = engine.start(engine.tiny_model("llama"), resident_layers=3)
    states = run.trainer._optimizer.states
    assert isinstance(states, DeviceStates) and not states.holds_any
    run.trainer.train_step(rows_of(engine, 0))
    assert not run.device.arena.held_bytes().get("moments")
