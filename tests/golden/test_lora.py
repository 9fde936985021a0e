"""Adapters against PEFT in plain PyTorch, and what they cost."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from tests.support.double import check_gradients, check_numbers, check_weights, plain_and_exact
from tests.support.further import further
from tests.support.plans import ledger_of
from tests.support.tiny_models import ARCHITECTURES, MIXES_DOCUMENTS, config_of, micro_batch
from torch import Tensor
from transformers import AutoModelForCausalLM

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.step_pass import StepKey
from horizon_server.engine.template import Template
from horizon_server.errors import InvalidModel, InvalidSpec
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import ActivationPlacement
from horizon_server.spec import LoraSpec, TrainSpec
from horizon_server.store.adapter_files import AdapterConfig
from horizon_server.store.checkpoint import AdapterExport, load_checkpoint, save_checkpoint
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import StoreLayout
from horizon_server.store.model_load import load_model

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

Pack = Callable[[list[Tensor]], MicroBatch]
NUM_STEPS = 5
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
COMPARED = ["llama", "gpt2", "qwen3_moe", *further("falcon", "qwen3", "gemma2", "phi3", "minicpm3")]
"""With fused projections, Conv1D, compressed queries, products with a transpose, and a mixture of experts, whose
attention is adapted."""


def found_in(model: TinyModel, folder: Path, *, original: bool = False, **lora: Any) -> ModelFolder:
    """The model in a folder, laid out with adapters."""
    reference: Any = model.reference()
    # In the names of the class, as the model's weights are.
    reference.save_pretrained(folder, save_original_format=original)
    return open_for_training(folder, TrainSpec(trainable=("lora",), lora=LoraSpec(**{"rank": 4, "alpha": 6.0, **lora})))


def adapted(model: TinyModel, folder: Path, **lora: Any) -> TinyModel:
    """The model with adapters of random values, A and B."""
    layout = found_in(model, folder, **lora).layout
    generator = torch.Generator().manual_seed(3)
    weights = {**model.weights}
    for _, tensor in layout.tensors():
        if tensor.adapts:
            weights[tensor.name] = 0.1 * torch.randn(tensor.shape, generator=generator)
    return dataclasses.replace(model, template=Template.from_config(model.config, layout=layout), weights=weights)


def adapter_names(layout: StoreLayout) -> list[str]:
    return [tensor.name for _, tensor in layout.tensors() if tensor.adapts]


def master(store: HostStore, name: str) -> Tensor:
    unit, tensor = store.layout.find(name)
    end = tensor.offset + tensor.num_elements
    return store.exact(unit.index, lambda flat: flat[tensor.offset : end].view(tensor.shape))


class PeftModel:
    """The same model in plain PyTorch, with PEFT's adapters."""

    def __init__(self, model: TinyModel, layout: StoreLayout, values: dict[str, Tensor], **lora: Any) -> None:
        reference = model.reference()
        bases = {tensor.adapts.removesuffix(".weight") for _, tensor in layout.tensors() if tensor.adapts}
        config = peft.LoraConfig(
            **{
                "r": 4,
                "lora_alpha": 6.0,
                "target_modules": "|".join(re.escape(base) for base in sorted(bases)),
                "fan_in_fan_out": model.config.model_type == "gpt2",
                **lora,
            }
        )
        with warnings.catch_warnings():
            # About experts, for which it prepares patterns of its own.
            warnings.simplefilter("ignore", RuntimeWarning)
            self.model: Any = peft.inject_adapter_in_model(config, reference)
        known = dict(self.model.named_parameters())
        self.parameters = {
            name: known[name.removesuffix("weight") + "default.weight"] for name in adapter_names(layout)
        }
        assert {p for p in known.values() if p.requires_grad} == set(self.parameters.values())
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(values[name])
        self.model.train(False)

    def double(self) -> PeftModel:
        self.model.double()
        return self

    def gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.parameters.items() if p.grad is not None}


@pytest.fixture
def rows(engine: Engine) -> list[MicroBatch]:
    return [engine.pack(engine.documents(11, 20, seed=1)), engine.pack(engine.documents(16, 9, seed=2))]


