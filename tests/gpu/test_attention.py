"""Attention without masks on a CUDA device: the numbers of the formula within bf16, for rows of any length, at once."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from horizon_server.engine.attention.adoption import try_implementation
from horizon_server.engine.attention.chunked import ChunkedRow, chunks_of
from horizon_server.engine.attention.function import attend
from horizon_server.engine.attention.implementation import Heads, adopt, use_deterministic_kernels
from horizon_server.engine.attention.kernels import attention, attention_backward
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


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("shape", [(8, 2, 64, 64), (4, 4, 192, 128), (4, 2, 20, 20), (2, 1, 320, 320)], ids=str)
def test_chunks_of_a_row_give_what_the_row_gives(shape: tuple[int, int, int, int], window: int) -> None:
    compare_chunks(shape, window)


def test_chunks_give_what_the_row_gives_by_attention_for_hopper() -> None:
    """FlashAttention-4 over earlier keys."""
    if torch.cuda.get_device_capability() not in ((9, 0), (10, 0)) or importlib.util.find_spec("flash_attn") is None:
        pytest.skip("needs flash-attn-4 and compute capability 9.0 or 10.0")
    heads = Heads(queries=8, keys=2, size=128, value_size=128)
    adopt(heads, "FA4")
    try:
        compare_chunks((8, 2, 128, 128), 0)
    finally:
        adopt(heads, "")


def compare_chunks(shape: tuple[int, int, int, int], window: int) -> None:
    """Outputs and gradients of a row in chunks, against those of the row."""
    documents, num_tokens = (40, 700, 92), 832
    ends = torch.tensor([0, *accumulate(documents)])
    whole = [tensor.requires_grad_() for tensor in inputs(*shape, num_tokens)]
    query, key, value = whole
    expected = attend(query, key, value, ends, window=window)
    gradient = torch.randn_like(expected)
    torch.autograd.backward(expected, gradient)

    parts = [tensor.detach().requires_grad_() for tensor in whole]
    kept = [torch.empty_like(tensor) for tensor in parts[1:]]
    sums = (torch.zeros_like(kept[0], dtype=torch.float32), torch.zeros_like(kept[1], dtype=torch.float32))
    outputs = {}
    for chunk, boundaries in chunks_of(ends.tolist(), 256):
        row = ChunkedRow(chunk, boundaries, kept[0], kept[1], sums, block_tokens=256)
        query, key, value = (tensor[:, :, chunk.first : chunk.stop] for tensor in parts)
        outputs[chunk.first] = row.attend(query, key, value, scale=None, window=window, softcap=None, sinks=None)
    for first in reversed(outputs):
        torch.autograd.backward(outputs[first], gradient[:, first : first + 256])
    found = torch.cat(list(outputs.values()), 1)
    for one, other in [(found, expected), *((a.grad, b.grad) for a, b in zip(parts, whole, strict=True))]:
        assert one is not None and other is not None
        with torch.no_grad():
            assert float((one.float() - other.float()).norm() / other.float().norm()) < 2e-2


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


def steps_twice(
    model: TinyModel, start: Callable[..., Run], rows: list[MicroBatch], **options: bool
) -> list[list[Tensor]]:
    """The weights and moments after two steps, of two runs."""
    found = []
    for _ in range(2):
        run = start(model, store=model.store(grad_dtype=torch.bfloat16), device=CudaDevice(), **options)
        for _ in range(2):
            run.trainer.train_step(rows)
        run.trainer.flush()
        found.append([run.store.plane(name).clone() for name in ("hi", "lo", "exp_avg", "exp_avg_sq")])
        run.trainer.close()
    return found


@pytest.mark.parametrize("architecture", ["qwen3", "gemma2"])
def test_two_runs_of_a_deterministic_job_have_the_same_bits(
    architecture: str,
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Pack,
) -> None:
    rows = [pack(documents(700, 1300, 64)), pack(documents(2048, seed=3))]
    try:
        one, other = steps_twice(tiny_model(architecture), start, rows, deterministic=True)
    finally:
        use_deterministic_kernels(False, torch.device("cuda"))
    for first, second in zip(one, other, strict=True):
        assert torch.equal(first, second)


def test_results_are_the_kernels_own_memory() -> None:
    """Nothing is copied where heads need no filling up: output and gradients are as large as what was allocated."""
    query, key, value = inputs(8, 2, 64, 64, 832)
    sinks, boundaries = query.new_empty(0), torch.tensor([0, 300, 832])
    output, sums = attention(query, key, value, boundaries, sinks, 0.125, 0, 0.0)
    gradients = attention_backward(output, query, key, value, output, sums, boundaries, sinks, 0.125, 0, 0.0)[:3]
    for tensor in (output, *(gradient.transpose(1, 2) for gradient in gradients)):
        assert tensor.is_contiguous()
    before = torch.cuda.memory_allocated()
    again, _ = attention(query, key, value, boundaries, sinks, 0.125, 0, 0.0)
    torch.cuda.reset_peak_memory_stats()
    del again
    attention(query, key, value, boundaries, sinks, 0.125, 0, 0.0)
    # The output once, and the sums and boundaries.
    assert torch.cuda.max_memory_allocated() - before < 1.5 * output.nbytes


def test_attention_for_hopper_is_tried_where_it_is_installed() -> None:
    if torch.cuda.get_device_capability() not in ((9, 0), (10, 0)) or importlib.util.find_spec("flash_attn") is None:
        pytest.skip("needs flash-attn-4 and compute capability 9.0 or 10.0")
    heads = Heads(queries=8, keys=2, size=128, value_size=128)
    device = torch.device("cuda")
    found = try_implementation("FA4", heads, dtype=torch.bfloat16, device=device, documents=[4096, 4096])
    adopt(heads, "")
    assert "differs from fp32" not in found.text and "does not run" not in found.text
