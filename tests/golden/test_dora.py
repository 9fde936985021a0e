"""DoRA: adapters with magnitudes, against PEFT in plain PyTorch, and what they cost."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from tests.golden.test_lora import found_in, loss_of, master, relative, rows_for
from tests.support.further import further
from tests.support.plans import ledger_of
from torch import Tensor
from torch.nn import functional

from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.linear import Adapter, LinearMap, LinearMaps
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.step_pass import StepKey
from horizon_server.engine.template import Template
from horizon_server.store import adapter_norms
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

Pack = Callable[[list[Tensor]], MicroBatch]
COMPARED = ["llama", "gpt2", "qwen3_moe", *further("qwen3", "gemma2", "phi3", "falcon")]
"""With Conv1D, whose weights are transposed, products written as x @ weight.T, biases, fused projections, and a mixture
of experts, whose attention is adapted.
"""
NUM_STEPS = 5
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
_LORA = {"dora": True, "rank": 4, "alpha": 6.0}


def loaded(model: TinyModel, folder: Path, **lora: Any) -> tuple[TinyModel, HostStore]:
    """The model with new adapters, in a store."""
    layout = found_in(model, folder, original=True, **{**_LORA, **lora}).layout
    store = HostStore.allocate(layout, num_threads=1)
    model.stores.append(store)
    load_model(store, folder, seed=2)
    return dataclasses.replace(model, template=Template.from_folder(folder, layout=layout)), store


def randomized(store: HostStore) -> None:
    """Give each B and each magnitude values of their own, so that no product and no norm is what it began as."""
    generator = torch.Generator().manual_seed(3)
    for _, tensor in store.layout.tensors():
        if tensor.adapts and "lora_A" not in tensor.name:
            change = 0.1 * torch.randn(tensor.shape, generator=generator)
            store.write_master(tensor.name, master(store, tensor.name) + change)


class Dora:
    """The same model in plain PyTorch, with PEFT's adapters of the store's values."""

    def __init__(self, model: TinyModel, store: HostStore, dtype: torch.dtype = torch.float32, **lora: Any) -> None:
        adapted = [tensor for _, tensor in store.layout.tensors() if tensor.adapts]
        bases = {tensor.adapts.removesuffix(".weight") for tensor in adapted}
        config = peft.LoraConfig(
            **{
                "r": 4,
                "lora_alpha": 6.0,
                "use_dora": True,
                "target_modules": "|".join(re.escape(base) for base in sorted(bases)),
                "fan_in_fan_out": model.config.model_type == "gpt2",
                **lora,
            }
        )
        with warnings.catch_warnings():
            # About experts, for which it prepares patterns of its own.
            warnings.simplefilter("ignore", RuntimeWarning)
            self.model: Any = peft.inject_adapter_in_model(config, model.reference()).to(dtype)
        if dtype is torch.float64:
            # Grouped products of experts know no fp64.
            config_of_experts: Any = self.model.config
            config_of_experts._experts_implementation = "eager"
        known = dict(self.model.named_parameters())
        names = {tensor.name: f"{tensor.name.removesuffix('.weight')}.default.weight" for tensor in adapted}
        self.parameters = {name: known[theirs] for name, theirs in names.items()}
        assert {p for p in known.values() if p.requires_grad} == set(self.parameters.values())
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(master(store, name))
        self.model.train(False)

    def values(self) -> Tensor:
        """All adapters, one after the other."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters.values()])