def rows_for(architecture: str, rows: list[MicroBatch]) -> list[MicroBatch]:
    """Falcon's class, which is the reference, does not keep the documents of a row apart."""
    if architecture != "falcon":
        return rows
    return [micro_batch([ids_T]) for row in rows for ids_T in torch.split(row.input_ids_T, list(row.document_lengths))]


def relative(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def loss_of(reference: Any, rows: list[MicroBatch], plain_loss: Callable[..., Tensor]) -> Tensor:
    total = sum((plain_loss(reference, row) for row in rows), torch.zeros(()))
    return total / sum(row.num_targets for row in rows)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("architecture", COMPARED)
def test_loss_and_gradients_are_those_of_peft(
    architecture: str,
    rslora: bool,
    engine: Engine,
    rows: list[MicroBatch],
    tmp_path: Path,
) -> None:
    rows = rows_for(architecture, rows)
    model = adapted(engine.tiny_model(architecture), tmp_path)
    peft_model = partial(PeftModel, model, model.template.layout, model.weights, use_rslora=rslora)
    run = engine.start(model, adapter_scale=LoraSpec(rank=4, alpha=6, rslora=rslora).scale)

    def autograd(reference: PeftModel) -> tuple[float, dict[str, Tensor]]:
        loss = loss_of(reference.model, rows, engine.plain_loss)
        torch.autograd.backward(loss)
        return loss.item(), reference.gradients()

    plain, exact = plain_and_exact(peft_model, autograd)
    check_numbers(run.trainer.train_step(rows).loss, plain[0], exact[0])
    check_gradients({name: run.gradient(name) for name in exact[1]}, plain[1], exact[1])


@pytest.mark.parametrize("architecture", COMPARED)
def test_steps_are_those_of_peft(
    architecture: str,
    engine: Engine,
    rows: list[MicroBatch],
    tmp_path: Path,
) -> None:
    rows = rows_for(architecture, rows)
    model = engine.tiny_model(architecture)
    layout = found_in(model, tmp_path, original=True).layout
    store = HostStore.allocate(layout, num_threads=1)
    model.stores.append(store)
    # Of a seed whose gradients have no element near zero: Adam's quotient magnifies its rounding, PEFT's in fp32 as
    # well as ours.
    load_model(store, tmp_path, seed=2)
    template = Template.from_folder(tmp_path, layout=layout)
    run = engine.start(
        dataclasses.replace(model, template=template),
        store=store,
        adapter_scale=1.5,
        learning_rate=1e-3,
        lr_schedule="constant",
        max_grad_norm=0.5,
        weight_decay=0.1,
    )

    def values() -> dict[str, Tensor]:
        run.trainer.flush()
        return {name: master(store, name) for name in adapter_names(layout)}

    def trained(reference: PeftModel) -> tuple[list[float], dict[str, Tensor]]:
        parameters = list(reference.parameters.values())
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, eps=1e-8, weight_decay=0.1)
        losses = []
        for _ in range(NUM_STEPS):
            loss = loss_of(reference.model, rows, engine.plain_loss)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
            losses.append(loss.item())
        return losses, {name: parameter.data for name, parameter in reference.parameters.items()}

    plain, exact = plain_and_exact(partial(PeftModel, model, layout, values()), trained)
    reported = [run.trainer.train_step(rows).loss for _ in range(NUM_STEPS)]
    check_numbers(reported, plain[0], exact[0], "the losses")
    assert exact[0][-1] < exact[0][0]
    check_weights(values(), plain[1], exact[1])


def test_dropout_draws_what_peft_draws_again_in_the_recompute(
    engine: Engine,
    rows: list[MicroBatch],
    tmp_path: Path,
) -> None:
    model = adapted(engine.tiny_model("llama"), tmp_path)
    reference = PeftModel(model, model.template.layout, model.weights, lora_dropout=0.3)
    run = engine.start(
        model, adapter_scale=1.5, adapter_dropout=0.3, seed=11, activation_placement="host", max_grad_norm=None
    )
    report = run.trainer.train_step(rows)
    reference.model.train()
    key, current = StepKey(seed=11, step=0), [0]

    def seed(unit: int) -> Callable[..., None]:
        def before(*_: object) -> None:
            torch.manual_seed(key.seed_of(unit, current[0]))

        return before

    for index, layer in enumerate(reference.model.model.layers):
        layer.register_forward_pre_hook(seed(index + 1))
    loss = torch.zeros(())
    for current[0], row in enumerate(rows):
        part = engine.plain_loss(reference.model, row) / sum(one.num_targets for one in rows)
        torch.autograd.backward(part)
        loss += part.detach()
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    ours = {name: run.gradient(name) for name in reference.parameters}
    theirs = {name: parameter.grad for name, parameter in reference.parameters.items() if parameter.grad is not None}
    assert relative(flat(ours), flat(theirs)) <= 1e-6


