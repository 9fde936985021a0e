"""What the engine asks of a GPU's fused kernel for chunks of a row: its calls, computed by definition on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import current_flash_attention_impl, register_flash_attention_impl

from horizon_server.engine.attention import fused, implementation
from horizon_server.engine.attention.chunked import ChunkedRow, chunks_of
from horizon_server.engine.attention.function import attend
from horizon_server.engine.attention.implementation import Heads, adopt

CHUNK = 32
DOCUMENTS = (40, 7, 49)
HEADS, KEY_HEADS = 4, 2
Calls = list[tuple[str, int, int, str | None]]


class FlashAttention:
    """FlashAttention's form for documents of any length, [tokens, heads, size], by its definition: the last query of a
    document sees its last key, and a window goes to the left from there."""

    def __init__(self) -> None:
        self.calls: Calls = []
        """Each with its queries, its keys, and which implementation torch had active."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor, *given: Any, **options: Any
    ) -> tuple[Tensor, ...]:
        self._check("forward", query, key, ends, key_ends, given)
        output, sums = torch.empty_like(query), query.new_empty(query.shape[1], query.shape[0])
        for own, seen in _documents(ends, key_ends):
            scores = _scores(query[own], key[seen], given[3], options)
            sums[:, own] = scores.logsumexp(-1)
            output[own] = (scores.softmax(-1) @ _by_head(value[seen])).transpose(0, 1)
        state = torch.zeros(2, dtype=torch.uint64)
        return output, sums, state, state, query.new_empty(0)

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        sums: Tensor,
        ends: Tensor,
        key_ends: Tensor,
        *given: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._check("backward", query, key, ends, key_ends, given)
        results = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for own, seen in _documents(ends, key_ends):
            weights = (_scores(query[own], key[seen], given[3], options) - sums[:, own, None]).exp()
            change = gradient[own].transpose(0, 1)
            dots = (gradient[own] * output[own]).sum(-1).transpose(0, 1)[..., None]
            for_scores = weights * (change @ _by_head(value[seen]).transpose(1, 2) - dots) * options["scale"]
            results[0][own] = (for_scores @ _by_head(key[seen])).transpose(0, 1)
            results[1][seen] = _by_key(for_scores.transpose(1, 2) @ query[own].transpose(0, 1))
            results[2][seen] = _by_key(weights.transpose(1, 2) @ change)
        return results

    def _check(
        self, what: str, query: Tensor, key: Tensor, ends: Tensor, key_ends: Tensor, given: tuple[Any, ...]
    ) -> None:
        assert (ends.dtype, key_ends.dtype) == (torch.int32, torch.int32)
        assert (int(ends[-1]), int(key_ends[-1])) == (len(query), len(key))
        assert given[:3] == (int(ends.diff().max()), int(key_ends.diff().max()), 0.0)
        self.calls.append((what, len(query), len(key), current_flash_attention_impl()))


def _documents(ends: Tensor, key_ends: Tensor) -> Iterator[tuple[slice, slice]]:
    for own, seen in zip(pairwise(ends.tolist()), pairwise(key_ends.tolist()), strict=True):
        yield slice(*own), slice(*seen)


def _scores(query: Tensor, key: Tensor, is_causal: bool, options: dict[str, Any]) -> Tensor:
    """[heads, queries, keys]."""
    scores = torch.matmul(query.transpose(0, 1), _by_head(key).transpose(1, 2)) * float(options["scale"])
    places = torch.arange(len(query))[:, None] + len(key) - len(query)
    behind, left = places - torch.arange(len(key))[None], options.get("window_size_left")
    if left is not None:
        return scores.masked_fill((behind < 0) | (behind > left), -torch.inf)
    return scores.masked_fill(behind < 0, -torch.inf) if is_causal else scores


def _by_head(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, 1).repeat_interleave(HEADS // KEY_HEADS, 0)


def _by_key(tensor: Tensor) -> Tensor:
    return torch.unflatten(tensor, 0, (KEY_HEADS, -1)).sum(1).transpose(0, 1)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[FlashAttention]:
    """In the place of a GPU's."""
    found = FlashAttention()
    library: Any = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("_flash_attention_forward", found.forward, "CPU")
    library.impl("_flash_attention_backward", found.backward, "CPU")
    monkeypatch.setattr(fused, "kernel_of", lambda _: "gpu")
    yield found
    library._destroy()


def inputs(value_size: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, 16), (KEY_HEADS, 16), (KEY_HEADS, value_size))
    return [torch.randn(1, sum(DOCUMENTS), n, e, generator=generator).transpose(1, 2) for n, e in sizes]


