"""The trial on the real weights: what is rounding and what is documents that mix."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from horizon_server.engine.attention.function import attend
from horizon_server.engine.attention.fused import without_fused_kernels
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.packing_limit import supports_packing


class Layers:
    """Layers whose packed rows come out `mixed` off, and whose kernel without fused attention is `noise` off, relative
    to what they add."""

    def __init__(self, *, mixed: float, noise: float) -> None:
        self._mixed, self._noise = mixed, noise

    def __call__(self, rows: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
        inputs, outputs = [], []
        for row in rows:
            added = 1.0 + self._mixed * (len(row.document_lengths) > 1)
            # torch's switches are the process's, so a trial that asks for another kernel gets it on compute's thread
            # too.
            if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
                added += self._noise
            inputs.append(torch.ones(row.num_tokens, 4))
            outputs.append(inputs[-1] + added)
        return torch.cat(inputs), torch.cat(outputs)


@pytest.mark.parametrize(
    ("dtype", "mixed", "noise", "supported"),
    [
        (torch.bfloat16, 0.03, 0.0, True),
        # A deep model: as far off as another kernel on the very same rows.
        (torch.bfloat16, 0.08, 0.07, True),
        # As far off, but no kernel's rounding explains it.
        (torch.bfloat16, 0.08, 0.001, False),
        # Mixed, in a model so noisy that rounding might have hidden it.
        (torch.bfloat16, 0.9, 0.6, False),
        (torch.float32, 5e-5, 0.0, True),
        (torch.float32, 5e-4, 1.0, False),
    ],
)
def test_rounding_does_not_turn_packing_off_and_mixing_does(
    dtype: torch.dtype, mixed: float, noise: float, *, supported: bool
) -> None:
    layers = Layers(mixed=mixed, noise=noise)
    assert supports_packing(layers, vocab_size=100, compute_dtype=dtype) is supported
    assert torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]


def test_rounding_of_own_attention_in_a_deep_model_does_not_turn_packing_off() -> None:
    """Our attention is no choice of torch's, so torch's switches alone show no rounding of it."""
    generator = torch.Generator().manual_seed(0)
    projections = [0.2 * torch.randn(3, 32, 32, generator=generator).bfloat16() for _ in range(24)]

    def deep(rows: Sequence[MicroBatch]) -> tuple[Tensor, Tensor]:
        inputs, outputs = [], []
        for row in rows:
            ends = torch.tensor([0, *accumulate(row.document_lengths)])
            hidden_TD = torch.nn.functional.one_hot(row.input_ids_T, 32).bfloat16()
            inputs.append(hidden_TD)
            # Stands for the tiles that a GPU's kernel chooses by the length of a row.
            with without_fused_kernels() if len(row.document_lengths) > 1 else nullcontext():
                for weights in projections:
                    query, key, value = (hidden_TD @ weight for weight in weights)
                    query, key, value = (x.unflatten(1, (4, 8)).transpose(0, 1)[None] for x in (query, key, value))
                    hidden_TD = hidden_TD + attend(query, key, value, ends, scale=0.35)[0].flatten(1)
            outputs.append(hidden_TD)
        return torch.cat(inputs), torch.cat(outputs)

    assert supports_packing(deep, vocab_size=32, compute_dtype=torch.bfloat16)
