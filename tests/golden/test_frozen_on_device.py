"""What stays on the device beside whole layers: packed weights, the head, and the embedding's table.

No bit depends on them, the link is spared exactly what stays, and the account is the plan's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from tests.golden.test_packed_weights import packed
from tests.golden.test_trainable import PARTS, both
from tests.support.plans import ledger_of
from torch import Tensor

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.planning.model_folder import ModelShape
from horizon_server.planning.residency import packed_units
from horizon_server.records.execution import Residency
from horizon_server.store.layout import Packing

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
SWITCHES: dict[str, Any] = {"poison_on_free": True, "max_delay_s": 0.0005}
DEVICES: dict[str, Callable[..., HostDevice | CudaDevice]] = {
    "host, fp32": lambda: HostDevice(num_threads=1, **SWITCHES),
    "host, bf16": lambda: HostDevice(num_threads=1, compute_dtype=torch.bfloat16, **SWITCHES),
    "cuda": lambda: CudaDevice(runtime=CpuRuntime(), staging_bytes=4096, **SWITCHES),
}
Figures = tuple[list[float], dict[str, Tensor]]

WITH_PACKED: list[dict[str, Any]] = [
    {"packed_layers": 3},
    {"packed_layers": 1},
    {"packed_layers": 2, "resident_layers": 1},
    {"packed_layers": 3, "num_weight_slots": 1},
    {"packed_layers": 3, "product_layers": 2},
]
# Which parameters are trained, and what may stay then: a tied table is among the weights of the head.
WITH_ENDS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "layers 1 and 2", {"resident_head": True}),
    ("llama", "the attention of layers", {"resident_head": True, "resident_table": True}),
    ("llama", "the attention of layers", {"resident_table": True}),
    ("llama", "the head", {"resident_head": True, "resident_table": True, "resident_layers": 2}),
    ("llama", "all but the embedding", {"resident_head": True, "resident_table": True}),
    ("llama", "the embedding", {"resident_head": True}),
    ("qwen3", "layers 1 and 2", {"resident_head": True}),
    ("qwen3", "the embedding", {"resident_head": True}),
    ("qwen3", "all but the embedding", {"resident_head": True, "num_weight_slots": 1}),
    ("gpt2", "the attention of layers", {"resident_head": True}),
    ("gpt2", "what is next to the embedding", {"resident_head": True}),
    ("gemma2", "norms alone", {"resident_head": True}),
]
EVERYTHING_TRAINED = ("llama", "qwen3", "gpt2")


@pytest.fixture
def train(engine: Engine) -> Callable[..., Figures]:
    """Runs three steps, with an evaluation after each and the device released after the second; returns all figures,
    and every plane."""

    def run_them(model: TinyModel, device: str, *, in_backward: bool = False, **options: Any) -> Figures:
        made = DEVICES[device]()
        store = model.store(grad_dtype=None if in_backward else made.gradient_dtype)
        options |= {"max_grad_norm": None} if in_backward else {}
        run = engine.start(model, store=store, device=made, learning_rate=1e-2, **options)
        numbers: list[float] = []
        for step in range(3):
            rows = [engine.pack(engine.documents(12, 7, seed=step)), engine.pack(engine.documents(21, seed=step + 50))]
            report = run.trainer.train_step(rows)
            numbers += [report.loss, report.grad_norm, run.trainer.evaluate(rows).eval_loss]
            if step == 1:
                run.trainer.release_device()
        run.trainer.flush()
        planes = {plane: store.plane(plane).clone() for plane in PLANES}
        run.trainer.close()
        made.release_memory()
        assert made.arena.held_bytes()["weights"] == 0
        return numbers, planes

    return run_them


def assert_same(one: Figures, other: Figures) -> None:
    assert one[0] == other[0]
    for plane in PLANES:
        assert torch.equal(one[1][plane].view(torch.uint8), other[1][plane].view(torch.uint8)), f"plane {plane} differs"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_no_bit_depends_on_packed_weights_that_stay(
    kind: Packing, device: str, engine: Engine, train: Callable[..., Figures]
) -> None:
    small, _ = packed(engine.tiny_model("llama"), kind)
    plain = train(small, device)
    for options in WITH_PACKED:
        assert_same(plain, train(small, device, **options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("architecture", "part", "options"), WITH_ENDS, ids=str)
def test_nor_on_head_and_table_that_stay(
    architecture: str,
    part: str,
    options: dict[str, Any],
    device: str,
    engine: Engine,
    train: Callable[..., Figures],
) -> None:
    _, frozen = both(engine.tiny_model(architecture), PARTS[part])
    assert_same(train(frozen, device), train(frozen, device, **options))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("in_backward", [False, True], ids=["deferred", "in backward"])
@pytest.mark.parametrize("architecture", EVERYTHING_TRAINED)
def test_nor_on_a_head_that_is_trained(
    architecture: str, in_backward: bool, device: str, engine: Engine, train: Callable[..., Figures]
) -> None:
    model = engine.tiny_model(architecture)
    plain = train(model, device, in_backward=in_backward)
    assert_same(plain, train(model, device, in_backward=in_backward, resident_head=True, resident_layers=1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_packed_weights_that_stay_cross_the_link_once(kind: Packing, device: str, engine: Engine) -> None:
    rows = [engine.pack(engine.documents(11, 20, seed=1))]
    small, _ = packed(engine.tiny_model("llama", num_hidden_layers=6), kind)
    moved = []
    for num_packed in (0, 4):
        run = engine.start(small, store=small.store(), device=DEVICES[device](), packed_layers=num_packed)
        moved.append([run.trainer.train_step(rows).h2d.bytes for _ in range(3)])
    plain, kept = moved
    stay = {unit.index: unit.packed_bytes for unit in packed_units(small.template.layout, Residency(packed_layers=4))}
    assert len(stay) == 4
    # Backward finds the last two layers in their slots.
    saved = sum(stay.values()) + sum(num_bytes for index, num_bytes in stay.items() if index <= 4)
    # Before the first step, the trial of packing has copied them.
    assert [before - after for before, after in zip(plain, kept, strict=True)] == [saved] * 3


@pytest.mark.parametrize("device", ["host, fp32", "host, bf16"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_frozen_head_and_the_rows_of_a_frozen_table_cross_the_link_once(
    architecture: str, device: str, engine: Engine
) -> None:
    rows = [engine.pack(engine.documents(11, 20, seed=1))]
    _, frozen = both(engine.tiny_model(architecture), PARTS["layers 1 and 2"])
    layout, made = frozen.template.layout, DEVICES[device]()
    options = {"resident_head": True, "resident_table": not layout.tied}
    plain = engine.start(frozen, store=frozen.store(), device=DEVICES[device]())
    kept = engine.start(frozen, store=frozen.store(), device=made, **options)
    before, after = ([run.trainer.train_step(rows).h2d.bytes for _ in range(3)] for run in (plain, kept))
    head = layout.units[-1].num_elements + (layout.units[0].num_elements if layout.tied else 0)
    used = len(set(rows[0].input_ids_T.tolist())) * frozen.template.hidden_size
    assert before[1] - after[1] == before[2] - after[2] == (head + used) * made.compute_dtype.itemsize


def test_rows_of_a_tied_table_that_is_trained_come_up_once_a_step(engine: Engine) -> None:
    rows, model = [engine.pack(engine.documents(24))], engine.tiny_model("qwen3")
    assert model.template.tied
    plain, kept = (engine.start(model, store=model.store(), resident_head=stays) for stays in (False, True))
    before, after = ([run.trainer.train_step(rows).h2d.bytes for _ in range(3)] for run in (plain, kept))
    used = len(set(rows[0].input_ids_T.tolist())) * model.template.hidden_size
    assert [one - other for one, other in zip(before, after, strict=True)] == [4 * used] * 3


def test_frozen_weights_that_were_replaced_are_sent_again(engine: Engine) -> None:
    rows = [engine.pack(engine.documents(24))]
    small, _ = packed(engine.tiny_model("llama"), "nf4")
    others = engine.tiny_model("llama").weights
    options: dict[str, Any] = {"packed_layers": 3, "resident_head": True}
    run = engine.start(small, store=small.store(), **options)
    run.trainer.evaluate(rows)
    fresh = engine.start(small, store=small.store(), **options)
    for store in (run.store, fresh.store):
        for name, weight in others.items():
            store.write_master(name, weight.flip(0))
    run.trainer.forget_weights()
    assert run.trainer.evaluate(rows).eval_loss == fresh.trainer.evaluate(rows).eval_loss


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [*WITH_PACKED[:3], {"resident_head": True}, {"packed_layers": 3, "resident_head": True}]
)
def test_the_account_of_packed_weights_and_a_head_is_the_plans(
    options: dict[str, Any], device: str, engine: Engine
) -> None:
    small, _ = packed(engine.tiny_model("llama"), "nf4")
    check_account(small, device, engine, options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("architecture", "part", "options"),
    [
        ("llama", "the attention of layers", {"resident_head": True, "resident_table": True}),
        ("llama", "the attention of layers", {"resident_table": True}),
        ("qwen3", "the attention of layers", {"resident_head": True}),
        ("gpt2", "the attention of layers", {"resident_head": True, "resident_layers": 3}),
        ("deepseek_v3", "the attention of layers", {"resident_head": True, "resident_layers": 1}),
    ],
    ids=str,
)
def test_the_account_of_head_and_table_is_the_plans(
    architecture: str, part: str, options: dict[str, Any], device: str, engine: Engine
) -> None:
    _, frozen = both(engine.tiny_model(architecture), PARTS[part])
    check_account(frozen, device, engine, options)


def check_account(model: TinyModel, device: str, engine: Engine, options: dict[str, Any]) -> None:
    """Compare what slots take with the plan."""
    made = DEVICES[device]()
    shape = ModelShape.from_config(model.config.to_dict(), names=model.weights)
    plan = ledger_of(
        model.template.layout,
        shape,
        tokens_per_step=220,
        sequence_length=110,
        device_kind=made.name,
        grad_bytes=made.gradient_dtype.itemsize,
        compute_dtype=str(made.compute_dtype).removeprefix("torch."),
        **options,
    )
    run = engine.start(
        model, store=model.store(grad_dtype=made.gradient_dtype), device=made, tokens_per_step=220, **options
    )
    report = run.trainer.train_step([engine.pack(engine.documents(60, 50)), engine.pack(engine.documents(100, 10))])
    assert report.device_memory_bytes["weights"] == plan.device_bytes["weights"]
