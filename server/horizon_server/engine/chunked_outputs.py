"""Outputs of attention of rows that layers compute in chunks: on the host between a layer's forward and its backward,
which then does not attend again.

On the device is room for those of two chunks: one is copied while the other is computed.

Shapes: T = tokens of a chunk, H = query heads, E = size of a value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horizon_server.engine.attention.chunked import KeptOutput, KeySizes, RowChunk
from horizon_server.engine.device.protocol import Device, Event
from horizon_server.planning.ledger import NUM_OUTPUT_SLOTS, plane_elements_of


class ChunkedOutputs:
    """What attention gave the chunks of a pass, of the last `num_layers` of the layers that `sizes` describe, with the
    logarithms of its sums in fp32.

    Memory grows to the largest step seen, and then stays. Thread: the driver's; a `KeptOutput` is compute's.
    """

    def __init__(self, device: Device, sizes: Sequence[KeySizes], *, num_layers: int, chunk_tokens: int) -> None:
        self._device, self._first = device, len(sizes) - num_layers
        self._sizes, self._chunk_tokens = sizes[self._first :], chunk_tokens
        # The elements of a token: outputs in the compute dtype, and sums.
        self._widths = (max(s.output_elements for s in self._sizes), max(s.query_heads for s in self._sizes))
        self._dtypes = (device.compute_dtype, torch.float32)
        self._slots: list[Tensor] = []
        self._host: list[Tensor] = []
        self._step_tokens = self._taken = 0
        self._is_needed = False
        # What the next use of a slot waits for, and the last copy down.
        self._free: dict[int, Event] = {}
        self._gone: Event | None = None

    def start(self, chunks: Sequence[RowChunk | None], *, has_backward: bool) -> None:
        """A pass begins over these parts. The queues must be idle.

        Raises:
            DoesNotFit: the device's memory limit would be exceeded.
        """
        together = sum(chunk.row_tokens for chunk in chunks if chunk is not None and chunk.is_last)
        self._is_needed = has_backward and together > 0
        # The last step's events have happened.
        self._free.clear()
        self._gone = None
        if not self._is_needed:
            return
        if not self._slots:
            for width, dtype in zip(self._widths, self._dtypes, strict=True):
                num_elements = NUM_OUTPUT_SLOTS * self._chunk_tokens * width
                self._slots.append(self._device.allocate("activations", num_elements, dtype))
        if together > self._step_tokens:
            self._close_host()
            self._step_tokens = together
        if not self._host:
            for stride, dtype in zip(self._strides, self._dtypes, strict=True):
                # Each layer's part begins on a page of its own, because a GPU's driver registers them one by one.
                num_elements = len(self._sizes) * stride
                self._host.append(self._device.allocate_host("activations", num_elements, dtype, piece_elements=stride))

    def before_forward(self, layer: int, chunk: RowChunk) -> KeptOutput | None:
        """Compute is about to run a layer on a chunk: where it leaves what attention gives; None where it need not."""
        if not self._keeps(layer):
            return None
        slot = self._take()
        if slot in self._free:
            self._device.compute.wait(self._free[slot])
        for tensor in self._parts(slot, layer, chunk):
            self._device.poison(self._device.compute, tensor)
        return self._kept(layer, chunk, is_there=False)

    def after_forward(self, layer: int, chunk: RowChunk) -> None:
        """Compute has run a layer on a chunk: copy what it left to the host."""
        if not self._keeps(layer):
            return
        device, slot = self._device, self._current
        device.d2h.wait(device.compute.record())
        for source, target in self._copies(slot, layer, chunk):
            device.download(source, target, label="attention outputs")
        self._free[slot] = self._gone = device.d2h.record()

    def before_backward(self, layer: int, chunk: RowChunk) -> KeptOutput | None:
        """Compute is about to recompute a layer on a chunk: bring what it left, and let compute wait for it."""
        if not self._keeps(layer):
            return None
        device, slot = self._device, self._take()
        for event in (self._free.get(slot), self._gone):
            if event is not None:
                device.h2d.wait(event)
        for target, source in self._copies(slot, layer, chunk):
            device.upload(source, target, label="attention outputs")
        device.compute.wait(device.h2d.record())
        return self._kept(layer, chunk, is_there=True)

    def after_backward(self, layer: int) -> None:
        """Compute has done all it does with a chunk in the backward of a layer."""
        if self._keeps(layer):
            self._free[self._current] = self._device.compute.record()

    def release(self) -> None:
        """Free the memory on the device. The queues must be idle."""
        for tensor in self._slots:
            self._device.free(tensor)
        self._slots = []

    def close(self) -> None:
        """Free all memory. The queues must be idle."""
        self.release()
        self._close_host()
        self._step_tokens = 0

    def _close_host(self) -> None:
        for tensor in self._host:
            self._device.free_host(tensor)
        self._host = []

    def _keeps(self, layer: int) -> bool:
        return self._is_needed and layer >= self._first

    def _take(self) -> int:
        self._taken += 1
        return self._current

    @property
    def _current(self) -> int:
        return self._taken % NUM_OUTPUT_SLOTS

    @property
    def _strides(self) -> list[int]:
        """From one layer's part on the host to the next."""
        return [plane_elements_of(self._step_tokens, width) for width in self._widths]

    def _parts(self, slot: int, layer: int, chunk: RowChunk) -> list[Tensor]:
        """A slot's output and sums of a chunk, flat."""
        num_tokens, size = chunk.stop - chunk.first, self._sizes[layer - self._first]
        widths = (size.output_elements, size.query_heads)
        starts = (slot * self._chunk_tokens * width for width in self._widths)
        return [
            tensor[start : start + num_tokens * width]
            for tensor, start, width in zip(self._slots, starts, widths, strict=True)
        ]

    def _copies(self, slot: int, layer: int, chunk: RowChunk) -> list[tuple[Tensor, Tensor]]:
        """A slot's output and sums, and where they are on the host."""
        found = []
        before = chunk.before + chunk.first
        for part, host, stride in zip(self._parts(slot, layer, chunk), self._host, self._strides, strict=True):
            width = part.numel() // (chunk.stop - chunk.first)
            start = (layer - self._first) * stride + before * width
            found.append((part, host[start : start + part.numel()]))
        return found

    def _kept(self, layer: int, chunk: RowChunk, *, is_there: bool) -> KeptOutput:
        heads = self._sizes[layer - self._first].query_heads
        output, sums = self._parts(self._current, layer, chunk)
        num_tokens = chunk.stop - chunk.first
        return KeptOutput(
            output=output.view(1, num_tokens, heads, -1), sums=sums.view(heads, num_tokens), is_there=is_there
        )
