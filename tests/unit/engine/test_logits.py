"""Whether a head's backward reads its logits, found out by trying."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from horizon_server.engine.logits import keeps_logits


def soft_cap(logits: Tensor) -> Tensor:
    return 30 * torch.tanh(logits / 30)


def unable(logits: Tensor) -> Tensor:
    raise TypeError("cannot run on ones")


@pytest.mark.parametrize(
    ("end", "kept"),
    [
        (lambda logits: logits, False),
        (lambda logits: 0.5 * logits.float(), False),
        (soft_cap, False),
        (torch.tanh, True),
        (lambda logits: logits.softmax(-1), True),
        (unable, True),
    ],
)
def test_what_ends_the_head_decides(end: Callable[[Tensor], Tensor], kept: bool) -> None:
    def head(parameters: Mapping[str, Tensor], hidden_1CD: Tensor) -> Tensor:
        hidden = functional.rms_norm(hidden_1CD, (8,), parameters["norm"])
        return end(functional.linear(hidden, parameters["lm_head"]))[0]

    parameters = {"norm": torch.zeros(8), "lm_head": torch.zeros(()).expand(50, 8)}

    assert keeps_logits(head, parameters, "lm_head", hidden_size=8) == kept


def test_the_projection_takes_no_memory() -> None:
    def head(parameters: Mapping[str, Tensor], hidden_1CD: Tensor) -> Tensor:
        return functional.linear(hidden_1CD, parameters["lm_head"])[0]

    # As a matrix it would take 8 TB.
    parameters = {"lm_head": torch.zeros(()).expand(200_000, 10_000_000)}

    assert not keeps_logits(head, parameters, "lm_head", hidden_size=8)