def in_chunks(given: list[Tensor], gradient: Tensor, window: int) -> list[Tensor]:
    """Output, and gradients of query, key and value."""
    parts = [tensor.clone().requires_grad_() for tensor in given]
    kept = [torch.full_like(tensor, torch.nan) for tensor in given[1:]]
    sums = (torch.zeros_like(kept[0]), torch.zeros_like(kept[1]))
    outputs = {}
    for chunk, boundaries in chunks_of([0, *accumulate(DOCUMENTS)], CHUNK):
        row = ChunkedRow(chunk, boundaries, kept[0], kept[1], sums, block_tokens=CHUNK)
        query, key, value = (tensor[:, :, chunk.first : chunk.stop] for tensor in parts)
        outputs[chunk.first] = row.attend(query, key, value, scale=None, window=window, softcap=None, sinks=None)
    for first in reversed(outputs):
        torch.autograd.backward(outputs[first], gradient[:, first : first + CHUNK])
    return [
        torch.cat(list(outputs.values()), 1).detach(),
        *(tensor.grad for tensor in parts if tensor.grad is not None),
    ]


def as_a_whole(given: list[Tensor], gradient: Tensor, window: int) -> list[Tensor]:
    whole = [tensor.clone().requires_grad_() for tensor in given]
    with fused.without_fused_kernels():
        query, key, value = whole
        output = attend(query, key, value, torch.tensor([0, *accumulate(DOCUMENTS)]), window=window)
        torch.autograd.backward(output, gradient)
    return [output.detach(), *(tensor.grad for tensor in whole if tensor.grad is not None)]


@pytest.mark.parametrize("value_size", [16, 8])
@pytest.mark.parametrize("window", [0, 20, 45])
def test_one_call_attends_to_all_keys_up_to_a_chunk(
    window: int, value_size: int, request: pytest.FixtureRequest
) -> None:
    given = inputs(value_size)
    gradient = torch.randn(1, sum(DOCUMENTS), HEADS, value_size, generator=torch.Generator().manual_seed(1))
    expected = as_a_whole(given, gradient, window)
    kernel: FlashAttention = request.getfixturevalue("kernel")
    found = in_chunks(given, gradient, window)
    assert len(found) == len(expected) == 4
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) < 1e-6
    forward = [(queries, keys) for what, queries, keys, _ in kernel.calls if what == "forward"]
    backward = [(queries, keys) for what, queries, keys, _ in kernel.calls if what == "backward"]
    if window:
        # The second chunk begins in the first document, the third in the last, which began before it.
        more = [min(window - 1, 32), min(window - 1, 17)]
        assert forward == [(32, 32), (32, 32 + more[0]), (32, 32 + more[1])]
        assert backward == forward[::-1]
    elif value_size == 16:
        assert forward == [(32, 32), (32, 64), (32, 49)]
        # Of earlier keys alone: those of the chunk come from the kernel for whole rows.
        assert backward == [(32, 17), (8, 32)]
    else:
        # Keys whose values are smaller would be copied, all of a row's.
        assert forward == [(8, 32), (32, 17)]


def test_the_adopted_implementation_serves_earlier_keys_too(kernel: FlashAttention) -> None:
    class Handle:
        def remove(self) -> None:
            """The stand-in stays: what counts is which implementation is active."""

    register_flash_attention_impl("chunks", register_fn=Handle)
    heads = Heads(queries=HEADS, keys=KEY_HEADS, size=16, value_size=16)
    adopt(heads, "chunks")
    try:
        in_chunks(inputs(16), torch.ones(1, sum(DOCUMENTS), HEADS, 16), 0)
        assert {active for *_, active in kernel.calls} == {"chunks"}
        kernel.calls.clear()
        # A window that hides keys is left to torch's own.
        in_chunks(inputs(16), torch.ones(1, sum(DOCUMENTS), HEADS, 16), 20)
        assert {active for _, _, keys, active in kernel.calls if keys > 20} == {None}
    finally:
        del implementation._adopted[heads]
