"""Host memory that a device copies from and to, besides the store: activation checkpoints and gradients on their way.

Owns the mappings and their account.

Units: bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from horizon_server.store import planes


class HostBuffers:
    """Page-aligned blocks, provided by the kernel at once and in parallel: nothing faults in the middle of a step.

    Thread: one driving thread.
    """

    def __init__(self, *, num_threads: int) -> None:
        self._num_threads = num_threads
        self._held: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._blocks: dict[int, tuple[str, int]] = {}

    def allocate(self, component: str, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A flat tensor of zeros.

        Raises:
            DoesNotFit: the kernel has no memory left.
        """
        if num_elements == 0:
            return torch.empty(0, dtype=dtype)
        num_bytes = num_elements * dtype.itemsize
        mapping = planes.map_anonymous(num_bytes)
        planes.touch(mapping, num_threads=self._num_threads)
        # The tensor keeps the mapping alive; the last view to go unmaps it.
        tensor = torch.frombuffer(mapping, dtype=dtype, count=num_elements)
        self._blocks[tensor.data_ptr()] = (component, num_bytes)
        self._held[component] = self._held.get(component, 0) + num_bytes
        self._peak[component] = max(self._peak.get(component, 0), self._held[component])
        return tensor

    def free(self, tensor: Tensor) -> None:
        """Take a block off the account; the caller drops the tensor."""
        if tensor.numel() == 0:
            return
        component, num_bytes = self._blocks.pop(tensor.data_ptr())
        self._held[component] -= num_bytes

    def peak_bytes(self) -> Mapping[str, int]:
        """The most each component has held."""
        return dict(self._peak)
