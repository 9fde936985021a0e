"""The kernel for bf16 attention on a CPU: the numbers of fp32 in blocks, a document's bits whatever is around it, and
torch's attention where the CPU lacks the instructions."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from horizon_server.engine.attention import host_kernel
from horizon_server.engine.attention.function import attend
from horizon_server.engine.attention.fused import without_fused_kernels
from horizon_server.engine.attention.kernels import attention, attention_backward
from horizon_server.store import native

# Heads, heads of keys, sizes of queries and keys, sizes of values.
SHAPES = {
    "grouped": (8, 4, 64, 64),
    "large": (2, 1, 256, 256),
    "128": (4, 4, 128, 128),
    "no whole vector": (6, 2, 80, 48),
    "odd": (3, 1, 33, 7),
}
# Shorter and longer than what a task owns and what it goes over at once, and one more and one less.
DOCUMENTS = {
    "one token": (1,),
    "edges": (63, 64, 65, 95, 96, 97, 1, 2),
    "long": (1000,),
    "mixed": (5, 300, 1, 129, 17),
}
# Rounding of the results to bf16 alone is half of it.
LIMIT = 2**-8

needs_kernel = pytest.mark.skipif(host_kernel._kernel() is None, reason="needs the kernel and a CPU with AVX512-BF16")


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a CPU that lacks the instructions."""
    lacking = SimpleNamespace(hz_attention_runs=lambda: 0)
    monkeypatch.setattr(native, "find", lambda *_: (lacking, ""))
    host_kernel._kernel.cache_clear()
    yield
    host_kernel._kernel.cache_clear()


def boundaries_of(documents: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(documents)])


