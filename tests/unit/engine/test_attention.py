"""Attention without masks: the numbers of the formula, for which models it is used, and that torch can trace it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.support.tiny_models import config_of, template_of
from torch import Tensor
from torch.func import vjp
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionMaskInterface

from horizon_server.engine.attention import blocks, fused, host_kernel, trial
from horizon_server.engine.attention.function import attend
from horizon_server.engine.attention.kernels import attention, attention_backward
from horizon_server.engine.template import Template
from horizon_server.planning import working_memory
from horizon_server.planning.model_folder import ModelShape

SHAPES = {
    "grouped": (8, 4, 16, 16),
    "latent": (4, 4, 24, 16),
    "wide values": (4, 1, 8, 32),
    "large heads": (2, 1, 256, 256),
}
SCORES_ON_CPU = blocks._SCORES["cpu"]
DOCUMENTS = {"one": (230,), "packed": (1, 100, 34, 95)}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short rows have several blocks too."""
    monkeypatch.setitem(blocks._SCORES, "cpu", 1 << 15)


def boundaries_of(documents: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(documents)])


def tensors_of(shape: tuple[int, int, int, int], num_tokens: int) -> list[Tensor]:
    heads, key_heads, size, value_size = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, size), (key_heads, size), (key_heads, value_size))
    # As projections make them: a token's heads next to each other.
    return [torch.randn(1, num_tokens, n, e, generator=generator).transpose(1, 2) for n, e in sizes]


