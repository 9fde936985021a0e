"""Memory as an account: what each component of a device holds, with a clear refusal where it would not fit, and the host memory that
a device copies from and to, besides the store (activation checkpoints, gradients on their way).

Owns the numbers and the mappings.

Units: bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from horizon_server.errors import DoesNotFit
from horizon_server.store import planes


class Arena:
    """Allocations by component under one limit, on a torch device. `limit_bytes` None means unbounded.

    Thread: safe from any.
    """

    def __init__(self, *, limit_bytes: int | None, device: torch.device | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._device = device or torch.device("cpu")
        self._held: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._peak_total = 0
        self._blocks: dict[int, tuple[str, int]] = {}
        self._lock = threading.Lock()

    def allocate(self, component: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A flat, uninitialised tensor.

        Raises:
            DoesNotFit: the limit would be exceeded.
        """
        num_bytes = num_elements * dtype.itemsize
        self.charge(component, num_bytes)
        tensor = torch.empty(num_elements, dtype=dtype, device=self._device)
        with self._lock:
            self._blocks[tensor.untyped_storage().data_ptr()] = (component, num_bytes)
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Take an allocation off the account; the caller drops the tensor."""
        with self._lock:
            component, num_bytes = self._blocks.pop(tensor.untyped_storage().data_ptr())
        self.charge(component, -num_bytes)

    def owns(self, tensor: Tensor) -> bool:
        """Whether the tensor is a view into an allocation of this arena."""
        return tensor.untyped_storage().data_ptr() in self._blocks

    def charge(self, component: str, num_bytes: int) -> None:
        """Add to a component's account; negative releases.

        Raises:
            DoesNotFit: the limit would be exceeded.
        """
        with self._lock:
            held_total = sum(self._held.values())
            if num_bytes > 0 and self._limit_bytes is not None and held_total + num_bytes > self._limit_bytes:
                held = ", ".join(f"{name} {size:,}" for name, size in sorted(self._held.items()) if size)
                raise DoesNotFit(
                    f"device memory: {component} needs {num_bytes:,} bytes more, but {held_total:,} of the limit of "
                    f"{self._limit_bytes:,} bytes are in use ({held or 'nothing'}); lower tokens_per_step or sequence_length, "
                    "or raise the device's memory limit"
                )
            self._held[component] = self._held.get(component, 0) + num_bytes
            self._peak[component] = max(self._peak.get(component, 0), self._held[component])
            # Of the sum: components have their peaks at different moments.
            self._peak_total = max(self._peak_total, held_total + num_bytes)

    def held_bytes(self) -> Mapping[str, int]:
        """What each component holds now."""
        with self._lock:
            return dict(self._held)

    def peak_bytes(self) -> Mapping[str, int]:
        """The most each component has held."""
        with self._lock:
            return dict(self._peak)

    @property
    def peak_total_bytes(self) -> int:
        """The most that was held at one moment."""
        return self._peak_total


class HostBuffers:
    """Page-aligned blocks, provided by the kernel at once and in parallel: nothing faults in the middle of a step.

    Thread: one driving thread.
    """

    def __init__(self, *, num_threads: int) -> None:
        self._num_threads = num_threads
        self._account = Arena(limit_bytes=None)
        self._blocks: dict[int, tuple[str, int]] = {}

    def allocate(self, component: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros.

        Raises:
            DoesNotFit: the kernel has no memory left.
        """
        # The kernel maps no empty range; an offloading model of one layer has nothing to offload.
        if num_elements == 0:
            return torch.empty(0, dtype=dtype)
        num_bytes = num_elements * dtype.itemsize
        mapping = planes.map_anonymous(num_bytes)
        planes.touch(mapping, num_threads=self._num_threads)
        # The tensor keeps the mapping alive; the last view to go unmaps it.
        tensor = torch.frombuffer(mapping, dtype=dtype, count=num_elements)
        self._blocks[tensor.data_ptr()] = (component, num_bytes)
        self._account.charge(component, num_bytes)
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Take a block off the account; the caller drops the tensor."""
        if tensor.numel() == 0:
            return
        component, num_bytes = self._blocks.pop(tensor.data_ptr())
        self._account.charge(component, -num_bytes)

    def peak_bytes(self) -> Mapping[str, int]:
        """The most each component has held."""
        return self._account.peak_bytes()