def tensors_of(shape: tuple[int, int, int, int], num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Query, key, value and the output's gradient, as projections make them: a token's heads next to each other."""
    heads, key_heads, size, value_size = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, size), (key_heads, size), (key_heads, value_size))
    tensors = [torch.randn(1, num_tokens, n, e, generator=generator).transpose(1, 2) for n, e in sizes]
    tensors.append(torch.randn(1, num_tokens, heads, value_size, generator=generator))
    return [tensor.to(dtype) for tensor in tensors]


def results_of(tensors: Sequence[Tensor], boundaries: Tensor, scale: float = 0.2) -> list[Tensor]:
    """Output, sums and the three gradients."""
    query, key, value, gradient = tensors
    rest = (boundaries, query.new_empty(0), scale, 0, 0.0)
    output, logsumexp = attention(query, key, value, *rest)
    found = attention_backward(gradient, query, key, value, output, logsumexp, *rest)
    return [output, logsumexp, *found[:3]]


def exact_results_of(tensors: Sequence[Tensor], boundaries: Tensor, scale: float = 0.2) -> list[Tensor]:
    with without_fused_kernels():
        return results_of([tensor.float() for tensor in tensors], boundaries, scale)


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        # A document of one token has no gradient of its query, but for rounding.
        assert float((one - other).norm()) <= LIMIT * float(other.norm()) + 1e-4 * other.numel() ** 0.5


@needs_kernel
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_sums_and_gradients_are_those_of_fp32_in_blocks(shape: str, documents: str) -> None:
    boundaries = boundaries_of(DOCUMENTS[documents])
    tensors = tensors_of(SHAPES[shape], int(boundaries[-1]))
    assert host_kernel.runs(tensors[0], tensors[2])

    found, expected = results_of(tensors, boundaries), exact_results_of(tensors, boundaries)

    assert_close(found, expected)
    # They are fp32 and are never rounded.
    assert torch.allclose(found[1], expected[1], atol=2e-5, rtol=0)


@needs_kernel
@pytest.mark.parametrize("shape", ["grouped", "no whole vector"])
def test_a_document_has_the_bits_that_it_has_alone(shape: str) -> None:
    boundaries = boundaries_of(DOCUMENTS["mixed"])
    tensors = tensors_of(SHAPES[shape], int(boundaries[-1]))
    output, logsumexp, *gradients = results_of(tensors, boundaries)

    for start, stop in itertools.pairwise(boundaries.tolist()):
        query, key, value = (tensor[:, :, start:stop] for tensor in tensors[:3])
        alone = results_of([query, key, value, tensors[3][:, start:stop]], torch.tensor([0, stop - start]))
        packed = [output[:, start:stop], logsumexp[:, start:stop], *(t[:, :, start:stop] for t in gradients)]
        assert all(torch.equal(one, other) for one, other in zip(packed, alone, strict=True))


@needs_kernel
def test_the_bits_do_not_depend_on_the_number_of_threads() -> None:
    boundaries = boundaries_of(DOCUMENTS["edges"])
    tensors = tensors_of(SHAPES["grouped"], int(boundaries[-1]))
    before = torch.get_num_threads()
    found = []
    try:
        for num_threads in (1, 2, 5):
            torch.set_num_threads(num_threads)
            found.append(results_of(tensors, boundaries))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


@needs_kernel
def test_tensors_may_have_any_strides() -> None:
    boundaries = boundaries_of((70, 30))
    tensors = tensors_of(SHAPES["grouped"], 100)
    strided = [tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in tensors]
    assert all(tensor.stride(-1) != 1 for tensor in strided)
    pairs = zip(results_of(tensors, boundaries), results_of(strided, boundaries), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@needs_kernel
def test_scores_of_any_size_stay_finite() -> None:
    boundaries = boundaries_of((300,))
    tensors = tensors_of(SHAPES["grouped"], 300)
    tensors[0] = tensors[0] * 1000
    found = results_of(tensors, boundaries)
    assert all(bool(tensor.isfinite().all()) for tensor in found)
    assert_close(found[:2], exact_results_of(tensors, boundaries)[:2])


@needs_kernel
def test_a_value_that_is_no_number_is_seen_in_its_document_and_nowhere_else() -> None:
    boundaries = boundaries_of((70, 80, 50))
    tensors = tensors_of(SHAPES["grouped"], 200)
    expected = results_of(tensors, boundaries)
    tensors[1][0, 0, 75] = torch.nan
    found = results_of(tensors, boundaries)
    heads_of_key = tensors[0].shape[1] // tensors[1].shape[1]
    assert bool(found[0][0, 75:150, :heads_of_key].isnan().all())
    found[0], expected[0] = found[0].transpose(1, 2), expected[0].transpose(1, 2)
    for one, other in zip(found, expected, strict=True):
        tokens = one.dim() - 1 if one is found[1] else 2
        for start, size in ((0, 70), (150, 50)):
            assert torch.equal(one.narrow(tokens, start, size), other.narrow(tokens, start, size))


@pytest.mark.parametrize("documents", ["one token", "edges", "mixed"])
def test_without_the_instructions_torch_attends(documents: str, without_kernel: None) -> None:
    boundaries = boundaries_of(DOCUMENTS[documents])
    tensors = tensors_of(SHAPES["grouped"], int(boundaries[-1]))
    assert not host_kernel.runs(tensors[0], tensors[2])
    found, expected = results_of(tensors, boundaries), exact_results_of(tensors, boundaries)
    assert_close(found, expected)


def test_fp32_never_takes_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_kernel, "attend", None)
    query, key, value, _ = tensors_of(SHAPES["grouped"], 20, torch.float32)
    attend(query, key, value, boundaries_of((20,)))


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("g++") is None, reason="needs g++ on Linux, found none")
def test_without_the_instructions_the_source_compiles_and_says_so(tmp_path: Path) -> None:
    source, file = native.KERNEL_FOLDER / native.ATTENTION_SOURCE_FILE, tmp_path / "attention.so"
    flags = source.read_text().split("build-flags: ")[1].split("\n")[0].split()
    subprocess.run(["g++", *flags, "-DHZ_PORTABLE", str(source), "-o", str(file)], check=True, timeout=300)
    assert ctypes.CDLL(str(file)).hz_attention_runs() == 0
