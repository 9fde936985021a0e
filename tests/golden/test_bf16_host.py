"""The host device in bf16: the numbers of a plain PyTorch loop in bf16, the bits of the cuda device's schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from tests.support.plans import ledger_of
from tests.support.tiny_models import ARCHITECTURES, MIXES_DOCUMENTS
from torch import Tensor
from transformers import AutoModelForCausalLM

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.errors import InvalidModel
from horizon_server.planning.model_folder import ModelShape
from horizon_server.records.execution import ActivationPlacement

if TYPE_CHECKING:
    from tests.support.tiny_models import Engine, TinyModel

Pack = Callable[[list[Tensor]], MicroBatch]
PlainLoss = Callable[..., Tensor]
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")

# bf16 has 8 significant bits: rounding changes a value by at most 2**-9 of its power of two.
ROUNDING = 2**-9


def host_device(**switches: Any) -> HostDevice:
    return HostDevice(num_threads=1, compute_dtype=torch.bfloat16, **switches)


@pytest.fixture
def rows_of_step(engine: Engine) -> Callable[[int], list[MicroBatch]]:
    """Two rows for a step, one of them with two documents."""
    return lambda step: [
        engine.pack(engine.documents(12, 7, seed=step)),
        engine.pack(engine.documents(21, seed=step + 50)),
    ]


def reference_in_bf16(model: TinyModel) -> torch.nn.Module:
    """Plain PyTorch with the weights rounded to bf16."""
    plain: torch.nn.Module = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, tensor in plain.state_dict().items():
            if name in model.weights:
                tensor.copy_(model.weights[name])
    return plain.train(False)


def gradients_of(
    plain: torch.nn.Module, rows: list[MicroBatch], plain_loss: PlainLoss
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of plain PyTorch, those of the rows added in fp32."""
    num_targets = sum(row.num_targets for row in rows)
    sums = {name: torch.zeros(parameter.shape) for name, parameter in plain.named_parameters()}
    loss = 0.0
    for row in rows:
        of_row = plain_loss(plain, row) / num_targets
        torch.autograd.backward(of_row)
        loss += of_row.item()
        for name, parameter in plain.named_parameters():
            if parameter.grad is not None:
                sums[name] += parameter.grad
            parameter.grad = None
    return loss, sums