def test_an_evaluation_drops_nothing(engine: Engine, rows: list[MicroBatch], tmp_path: Path) -> None:
    model = adapted(engine.tiny_model("llama"), tmp_path)
    plain = engine.start(model).trainer.evaluate(rows).eval_loss
    dropping = engine.start(model, adapter_dropout=0.5, learning_rate=0.0)
    assert dropping.trainer.evaluate(rows).eval_loss == plain
    assert dropping.trainer.train_step(rows).loss != pytest.approx(plain, rel=1e-4)
    assert dropping.trainer.evaluate(rows).eval_loss == plain


@pytest.mark.parametrize("architecture", ["gpt2", *further("llama", "qwen3_moe")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_that_changes_memory_or_time_changes_a_bit(
    architecture: str,
    dtype: torch.dtype,
    engine: Engine,
    rows: list[MicroBatch],
    tmp_path: Path,
) -> None:
    model = adapted(engine.tiny_model(architecture), tmp_path)
    stores: list[HostStore] = []
    choices: list[dict[str, Any]] = [
        {},
        {"activation_placement": "host"},
        {"num_weight_slots": 1, "num_gradient_slots": 3},
        {"resident_layers": 2},
        {"released": True},
    ]
    for options in choices:
        device = HostDevice(num_threads=1, compute_dtype=dtype, max_delay_s=0.0005, delay_seed=len(stores))
        released = options.pop("released", False)
        run = engine.start(model, device=device, adapter_scale=1.5, adapter_dropout=0.2, **options)
        for _ in range(3):
            run.trainer.train_step(rows)
            if released:
                run.trainer.release_device()
        run.trainer.flush()
        stores.append(run.store)
    for store in stores[1:]:
        for plane in PLANES:
            assert torch.equal(store.plane(plane), stores[0].plane(plane)), plane


def test_updates_in_backward_are_those_of_a_step_without_clipping(
    engine: Engine, rows: list[MicroBatch], tmp_path: Path
) -> None:
    model = adapted(engine.tiny_model("llama"), tmp_path)
    kept = engine.start(model, max_grad_norm=None)
    landed = engine.start(model, max_grad_norm=None, store=model.store(grad_dtype=None))
    for _ in range(3):
        assert kept.trainer.train_step(rows).loss == landed.trainer.train_step(rows).loss
    kept.trainer.flush()
    landed.trainer.flush()
    for plane in PLANES:
        assert torch.equal(kept.store.plane(plane), landed.store.plane(plane))


def test_only_adapters_change_and_their_products_are_not_in_fp8(
    engine: Engine, rows: list[MicroBatch], tmp_path: Path
) -> None:
    model = adapted(engine.tiny_model("llama"), tmp_path, rank=16)
    run = engine.start(model, matmul="fp8")
    before = {name: run.store.tensor(name, "hi").clone() for name in model.weights}
    for _ in range(3):
        assert run.trainer.train_step(rows).skipped == ""
    run.trainer.flush()
    changed = {name for name in before if not torch.equal(before[name], run.store.tensor(name, "hi"))}
    assert changed == set(adapter_names(model.template.layout))
    # With adapters whose B is zero, the products of the model alone: fp8 rounds those, and nothing else.
    names = [name for name in changed if "lora_B" in name]
    zeroed = dataclasses.replace(
        model, weights={**model.weights, **{n: torch.zeros_like(model.weights[n]) for n in names}}
    )
    losses = [
        engine.start(one, matmul="fp8").trainer.train_step(rows).loss for one in (zeroed, engine.tiny_model("llama"))
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_the_device_holds_is_what_the_plan_says(
    dropout: float,
    placement: ActivationPlacement,
    engine: Engine,
    tmp_path: Path,
) -> None:
    model = engine.tiny_model("llama", num_hidden_layers=4)
    shape = found_in(model, tmp_path).shape
    model = adapted(model, tmp_path)
    run = engine.start(model, activation_placement=placement, adapter_dropout=dropout)
    rows = [engine.pack(engine.documents(40, 30)), engine.pack(engine.documents(31))]
    run.trainer.train_step(rows)
    report = run.trainer.train_step(rows)
    plan = ledger_of(
        model.template.layout,
        shape,
        tokens_per_step=101,
        sequence_length=70,
        device_kind="host",
        grad_bytes=4,
        activation_placement=placement,
        adapter_dropout=dropout,
    )
    for component in ("weights", "gradients", "activations"):
        assert report.device_memory_bytes[component] == plan.device_bytes[component], component
    assert report.device_memory_bytes["workspace"] <= plan.device_bytes["workspace"]
    for component in ("weights", "moments", "gradients"):
        assert report.host_memory_bytes[component] == plan.host_bytes[component], component


def test_a_checkpoint_restores_every_bit_and_the_same_random_numbers(
    engine: Engine, rows: list[MicroBatch], tmp_path: Path
) -> None:
    model = engine.tiny_model("llama")
    layout = found_in(model, tmp_path / "source").layout
    model = dataclasses.replace(model, template=Template.from_folder(tmp_path / "source", layout=layout))
    store = HostStore.allocate(layout, num_threads=1)
    load_model(store, tmp_path / "source")
    run = engine.start(model, store=store, adapter_dropout=0.3)
    for _ in range(2):
        run.trainer.train_step(rows)
    state = run.trainer.state()
    export = AdapterExport(
        config=AdapterConfig(rank=4, alpha=6.0, dropout=0.3, base="model"), base_sha256=lambda: "0" * 64
    )
    save_checkpoint(store, tmp_path / "kept", source=tmp_path / "source", trainer_state=state, adapter=export)
    again = HostStore.allocate(layout, num_threads=1)
    assert load_checkpoint(again, tmp_path / "kept", base=tmp_path / "source", base_sha256=lambda: "0" * 64) == state
    resumed = engine.start(model, store=again, adapter_dropout=0.3)
    resumed.trainer.restore(state)
    for _ in range(2):
        assert resumed.trainer.train_step(rows).loss == run.trainer.train_step(rows).loss
    run.trainer.flush()
    resumed.trainer.flush()
    for plane in PLANES:
        assert torch.equal(again.plane(plane), store.plane(plane)), plane


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES, *MIXES_DOCUMENTS}))
def test_all_linear_finds_linear_maps_in_every_family(architecture: str, tmp_path: Path) -> None:
    config = config_of(architecture)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path)
    found = open_for_training(tmp_path, TrainSpec(trainable=("lora",), lora=LoraSpec(rank=2)))
    template = Template.from_folder(tmp_path, layout=found.layout)
    assert template.has_adapters
    if architecture != "xlstm":
        template.check_dtype(torch.bfloat16)


