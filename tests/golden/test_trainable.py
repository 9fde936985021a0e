"""Frozen parameters: the trained ones get the very gradients that they get when everything is trained, and the others
cost what is said."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.double import check_numbers, plain_and_exact
from tests.support.further import further
from tests.support.plans import ledger_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.objectives import Documents, StepObjective, WeightedSFT
from horizon_server.engine.template import Template
from horizon_server.errors import InvalidModel
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import ActivationPlacement
from horizon_server.spec import TrainSpec
from horizon_server.store.checkpoint import load_checkpoint, save_checkpoint
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import StoreLayout, with_trained
from horizon_server.store.model_load import load_model

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

Pack = Callable[[list[Tensor]], MicroBatch]
NUM_STEPS = 5
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")

PARTS = {
    "the attention of layers": r"attn|attention",
    "norms alone": r"norm|ln_|layernorm",
    "the last layer": r"(layers|h)\.2\.",
    "layers 1 and 2": r"(layers|h)\.[12]\.",
    "the first layer": r"(layers|h)\.0\.",
    "the head": r"lm_head|embed_out|model\.norm|final_layer_norm|ln_f|final_layernorm",
    "the embedding": r"embed_tokens|wte|embed_in|word_embeddings",
    "what is next to the embedding": r"wpe|embed_positions|norm",
    "all but the embedding": r"^(?!.*(embed_tokens|wte|embed_in|word_embeddings))",
}


def frozen_but(model: TinyModel, expression: str) -> TinyModel | None:
    """The model with only the tensors trained that fit; every second frozen one is exact in bfloat16. None where none
    fits."""
    names = [tensor.name for _, tensor in model.template.layout.tensors()]
    trained = {name for name in names if re.search(expression, name)}
    if not trained:
        return None
    in_bf16 = set(names[::2]) - trained
    weights = {n: w.bfloat16().float() if n in in_bf16 else w for n, w in model.weights.items()}
    layout = with_trained(model.template.layout, trained.__contains__, is_bfloat16=in_bf16.__contains__)
    template = Template.from_config(model.config, layout=layout)
    return dataclasses.replace(model, template=template, weights=weights)


def both(model: TinyModel, expression: str) -> tuple[TinyModel, TinyModel]:
    """The model with everything trained and with a part, on equal weights."""
    part = frozen_but(model, expression)
    if part is None:
        pytest.skip("the model has no such part")
    return dataclasses.replace(model, weights=part.weights), part


def trained_names(layout: StoreLayout) -> list[str]:
    return [tensor.name for _, tensor in layout.tensors() if tensor.trained]


@pytest.fixture
def rows(engine: Engine) -> list[MicroBatch]:
    return [engine.pack(engine.documents(11, 20, seed=1)), engine.pack(engine.documents(16, 9, seed=2))]


@pytest.mark.parametrize(
    "architecture", ["qwen3", "gpt2", "deepseek_v3", *further("llama", "qwen3_moe", "gemma2", "gpt_neox")]
)
@pytest.mark.parametrize("part", PARTS)
def test_what_is_trained_has_the_gradients_that_it_has_with_everything(
    architecture: str,
    part: str,
    engine: Engine,
    rows: list[MicroBatch],
) -> None:
    model, frozen = both(engine.tiny_model(architecture), PARTS[part])
    whole, run = engine.start(model), engine.start(frozen)
    before = {name: run.store.tensor(name, "hi").clone() for name in frozen.weights}

    one, other = whole.trainer.train_step(rows), run.trainer.train_step(rows)
    assert other.loss == one.loss
    names = trained_names(frozen.template.layout)
    for name in names:
        assert torch.equal(run.gradient(name), whole.gradient(name)), name
    run.trainer.flush()
    changed = {name for name in before if not torch.equal(before[name], run.store.tensor(name, "hi"))}
    assert changed <= set(names)


@pytest.mark.parametrize("architecture", ["qwen3", *further("gpt2", "qwen3_moe")])
@pytest.mark.parametrize("part", ["the attention of layers", "layers 1 and 2", "the head", "the embedding"])
def test_steps_follow_a_plain_loop_with_the_others_frozen(
    architecture: str,
    part: str,
    engine: Engine,
    rows: list[MicroBatch],
) -> None:
    _, frozen = both(engine.tiny_model(architecture), PARTS[part])
    names = set(trained_names(frozen.template.layout))

    def plain_loop(reference: torch.nn.Module) -> list[float]:
        for name, parameter in reference.named_parameters():
            # A class that fuses the checkpoint's experts has other names; its layers are trained whole or not at all.
            parameter.requires_grad_(any(name == found or _fused(name) == _fused(found) for found in names))
        trained = [parameter for parameter in reference.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-8, weight_decay=0)
        losses = []
        for _ in range(NUM_STEPS):
            loss = sum((engine.plain_loss(reference, row) for row in rows), torch.zeros(())) / sum(
                r.num_targets for r in rows
            )
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(trained, 0.5)
            optimizer.step()
            losses.append(loss.item())
        return losses

    run = engine.start(frozen, learning_rate=1e-3, lr_schedule="constant", max_grad_norm=0.5)
    reported = [run.trainer.train_step(rows).loss for _ in range(NUM_STEPS)]
    plain, exact = plain_and_exact(frozen.reference, plain_loop)
    check_numbers(reported, plain, exact, "the losses")
    assert exact[-1] < exact[0]


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("architecture", ["gpt_oss", "mixtral", *further("qwen3_moe")])
def test_experts_that_no_adapter_fits_are_trained_by_their_name_as_in_a_plain_loop(
    architecture: str,
    original: bool,
    engine: Engine,
    tmp_path: Path,
) -> None:
    # One document in a row: the class of gpt_oss mixes packed ones.
    model, rows = (
        engine.tiny_model(architecture),
        [engine.pack(engine.documents(length, seed=length)) for length in (31, 25)],
    )
    saved: Any = model.reference()
    # Divided as published, and as the class has them: all of a layer in one tensor.
    saved.save_pretrained(tmp_path, save_original_format=original)
    layout = open_for_training(tmp_path, TrainSpec(trainable=("experts",))).layout
    found = trained_names(layout)
    assert found and all(".experts." in name for name in found)
    store = HostStore.allocate(layout, num_threads=1)
    model.stores.append(store)
    load_model(store, tmp_path)
    trained = dataclasses.replace(model, template=Template.from_folder(tmp_path, layout=layout))
    run = engine.start(trained, store=store, learning_rate=1e-3, lr_schedule="constant", max_grad_norm=None)
    before = {name: store.tensor(name, "hi").clone() for name in (tensor.name for _, tensor in layout.tensors())}
    reported = [run.trainer.train_step(rows).loss for _ in range(10)]
    run.trainer.flush()
    changed = {name for name in before if not torch.equal(before[name], store.tensor(name, "hi"))}
    assert changed == set(found)

    def plain_loop(reference: torch.nn.Module) -> list[float]:
        for name, parameter in reference.named_parameters():
            parameter.requires_grad_(".experts." in name)
        parts = [parameter for parameter in reference.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parts, lr=1e-3, eps=1e-8, weight_decay=0)
        losses = []
        for _ in range(10):
            loss = sum((engine.plain_loss(reference, row) for row in rows), torch.zeros(())) / sum(
                r.num_targets for r in rows
            )
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        return losses

    plain, exact = plain_and_exact(model.reference, plain_loop)
    check_numbers(reported, plain, exact, "the losses")
    assert exact[-1] < exact[0]


def _fused(name: str) -> str:
    """The name of a layer's experts, whichever way they are divided."""
    return name.partition(".experts.")[0] if ".experts." in name else name