@pytest.fixture
def rows(engine: Engine) -> list[MicroBatch]:
    return [engine.pack(engine.documents(11, 20, seed=1)), engine.pack(engine.documents(16, 9, seed=2))]


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("architecture", COMPARED)
def test_loss_and_gradients_are_those_of_peft(
    architecture: str,
    dropout: float,
    engine: Engine,
    rows: list[MicroBatch],
    tmp_path: Path,
) -> None:
    rows = rows_for(architecture, rows)
    model, store = loaded(engine.tiny_model(architecture), tmp_path)
    randomized(store)
    ends = [Dora(model, store, dtype, lora_dropout=dropout) for dtype in (torch.float32, torch.float64)]
    run = engine.start(model, store=store, adapter_scale=1.5, adapter_dropout=dropout, seed=11, max_grad_norm=None)
    report = run.trainer.train_step(rows)
    key, current = StepKey(seed=11, step=0), [0]
    gradients = []
    for reference in ends if dropout == 0 else ends[:1]:
        reference.model.train(dropout > 0)

        def seed(unit: int) -> Callable[..., None]:
            def before(*_: object) -> None:
                torch.manual_seed(key.seed_of(unit, current[0]))

            return before

        base = reference.model.transformer.h if architecture in ("gpt2", "falcon") else reference.model.model.layers
        for index, layer in enumerate(base):
            layer.register_forward_pre_hook(seed(index + 1))
        loss = 0.0
        for current[0], row in enumerate(rows):
            part = engine.plain_loss(reference.model, row) / sum(one.num_targets for one in rows)
            torch.autograd.backward(part)
            loss += part.item()
        assert report.loss == pytest.approx(loss, rel=1e-6)
        found = [p.grad for p in reference.parameters.values()]
        gradients.append(torch.cat([gradient.reshape(-1).double() for gradient in found if gradient is not None]))
    ours = torch.cat([run.gradient(name).reshape(-1) for name in ends[0].parameters])
    theirs, exact = gradients[0], gradients[-1]
    # As near to the exact gradients as PEFT's own arithmetic is; with dropout, whose draws differ in fp64, as near to
    # PEFT.
    allowed = 1e-6 if dropout else max(3 * relative(theirs, exact), 3e-7)
    assert relative(ours, exact) <= allowed


@pytest.mark.parametrize("architecture", COMPARED)
def test_steps_are_those_of_peft(
    architecture: str,
    engine: Engine,
    rows: list[MicroBatch],
    tmp_path: Path,
) -> None:
    rows = rows_for(architecture, rows)
    model, store = loaded(engine.tiny_model(architecture), tmp_path)
    run = engine.start(
        model,
        store=store,
        adapter_scale=1.5,
        learning_rate=1e-3,
        lr_schedule="constant",
        max_grad_norm=0.5,
        weight_decay=0.1,
    )
    run.trainer.flush()
    reference = Dora(model, store)
    parameters = list(reference.parameters.values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, eps=1e-8, weight_decay=0.1)
    losses, reported = [], []
    for _ in range(NUM_STEPS):
        loss = loss_of(reference.model, rows, engine.plain_loss)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        losses.append(loss.item())
        reported.append(run.trainer.train_step(rows).loss)
    run.trainer.flush()
    assert reported == pytest.approx(losses, rel=1e-6)
    assert losses[-1] < losses[0]
    ours = torch.cat([master(store, name).reshape(-1) for name in reference.parameters])
    assert relative(ours, reference.values()) <= 1e-6


