"""Keys and values of rows that layers compute in chunks: on the device while a layer is visited, on the host between
its forward and its backward.

On the device is room for one row: its keys and values in the compute dtype, and their gradients in fp32. All else of a
layer's visit is as large as a chunk. What attention gave a chunk may wait on the host as well (`chunked_outputs`).

Shapes: N = tokens of a row, G = key heads, E = size of a head, of keys or of values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from horizon_server.engine.attention.chunked import ChunkedRow, KeptOutput, KeySizes, RowChunk
from horizon_server.engine.chunked_outputs import ChunkedOutputs
from horizon_server.engine.device.protocol import Device, Event
from horizon_server.planning.ledger import PAST_BLOCK_TOKENS, plane_elements_of
from horizon_server.records.execution import Execution


class ChunkedKeys:
    """The keys and values of a pass, layer by layer. `sizes` are those of each layer; the first `num_skipped` layers
    have no backward, and nothing of theirs is kept on the host.

    Memory grows to the largest row and step seen, and then stays. Thread: the driver's; `row` is compute's.
    """

    def __init__(self, device: Device, sizes: Sequence[KeySizes], execution: Execution, *, num_skipped: int) -> None:
        self._device, self._sizes, self._num_skipped = device, sizes, num_skipped
        self._block_tokens = max(execution.chunk_tokens, PAST_BLOCK_TOKENS)
        self._outputs: ChunkedOutputs | None = None
        if num_layers := min(execution.residency.attention_layers, len(sizes) - num_skipped):
            self._outputs = ChunkedOutputs(device, sizes, num_layers=num_layers, chunk_tokens=execution.chunk_tokens)
        self._row_tokens = self._step_tokens = 0
        self._keys: Tensor | None = None
        self._gradients: Tensor | None = None
        self._host: Tensor | None = None
        self._stride = 0
        self._has_backward = False
        self._gone: Event | None = None

    def start(self, chunks: Sequence[RowChunk | None], *, has_backward: bool) -> None:
        """A pass begins over these parts. The queues must be idle.

        Raises:
            DoesNotFit: the device's memory limit would be exceeded.
        """
        self._has_backward, self._gone = has_backward, None
        if self._outputs is not None:
            self._outputs.start(chunks, has_backward=has_backward)
        rows = [chunk for chunk in chunks if chunk is not None and chunk.is_last]
        if not rows:
            return
        longest, together = max(row.row_tokens for row in rows), sum(row.row_tokens for row in rows)
        if longest > self._row_tokens:
            self._release_keys()
            self._row_tokens = longest
        self._open(with_gradients=has_backward)
        if has_backward and together > self._step_tokens:
            self._close_host()
            self._step_tokens = together
        if has_backward and self._host is None:
            # Each layer's part begins on a page of its own, because a GPU's driver registers them one by one.
            self._stride = plane_elements_of(self._step_tokens, max(size.elements for size in self._sizes))
            self._host = self._device.allocate_host(
                "activations",
                (len(self._sizes) - self._num_skipped) * self._stride,
                self._device.compute_dtype,
                piece_elements=self._stride,
            )

    def row(self, layer: int, chunk: RowChunk, boundaries: Tensor, kept: KeptOutput | None) -> ChunkedRow:
        """What a layer gets in a mask's place for a chunk, with what was announced for it."""
        assert self._keys is not None, "start comes first"
        keys, values = self._of_row(self._keys, layer)
        gradients = None if self._gradients is None else self._of_row(self._gradients, layer)
        return ChunkedRow(chunk, boundaries, keys, values, gradients, block_tokens=self._block_tokens, kept=kept)

    def before_forward(self, layer: int, chunk: RowChunk) -> KeptOutput | None:
        """Compute is about to run a layer on a chunk: let it wait until the row before has left. Returns where it
        leaves what attention gives, if that is kept."""
        if chunk.first == 0 and self._gone is not None:
            self._device.compute.wait(self._gone)
        return None if self._outputs is None else self._outputs.before_forward(layer, chunk)

    def after_forward(self, layer: int, chunk: RowChunk) -> None:
        """Compute has run a layer on a chunk: copy its keys and values to the host, where backward wants them."""
        if not self._has_backward or layer < self._num_skipped:
            return
        device = self._device
        device.d2h.wait(device.compute.record())
        for source, target in self._copies(layer, chunk.first, chunk.stop, chunk.before):
            device.download(source, target, label="keys and values")
        self._gone = device.d2h.record()
        if self._outputs is not None:
            self._outputs.after_forward(layer, chunk)

    def before_backward(self, layer: int, chunk: RowChunk) -> KeptOutput | None:
        """Compute is about to recompute a layer on a chunk: bring the row's keys and values where it is the row's
        last one, and clear their gradients. Returns what attention gave, if that was kept."""
        if chunk.is_last:
            self._bring(layer, chunk)
        return None if self._outputs is None else self._outputs.before_backward(layer, chunk)

    def after_backward(self, layer: int) -> None:
        """Compute has done all it does with a chunk in the backward of a layer."""
        if self._outputs is not None:
            self._outputs.after_backward(layer)

    def _bring(self, layer: int, chunk: RowChunk) -> None:
        device = self._device
        assert self._gone is not None and self._gradients is not None, "forward was before"
        device.h2d.wait(device.compute.record())
        device.h2d.wait(self._gone)
        for target, source in self._copies(layer, 0, chunk.stop, chunk.before):
            device.upload(source, target)
        device.compute.wait(device.h2d.record())
        for gradients in self._of_row(self._gradients, layer):
            device.compute.submit(gradients[:, :, : chunk.stop].zero_, label=f"backward {layer + 1}")

    def release(self) -> None:
        """Free the memory on the device. The queues must be idle."""
        self._release_keys()
        if self._outputs is not None:
            self._outputs.release()

    def _release_keys(self) -> None:
        for tensor in (self._keys, self._gradients):
            if tensor is not None:
                self._device.free(tensor)
        self._keys = self._gradients = None

    def close(self) -> None:
        """Free all memory. The queues must be idle."""
        self._release_keys()
        if self._outputs is not None:
            self._outputs.close()
        self._close_host()
        self._row_tokens = self._step_tokens = 0

    def _open(self, *, with_gradients: bool) -> None:
        num_elements = self._row_tokens * max(size.elements for size in self._sizes)
        if self._keys is None:
            self._keys = self._device.allocate("activations", num_elements, self._device.compute_dtype)
        if self._gradients is None and with_gradients:
            self._gradients = self._device.allocate("activations", num_elements, torch.float32)

    def _close_host(self) -> None:
        if self._host is not None:
            self._device.free_host(self._host)
        self._host = None

    def _of_row(self, flat: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer in a flat buffer, token by token. Shapes: [1, G, N, E] each."""
        size = self._sizes[layer]
        num_keys = self._row_tokens * size.heads * size.key
        keys = flat[:num_keys].view(1, self._row_tokens, size.heads, size.key)
        num_values = self._row_tokens * size.heads * size.value
        values = flat[num_keys : num_keys + num_values].view(1, self._row_tokens, size.heads, size.value)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def _copies(self, layer: int, first: int, stop: int, before: int) -> list[tuple[Tensor, Tensor]]:
        """What a layer has of some tokens of a row, keys and then values: on the device, and where that is on the
        host."""
        assert self._keys is not None and self._host is not None, "start comes first"
        size, start = self._sizes[layer], (layer - self._num_skipped) * self._stride
        found = []
        on_device = on_host = 0
        for width in (size.heads * size.key, size.heads * size.value):
            source = self._keys[on_device + first * width : on_device + stop * width]
            at = start + on_host + before * width
            found.append((source, self._host[at + first * width : at + stop * width]))
            on_device += self._row_tokens * width
            on_host += self._step_tokens * width
        return found
