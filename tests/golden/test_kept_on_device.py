"""Spare device memory: layers whose weights stay from step to step, and products that stay from forward to backward.

No bit depends on them, less crosses the link and less is computed by exactly what was planned, and the account is the
plan's. Compiled layers keep products; here they are the graphs that are compiled, run as plain operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from tests.golden.test_dora import loaded
from tests.support.further import further
from tests.support.plans import folder_of, ledger_of, settings
from tests.support.traced_layers import keeping_graphs, layer_graphs, traced_layers
from torch import Tensor

from horizon_server.engine.compiled.kept import PRODUCTS, products_of
from horizon_server.engine.compiled.layers import CompiledLayers
from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.template import Template
from horizon_server.errors import DoesNotFit
from horizon_server.planning.model_folder import ModelShape
from horizon_server.planning.residency import product_bytes, resident_units
from horizon_server.store.layout import with_trained

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

Pack = Callable[[list[Tensor]], MicroBatch]
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
ALL_KEPT: dict[str, Any] = {"resident_layers": 2, "product_layers": 3}
DENSE = ["qwen3", "llama", "qwen2", "gemma2", "phi3", "olmo2", "granite", "glm4"]
OTHERS = ["gpt2", "mixtral", "gpt_oss", "deepseek_v3", "opt"]


def device_of(kind: str, **switches: Any) -> HostDevice | CudaDevice:
    return CudaDevice(runtime=CpuRuntime(), **switches) if kind == "cuda" else HostDevice(num_threads=1, **switches)


def grad_dtype_of(device: HostDevice | CudaDevice) -> torch.dtype:
    return device.gradient_dtype


def compiled_of(model: TinyModel, device: HostDevice | CudaDevice, options: dict[str, Any]) -> CompiledLayers | None:
    """As a worker has them: no layer whose products are in FP8 is compiled."""
    if options.get("matmul") == "fp8":
        return None
    return traced_layers(model.template, device.compute_dtype, product_layers=options.get("product_layers", 0))


@pytest.fixture
def train(engine: Engine) -> Callable[..., tuple[list[float], dict[str, Tensor]]]:
    """Runs three steps with an evaluation between them; returns all figures, and every plane."""

    def run_them(model: TinyModel, kind: str, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
        device = device_of(kind, poison_on_free=True, max_delay_s=0.0005, delay_seed=len(options))
        store = options.pop("store", None) or model.store(grad_dtype=grad_dtype_of(device))
        run = engine.start(model, store=store, device=device, compiled=compiled_of(model, device, options), **options)
        numbers = []
        for step in range(3):
            rows = [engine.pack(engine.documents(12, 7, seed=step)), engine.pack(engine.documents(21, seed=step + 50))]
            report = run.trainer.train_step(rows)
            assert report.skipped == ""
            numbers += [report.loss, report.grad_norm, run.trainer.evaluate(rows).eval_loss]
        run.trainer.flush()
        planes = {plane: store.plane(plane).clone() for plane in PLANES}
        run.trainer.close()
        held = device.arena.held_bytes()
        assert held["weights"] == held["activations"] == held["workspace"] == 0
        return numbers, planes

    return run_them


def assert_same(one: tuple[list[float], dict[str, Tensor]], other: tuple[list[float], dict[str, Tensor]]) -> None:
    assert one[0] == other[0]
    for plane in PLANES:
        assert torch.equal(one[1][plane].view(torch.uint8), other[1][plane].view(torch.uint8)), f"plane {plane} differs"


@pytest.mark.parametrize("kind", ["host", "cuda"])
@pytest.mark.parametrize("architecture", [*DENSE, *OTHERS])
def test_no_bit_depends_on_what_is_kept(
    architecture: str, kind: str, engine: Engine, train: Callable[..., Any]
) -> None:
    model = engine.tiny_model(architecture)
    assert_same(train(model, kind), train(model, kind, **ALL_KEPT))


@pytest.mark.parametrize(
    ("architecture", "changes", "options"),
    [
        ("llama", {"attention_dropout": 0.3}, {"seed": 11}),
        ("phi3", {"resid_pdrop": 0.3}, {"seed": 11}),
        ("llama", {}, {"matmul": "fp8"}),
        ("qwen3", {}, {"product_bytes": 10_000}),
        ("qwen3", {}, {"micro_batch_tokens": 64}),
        ("qwen3", {}, {"activation_placement": "host", "num_weight_slots": 1, "num_gradient_slots": 1}),
    ],
)
def test_nor_with_dropout_fp8_joined_rows_a_budget_or_one_slot(
    architecture: str,
    changes: dict[str, Any],
    options: dict[str, Any],
    engine: Engine,
    train: Callable[..., Any],
) -> None:
    model = engine.tiny_model(architecture, **changes)
    plain = {name: value for name, value in options.items() if name != "product_bytes"}
    assert_same(train(model, "host", **plain), train(model, "host", **ALL_KEPT, **options))


ADAPTERS: list[Any] = [
    {},
    {"dora": True, "targets": ("o_proj", "down_proj")},
    *further({"dora": True}, {"targets": ("q_proj", "o_proj")}, {"dora": True, "targets": ("q_proj", "o_proj")}),
]


@pytest.mark.parametrize(("architecture", "lora"), [("llama", {}), *further(("llama", {"dora": True}), ("gemma2", {}))])
def test_nor_with_adapters(
    architecture: str, lora: dict[str, Any], engine: Engine, train: Callable[..., Any], tmp_path: Path
) -> None:
    runs = []
    for number, options in enumerate(({}, ALL_KEPT)):
        folder = tmp_path / str(number)
        model, store = loaded(engine.tiny_model(architecture), folder, **{"dora": False, **lora})
        runs.append(train(model, "host", store=store, **options))
    assert_same(*runs)


def test_nor_with_layers_that_are_frozen(engine: Engine, train: Callable[..., Any]) -> None:
    # Backward passes through the last one, and ends before the first.
    config = engine.tiny_model("qwen3").config
    tiny = engine.tiny_model("qwen3")
    layout = with_trained(tiny.template.layout, lambda name: "layers.1." in name, is_bfloat16=lambda _: False)
    model = dataclasses.replace(tiny, template=Template.from_config(config, layout=layout))
    assert_same(train(model, "host"), train(model, "host", **ALL_KEPT))


@pytest.mark.parametrize(
    ("architecture", "lora"),
    [
        *[(architecture, None) for architecture in [*DENSE, "gpt2", "opt"]],
        ("llama", {}),
        ("llama", {"dora": True, "targets": ("o_proj", "down_proj")}),
        *further(("gemma2", {}), ("gemma2", {"dora": True}), ("gpt2", {"dora": True})),
    ],
)
def test_backward_computes_no_product_of_forward_again_and_none_is_kept_in_vain(
    architecture: str, lora: dict[str, Any] | None, engine: Engine, tmp_path: Path
) -> None:
    model = engine.tiny_model(architecture)
    if lora is not None:
        model, _ = loaded(model, tmp_path, **{"dora": False, **lora})
    for kind in set(model.template.layer_kinds):
        graphs, keeping = layer_graphs(model.template, kind), keeping_graphs(model.template, kind)
        kept = list(keeping.backward.module.graph.find_nodes(op="placeholder"))[len(graphs.backward.inputs) :]
        # Of GPT-2 four projections but for the last, and attention with its sums.
        assert len(kept) >= 5
        assert all(tensor.users for tensor in kept)
        recomputed, left = products_of(graphs.backward), products_of(keeping.backward)
        assert len(products_of(keeping.forward)) == len(products_of(graphs.forward))
        # Attention has two outputs.
        assert len(left) == len(recomputed) - (len(kept) - 1)
        # Those that are left are gradients: each comes of the gradient of the layer's output.
        number = len(graphs.forward.inputs)
        gradient = list(keeping.backward.module.graph.find_nodes(op="placeholder"))[number]
        of_gradient = {gradient}
        for node in keeping.backward.module.graph.nodes:
            if of_gradient & set(node.all_input_nodes):
                of_gradient.add(node)
        assert set(left) <= of_gradient and all(node.target in PRODUCTS for node in left)


@pytest.mark.parametrize("kind", ["host", "cuda"])
@pytest.mark.parametrize("resident", [1, 2, 5, 6])
def test_a_resident_layer_crosses_the_link_once_after_each_update(
    resident: int,
    kind: str,
    engine: Engine,
) -> None:
    model, rows = engine.tiny_model("llama", num_hidden_layers=6), [engine.pack(engine.documents(24))]
    layout, runs = model.template.layout, []
    for num_layers in (0, resident):
        device = device_of(kind)
        store = model.store(grad_dtype=grad_dtype_of(device))
        runs.append(engine.start(model, store=store, device=device, resident_layers=num_layers))

    plain, kept = ([run.trainer.train_step(rows).h2d.bytes for _ in range(3)] for run in runs)
    evaluated, evaluated_kept = (run.trainer.evaluate(rows).h2d.bytes for run in runs)
    again = runs[1].trainer.evaluate(rows).h2d.bytes

    element_bytes = 4 if kind == "host" else 2
    layers = {unit.index: unit.num_elements * element_bytes for unit in layout.units if unit.kind == "layer"}
    stay = {unit.index for unit in resident_units(layout, resident)}
    passing = [index for index in layers if index not in stay]
    # Without any, backward finds the last two layers of forward; with some, the last two of the others.
    saved = sum(layers[index] for index in {*stay, *passing[-2:]}) - sum(layers[index] for index in (5, 6))
    assert len(stay) == resident and saved >= 0
    assert plain[1] - kept[1] == plain[2] - kept[2] == saved
    # The update after the last step, and nothing after that.
    assert evaluated_kept == evaluated
    assert evaluated - again == sum(layers[index] for index in stay)


def test_a_step_that_was_skipped_sends_no_resident_layer_again(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, rows = engine.tiny_model("llama"), [engine.pack(engine.documents(24))]
    run = engine.start(model, resident_layers=3)
    monkeypatch.setattr("horizon_server.engine.trainer.global_norm", lambda _: float("nan"))
    first, second = (run.trainer.train_step(rows) for _ in range(2))
    assert first.skipped == second.skipped == "non_finite_gradient"
    layers = sum(unit.num_elements for unit in model.template.layout.units if unit.kind == "layer")
    assert first.h2d.bytes - second.h2d.bytes == 4 * layers


def test_weights_that_were_restored_are_sent_again(engine: Engine) -> None:
    model, rows = engine.tiny_model("llama"), [engine.pack(engine.documents(24))]
    run, fresh = engine.start(model, resident_layers=3), engine.start(model)
    state, planes = run.trainer.state(), {plane: run.store.plane(plane).clone() for plane in PLANES}
    run.trainer.train_step(rows)
    run.trainer.flush()
    run.trainer.evaluate(rows)
    for plane, values in planes.items():
        run.store.plane(plane).copy_(values)
    run.trainer.restore(state)
    assert run.trainer.train_step(rows).loss == fresh.trainer.train_step(rows).loss


@pytest.mark.parametrize("kind", ["host", "cuda"])
@pytest.mark.parametrize("grad_bytes", [2, 0])
@pytest.mark.parametrize("resident", [1, 3])
@pytest.mark.parametrize("architecture", [*DENSE, "deepseek_v3"])
def test_the_account_is_the_plans(
    architecture: str,
    resident: int,
    grad_bytes: int,
    kind: str,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    shape = ModelShape.from_config(model.config.to_dict(), names=model.weights)
    layout, dtype = model.template.layout, "float32" if kind == "host" else "bfloat16"
    a_layer = product_bytes(folder_of(layout, shape), *settings(tokens_per_step=220, compute_dtype=dtype))
    product_layers = 2 if a_layer else 0
    assert (a_layer > 0) == (architecture in DENSE)
    plan = ledger_of(
        layout,
        shape,
        tokens_per_step=220,
        sequence_length=110,
        device_kind="cuda" if kind == "cuda" else "host",
        grad_bytes=grad_bytes and (4 if kind == "host" else 2),
        compute_dtype=dtype,
        resident_layers=resident,
        product_layers=product_layers,
    )
    device = device_of(kind)
    run = engine.start(
        model,
        store=model.store(grad_dtype=grad_dtype_of(device) if grad_bytes else None),
        device=device,
        tokens_per_step=220,
        max_grad_norm=1.0 if grad_bytes else None,
        resident_layers=resident,
        product_layers=product_layers,
        product_bytes=product_layers * a_layer,
        compiled=traced_layers(model.template, device.compute_dtype, product_layers=product_layers),
    )

    report = run.trainer.train_step([engine.pack(engine.documents(60, 50)), engine.pack(engine.documents(100, 10))])

    for component in ("weights", "gradients", "activations"):
        assert report.device_memory_bytes[component] == plan.device_bytes[component]


@pytest.mark.parametrize("lora", ADAPTERS)
@pytest.mark.parametrize("architecture", ["llama", *further(*(name for name in DENSE if name != "llama"))])
def test_the_account_of_adapters_products_is_the_plans(
    architecture: str,
    lora: dict[str, Any],
    engine: Engine,
    tmp_path: Path,
) -> None:
    if "targets" in lora and architecture in ("phi3", "glm4"):
        lora = {**lora, "targets": ("o_proj", "down_proj")}
    model, store = loaded(engine.tiny_model(architecture), tmp_path, **{"dora": False, **lora})
    shape, rows = (
        ModelShape.from_config(model.config.to_dict(), names=model.weights),
        [engine.pack(engine.documents(60, 50))],
    )
    a_layer = product_bytes(folder_of(model.template.layout, shape), *settings(tokens_per_step=110))
    reports = []
    for num_layers in (0, 2):
        compiled = traced_layers(model.template, product_layers=num_layers)
        trainer = engine.start(model, store=store, product_layers=num_layers, compiled=compiled).trainer
        reports.append(trainer.train_step(rows))
        trainer.flush()  # the next one takes the store over
    plain, kept = reports
    assert kept.device_memory_bytes["activations"] - plain.device_memory_bytes["activations"] == 2 * a_layer


def test_dropout_of_adapters_is_planned_to_keep_nothing_because_it_is_not_compiled(
    engine: Engine, tmp_path: Path
) -> None:
    model, _ = loaded(engine.tiny_model("llama"), tmp_path, dora=False)
    folder = folder_of(model.template.layout, ModelShape.from_config(model.config.to_dict(), names=model.weights))
    assert product_bytes(folder, *settings(tokens_per_step=110, adapter_dropout=0.1)) == 0
    assert product_bytes(folder, *settings(tokens_per_step=110)) > 0


@pytest.mark.parametrize("architecture", DENSE)
def test_what_backward_takes_over_is_not_counted_twice(
    architecture: str,
    engine: Engine,
) -> None:
    model, rows = (
        engine.tiny_model(architecture),
        [engine.pack(engine.documents(60, 50)), engine.pack(engine.documents(100, 10))],
    )
    plain, kept = (
        engine.start(model, product_layers=n, compiled=traced_layers(model.template, product_layers=n))
        .trainer.train_step(rows)
        .device_memory_bytes
        for n in (0, 3)
    )
    assert kept["workspace"] == plain["workspace"]
    assert kept["activations"] > plain["activations"]


def test_products_of_a_step_that_fails_are_given_back(engine: Engine) -> None:
    model, rows = engine.tiny_model("llama"), [engine.pack(engine.documents(100))]
    compiled = traced_layers(model.template, product_layers=3)
    roomy = engine.start(model, product_layers=3, compiled=compiled)
    roomy.trainer.train_step(rows)
    inputs = (3 + 2) * 100 * 32 * 4
    device = HostDevice(num_threads=1, limit_bytes=roomy.device.arena.peak_total_bytes - 1)
    run = engine.start(model, device=device, product_layers=3, compiled=compiled)
    with pytest.raises(DoesNotFit):
        run.trainer.train_step(rows)
    assert run.device.arena.held_bytes()["activations"] == inputs
