"""Which implementation computes fused attention: torch's own kernels, or one of those that torch can put behind the
operators that `kernels` calls.

An implementation is active only while one of the engine's operators runs: what else in the process asks torch for
attention (generation, layers that keep their masks) gets torch's own. To switch there and back takes about 0.05 ms.
Source: torch.nn.attention.activate_flash_attention_impl.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of an attention call: how many, and their sizes. An implementation compiles a kernel for each."""

    queries: int
    keys: int
    size: int
    value_size: int

    @classmethod
    def of(cls, query: Tensor, key: Tensor, value: Tensor) -> Heads:
        """Those of [1, heads, T, E]."""
        return cls(queries=query.shape[1], keys=key.shape[1], size=query.shape[-1], value_size=value.shape[-1])


# Changed by the trainer's thread before its first step, read by compute's.
_adopted: dict[Heads, str] = {}


def adopt(heads: Heads, name: str) -> None:
    """Have calls with these heads computed by an implementation of torch's registry; by torch's own where it is
    empty."""
    _adopted[heads] = name


@contextmanager
def implementation_of(heads: Heads, *, has_window: bool) -> Iterator[None]:
    """Inside, torch's operators are those adopted for these heads. A window that hides keys is left to torch's own:
    FlashAttention-4's backward has none on compute capability 9.0."""
    name = "" if has_window else _adopted.get(heads, "")
    if not name:
        yield
        return
    activate_flash_attention_impl(name)
    try:
        yield
    finally:
        restore_flash_attention_impl()


def use_deterministic_kernels(wanted: bool, device: torch.device) -> None:
    """Have torch use the kernels that add in a fixed order, wherever it has them: a switch of the whole process. On a
    CPU its kernels do so anyway, and nothing changes.

    Where torch knows only a kernel that adds in another order each time, it warns and runs it.
    """
    if device.type != "cuda":
        return
    # Not torch.use_deterministic_algorithms, which loads the compiler; and memory that a kernel is about to write is
    # not filled before.
    torch._C._set_deterministic_algorithms(wanted, warn_only=True)
    torch._C._set_deterministic_fill_uninitialized_memory(not wanted)
