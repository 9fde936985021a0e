"""What the functions of the engine that autograd differentiates have in common."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

Forward = TypeVar("Forward", bound=Callable[..., object])


def with_signature(forward: Forward) -> Forward:
    """Keep a forward's signature with it: `torch.autograd.Function.apply` asks for it in every call where there is a
    `setup_context`, and finding it takes three times as long as all the rest of the call."""
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward
