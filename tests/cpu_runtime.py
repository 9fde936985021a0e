"""A driver for the cuda device that computes on the CPU: streams are the queues' own threads, marks are moments on
them.

Stands at the port `cuda_runtime.Runtime`, so that all of the cuda device but that one module runs on a machine without
a GPU.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class CpuMark:
    """A moment; waiting for one that was never recorded is a defect here, where the real driver would silently not
    wait."""

    def __init__(self) -> None:
        self.recorded = threading.Event()
        self.at_s = 0.0

    def record(self, stream: Any) -> None:
        self.at_s = time.perf_counter()
        self.recorded.set()

    def query(self) -> bool:
        return self.recorded.is_set()

    def synchronize(self) -> None:
        """What ran before it on its thread is over when it is recorded."""

    def elapsed_time(self, later: CpuMark) -> float:
        assert self.recorded.is_set() and later.recorded.is_set()
        return 1e3 * (later.at_s - self.at_s)


class CpuRuntime:
    """See the module. `pinnable_bytes` is how much the driver agrees to register; `memory_bytes` what it was limited
    to.

    From `broken` on, every call that waits for the device fails, as after an illegal access. `is_full` makes it refuse
    to place tensors.
    """

    device = torch.device("cpu")

    def __init__(self, *, pinnable_bytes: int = 1 << 40) -> None:
        self.pinnable_bytes = pinnable_bytes
        self.registered: dict[int, int] = {}
        self.memory_bytes: int | None = None
        self.peak_bytes = self.reserved_bytes = self.num_releases = 0
        self.broken: str | None = None
        self.is_full = False

    def new_stream(self) -> object:
        return object()

    def using(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def new_mark(self) -> CpuMark:
        return CpuMark()

    def wait(self, stream: Any, mark: CpuMark) -> None:
        assert mark.recorded.is_set(), "the driver takes a wait for an unrecorded mark for no wait at all"

    def synchronize(self) -> None:
        """Nothing is left to do when a call returns."""
        if self.broken:
            raise RuntimeError(self.broken)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def register(self, address: int, num_bytes: int) -> int:
        if sum(self.registered.values()) + num_bytes > self.pinnable_bytes:
            return 2
        assert address not in self.registered, "registered twice"
        self.registered[address] = num_bytes
        return 0

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def place(self, tensor: Tensor) -> Tensor:
        if self.is_full:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.\nMore.")
        return tensor.to(self.device)

    def limit_memory(self, num_bytes: int | None) -> None:
        self.memory_bytes = num_bytes

    def release_cached(self) -> None:
        self.num_releases += 1

    def peak_allocated_bytes(self) -> int:
        return self.peak_bytes

    def peak_reserved_bytes(self) -> int:
        return max(self.peak_bytes, self.reserved_bytes)

    def generator(self) -> torch.Generator:
        return torch.default_generator