def relative_error(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Of all gradients as one vector."""
    error = sum(float((got[name] - wanted[name]).square().sum()) for name in wanted)
    return float((error / sum(float(gradient.square().sum()) for gradient in wanted.values())) ** 0.5)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2", "phi3", "olmo2", "qwen3_moe"])
def test_losses_gradients_and_updates_are_those_of_a_plain_loop_in_bf16(
    architecture: str,
    engine: Engine,
    rows_of_step: Callable[[int], list[MicroBatch]],
) -> None:
    """Weights rounded from fp32 masters before each step, gradients added up in fp32, AdamW in fp32."""
    model = engine.tiny_model(architecture)
    # Stored in fp32, so that what is compared has not been rounded on its way to the store.
    store = model.store(grad_dtype=torch.float32)
    run = engine.start(model, store=store, device=host_device(), max_grad_norm=None, lr_schedule="constant")
    plain, reference = reference_in_bf16(model), model.reference()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(3):
        rows = rows_of_step(step)

        report = run.trainer.train_step(rows)
        run.trainer.flush()

        loss, wanted = gradients_of(plain, rows, engine.plain_loss)
        got = {name: run.gradient(name) for name in wanted}
        assert report.loss == pytest.approx(loss, rel=5e-4)
        # Attention rounds elsewhere than the model's own code, so both are compared with the truth.
        _, exact = gradients_of(reference, rows, engine.plain_loss)
        assert relative_error(got, exact) <= max(4 * ROUNDING, 1.5 * relative_error(wanted, exact))
        # From the same gradients, because AdamW makes a full step of one that is nothing but rounding.
        for name, master in reference.named_parameters():
            master.grad = got[name].clone()
        optimizer.step()
        with torch.no_grad():
            for name, master in reference.named_parameters():
                bits = (store.tensor(name, "hi").view(torch.int16).int() << 16) + store.tensor(name, "lo").int()
                assert torch.allclose(bits.view(torch.float32), master, rtol=1e-6, atol=1e-8), name
                plain.get_parameter(name).copy_(store.tensor(name, "hi"))


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES, *MIXES_DOCUMENTS} - {"xlstm"}))
def test_every_architecture_has_the_gradients_of_its_own_code_in_bf16(
    architecture: str,
    engine: Engine,
) -> None:
    model = engine.tiny_model(architecture)
    rows = [engine.pack(engine.documents(14)), engine.pack(engine.documents(25, seed=3))]
    run = engine.start(model, store=model.store(grad_dtype=torch.float32), device=host_device())

    report = run.trainer.train_step(rows)

    assert report.skipped == ""
    _, exact = gradients_of(model.reference(), rows, engine.plain_loss)
    loss, rounded = gradients_of(reference_in_bf16(model), rows, engine.plain_loss)
    got = {name: run.gradient(name) for name in exact}
    assert report.loss == pytest.approx(loss, rel=5e-4)
    # Not closer to each other: attention and the loss round elsewhere than the model's own code. But no further from
    # the truth.
    assert relative_error(got, exact) <= max(4 * ROUNDING, 1.5 * relative_error(rounded, exact))


def test_a_model_whose_code_cannot_compute_in_bf16_is_refused(engine: Engine) -> None:
    model = engine.tiny_model("xlstm")
    with pytest.raises(InvalidModel, match="'xlstm' cannot be computed in bfloat16"):
        engine.start(model, store=model.store(grad_dtype=torch.bfloat16), device=host_device())


@pytest.mark.parametrize("options", [{}, {"activation_placement": "host"}, {"max_grad_norm": None}])
@pytest.mark.parametrize("architecture", ["qwen3", "llama", "mixtral"])
def test_it_gives_the_bits_of_the_cuda_devices_schedule(
    architecture: str,
    options: dict[str, Any],
    engine: Engine,
    rows_of_step: Callable[[int], list[MicroBatch]],
) -> None:
    """On the stand-in for CUDA, which computes with the same kernels. Nothing is clipped, as the norms are summed in
    another order."""
    model = engine.tiny_model(architecture, num_hidden_layers=5, layer_types=None)
    grad_dtype = None if "max_grad_norm" in options else torch.bfloat16
    found = []
    for device in (host_device(max_delay_s=0.001, poison_on_free=True), CudaDevice(runtime=CpuRuntime())):
        store = model.store(grad_dtype=grad_dtype)
        run = engine.start(model, store=store, device=device, **{"max_grad_norm": 1e9, **options})
        reports = [run.trainer.train_step(rows_of_step(step)) for step in range(3)]
        run.trainer.flush()
        found.append((reports, {plane: store.plane(plane).clone() for plane in PLANES}))
        run.trainer.close()

    (ours, our_planes), (theirs, their_planes) = found
    assert [report.loss for report in ours] == [report.loss for report in theirs]
    for report, other in zip(ours, theirs, strict=True):
        assert report.grad_norm == pytest.approx(other.grad_norm, rel=1e-6)
        assert (report.h2d.bytes, report.d2h.bytes) == (other.h2d.bytes, other.d2h.bytes)
    for plane in PLANES:
        assert torch.equal(our_planes[plane], their_planes[plane]), f"plane {plane} differs"


@pytest.mark.parametrize("placement", ["device", "host"])
@pytest.mark.parametrize("grad_bytes", [2, 0])
@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_the_ledger_knows_what_it_will_hold(
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
        device_kind="host",
        compute_dtype="bfloat16",
        grad_bytes=grad_bytes,
        activation_placement=placement,
    )
    store = model.store(grad_dtype=torch.bfloat16 if grad_bytes else None)
    options = {"activation_placement": placement, "max_grad_norm": 1.0 if grad_bytes else None}
    run = engine.start(model, store=store, device=host_device(), tokens_per_step=220, **options)

    report = run.trainer.train_step([engine.pack(engine.documents(60, 50)), engine.pack(engine.documents(100, 10))])

    held, on_host = report.device_memory_bytes, report.host_memory_bytes
    for component in ("weights", "gradients", "activations"):
        assert held[component] == plan.device_bytes[component]
    # Counted on Qwen3, whose norms of queries and keys others lack.
    assert held["workspace"] == pytest.approx(
        plan.device_bytes["workspace"], rel=0.1 if architecture == "qwen3" else 0.2
    )
    for component in ("weights", "moments", "gradients"):
        assert on_host.get(component, 0) == plan.host_bytes[component]
    assert on_host.get("activations", 0) == plan.host_bytes["activations"] - plan.device_bytes["activations"]
    assert (
        on_host["staging"] == plan.host_bytes["staging"] - plan.device_bytes["weights"] - plan.device_bytes["gradients"]
    )
