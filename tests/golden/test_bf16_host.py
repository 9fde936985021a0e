"""The host device in bf16: the numbers of a plain PyTorch loop in bf16, the bits of the cuda device's schedule, and of a run that was cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from tests.support.tiny_models import ARCHITECTURES, MIXES_DOCUMENTS
from torch import Tensor
from transformers import AutoModelForCausalLM

from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.planning.ledger import ActivationPlacement, plan_memory
from horizon_server.planning.model_folder import ModelShape

if TYPE_CHECKING:
    from tests.support.tiny_models import Run, TinyModel

Pack = Callable[[list[Tensor]], MicroBatch]
PlainLoss = Callable[..., Tensor]
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")

# bf16 has 8 bits: a value is off by at most 2**-9 of itself.
ROUNDING = 2**-9


def host_device(**switches: Any) -> HostDevice:
    return HostDevice(num_threads=1, compute_dtype=torch.bfloat16, **switches)


@pytest.fixture
def rows_of_step(documents: Callable[..., list[Tensor]], pack: Pack) -> Callable[[int], list[MicroBatch]]:
    """Two rows for a step, one of them with two documents."""
    return lambda step: [pack(documents(12, 7, seed=step)), pack(documents(21, seed=step + 50))]


def reference_in_bf16(model: TinyModel) -> torch.nn.Module:
    """Plain PyTorch with the weights rounded to bf16."""
    plain: torch.nn.Module = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, tensor in plain.state_dict().items():
            if name in model.weights:
                tensor.copy_(model.weights[name])
    return plain.train(False)


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2", "phi3", "olmo2", "qwen3_moe"])
def test_losses_and_gradients_are_those_of_a_plain_loop_in_bf16(
    architecture: str,
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    rows_of_step: Callable[[int], list[MicroBatch]],
    plain_loss: PlainLoss,
) -> None:
    """Three steps: bf16 weights rounded from fp32 masters, gradients of rows added in fp32, AdamW in fp32."""
    model = tiny_model(architecture)
    # fp32, so that what is compared has not been rounded on its way to the store.
    run = start(
        model, store=model.store(grad_dtype=torch.float32), device=host_device(), max_grad_norm=1e9, lr_schedule="constant", eps=1e-2, learning_rate=0.02
    )
    plain = reference_in_bf16(model)
    masters = {name: model.reference().get_parameter(name).detach().clone() for name, _ in plain.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=0.02, eps=1e-2, weight_decay=0.0)
    for step in range(3):
        rows = rows_of_step(step)

        report = run.trainer.train_step(rows)

        num_targets = sum(row.num_targets for row in rows)
        loss, sums = 0.0, {name: torch.zeros_like(master) for name, master in masters.items()}
        for row in rows:
            of_row = plain_loss(plain, row) / num_targets
            torch.autograd.backward(of_row)
            loss += of_row.item()
            for name, parameter in plain.named_parameters():
                assert parameter.grad is not None
                sums[name] += parameter.grad
                parameter.grad = None
        assert report.loss == pytest.approx(loss, rel=2 * ROUNDING)
        square_error = sum(float((run.store.tensor(n, "grad") - g).square().sum()) for n, g in sums.items())
        squares = sum(float(gradient.square().sum()) for gradient in sums.values())
        print(architecture, step, report.loss/loss-1, (square_error / squares) ** 0.5)
        assert (square_error / squares) ** 0.5 <= 4 * ROUNDING
        for name, master in masters.items():
            master.grad = sums[name]
        optimizer.step()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(masters[name])


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *MIXES_DOCUMENTS])
def test_every_architecture_trains_with_the_gradients_of_autograd_within_bf16(
    architecture: str,
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    rows_of_step: Callable[[int], list[MicroBatch]],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
    plain_loss: PlainLoss,
) -> None:
    model = tiny_model(architecture)
    rows = [pack(documents(14)), pack(documents(25, seed=3))]
    run = start(model, store=model.store(grad_dtype=torch.float32), device=host_device())

    report = run.trainer.train_step(rows)

    num_targets = sum(row.num_targets for row in rows)
    def grads(reference):
        losses = [plain_loss(reference, row) / num_targets for row in rows]
        torch.autograd.backward(losses)
        return {n: (torch.zeros_like(p) if p.grad is None else p.grad).float() for n,p in reference.named_parameters()}, sum(l.item() for l in losses)
    g32, l32 = grads(model.reference())
    ours = {n: run.store.tensor(n,"grad") for n in g32}
    def err(a,b):
        return (sum(float((a[n]-b[n]).square().sum()) for n in a)/sum(float(b[n].square().sum()) for n in b))**0.5
    print(architecture, "0 ours32", err(ours,g32), flush=True)
    g16, l16 = grads(reference_in_bf16(model))
    print(architecture, "0 ours32", err(ours,g32), "ours16", err(ours,g16), "plain 16-32", err(g16,g32), "loss", report.loss-l32, report.loss-l16)
    assert err(ours, g16) < 8e-3
