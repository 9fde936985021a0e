"""Layers whose experts come in pages: the bytes of whole layers whose classes compute their experts one by one, in less
memory of the device, and of few tokens with less over the link."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.plans import ledger_of
from tests.support.tiny_models import config_of
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.paged_experts import Paging
from horizon_server.engine.template import Template
from horizon_server.errors import InvalidModel
from horizon_server.planning.model_folder import ModelShape
from horizon_server.planning.pages import NEVER_PAGED
from horizon_server.planning.trainable import open_for_training
from horizon_server.records.execution import ActivationPlacement
from horizon_server.spec import LoraSpec, TrainSpec
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import StoreLayout, with_trained
from horizon_server.store.pages import paged_unit

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, Run, TinyModel

PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
# Stacked experts with biases that are transposed; a correction bias, a shared expert, dense layers among the others;
# attention of other kinds.
FAMILIES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "ernie4_5_moe", "minimax", "phimoe"]
# Of a tiny model, less than two of its experts have.
ONE_EXPERT = 5000


def eager_model(engine: Engine, architecture: str, **changes: Any) -> TinyModel:
    """A model whose whole layers compute their experts one by one."""
    model = engine.tiny_model(architecture, experts_implementation="eager", **changes)
    modules: list[Any] = [module for group in model.template.groups.values() for module in group.modules()]
    (chosen,) = {one.config._experts_implementation for one in modules if hasattr(one, "_is_expert_parallel")}
    assert chosen == "eager"
    return model


def result(run: Run, rows: list[MicroBatch], *, num_steps: int = 3) -> tuple[list[tuple[float, float]], list[Tensor]]:
    """Loss and norm of some steps, and the planes after them."""
    steps = [run.trainer.train_step(rows) for _ in range(num_steps)]
    run.trainer.flush()
    planes = [run.store.plane(name).view(torch.uint8).clone() for name in PLANES]
    return [(step.loss, step.grad_norm) for step in steps], planes


def check_same(one: tuple[Any, list[Tensor]], other: tuple[Any, list[Tensor]]) -> None:
    assert one[0] == other[0]
    for plane, same in zip(one[1], other[1], strict=True):
        assert torch.equal(plane, same)


@pytest.fixture
def rows(engine: Engine) -> list[MicroBatch]:
    """Three micro-batches."""
    return [engine.pack(engine.documents(length, seed=length)) for length in (20, 31, 9)]


@pytest.mark.parametrize("most_elements", [ONE_EXPERT, 12000, 1 << 28])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_pages_give_the_bytes_of_whole_layers(
    architecture: str, most_elements: int, engine: Engine, rows: list[MicroBatch]
) -> None:
    model = eager_model(engine, architecture)
    whole, paged = (
        result(engine.start(model, max_grad_norm=0.5, expert_page_elements=elements), rows)
        for elements in (0, most_elements)
    )
    check_same(whole, paged)


@pytest.mark.parametrize("max_grad_norm", [0.5, None])
@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("architecture", ["mixtral", "deepseek_v3"])
def test_wherever_inputs_wait_and_whenever_units_are_updated(
    architecture: str,
    placement: ActivationPlacement,
    max_grad_norm: float | None,
    engine: Engine,
    rows: list[MicroBatch],
) -> None:
    model = eager_model(engine, architecture)
    found = []
    for elements in (0, ONE_EXPERT):
        run = engine.start(
            model,
            store=model.store(grad_dtype=None if max_grad_norm is None else torch.float32),
            # Queues that are late, and memory that is poisoned once it is free.
            device=HostDevice(num_threads=1, max_delay_s=0.001, delay_seed=1, poison_on_free=True),
            max_grad_norm=max_grad_norm,
            activation_placement=placement,
            expert_page_elements=elements,
        )
        found.append(result(run, rows))
    check_same(*found)


def frozen_but(model: TinyModel, is_trained: Callable[[str], bool]) -> TinyModel:
    """The model with some of its tensors trained."""
    layout = with_trained(model.template.layout, is_trained, is_bfloat16=lambda _: False)
    return dataclasses.replace(model, template=Template.from_config(model.config, layout=layout))


@pytest.mark.parametrize(
    "is_trained",
    [
        lambda name: ".experts." not in name,
        lambda name: ".experts." in name,
        lambda name: "down_proj" in name,
        # Backward ends in the middle of the model, at experts alone, and at all else of a layer.
        lambda name: "layers.1" in name and ".experts." in name,
        lambda name: "layers.1" in name and ".experts." not in name,
        lambda name: name == "lm_head.weight",
    ],
    ids=["all but experts", "experts", "a part of them", "those of a layer", "the rest of a layer", "none"],
)
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_what_is_frozen_stays_and_all_else_is_as_of_whole_layers(
    architecture: str, is_trained: Callable[[str], bool], engine: Engine, rows: list[MicroBatch]
) -> None:
    model = frozen_but(eager_model(engine, architecture), is_trained)
    whole, paged = (result(engine.start(model, expert_page_elements=elements), rows) for elements in (0, ONE_EXPERT))
    check_same(whole, paged)


def test_experts_in_tensors_of_their_own_that_are_no_views_together(
    engine: Engine, rows: list[MicroBatch], tmp_path: Path
) -> None:
    # 180 elements for each projection of an expert, with a gap before the next one.
    model = eager_model(engine, "qwen3_moe", hidden_size=36, moe_intermediate_size=5)
    reference: Any = model.reference()
    reference.save_pretrained(tmp_path)
    layout = open_for_training(tmp_path, TrainSpec()).layout
    model = dataclasses.replace(model, template=Template.from_config(model.config, layout=layout))
    found = []
    for elements in (0, 1200):
        store = filled(layout)
        model.stores.append(store)
        run = engine.start(model, store=store, max_grad_norm=0.5, expert_page_elements=elements)
        found.append(result(run, rows))
    check_same(*found)


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_adapters_next_to_frozen_experts(
    dropout: float, engine: Engine, rows: list[MicroBatch], tmp_path: Path
) -> None:
    model = eager_model(engine, "qwen3_moe")
    reference: Any = model.reference()
    # With every expert in tensors of its own, as published.
    reference.save_pretrained(tmp_path)
    lora = LoraSpec(rank=4, alpha=6.0, dropout=dropout, dora=True)
    layout = open_for_training(tmp_path, TrainSpec(trainable=("lora",), lora=lora)).layout
    assert any(".experts.3." in tensor.name for _, tensor in layout.tensors())
    template = Template.from_config(model.config, layout=layout)
    found = []
    for elements in (0, ONE_EXPERT):
        store = filled(layout)
        model.stores.append(store)
        adapted = dataclasses.replace(model, template=template)
        run = engine.start(
            adapted, store=store, adapter_scale=lora.scale, adapter_dropout=dropout, expert_page_elements=elements
        )
        found.append(result(run, rows))
    check_same(*found)


def filled(layout: StoreLayout) -> HostStore:
    """A store with random weights, the same for the same layout."""
    store, generator = HostStore.allocate(layout, num_threads=1), torch.Generator().manual_seed(2)
    for _, tensor in layout.tensors():
        store.write_master(tensor.name, 0.1 * torch.randn(tensor.shape, generator=generator) + 0.05)
    return store


def test_layers_with_dropout_draw_the_same(engine: Engine, rows: list[MicroBatch]) -> None:
    model = eager_model(engine, "phimoe", input_jitter_noise=0.1, attention_dropout=0.2)
    whole, paged = (result(engine.start(model, expert_page_elements=elements), rows) for elements in (0, ONE_EXPERT))
    check_same(whole, paged)


def test_evaluations_are_those_of_whole_layers(engine: Engine, rows: list[MicroBatch]) -> None:
    model = eager_model(engine, "qwen3_moe")
    found = []
    for elements in (0, ONE_EXPERT):
        trainer = engine.start(model, expert_page_elements=elements).trainer
        trainer.train_step(rows)
        found.append((trainer.evaluate(rows).eval_loss, torch.cat(trainer.log_probabilities(rows)).tolist()))
    assert found[0] == found[1]


def test_a_class_that_reads_the_experts_input_again_adds_up_in_another_order(
    engine: Engine, rows: list[MicroBatch]
) -> None:
    # The gate of its shared expert, which comes after the experts.
    model = eager_model(engine, "qwen3_next")
    whole, paged = (engine.start(model, expert_page_elements=elements) for elements in (0, ONE_EXPERT))
    one, other = (run.trainer.train_step(rows) for run in (whole, paged))
    assert one.loss == other.loss
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
    torch.testing.assert_close(paged.gradients(), whole.gradients(), rtol=1e-5, atol=1e-6 * one.grad_norm)


def test_bf16_is_that_of_whole_layers_but_for_the_norm(engine: Engine, rows: list[MicroBatch]) -> None:
    model = eager_model(engine, "mixtral")
    found = []
    for elements in (0, ONE_EXPERT):
        run = engine.start(
            model,
            store=model.store(grad_dtype=torch.bfloat16),
            device=HostDevice(num_threads=1, compute_dtype=torch.bfloat16),
            compute_dtype="bfloat16",
            max_grad_norm=None,
            expert_page_elements=elements,
        )
        found.append(result(run, rows))
    (whole, planes), (paged, others) = found
    for plane, same in zip(planes, others, strict=True):
        assert torch.equal(plane, same)
    for (loss, norm), (same_loss, same_norm) in zip(whole, paged, strict=True):
        assert loss == same_loss
        # Of a paged layer the squares are summed where its gradient has landed, which is in bf16.
        assert norm == pytest.approx(same_norm, rel=1e-3)


def of_few_tokens(engine: Engine, *, num_experts: int) -> tuple[TinyModel, list[MicroBatch]]:
    model = eager_model(engine, "qwen3_moe", num_experts=num_experts, num_experts_per_tok=4)
    return model, [engine.pack(engine.documents(16))]


def test_sixteen_tokens_bring_up_no_more_than_half_of_the_experts(engine: Engine) -> None:
    model, few = of_few_tokens(engine, num_experts=128)
    whole = engine.start(model)
    paged = engine.start(model, expert_page_elements=ONE_EXPERT * 4)
    steps = [run.trainer.train_step(few) for run in (whole, paged)]
    # All layers twice, in fp32, where the whole ones keep those of the turn from forward to backward.
    all_bytes = 2 * 4 * sum(unit.num_elements for unit in model.template.layout.units if unit.kind == "layer")
    assert steps[1].h2d.bytes <= 0.5 * all_bytes and steps[1].h2d.bytes < steps[0].h2d.bytes
    check_same(result(whole, few), result(paged, few))
    # An evaluation brings them once.
    assert paged.trainer.evaluate(few).h2d.bytes < 0.5 * whole.trainer.evaluate(few).h2d.bytes


def rest_of(model: TinyModel) -> int:
    """Elements of all layers besides their experts."""
    units = model.template.layout.units
    paged = [paged_unit(unit) for unit in units if unit.kind == "layer"]
    return sum(one.rest.num_elements for one in paged if one is not None)


def test_the_device_holds_as_much_for_sixteen_experts_as_for_256(engine: Engine, rows: list[MicroBatch]) -> None:
    peaks, rests = {}, {}
    for num_experts in (16, 256):
        model = eager_model(engine, "qwen3_moe", num_experts=num_experts)
        steps = [engine.start(model, expert_page_elements=ONE_EXPERT * 4).trainer.train_step(rows) for _ in range(2)]
        peaks[num_experts] = steps[-1].device_memory_bytes
        rests[num_experts] = rest_of(model) // model.template.num_layers
    # A router has a row for each expert, and is of the rest of the layer.
    for component in ("weights", "gradients"):
        (few, most) = (peaks[number][component] - 2 * 4 * rests[number] for number in (16, 256))
        assert few == most
    assert peaks[256]["activations"] == peaks[16]["activations"]


@pytest.mark.parametrize("grad_bytes", [4, 0])
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_the_ledger_knows_what_the_device_holds(architecture: str, grad_bytes: int, engine: Engine) -> None:
    model = eager_model(engine, architecture)
    settings: dict[str, Any] = {"tokens_per_step": 220, "expert_page_elements": ONE_EXPERT}
    plan = ledger_of(
        model.template.layout,
        ModelShape.from_config(model.config.to_dict(), names=model.weights),
        sequence_length=110,
        device_kind="host",
        grad_bytes=grad_bytes,
        **settings,
    )
    store = model.store(grad_dtype=torch.float32 if grad_bytes else None)
    run = engine.start(model, store=store, max_grad_norm=1.0 if grad_bytes else None, **settings)

    report = run.trainer.train_step([engine.pack(engine.documents(60, 50)), engine.pack(engine.documents(100, 10))])

    held = report.device_memory_bytes
    for component in ("weights", "gradients", "activations"):
        assert held[component] == plan.device_bytes[component]
    assert sum(held.values()) == pytest.approx(plan.device_total_bytes, rel=0.05)
    assert report.host_memory_bytes["staging"] == (
        plan.host_bytes["staging"] - plan.device_bytes["weights"] - plan.device_bytes["gradients"]
    )


def test_closing_gives_everything_back(engine: Engine, rows: list[MicroBatch]) -> None:
    run = engine.start(eager_model(engine, "mixtral"), expert_page_elements=ONE_EXPERT)
    first = run.trainer.train_step(rows)
    run.trainer.release_device()
    assert set(run.device.arena.held_bytes().values()) == {0}
    assert run.trainer.train_step(rows).device_memory_bytes == first.device_memory_bytes

    run.trainer.close()

    assert set(run.device.arena.held_bytes().values()) == {0}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (config_of("llama"), "it has no experts"),
        (config_of("llama4_text"), "does not call its experts by transformers' ExpertsInterface"),
        (config_of("dbrx"), "does not call its experts by transformers' ExpertsInterface"),
        # A norm after the experts.
        (
            AutoConfig.for_model(
                "flex_olmo",
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                num_experts=4,
                num_experts_per_tok=2,
                vocab_size=96,
                pad_token_id=7,
            ),
            "compute more with the result of their experts",
        ),
    ],
    ids=["llama", "llama4_text", "dbrx", "flex_olmo"],
)
def test_models_that_cannot_be_paged_are_refused_and_say_why(config: PretrainedConfig, why: str) -> None:
    template = Template.from_config(config)
    # The plan refuses them by name; a dense model has no pages.
    assert config.model_type in NEVER_PAGED or paged_unit(template.layout.units[1]) is None
    with pytest.raises(InvalidModel, match=rf"memory.experts is paged, .*{why}.*; use memory.experts: whole"):
        Paging.of(template, ONE_EXPERT)
