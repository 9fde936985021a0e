"""Recompute points: the input of every layer, for all tokens of a step, kept on the device or offloaded to the host.

The schedule announces what it does with the input of each (layer, micro-batch): `before_write`, `produced`,
`await_input`, `consumed`. Both placements give the same bits; they differ in where the memory is and what crosses the
link.

Shapes: L = layers, N = tokens of the step over all its micro-batches, D = hidden size.
"""

from __future__ import annotations

from torch import Tensor

from horizon_server.engine.device.protocol import Device, Event
from horizon_server.planning.ledger import ACTIVATION_ALIGN_ELEMENTS


class Activations:
    """Hidden states of a step: layer inputs 0 to L - 1, the last output L, and one gradient.

    Everything stays on the device, in one block of L + 2 planes of N tokens, and nothing crosses the link. The block
    grows to the largest step seen and then stays, so that a running job allocates nothing; `capacity_tokens` is what a
    step may have before it grows.
    """

    def __init__(self, device: Device, *, num_layers: int, hidden_size: int, num_planes: int | None = None) -> None:
        self._device, self._num_layers, self._hidden_size = device, num_layers, hidden_size
        self._num_planes = num_planes or num_layers + 2
        self._block: Tensor | None = None
        self._num_tokens = self.capacity_tokens = 0

    def reserve(self, num_tokens: int) -> None:
        """Make room for a step, and forget the last one. The queues must be idle.

        Raises:
            DoesNotFit: the device's memory limit would be exceeded.
        """
        self._num_tokens = num_tokens
        if num_tokens <= self.capacity_tokens:
            return
        # The old block goes first: the limit need not hold both.
        self.close()
        self._block = self._allocate(num_tokens)
        # Only now: a step that does not fit has left room for none.
        self.capacity_tokens = num_tokens

    def layer_input(self, index: int) -> Tensor:
        """The device memory of the input of layer `index`; index L is the last layer's output. Shapes: [N, D]."""
        # With fewer planes than inputs, they take turns.
        return self._plane(index % (self._num_planes - 1))

    @property
    def gradient(self) -> Tensor:
        """The gradient of the hidden state, at the layer that backward has reached. Shapes: [N, D]."""
        return self._plane(self._num_planes - 1)

    def before_write(self, index: int, span: slice) -> None:
        """Compute is about to write some tokens of a layer's input: let it wait until their memory is free."""

    def produced(self, index: int, span: slice) -> None:
        """Compute has written some tokens of a layer's input, which backward will want again."""

    def await_input(self, index: int, span: slice) -> None:
        """Compute is about to recompute from some tokens of a layer's input: let it wait until they are there."""

    def consumed(self, index: int, span: slice) -> None:
        """Backward is done with some tokens of a layer's input."""

    def open(self) -> None:
        """Have device memory for `capacity_tokens` again after `release`."""
        if self._block is None and self.capacity_tokens:
            self._block = self._allocate(self.capacity_tokens)

    def release(self) -> None:
        """Free the memory on the device, and keep its size for `open`. The queues must be idle."""
        if self._block is not None:
            self._device.free(self._block)
        self._block = None

    def close(self) -> None:
        """Free all memory. The queues must be idle."""
        self.release()
        self.capacity_tokens = 0

    def _allocate(self, num_tokens: int) -> Tensor:
        num_elements = self._num_planes * num_tokens * self._hidden_size
        return self._device.allocate("activations", num_elements, self._device.compute_dtype)

    def _plane(self, index: int) -> Tensor:
        assert self._block is not None, "reserve comes first"
        plane_elements = self._num_tokens * self._hidden_size
        return self._block[index * plane_elements : (index + 1) * plane_elements].view(-1, self._hidden_size)


class OffloadedActivations(Activations):
    """Three hidden states on the device for any number of layers: two that layers read and write in turn, and the
    gradient.

    An input is copied to host memory as soon as it is produced, and its memory is used again two layers later; in
    backward it comes back into the same memory while the layer after it is recomputed. The last layer's input is still
    there when backward begins, so L - 1 inputs cross the link, once in each direction.
    """

    def __init__(self, device: Device, *, num_layers: int, hidden_size: int) -> None:
        super().__init__(device, num_layers=num_layers, hidden_size=hidden_size, num_planes=3)
        self._host: Tensor | None = None
        self._host_stride = 0
        self._gone: dict[tuple[int, int], Event] = {}
        self._back: dict[tuple[int, int], Event] = {}

    def reserve(self, num_tokens: int) -> None:
        # The last step's events have happened, and this one may cut its tokens differently.
        self._gone.clear()
        self._back.clear()
        super().reserve(num_tokens)
        if self._host is None:
            # Each layer's part begins on a page of its own, because a GPU's driver registers them one by one.
            num_pages = -(-self.capacity_tokens * self._hidden_size // ACTIVATION_ALIGN_ELEMENTS)
            stride = self._host_stride = num_pages * ACTIVATION_ALIGN_ELEMENTS
            self._host = self._device.allocate_host(
                "activations", (self._num_layers - 1) * stride, self._device.compute_dtype, piece_elements=stride
            )

    def before_write(self, index: int, span: slice) -> None:
        event = self._gone.get((index - 2, span.start))
        # What is there must have been copied to the host first.
        if event is not None:
            self._device.compute.wait(event)
            self._device.poison(self._device.compute, self.layer_input(index)[span])

    def produced(self, index: int, span: slice) -> None:
        # The last layer's input is still there when backward begins, and its output is read by the head alone.
        if index >= self._num_layers - 1:
            return
        device = self._device
        device.d2h.wait(device.compute.record())
        device.download(self.layer_input(index)[span], self._host_part(index, span))
        self._gone[index, span.start] = device.d2h.record()

    def await_input(self, index: int, span: slice) -> None:
        event = self._back.get((index, span.start))
        if event is not None:
            self._device.compute.wait(event)

    def consumed(self, index: int, span: slice) -> None:
        # The memory is free now for the input two layers before, which had it in forward too.
        wanted, device = index - 2, self._device
        if wanted < 0:
            return
        part = self.layer_input(index)[span]
        device.poison(device.compute, part)
        device.h2d.wait(device.compute.record())
        device.upload(self._host_part(wanted, span), part)
        self._back[wanted, span.start] = device.h2d.record()

    def close(self) -> None:
        super().close()
        if self._host is not None:
            self._device.free_host(self._host)
        self._host = None

    def _host_part(self, index: int, span: slice) -> Tensor:
        assert self._host is not None, "reserve comes first"
        start = index * self._host_stride + span.start * self._hidden_size
        num_elements = (span.stop - span.start) * self._hidden_size
        return self._host[start : start + num_elements].view(-1, self._hidden_size)
