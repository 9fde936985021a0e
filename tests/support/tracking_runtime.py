"""A stand-in driver that counts what compute allocates: the plan's arithmetic, checked on the real code without a GPU.

It refuses what is beyond a limit, as a GPU does. It sees what reaches torch's dispatcher: every tensor that an
operation returns. What a kernel allocates inside itself it does not see.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from tests.cpu_runtime import CpuRuntime
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from horizon_server.engine import cross_entropy

_ALIGN_BYTES = 512
"""What the allocator on a GPU rounds up to."""


class Allocations:
    """Bytes of storages that came up in tracked work and are still alive, and what was alive at their peak. Thread:
    any."""

    def __init__(self) -> None:
        self.peak_bytes = self.held_bytes = 0
        self.limit_bytes: int | None = None
        self.at_peak: list[str] = []
        self._live: dict[int, tuple[int, str]] = {}
        self._lock = threading.RLock()

    def add(self, tensor: Tensor, origin: str) -> None:
        """Count a tensor's storage, once.

        Raises:
            OutOfMemoryError: it is beyond the limit.
        """
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, -(-storage.nbytes() // _ALIGN_BYTES) * _ALIGN_BYTES
        with self._lock:
            if key in self._live or tensor.is_meta:
                return
            if self.limit_bytes is not None and self.held_bytes + num_bytes > self.limit_bytes:
                raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes >> 20} MiB.")
            self._live[key] = num_bytes, f"{num_bytes:>12,} {origin} {tuple(tensor.shape)} {tensor.dtype}"
            self.held_bytes += num_bytes
            if self.held_bytes > self.peak_bytes:
                self.peak_bytes = self.held_bytes
                self.at_peak = [text for _, text in sorted(self._live.values(), reverse=True)[:16]]
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        with self._lock:
            self.held_bytes -= self._live.pop(key)[0]


class _Tracking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, allocations: Allocations) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._allocations = allocations

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # A view of what was given was counted when it was made, or is memory that was allocated by name.
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in given:
                self._allocations.add(leaf, str(func))
        return result


class TrackingRuntime(CpuRuntime):
    """What runs inside its streams is tracked, and what is placed on the device. What is allocated by name is not."""

    def __init__(self) -> None:
        super().__init__()
        self.allocations = Allocations()

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        return _Tracking(self.allocations)

    def place(self, tensor: Tensor) -> Tensor:
        placed = super().place(tensor).clone()
        self.allocations.add(placed, "place")
        return placed

    def limit_memory(self, num_bytes: int | None) -> None:
        super().limit_memory(num_bytes)
        self.allocations.limit_bytes = num_bytes

    def peak_allocated_bytes(self) -> int:
        return self.allocations.peak_bytes


def count_losses_as_of_a_kernel(patch: pytest.MonkeyPatch) -> None:
    """A GPU's kernel turns logits into their gradient without memory of its own; the CPU's blocks must not count."""
    row_losses = cross_entropy._row_losses

    def untracked(*arguments: Any) -> Tensor:
        with _disable_current_modes():
            return row_losses(*arguments)

    patch.setattr(cross_entropy, "_row_losses", untracked)