def formula(
    query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, window: int, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention with a mask, written out."""
    num_tokens, per_group = query.shape[2], query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(per_group, 1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * 0.2
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    document_T = torch.arange(len(boundaries) - 1).repeat_interleave(boundaries.diff())
    places_T = torch.arange(num_tokens)
    seen_TT = (document_T[:, None] == document_T) & (places_T <= places_T[:, None])
    if window:
        seen_TT &= places_T > places_T[:, None] - window
    scores = scores.masked_fill(~seen_TT, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(1, -1, num_tokens, 1)], -1)
    weights: Tensor = scores.softmax(-1)[..., :num_tokens]
    return (weights @ value).transpose(1, 2)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 5e-6), (torch.bfloat16, 6e-2)])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"),
    [(0, 0.0, False), (9, 0.0, False), (99, 0.0, True), (0, 5.0, False), (9, 5.0, True)],
)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_gradients_are_those_of_the_formula(
    shape: str, documents: str, window: int, softcap: float, has_sinks: bool, dtype: torch.dtype, limit: float
) -> None:
    boundaries = boundaries_of(DOCUMENTS[documents])
    inputs = tensors_of(SHAPES[shape], int(boundaries[-1]))
    torch.manual_seed(1)
    if has_sinks:
        inputs.append(torch.randn(inputs[0].shape[1]))
    ours = [tensor.to(dtype).requires_grad_() for tensor in inputs]
    exact = [tensor.detach().double().requires_grad_() for tensor in ours]
    sinks, exact_sinks = (ours[3], exact[3]) if has_sinks else (None, None)

    query, key, value = ours[:3]
    found = attend(query, key, value, boundaries, scale=0.2, window=window, softcap=softcap, sinks=sinks)
    expected = formula(exact[0], exact[1], exact[2], boundaries, window, softcap, exact_sinks)
    # Along the output, or the terms of a sink's gradient cancel and only their rounding is left.
    gradient = expected.detach() + torch.randn_like(expected)
    torch.autograd.backward(found, gradient.to(dtype))
    torch.autograd.backward(expected, gradient)

    pairs = [(found, expected), *((one.grad, other.grad) for one, other in zip(ours, exact, strict=True))]
    for one, other in pairs:
        assert one is not None and other is not None
        with torch.no_grad():
            assert float((one - other).norm() / other.norm()) <= limit


def test_a_document_in_a_packed_row_has_the_bits_that_it_has_alone() -> None:
    boundaries = boundaries_of((5, 300, 95))
    query, key, value = tensors_of(SHAPES["grouped"], 400)
    packed = attend(query, key, value, boundaries)
    start, stop = boundaries[1:3].tolist()
    query, key, value = (tensor[:, :, start:stop] for tensor in (query, key, value))
    alone = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.equal(packed[:, start:stop], alone.transpose(1, 2))


def test_documents_of_all_lengths_reach_torchs_kernel_in_bf16_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_kernel, "runs", lambda *_: False)
    lengths: set[int] = set()
    filled = fused._filled

    def record(*args: Any, **options: Any) -> Tensor:
        document = filled(*args, **options)
        if document.dtype is torch.bfloat16:
            lengths.add(document.shape[2])
        return document

    monkeypatch.setattr(fused, "_filled", record)
    # Their backward is in fp32, where lengths do not matter.
    boundaries = boundaries_of(range(1, 40))
    inputs = [tensor.bfloat16().requires_grad_() for tensor in tensors_of(SHAPES["grouped"], int(boundaries[-1]))]

    attend(inputs[0], inputs[1], inputs[2], boundaries).float().sum().backward()  # type: ignore[no-untyped-call]

    assert lengths == {64}
    assert all(tensor.grad is not None and bool(tensor.grad.isfinite().all()) for tensor in inputs)


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_operators_answer_without_storage_as_they_do_with_it(shape: str, has_sinks: bool) -> None:
    boundaries = boundaries_of((30, 10))
    tensors = tensors_of(SHAPES[shape], 40)
    sinks = torch.randn(tensors[0].shape[1]) if has_sinks else torch.empty(0)
    rest: tuple[Any, ...] = (boundaries, sinks, 0.2, 0, 0.0)
    output, logsumexp = attention(*tensors, *rest)
    real = [output, logsumexp, *attention_backward(output, *tensors, output, logsumexp, *rest)]
    torch.library.opcheck(attention, (*tensors, *rest), test_utils=["test_schema", "test_faketensor"])
    meta = [tensor.to("meta") for tensor in tensors]
    rest = (boundaries.to("meta"), sinks.to("meta"), 0.2, 0, 0.0)
    output, logsumexp = attention(*meta, *rest)
    without = [output, logsumexp, *attention_backward(output, *meta, output, logsumexp, *rest)]
    for one, other in zip(real, without, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_a_trace_holds_for_rows_of_any_length_and_number_of_documents() -> None:
    def gradients(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, gradient: Tensor) -> Any:
        found: Any = vjp(lambda q, k, v: attend(q, k, v, boundaries, window=20), query, key, value)
        output, back = found
        return output, back(gradient)

    def example(*documents: int) -> list[Tensor]:
        tensors = tensors_of(SHAPES["grouped"], sum(documents))
        return [*tensors, boundaries_of(documents), torch.ones(1, sum(documents), 8, 16)]

    traced: Callable[..., Any] = make_fx(gradients, tracing_mode="symbolic")(*example(30, 13))
    for documents in ((30, 13), (57,), (5, 6, 70)):
        row = example(*documents)
        torch.testing.assert_close(traced(*row), gradients(*row))


@pytest.mark.parametrize(
    ("model_type", "needs_masks"),
    [
        ("qwen3", False),
        ("gemma2", False),
        ("gpt_oss", False),
        ("deepseek_v3", False),
        ("gpt2", False),
        ("qwen3_next", False),
        # In this order: chunks, distances in the mask, attention of its own, an indexer that changes the mask, no
        # attention.
        *((model_type, True) for model_type in ("llama4_text", "bloom", "gptj", "deepseek_v32", "mamba")),
    ],
)
def test_a_trial_decides_which_models_need_masks(model_type: str, needs_masks: bool) -> None:
    config = config_of(model_type)
    template = template_of(config)
    assert template.needs_masks == needs_masks
    # Said in the job's events: what is served may differ between versions of transformers.
    assert bool(template.keeps_masks) == needs_masks
    # The plan knows without torch. It does not ask for models without attention.
    assert ModelShape.from_config(config.to_dict()).needs_masks == (needs_masks and model_type != "mamba")


@pytest.mark.parametrize("sliding_window", [9, 4096])
@pytest.mark.parametrize("difference", [-1, 1])
def test_a_window_that_is_off_by_one_is_found_out(
    sliding_window: int, difference: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("mistral", sliding_window=sliding_window, max_position_embeddings=1 << 17)
    assert not Template.from_config(config).needs_masks
    real = trial._causal
    monkeypatch.setattr(trial, "_causal", lambda q, k, window: real(q, k, window and window + difference))
    assert Template.from_config(config).needs_masks


def test_the_plan_counts_the_blocks_that_are_computed() -> None:
    # Not the fixture's, but the module's own.
    assert working_memory.BLOCK_SCORES == 1 << 22 == SCORES_ON_CPU
    assert working_memory.BLOCK_QUERIES == blocks._MIN_BLOCK


def test_attention_with_dropout_keeps_its_implementation() -> None:
    config = config_of("qwen3", attention_dropout=0.1)
    template = Template.from_config(config)
    assert template.needs_masks and ModelShape.from_config(config.to_dict()).needs_masks
    assert template.config._attn_implementation == "sdpa"


def test_no_mask_is_made_for_a_packed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    template = template_of(config_of("gemma2"))
    made = []
    for name in ("sdpa", "eager"):
        monkeypatch.setitem(AttentionMaskInterface._global_mapping, name, lambda **_: made.append(1))
    table = {place.name: torch.zeros(place.piece.shape) for place in template.places[0]}
    positions = torch.cat([torch.arange(20), torch.arange(30)])
    with torch.no_grad():
        _, calls = template.embed(table, torch.zeros(50, dtype=torch.int64), positions, torch.tensor([0, 20, 50]))
    assert not made
    assert max(tensor.numel() for call in calls for tensor in call.tensors()) < 50 * 50


def test_the_boundaries_of_documents_go_to_a_device_without_waiting_for_it() -> None:
    copies: list[tuple[torch.dtype, bool]] = []

    class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if result.device.type == "meta":
                copies.append((args[0].dtype, bool((kwargs or {}).get("non_blocking"))))
            return result

    with Seen():  # type: ignore[no-untyped-call]
        placed = fused._placed(boundaries_of((3, 5)), torch.device("meta"))

    assert placed.dtype == torch.int32
    # One copy, of integers of the kernel's own size: nothing is converted on the device.
    assert copies == [(torch.int32, True)]