@pytest.mark.parametrize(
    "part", ["layers 1 and 2", "the head", "the attention of layers", "all but the embedding", "the embedding"]
)
@pytest.mark.parametrize("architecture", ["llama", *further("qwen3")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_that_changes_memory_or_time_changes_a_bit(
    architecture: str,
    part: str,
    dtype: torch.dtype,
    engine: Engine,
    rows: list[MicroBatch],
) -> None:
    _, frozen = both(engine.tiny_model(architecture), PARTS[part])
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
        run = engine.start(frozen, device=device, store=frozen.store(), **options)
        for _ in range(3):
            run.trainer.train_step(rows)
            if released:
                run.trainer.release_device()
        run.trainer.flush()
        stores.append(run.store)
    for store in stores[1:]:
        for plane in PLANES:
            assert torch.equal(store.plane(plane), stores[0].plane(plane)), plane


@pytest.mark.parametrize("part", ["layers 1 and 2", "the head", "the attention of layers", "the embedding"])
@pytest.mark.parametrize("architecture", ["llama", *further("qwen3")])
def test_updates_in_backward_are_those_of_a_step_without_clipping(
    architecture: str,
    part: str,
    engine: Engine,
    rows: list[MicroBatch],
) -> None:
    _, frozen = both(engine.tiny_model(architecture), PARTS[part])
    kept = engine.start(frozen, max_grad_norm=None)
    landed = engine.start(frozen, max_grad_norm=None, store=frozen.store(grad_dtype=None))
    for _ in range(3):
        one, other = kept.trainer.train_step(rows), landed.trainer.train_step(rows)
        assert (one.loss, one.grad_norm, one.skipped) == (other.loss, other.grad_norm, other.skipped)
    kept.trainer.flush()
    landed.trainer.flush()
    for plane in PLANES:
        assert torch.equal(kept.store.plane(plane), landed.store.plane(plane))


@pytest.mark.parametrize("part", ["layers 1 and 2", "the head", "the embedding"])
def test_an_objective_has_the_same_gradients_of_what_is_trained(
    part: str, engine: Engine, rows: list[MicroBatch]
) -> None:
    model, frozen = both(engine.tiny_model("qwen3"), PARTS[part])
    weights_S = torch.rand(sum(row.num_targets for row in rows)) + 0.5
    objective = StepObjective(objective=WeightedSFT(), documents=Documents.of(rows), weights_S=weights_S)
    whole, run = engine.start(model), engine.start(frozen)
    assert run.trainer.train_step(rows, objective).loss == whole.trainer.train_step(rows, objective).loss
    for name in trained_names(frozen.template.layout):
        assert torch.equal(run.gradient(name), whole.gradient(name)), name


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("part", ["layers 1 and 2", "the last layer", "the head", "the attention of layers"])
def test_what_the_device_holds_is_what_the_plan_says(
    part: str,
    placement: ActivationPlacement,
    engine: Engine,
    tmp_path: Path,
) -> None:
    _, frozen = both(engine.tiny_model("llama", num_hidden_layers=4), PARTS[part])
    AutoModelForCausalLM.from_config(frozen.config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    shape = open_model_folder(tmp_path).shape
    run = engine.start(frozen, activation_placement=placement)
    # More tokens than the trial of packing has.
    rows = [engine.pack(engine.documents(40, 30)), engine.pack(engine.documents(31))]
    run.trainer.train_step(rows)
    report = run.trainer.train_step(rows)
    plan = ledger_of(
        frozen.template.layout,
        shape,
        tokens_per_step=101,
        sequence_length=70,
        device_kind="host",
        grad_bytes=4,
        activation_placement=placement,
    )
    for component in ("weights", "gradients", "activations"):
        assert report.device_memory_bytes[component] == plan.device_bytes[component], component
    for component in ("weights", "moments", "gradients"):
        assert report.host_memory_bytes[component] == plan.host_bytes[component], component


def test_a_frozen_layer_goes_up_once_where_it_stays_and_sends_nothing_down(
    engine: Engine, rows: list[MicroBatch]
) -> None:
    model, frozen = both(engine.tiny_model("llama"), PARTS["the head"])
    whole, run = engine.start(model), engine.start(frozen, resident_layers=3)
    run.trainer.train_step(rows)
    all_bytes, step = whole.trainer.train_step(rows), run.trainer.train_step(rows)
    layers, head = model.template.layout.units[1:-1], frozen.template.layout.units[-1]
    assert all_bytes.h2d.bytes - step.h2d.bytes >= sum(unit.num_elements for unit in layers) * 4
    # The loss, and the head's gradient.
    assert step.d2h.bytes <= head.trained_elements * 4 + 8


@pytest.mark.parametrize("dtype", ["source", "bf16", "fp16", "fp32"])
def test_a_checkpoint_has_no_state_of_what_is_frozen_and_restores_every_bit(
    dtype: str, engine: Engine, rows: list[MicroBatch], tmp_path: Path
) -> None:
    model = engine.tiny_model("llama")
    # A folder in two formats, as some models are stored.
    plain = model.reference()
    for name, parameter in plain.named_parameters():
        if "mlp" in name:
            parameter.data = parameter.data.bfloat16()
    plain.save_pretrained(tmp_path / "source")  # type: ignore[operator]
    folder = open_model_folder(tmp_path / "source")
    is_bfloat16 = {name for name, header in folder.headers.items() if header.dtype == "BF16"}
    layout = with_trained(folder.layout, lambda n: "layers.2." in n, is_bfloat16=is_bfloat16.__contains__)
    assert {t.name for _, t in layout.tensors() if not t.exact} == {n for n in is_bfloat16 if "layers.2." not in n}
    template = Template.from_folder(tmp_path / "source", layout=layout)
    model = dataclasses.replace(model, template=template)

    store = HostStore.allocate(layout, num_threads=1)
    load_model(store, tmp_path / "source")
    run = engine.start(model, store=store)
    for _ in range(3):
        run.trainer.train_step(rows)
    state = run.trainer.state()
    save_checkpoint(store, tmp_path / "kept", source=tmp_path / "source", trainer_state=state, dtype=dtype)  # type: ignore[arg-type]
    trained_bytes = 4 * sum(t.num_elements for _, t in layout.tensors() if t.trained)
    for plane in ("exp_avg", "exp_avg_sq"):
        size = sum(file.stat().st_size for file in (tmp_path / "kept" / "trainer").glob(f"{plane}[.-]*safetensors"))
        assert trained_bytes <= size < trained_bytes + 4096

    again = HostStore.allocate(layout, num_threads=1)
    assert load_checkpoint(again, tmp_path / "kept") == state
    for plane in PLANES:
        assert torch.equal(again.plane(plane), store.plane(plane)), plane
    resumed = engine.start(model, store=again)
    resumed.trainer.restore(state)
    assert resumed.trainer.train_step(rows).loss == run.trainer.train_step(rows).loss


def test_a_loss_that_is_not_finite_changes_nothing(engine: Engine, rows: list[MicroBatch]) -> None:
    _, frozen = both(engine.tiny_model("llama"), PARTS["layers 1 and 2"])
    for store in (frozen.store(), frozen.store(grad_dtype=None)):
        name = next(name for name in trained_names(frozen.template.layout) if "layers.1" in name)
        store.tensor(name, "hi").view(-1)[0] = torch.nan
        before = {plane: store.plane(plane).clone() for plane in PLANES}
        run = engine.start(frozen, store=store, max_grad_norm=None if store.grad_dtype is None else 1.0)
        assert run.trainer.train_step(rows).skipped == "non_finite_gradient"
        run.trainer.flush()
        for plane in PLANES:
            assert torch.equal(store.plane(plane).view(torch.uint8), before[plane].view(torch.uint8))


def test_parts_of_one_parameter_of_the_model_are_trained_together(engine: Engine, tmp_path: Path) -> None:
    model = engine.tiny_model("qwen3_moe")
    AutoModelForCausalLM.from_config(model.config).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    layout = open_model_folder(tmp_path).layout
    some = with_trained(layout, lambda name: "experts.1." in name, is_bfloat16=lambda _: False)
    with pytest.raises(
        InvalidModel, match=r"trains only one of .*experts.* which the model computes with as one parameter"
    ):
        Template.from_folder(tmp_path, layout=some)
