"""Recompute points: the input of every layer, for all tokens of a step, in one block of device memory.

Owns that block and the gradient of the hidden state beside it. Must not know layers or queues.

Shapes: L = layers, N = tokens of the step over all its micro-batches, D = hidden size.
"""

from __future__ import annotations

from torch import Tensor

from horizon_server.engine.device.protocol import Device


class Activations:
    """Room for L + 1 hidden states (layer inputs and the last output) and one gradient, N tokens each.

    It grows to the largest step seen and then stays, so that a run in its stride allocates nothing.
    """

    def __init__(self, device: Device, *, num_layers: int, hidden_size: int) -> None:
        self._device, self._num_layers, self._hidden_size = device, num_layers, hidden_size
        self._block: Tensor | None = None
        self._capacity_tokens = 0
        self._num_tokens = 0

    @property
    def capacity_tokens(self) -> int:
        """Tokens a step may have before the block grows."""
        return self._capacity_tokens

    def reserve(self, num_tokens: int) -> None:
        """Make room for a step. The queues must be idle.

        Raises:
            DoesNotFit: the device's memory limit would be exceeded.
        """
        self._num_tokens = num_tokens
        if num_tokens <= self._capacity_tokens:
            return
        self.close()
        num_elements = (self._num_layers + 2) * num_tokens * self._hidden_size
        self._block = self._device.allocate("activations", num_elements, self._device.compute_dtype)
        self._capacity_tokens = num_tokens

    def layer_input(self, index: int) -> Tensor:
        """The input of layer `index`; index L is the last layer's output. Shapes: [N, D]."""
        return self._plane(index)

    @property
    def gradient(self) -> Tensor:
        """The gradient of the hidden state, wherever backward stands. Shapes: [N, D]."""
        return self._plane(self._num_layers + 1)

    def close(self) -> None:
        """Give the block back. The queues must be idle."""
        if self._block is not None:
            self._device.free(self._block)
        self._block, self._capacity_tokens = None, 0

    def _plane(self, index: int) -> Tensor:
        assert self._block is not None, "reserve comes first"
        plane_elements = self._num_tokens * self._hidden_size
        return self._block[index * plane_elements : (index + 1) * plane_elements].view(-1, self._hidden_size)
