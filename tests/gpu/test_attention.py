"""Attention without masks on a CUDA device: the numbers of the formula within bf16, for rows of any length, at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from horizon_server.engine.attention.function import attend
from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.micro_batch import MicroBatch

if TYPE_CHECKING:
    from tests.support.tiny_models import Run, TinyModel

pytestmark = pytest.mark.gpu
Pack = Callable[[list[Tensor]], MicroBatch]


def inputs(heads: int, key_heads: int, size: int, value_size: int, num_tokens: int) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((heads, size), (key_heads, size), (key_heads, value_size))
    return [
        torch.randn(1, num_tokens, n, e, generator=generator, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
        for n, e in sizes
    ]


def mask_of(documents: tuple[int, ...], window: int) -> Tensor:
    document_T = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
    places_T = torch.arange(sum(documents))
    seen_TT = (document_T[:, None] == document_T) & (places_T <= places_T[:, None])
    return (seen_TT & (places_T > places_T[:, None] - (window or len(places_T)))).cuda()


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("documents", [(832,), (1, 300, 64, 467)], ids=["one", "packed"])
@pytest.mark.parametrize(
    "shape", [(8, 2, 64, 64), (4, 4, 192, 128), (4, 1, 256, 256), (4, 2, 20, 20), (2, 1, 320, 320)], ids=str
)
def test_outputs_and_gradients_are_those_of_a_mask(
    shape: tuple[int, int, int, int], documents: tuple[int, ...], window: int
) -> None:
    ours = [tensor.requires_grad_() for tensor in inputs(*shape, sum(documents))]
    exact = [tensor.detach().float().requires_grad_() for tensor in ours]
    query, key, value = ours
    found = attend(query, key, value, torch.tensor([0, *accumulate(documents)]), window=window)
    key, value = (tensor.repeat_interleave(shape[0] // shape[1], 1) for tensor in exact[1:])
    with sdpa_kernel(SDPBackend.MATH):
        expected = scaled_dot_product_attention(exact[0], key, value, attn_mask=mask_of(documents, window)).transpose(
            1, 2
        )
    gradient = torch.randn_like(expected)
    torch.autograd.backward(found, gradient.to(found.dtype))
    torch.autograd.backward(expected, gradient)
    for one, other in [(found, expected), *((a.grad, b.grad) for a, b in zip(ours, exact, strict=True))]:
        assert one is not None and other is not None
        with torch.no_grad():
            assert float((one.float() - other).norm() / other.norm()) < 2e-2


def test_nothing_waits_for_the_device() -> None:
    query, key, value = (tensor.requires_grad_() for tensor in inputs(8, 2, 64, 64, 832))
    boundaries, gradient = torch.tensor([0, 300, 832]), torch.ones(1, 832, 8, 64, device="cuda", dtype=torch.bfloat16)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.backward(attend(query, key, value, boundaries), gradient)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_scores_far_below_zero_give_finite_gradients() -> None:
    """What cuDNN's masked backward answers with NaN: rows of 64 + 128 k tokens, every score of a query below -88."""
    query, key, value = inputs(2, 2, 64, 64, 64 + 128)
    query, key = (-30 * query.abs()).requires_grad_(), key.abs().requires_grad_()
    value = value.clone().requires_grad_()
    output = attend(query, key, value, torch.tensor([0, 100, 192]))
    torch.autograd.backward(output, torch.ones_like(output))
    for tensor in (query, key, value):
        assert tensor.grad is not None and torch.isfinite(tensor.grad).all()


def test_rows_of_many_lengths_cost_no_more_in_the_first_step_than_in_the_second(
    tiny_model: Callable[..., TinyModel], start: Callable[..., Run], documents: Callable[..., list[Tensor]], pack: Pack
) -> None:
    model = tiny_model("qwen3", max_position_embeddings=4096, head_dim=64)
    run = start(model, store=model.store(grad_dtype=torch.bfloat16), device=CudaDevice(), tokens_per_step=70_000)
    rows = [pack(documents(500 + 7 * i, 40 + i)) for i in range(64)]
    # Libraries are loaded and memory is found on a row of another length.
    run.trainer.train_step([pack(documents(3000, 100))] * 20)
    durations = []
    for _ in range(2):
        start_s = time.perf_counter()
        run.trainer.train_step(rows)
        run.trainer.flush()
        durations.append(time.perf_counter() - start_s)
    # cuBLAS chooses a kernel for each new shape; what is compiled for a length costs ten times as much.
    assert durations[0] < 2.0 * durations[1]
