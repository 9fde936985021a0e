"""The cuda device's schedule, run on the CPU through the driver's port: right numbers in bf16, and the same bits
whatever the timing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from tests.support.plans import ledger_of
from torch import Tensor

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.errors import DoesNotFit
from horizon_server.planning.model_folder import ModelShape
from horizon_server.records.execution import ActivationPlacement

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine

Pack = Callable[[list[Tensor]], MicroBatch]
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
DELAYS: dict[str, Any] = {"max_delay_s": 0.002, "poison_on_free": True}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "delays, poison and three slots": (
        {**DELAYS, "delay_seed": 1},
        {"num_weight_slots": 3, "num_gradient_slots": 3},
        1 << 40,
    ),
    "delays, poison and one slot": (
        {**DELAYS, "delay_seed": 2},
        {"num_weight_slots": 1, "num_gradient_slots": 1},
        1 << 40,
    ),
    "offloaded inputs": (DELAYS, {"activation_placement": "host"}, 1 << 40),
    "nothing can be pinned": ({**DELAYS, "staging_bytes": 4096}, {"activation_placement": "host"}, 0),
    "resident weights": ({**DELAYS, "delay_seed": 3}, {"resident_layers": 3}, 1 << 40),
    "resident weights of every layer": ({**DELAYS, "delay_seed": 4}, {"resident_layers": 5}, 1 << 40),
    "some can be pinned": ({"staging_bytes": 1024}, {}, 40_000),
}


@pytest.fixture
def three_steps(engine: Engine) -> Callable[..., tuple[list[float], dict[str, Tensor]]]:
    """Runs three steps of a five-layer model on the cuda device; returns losses with norms, and every plane."""

    def run_them(
        architecture: str,
        device: CudaDevice,
        options: dict[str, Any],
        *,
        grad_dtype: torch.dtype | None = torch.bfloat16,
    ) -> tuple[list[float], dict[str, Tensor]]:
        model = engine.tiny_model(architecture, num_hidden_layers=5, layer_types=None)
        store = model.store(grad_dtype=grad_dtype)
        run = engine.start(model, store=store, device=device, **options)
        numbers = []
        for step in range(3):
            rows = [engine.pack(engine.documents(12, 7, seed=step)), engine.pack(engine.documents(21, seed=step + 50))]
            report = run.trainer.train_step(rows)
            assert report.skipped == ""
            numbers += [report.loss, report.grad_norm]
        run.trainer.flush()
        planes = {plane: store.plane(plane).clone() for plane in PLANES}
        run.trainer.close()
        return numbers, planes

    return run_them


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_streams_timing_and_pinning_do_not_change_a_bit(
    architecture: str, variant: str, three_steps: Callable[..., tuple[list[float], dict[str, Tensor]]]
) -> None:
    switches, options, pinnable_bytes = VARIANTS[variant]
    numbers, planes = three_steps(architecture, CudaDevice(runtime=CpuRuntime()), {})
    device = CudaDevice(runtime=CpuRuntime(pinnable_bytes=pinnable_bytes), **switches)

    other_numbers, other_planes = three_steps(architecture, device, options)

    assert other_numbers == numbers
    for plane in PLANES:
        assert torch.equal(other_planes[plane], planes[plane]), f"plane {plane} differs"
    assert bool(device.refusals) == (pinnable_bytes < 1 << 40)


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_updating_in_backward_gives_the_bits_of_the_deferred_update(
    architecture: str, three_steps: Callable[..., tuple[list[float], dict[str, Tensor]]]
) -> None:
    no_clipping = {"max_grad_norm": None}
    numbers, planes = three_steps(architecture, CudaDevice(runtime=CpuRuntime()), no_clipping)

    other_numbers, other_planes = three_steps(
        architecture, CudaDevice(runtime=CpuRuntime(), **DELAYS), no_clipping, grad_dtype=None
    )

    assert other_numbers == numbers
    for plane in PLANES:
        assert torch.equal(other_planes[plane], planes[plane]), f"plane {plane} differs"


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2", "phi3", "olmo2"])
def test_gradients_are_those_of_autograd_within_bf16(
    architecture: str,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    rows = [engine.pack(engine.documents(14, 22)), engine.pack(engine.documents(25, seed=3))]
    run = engine.start(model, store=model.store(grad_dtype=torch.bfloat16), device=CudaDevice(runtime=CpuRuntime()))

    report = run.trainer.train_step(rows)

    reference = model.reference()
    num_targets = sum(row.num_targets for row in rows)
    losses = [engine.plain_loss(reference, row) / num_targets for row in rows]
    for loss in losses:
        torch.autograd.backward(loss)
    assert report.loss == pytest.approx(sum(loss.item() for loss in losses), rel=5e-3)
    squares, error = 0.0, 0.0
    for name, parameter in reference.named_parameters():
        assert parameter.grad is not None
        squares += float(parameter.grad.square().sum())
        error += float((run.gradient(name).float() - parameter.grad).square().sum())
    assert report.grad_norm == pytest.approx(squares**0.5, rel=2e-2)
    assert (error / squares) ** 0.5 <= 5e-2


def test_the_norm_is_that_of_the_gradients_before_rounding(engine: Engine) -> None:
    model, reports, norms = engine.tiny_model("llama"), [], []
    # What one row adds is bf16 itself; the sum over two is not.
    rows = [engine.pack(engine.documents(30)), engine.pack(engine.documents(17, seed=1))]
    for grad_dtype in (torch.float32, torch.bfloat16):
        run = engine.start(model, store=model.store(grad_dtype=grad_dtype), device=CudaDevice(runtime=CpuRuntime()))
        reports.append(run.trainer.train_step(rows))
        norms.append(float(run.gradients().double().norm()))

    assert reports[0].grad_norm == reports[1].grad_norm == pytest.approx(norms[0], rel=1e-6)
    assert norms[1] != pytest.approx(norms[0], rel=1e-6)


def test_bytes_seconds_and_pins_are_accounted(engine: Engine) -> None:
    model, runtime = engine.tiny_model("llama"), CpuRuntime()
    (document,) = engine.documents(24)
    device = CudaDevice(runtime=runtime, max_delay_s=0.001, limit_bytes=1 << 30)
    run = engine.start(model, store=model.store(grad_dtype=torch.bfloat16), device=device)

    report = run.trainer.train_step([engine.pack([document])])

    units, bf16_bytes = model.template.layout.units, 2
    layers = sum(unit.num_elements for unit in units[1:-1])
    rows = torch.unique(document).numel() * 32
    last_two = sum(unit.num_elements for unit in units[-3:-1])
    assert report.h2d.bytes == (2 * layers - last_two + units[-1].num_elements + 2 * rows) * bf16_bytes
    assert report.d2h.bytes == (layers + units[-1].num_elements + rows) * bf16_bytes
    assert report.compute_s > 0 and report.h2d.busy_s > 0 and report.d2h.busy_s > 0
    # On a busy machine compute may come after the copy has ended.
    assert 0 <= report.h2d.exposed_s < report.duration_s
    assert runtime.memory_bytes == 1 << 30
    assert run.store.plane("hi").data_ptr() in runtime.registered
    assert run.store.plane("grad").data_ptr() in runtime.registered
    run.trainer.close()
    device.close()
    assert not runtime.registered
    assert set(device.arena.held_bytes().values()) == {0}


def test_a_device_that_is_full_in_the_middle_of_a_step_fails_it_with_numbers_and_closes(engine: Engine) -> None:
    model, rows = engine.tiny_model("llama"), [engine.pack(engine.documents(60, 40))]
    roomy = engine.start(model, store=model.store(grad_dtype=torch.bfloat16), device=CudaDevice(runtime=CpuRuntime()))
    roomy.trainer.train_step(rows)
    tight = CudaDevice(runtime=CpuRuntime(), limit_bytes=roomy.device.arena.peak_total_bytes - 1)
    run = engine.start(model, store=model.store(grad_dtype=torch.bfloat16), device=tight)

    with pytest.raises(DoesNotFit, match="device memory: workspace needs"):
        run.trainer.train_step(rows)
    run.trainer.close()

    assert {name: held for name, held in tight.arena.held_bytes().items() if held} == {
        "gradients": 2 * max(unit.num_elements for unit in model.template.layout.units)
    }


def test_a_step_that_is_too_large_is_refused_before_its_tokens_take_memory(engine: Engine) -> None:
    model, runtime = engine.tiny_model("llama"), CpuRuntime()
    roomy = engine.start(model, store=model.store(grad_dtype=torch.bfloat16), device=CudaDevice(runtime=runtime))
    limit_bytes = sum(roomy.device.arena.held_bytes().values()) + 4096
    tight = CudaDevice(runtime=runtime, limit_bytes=limit_bytes)
    run = engine.start(model, store=model.store(grad_dtype=torch.bfloat16), device=tight)
    # If tokens came first, the driver's refusal without the account would be what the user sees.
    runtime.is_full = True

    with pytest.raises(DoesNotFit, match=r"device memory: activations needs [\d,]+ bytes more, but"):
        run.trainer.train_step([engine.pack(engine.documents(100, seed=seed)) for seed in range(4)])


def test_an_update_that_fails_ends_the_run_and_no_checkpoint_follows(engine: Engine) -> None:
    model = engine.tiny_model("llama")
    store = model.store(grad_dtype=torch.bfloat16)
    run = engine.start(model, store=store, device=CudaDevice(runtime=CpuRuntime()))
    rows, unit = [engine.pack(engine.documents(14))], store.unit
    run.trainer.train_step(rows)
    run.trainer.flush()

    def lost(index: int, plane: str) -> Tensor:
        if (index, plane) == (2, "exp_avg"):
            raise ZeroDivisionError("the update failed")
        return unit(index, plane)

    store.unit = lost  # type: ignore[method-assign]
    # The update of this step fails while nobody looks; the next step reads a unit that it has left half updated.
    run.trainer.train_step(rows)
    with pytest.raises(ZeroDivisionError, match="the update failed"):
        run.trainer.train_step(rows)
    with pytest.raises(ZeroDivisionError, match="the update failed"):
        run.trainer.state()
    run.trainer.close()


def test_the_driver_is_at_most_two_units_ahead_of_compute(engine: Engine) -> None:
    device = CudaDevice(runtime=CpuRuntime())
    waiting, most = 0, 0
    submit, lock = device.compute.submit, threading.Lock()

    def counted(work: Callable[[], object], *, num_bytes: int = 0, label: str = "", **more: Any) -> None:
        nonlocal waiting, most

        def run_it() -> None:
            nonlocal waiting
            work()
            with lock:
                waiting -= 1

        with lock:
            waiting += 1
            most = max(most, waiting)
        submit(run_it, num_bytes=num_bytes, label=label, **more)

    device.compute.submit = counted  # type: ignore[method-assign]
    run = engine.start(engine.tiny_model("llama", num_hidden_layers=12), device=device)
    run.trainer.train_step([engine.pack(engine.documents(9))])

    # A unit is one piece of work or two (its gradient's zeroing), and three of them may be queued: the one that runs,
    # and two.
    assert most <= 8, f"{most} pieces of work were queued at once"


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("grad_bytes", [2, 0])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "deepseek_v3", "ernie4_5_moe"])
def test_the_ledger_knows_what_device_and_host_will_hold(
    architecture: str,
    grad_bytes: int,
    placement: ActivationPlacement,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    plan = ledger_of(
        model.template.layout,
        ModelShape.from_config(model.config.to_dict()),
        tokens_per_step=220,
        sequence_length=110,
        device_kind="cuda",
        grad_bytes=grad_bytes,
        activation_placement=placement,
    )
    store = model.store(grad_dtype=torch.bfloat16 if grad_bytes else None)
    run = engine.start(
        model,
        store=store,
        device=CudaDevice(runtime=CpuRuntime()),
        activation_placement=placement,
        tokens_per_step=220,
        max_grad_norm=1.0 if grad_bytes else None,
    )

    report = run.trainer.train_step([engine.pack(engine.documents(60, 50)), engine.pack(engine.documents(100, 10))])

    for component in ("weights", "gradients", "activations"):
        assert report.device_memory_bytes[component] == plan.device_bytes[component]
    for component in ("weights", "moments", "gradients", "activations", "staging"):
        assert report.host_memory_bytes.get(component, 0) == plan.host_bytes[component]
