"""Objectives on a CUDA device: the same numbers as on the CPU, without waiting for the device, and a whole step within
bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from horizon_server.engine.cross_entropy import log_probabilities, write_gradient
from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.objectives import (
    DPO,
    KTO,
    ORPO,
    Documents,
    Objective,
    PolicyGradient,
    SimPO,
    StepObjective,
    WeightedSFT,
)

if TYPE_CHECKING:
    from tests.support.tiny_models import Run, TinyModel

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
OBJECTIVES: list[Objective] = [
    WeightedSFT(),
    DPO(label_smoothing=0.1),
    DPO(loss="hinge"),
    DPO(loss="ipo", length_normalised=True),
    SimPO(),
    ORPO(),
    KTO(),
    PolicyGradient(clip=False),
    PolicyGradient(clip_low=0.2, clip_high=0.2, kl_coefficient=0.04, mean="documents"),
]


def draw(size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_an_objective_gives_what_it_gives_on_the_cpu_and_waits_for_nothing(objective: Objective) -> None:
    sizes = torch.tensor([300, 700, 41, 1200, 9, 63])
    size = int(sizes.sum())
    documents = Documents(
        num_targets_K=sizes,
        pairs_P2=torch.tensor([[0, 1], [3, 2], [4, 5]]),
        labels_K=torch.tensor([1, 0, -1, 0, 1, -1]),
        recorded_S=-draw(size, 1).abs(),
        advantages_S=draw(size, 2),
    )
    step = StepObjective(
        objective=objective, documents=documents, references_S=-draw(size, 3).abs(), weights_S=draw(size, 4).abs()
    )
    logprobs = -draw(size, 5).abs() - 0.01
    placed, there = step.placed(lambda tensor: tensor.to(DEVICE)), logprobs.to(DEVICE)

    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, gradient = placed(there)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    wanted, slopes = step(logprobs)
    assert float(loss) == pytest.approx(float(wanted), rel=1e-12)
    assert torch.allclose(gradient.cpu(), slopes, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_place", [True, False])
def test_every_token_may_have_a_coefficient_of_its_own(dtype: torch.dtype, in_place: bool) -> None:
    logits = (4 * draw(33 * 32003, 0)).view(33, -1).to(dtype).to(DEVICE)
    targets, coefficients = torch.arange(33, device=DEVICE) * 900, draw(33, 1).to(DEVICE).double()
    leaf = logits.double().requires_grad_()
    exact = torch.log_softmax(leaf, 1).gather(1, targets[:, None])[:, 0]
    torch.autograd.backward((coefficients * exact).sum())
    out = logits if in_place else torch.empty_like(logits)

    got = log_probabilities(logits, targets)
    write_gradient(logits, targets, coefficients, out)

    assert leaf.grad is not None
    assert torch.allclose(got.double(), exact, rtol=1e-6)
    error = float((out.double() - leaf.grad).norm() / leaf.grad.norm())
    assert error <= (3e-6 if dtype == torch.float32 else 3e-3)


def test_a_step_of_pairs_is_that_of_the_host_within_bf16(
    make_device: Callable[..., CudaDevice],
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Callable[[list[Tensor]], MicroBatch],
) -> None:
    model = tiny_model("qwen3")
    rows = [pack(documents(14, 22)), pack(documents(25, 9, seed=3))]
    objective = StepObjective(
        objective=SimPO(beta=2.0, gamma=0.5), documents=Documents.of(rows, pairs_P2=torch.tensor([[0, 1], [2, 3]]))
    )
    host = start(model)
    # Before the other run moves the template's buffers to its device.
    wanted = host.trainer.train_step(rows, objective)
    cuda = start(model, store=model.store(grad_dtype=torch.bfloat16), device=make_device(), head_chunk_tokens=16)

    got = cuda.trainer.train_step(rows, objective)

    assert got.loss == pytest.approx(wanted.loss, rel=1e-2)
    one, other = host.gradients(), cuda.gradients().float()
    assert float((one - other).norm() / one.norm()) <= 5e-2