@pytest.mark.parametrize(
    ("architecture", "original", "targets", "problem"),
    [
        (
            "qwen3_moe",
            True,
            (r"experts\.0\.gate",),
            "model.layers.0.mlp.experts.0.gate_proj.weight cannot have an adapter: the model com",
        ),
        (
            "qwen3_moe",
            False,
            ("gate_up",),
            "train.lora.targets: model.layers.0.mlp.experts.gate_up_proj has shape [4, 48, 32] and is not",
        ),
        (
            "mamba",
            True,
            ("dt_proj",),
            "backbone.layers.0.mixer.dt_proj.weight cannot have an adapter: the model's code gives it to matmul",
        ),
    ],
)
def test_what_is_not_used_as_a_linear_map_is_refused_by_name(
    architecture: str,
    original: bool,
    targets: tuple[str, ...],
    problem: str,
    engine: Engine,
    tmp_path: Path,
) -> None:
    with pytest.raises((InvalidModel, InvalidSpec)) as refused:
        layout = found_in(engine.tiny_model(architecture), tmp_path, original=original, targets=targets).layout
        Template.from_folder(tmp_path, layout=layout)
    assert str(refused.value).startswith(problem)
    assert ("(train.trainable: [experts])" in str(refused.value)) == ("experts" in problem)
