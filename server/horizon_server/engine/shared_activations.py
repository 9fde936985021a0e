"""Hidden states of ranks that divide a step by layers: each rank computes its layers for all tokens, and hands what
they write to the next one through memory that all of them map.

A rank has two hidden states on its device: A, which a layer reads, and B, which it writes; in backward A is the layer's
input again, and B the gradient. Host memory has one plane for the input of each layer that backward wants, and one for
the last output. A layer's gradient goes where its input was. Next to the planes are counters: how many micro-batches
each layer has done in this pass, forward and backward, and the head of each rank. Whoever reads waits for the counter
of who writes, in a queue of its own; so a rank's compute waits for the others only through its own queues' events.

A place is written again only by who has read it before: a layer's input by its gradient, and what no backward wants by
the output of the next layer. Between two passes the ranks meet. The order of each queue is that of the schedule, and no
work waits for what comes behind it there, so nothing waits in a circle.

Shapes: L = layers, N = tokens of the step, D = hidden size.
Source: RoundPipe's idea of stages that go round the devices; weights cross a link once a pass, and no sum of gradients
does.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from horizon_server.engine.activations import EMBEDDING, Activations, Purpose
from horizon_server.engine.device.protocol import Device, Event
from horizon_server.engine.ranks import RankEvent, Ranks
from horizon_server.planning.ledger import counter_bytes, num_shared_planes, plane_elements_of
from horizon_server.store.planes import map_memory_file

# Bits of a counter below the number of the pass.
_COUNT_BITS = 24


class SharedActivations(Activations):
    """Of one rank, which computes the layers `own`. `first_trained` is the first layer that is trained; EMBEDDING where
    the embedding is.

    Thread: the driver's. Counters are read by a queue's and written by a queue's own.
    """

    def __init__(
        self,
        device: Device,
        ranks: Ranks,
        own: Sequence[int],
        *,
        num_layers: int,
        num_skipped: int,
        first_trained: int,
        hidden_size: int,
    ) -> None:
        super().__init__(device, num_layers=num_layers, num_skipped=num_skipped, hidden_size=hidden_size, num_planes=2)
        self._ranks, self._own, self._first_trained = ranks, own, first_trained
        assert own, "each rank has a layer"
        self._up, self._down, self._signals = device.hops()
        self._counters_bytes = counter_bytes(num_layers=num_layers, num_ranks=ranks.num_ranks)
        _grow(ranks.shared_fd, self._counters_bytes)
        # Forward by layer, backward by layer, head by rank.
        self._counters = memoryview(mmap.mmap(ranks.shared_fd, self._counters_bytes)).cast("q")
        self._host: Tensor | None = None
        self._stride = 0
        self._pass = 0
        self._edges: Sequence[range] = ()
        self._arrived: dict[tuple[int, int], Event] = {}
        self._gone: dict[int, Event] = {}

    def reserve(self, num_tokens: int) -> None:
        super().reserve(num_tokens)
        if self._host is not None:
            return
        # All ranks need the same size: the first one here extends the file.
        device = self._device
        self._stride = plane_elements_of(self.capacity_tokens, self._hidden_size)
        num_bytes = num_shared_planes(self._num_kept) * self._stride * device.compute_dtype.itemsize
        _grow(self._ranks.shared_fd, self._counters_bytes + num_bytes)
        memory = map_memory_file(self._ranks.shared_fd, num_bytes, offset_bytes=self._counters_bytes)
        self._host = device.share_host(
            "activations", memory, device.compute_dtype, piece_elements=self._stride, is_counted=self._ranks.leads
        )

    def start(self, purpose: Purpose, spans: Sequence[slice], edges: Sequence[range]) -> None:
        super().start(purpose, spans, edges)
        assert len(spans) < 1 << _COUNT_BITS
        self._edges = edges
        self._pass += 1
        self._arrived.clear()
        self._gone.clear()

    def input(self, layer: int) -> Tensor:
        return self._plane(0)

    def output(self, layer: int) -> Tensor:
        return self._plane(0 if layer == EMBEDDING else 1)

    @property
    def gradient(self) -> Tensor:
        return self._plane(1)

    @property
    def head_input(self) -> Tensor:
        return self._plane(0)[self._edge_tokens]

    @property
    def edge_gradient(self) -> Tensor:
        return self._plane(1)[self._edge_tokens]

    @property
    def trial_ends(self) -> tuple[Tensor, Tensor]:
        whole = slice(0, self._num_tokens)
        ends = self._host_part(0, whole).clone(), self._host_part(self._num_layers, whole).clone()
        # The next pass writes there.
        self._ranks.meet()
        return ends

    def before_forward(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        self._await_arrival(layer, index)
        self._await_leaving(index)
        return super().before_forward(layer, index)

    def after_forward(self, layer: int, index: int) -> None:
        device = self._device
        # What every rank embeds, the first layer's hands on.
        if layer != EMBEDDING or self._own[0] == 0:
            self._send(layer + 1, index, self.output(layer))
        if layer != EMBEDDING:
            self._signal(self._forward_counter(layer), index + 1)
        wanted = next((own for own in self._own if own > layer), self._num_layers)
        if wanted == layer + 1 == 0 or (wanted == self._num_layers and index not in self._own_edge):
            return
        # Only when compute has read what is there.
        self._up.wait(device.compute.record())
        self._receive(wanted, index, self._plane(0), self._forward_counter(wanted - 1), index + 1)
        self._arrived[wanted, index] = self._up.record()

    def before_head(self) -> None:
        for index in self._own_edge:
            self._await_arrival(self._num_layers, index)
            self._await_leaving(index)

    def after_head(self, numbers: range) -> None:
        start = self._own_edge.start
        for number in numbers:
            self._send(self._num_layers, start + number, self._plane(1))
        self._signal(self._head_counter(self._ranks.rank), numbers.stop)

    def start_backward(self) -> None:
        if self._own[-1] >= self._first_trained:
            for index in range(len(self._spans)):
                self._receive_for_backward(self._own[-1], index)

    def before_backward(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        self._await_arrival(layer, index)
        return super().before_backward(layer, index)

    def after_backward(self, layer: int, index: int) -> None:
        if layer > self._first_trained:
            self._send(layer, index, self._plane(1))
            self._signal(self._backward_counter(layer), index + 1)
        wanted = next((own for own in reversed(self._own) if own < layer), EMBEDDING)
        if wanted >= max(0, self._first_trained):
            self._receive_for_backward(wanted, index)
        elif self._first_trained == EMBEDDING and index in self._own_edge:
            self._free_gradient(index)
            self._receive(0, index, self._plane(1), self._backward_counter(0), index + 1)
            self._arrived[EMBEDDING, index] = self._up.record()

    def before_embedding_backward(self) -> None:
        for index in self._own_edge:
            self._await_arrival(EMBEDDING, index)

    def finish(self) -> None:
        self._ranks.meet()

    def close(self) -> None:
        super().close()
        if self._host is not None:
            self._device.free_host(self._host)
        self._host = None

    @property
    def _own_edge(self) -> range:
        return self._edges[self._ranks.rank]

    @property
    def _edge_tokens(self) -> slice:
        edge = self._own_edge
        return slice(self._spans[edge.start].start, self._spans[edge.stop - 1].stop) if edge else slice(0, 0)

    def _receive_for_backward(self, layer: int, index: int) -> None:
        """Bring what a layer has read, and the gradient of what it wrote, once that is known."""
        device, counter, count = self._device, self._backward_counter(layer + 1), index + 1
        if layer + 1 == self._num_layers:
            rank = next(rank for rank, edge in enumerate(self._edges) if index in edge)
            counter, count = self._head_counter(rank), count - self._edges[rank].start
        self._free_gradient(index)
        span = self._spans[index]
        device.upload(self._host_part(layer, span), self._plane(0)[span], queue=self._up)
        self._receive(layer + 1, index, self._plane(1), counter, count)
        self._arrived[layer, index] = self._up.record()

    def _free_gradient(self, index: int) -> None:
        """Have the next copy up wait until compute and the copy down are done with a micro-batch's part of A and B."""
        device = self._device
        self._up.wait(device.compute.record())
        if index in self._gone:
            self._up.wait(self._gone[index])

    def _send(self, layer: int, index: int, source: Tensor) -> None:
        """Copy some tokens to where a layer's input has its place."""
        device, span = self._device, self._spans[index]
        self._down.wait(device.compute.record())
        device.download(source[span], self._host_part(layer, span), label=f"hidden states {layer}", queue=self._down)
        self._gone[index] = self._down.record()

    def _receive(self, layer: int, index: int, target: Tensor, counter: int, count: int) -> None:
        """Copy some tokens from where a layer's input has its place, once the counter is that far."""
        device, span = self._device, self._spans[index]
        wanted = self._value(count)
        self._up.wait(RankEvent(lambda: self._counters[counter] >= wanted, self._ranks, device))
        device.upload(self._host_part(layer, span), target[span], queue=self._up)

    def _signal(self, counter: int, count: int) -> None:
        """Set a counter to this number of micro-batches, after the copies down that were submitted before."""
        # On a queue of the host's own: a copy's work ends when it is submitted, not when it is done.
        self._signals.wait(self._down.record())
        value = self._value(count)
        self._signals.submit(partial(self._counters.__setitem__, counter, value), label="signal")

    def _value(self, count: int) -> int:
        """Of a counter in this pass."""
        return (self._pass << _COUNT_BITS) + count

    def _await_arrival(self, layer: int, index: int) -> None:
        event = self._arrived.pop((layer, index), None)
        if event is not None:
            self._device.compute.wait(event)

    def _await_leaving(self, index: int) -> None:
        """Have compute wait until its last output of a micro-batch has been copied, before it writes the next one."""
        if index in self._gone:
            self._device.compute.wait(self._gone[index])
            self._device.poison(self._device.compute, self._plane(1)[self._spans[index]])

    def _forward_counter(self, layer: int) -> int:
        return layer

    def _backward_counter(self, layer: int) -> int:
        return self._num_layers + layer

    def _head_counter(self, rank: int) -> int:
        return 2 * self._num_layers + rank

    def _host_part(self, layer: int, span: slice) -> Tensor:
        assert self._host is not None, "reserve comes first"
        start = self._place(layer) * self._stride + span.start * self._hidden_size
        num_elements = (span.stop - span.start) * self._hidden_size
        return self._host[start : start + num_elements].view(-1, self._hidden_size)


def _grow(fd: int, num_bytes: int) -> None:
    # Another rank may do the same at the same time.
    if os.fstat(fd).st_size < num_bytes:
        os.ftruncate(fd, num_bytes)
