"""A device's memory as a bounded account: who holds how much, and a clear refusal when it would not fit.

Owns the numbers.

Units: bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from horizon_server.errors import DoesNotFit


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
                raise DoesNotFit(self._refusal(component, num_bytes, held_total))
            self._held[component] = self._held.get(component, 0) + num_bytes
            self._peak[component] = max(self._peak.get(component, 0), self._held[component])
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

    def _refusal(self, component: str, num_bytes: int, held_total: int) -> str:
        held = ", ".join(f"{name} {size:,}" for name, size in sorted(self._held.items()) if size)
        return (
            f"device memory: {component} needs {num_bytes:,} bytes more, but {held_total:,} of the limit of "
            f"{self._limit_bytes:,} bytes are in use ({held or 'nothing'}); lower tokens_per_step or sequence_length, "
            "or raise the device's memory limit"
        )