@pytest.mark.parametrize("base", ["source", "int8", "nf4"])
def test_new_adapters_leave_every_bit_of_the_base(
    base: str, engine: Engine, rows: list[MicroBatch], tmp_path: Path
) -> None:
    model, store = loaded(engine.tiny_model("qwen3"), tmp_path, base=base)
    plain, plain_store = loaded(engine.tiny_model("qwen3"), tmp_path / "plain", base=base, dora=False)
    losses = [
        engine.start(one, store=at).trainer.evaluate(rows).eval_loss
        for one, at in ((model, store), (plain, plain_store))
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_that_changes_memory_or_time_changes_a_bit(
    dtype: torch.dtype,
    engine: Engine,
    rows: list[MicroBatch],
    tmp_path: Path,
) -> None:
    stores: list[HostStore] = []
    choices: list[dict[str, Any]] = [
        {},
        {"activation_placement": "host"},
        {"num_weight_slots": 1, "num_gradient_slots": 3},
        {"resident_layers": 2},
    ]
    for number, options in enumerate(choices):
        model, store = loaded(engine.tiny_model("llama"), tmp_path / str(number))
        device = HostDevice(num_threads=1, compute_dtype=dtype, max_delay_s=0.0005, delay_seed=number)
        run = engine.start(model, store=store, device=device, adapter_scale=1.5, adapter_dropout=0.2, **options)
        for _ in range(3):
            run.trainer.train_step(rows)
        run.trainer.flush()
        stores.append(store)
    for store in stores[1:]:
        for plane in PLANES:
            assert torch.equal(store.plane(plane), stores[0].plane(plane)), plane


def test_bf16_trains_magnitudes_in_fp32(engine: Engine, rows: list[MicroBatch], tmp_path: Path) -> None:
    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        model, store = loaded(engine.tiny_model("llama"), tmp_path / str(dtype))
        run = engine.start(
            model, store=store, device=HostDevice(num_threads=1, compute_dtype=dtype), learning_rate=1e-2
        )
        losses.append([run.trainer.train_step(rows).loss for _ in range(10)])
    assert losses[1] == pytest.approx(losses[0], rel=3e-3)
    assert losses[1][-1] < losses[1][0]


def test_a_map_in_fp32_next_to_adapters_in_bf16_drops_its_inputs() -> None:
    # As a router is that its class keeps in fp32.
    torch.manual_seed(0)
    inputs, weight = torch.randn(5, 4), torch.randn(3, 4)
    a, b = torch.randn(2, 4, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.bfloat16)
    adapter = Adapter(a=a, b=b, magnitude=torch.full((3,), 2.0), norms=torch.ones(3), dropout=0.5)
    torch.manual_seed(1)
    with LinearMaps([(weight, LinearMap(adapter=adapter))]):
        output = functional.linear(inputs, weight)
    torch.manual_seed(1)
    dropped = functional.dropout(inputs.bfloat16(), 0.5).float()
    assert output.dtype == torch.float32
    assert torch.allclose(output, functional.linear(inputs, weight) + functional.linear(dropped, weight), rtol=1e-6)


def test_norms_are_computed_once_a_visit(
    engine: Engine,
    rows: list[MicroBatch],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, store = loaded(engine.tiny_model("llama"), tmp_path)
    run = engine.start(model, store=store)
    # The first step also tries how far rows can be packed.
    run.trainer.train_step(rows)
    calls: list[int] = []
    compute = adapter_norms.adapted_norms

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return compute(*args, **kwargs)

    monkeypatch.setattr("horizon_server.engine.template.adapted_norms", counted)
    run.trainer.train_step([*rows, *rows])
    num_maps = sum(tensor.norm_dim is not None for _, tensor in store.layout.tensors())
    assert len(calls) == 2 * num_maps, "forward and backward, whatever the number of micro-batches"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_device_holds_is_what_the_plan_says(
    dtype: torch.dtype,
    engine: Engine,
    tmp_path: Path,
) -> None:
    original = engine.tiny_model("llama", num_hidden_layers=4)
    model, store = loaded(original, tmp_path)
    shape = found_in(original, tmp_path / "shape", original=True).shape
    run = engine.start(model, store=store, device=HostDevice(num_threads=1, compute_dtype=dtype))
    rows = [engine.pack(engine.documents(40, 30)), engine.pack(engine.documents(31))]
    run.trainer.train_step(rows)
    report = run.trainer.train_step(rows)
    plan = ledger_of(
        store.layout,
        shape,
        tokens_per_step=101,
        sequence_length=70,
        device_kind="host",
        grad_bytes=4,
        compute_dtype="float32" if dtype == torch.float32 else "bfloat16",
    )
    for component in ("weights", "gradients", "activations"):
        assert report.device_memory_bytes[component] == plan.device_bytes[component], component
    assert report.device_memory_bytes["workspace"] <= plan.device_bytes["workspace"]
    for component in ("weights", "moments", "gradients"):
        assert report.host_memory_bytes[component] == plan.host_bytes[component], component


def test_a_row_of_zeros_has_no_direction_and_trains_no_nan(
    engine: Engine, rows: list[MicroBatch], tmp_path: Path
) -> None:
    model = engine.tiny_model("llama")
    name = next(name for name in model.weights if name.endswith("q_proj.weight"))
    weight = model.weights[name].clone()
    weight[0] = 0
    changed = dataclasses.replace(model, weights={**model.weights, name: weight})
    found, store = loaded(changed, tmp_path)
    run = engine.start(found, store=store, learning_rate=1e-2)
    reports = [run.trainer.train_step(rows) for _ in range(3)]
    assert all(report.skipped == "" and report.loss == report.loss for report in reports)
