"""Recompute points: the input of every layer, for all tokens of a step, kept on the device or offloaded to the host.

The schedule announces what it does with each (layer, micro-batch), and asks where the hidden states are. All placements
give the same bits; they differ in where the memory is and what crosses the link. Ranks that divide a step by layers
have another one (`shared_activations`).

Layers count from 0; the embedding, whose output the first one reads, is `EMBEDDING`.

Shapes: L = layers, N = tokens of the step over all its micro-batches, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from horizon_server.engine.device.protocol import Device, Event
from horizon_server.planning.ledger import ACTIVATION_ALIGN_ELEMENTS, EXPERT_PLANES

Purpose = Literal["training", "evaluation", "trial"]
"""Training wants the inputs of layers again, in backward. An evaluation wants the last output alone, and the trial of a
model what goes into the first layer as well."""

EMBEDDING = -1

EdgeWork = Literal["loss", "head", "embedding"]
"""What runs at an edge: the head forward alone, the head for its gradients, or the embedding's backward."""


@dataclass(frozen=True, kw_only=True)
class EdgeVisit:
    """Parts whose hidden states, and the gradients of these, are on the device while an edge works on them. `tokens`
    are theirs among those at the edge. Shapes: [tokens, D] both."""

    numbers: range
    tokens: slice
    input: Tensor
    """What the last layer wrote; of the embedding's backward nothing that counts."""
    gradient: Tensor


class Activations:
    """Hidden states of a step: layer inputs 0 to L - 1, the last output L, and one gradient.

    Everything stays on the device, in one block of L + 2 planes of N tokens, and nothing crosses the link. The block
    grows to the largest step seen and then stays, so that a running job allocates nothing; `capacity_tokens` is what a
    step may have before it grows. Of layers that backward does not reach (`num_skipped`), no input is kept. Where
    experts come in pages, there are planes for the layer that is visited.
    """

    def __init__(
        self,
        device: Device,
        *,
        num_layers: int,
        num_skipped: int,
        hidden_size: int,
        num_planes: int | None = None,
        pages_experts: bool = False,
        by_part: bool = False,
    ) -> None:
        """With `by_part` the edges work part by part, as they must where no more is on the device: the order of their
        sums does not depend on where hidden states are."""
        self._by_part = by_part
        self._device, self._num_layers, self._num_skipped = device, num_layers, num_skipped
        self._hidden_size, self._num_kept = hidden_size, num_layers - num_skipped
        self._num_planes = num_planes or self._num_kept + 2
        self._num_expert_planes = EXPERT_PLANES if pages_experts else 0
        self._block: Tensor | None = None
        self._num_tokens = self.capacity_tokens = 0
        self._spans: Sequence[slice] = ()
        self._purpose: Purpose = "evaluation"

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

    def start(self, purpose: Purpose, spans: Sequence[slice], edges: Sequence[range]) -> None:
        """A pass begins, after `reserve`. `spans` are the tokens of its micro-batches. `edges` are, for each rank, the
        micro-batches whose loss is calculated there, and the gradient of their embedding."""
        self._purpose, self._spans = purpose, spans

    def input(self, layer: int) -> Tensor:
        """The device memory of what a layer reads; of L, what the head does. Shapes: [N, D]."""
        # With fewer planes than inputs, they take turns.
        return self._plane(self._place(layer) % (self._num_planes - 1))

    def output(self, layer: int) -> Tensor:
        """The device memory of what a layer writes. Shapes: [N, D]."""
        return self.input(layer + 1)

    @property
    def gradient(self) -> Tensor:
        """The gradient of the hidden state, at the layer that backward has reached. Shapes: [N, D]."""
        return self._plane(self._num_planes - 1)

    def expert_plane(self, number: int) -> Tensor:
        """One of the planes for what goes into the experts of a layer, comes out of them, and its gradients. Shapes:
        [N, D]."""
        assert number < self._num_expert_planes, "experts come in pages"
        return self._plane(self._num_planes + number)

    @property
    def head_input(self) -> Tensor:
        """What the head reads, of the tokens that this rank has at the edges. Shapes: [edge tokens, D]."""
        return self.input(self._num_layers)

    @property
    def edge_gradient(self) -> Tensor:
        """The gradient that the head writes and the embedding gets, of the same tokens."""
        return self.gradient

    @property
    def trial_ends(self) -> tuple[Tensor, Tensor]:
        """After a trial, copies of what went into the first layer and what came out of the last, on the CPU."""
        return self.input(0).cpu().clone(), self.input(self._num_layers).cpu().clone()

    def before_embedding(self, index: int) -> Tensor:
        """Compute is about to embed a micro-batch. Returns where to. Shapes: [T, D]."""
        return self.output(EMBEDDING)[self._spans[index]]

    def before_forward(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        """Compute is about to run a layer on a micro-batch: let it wait until its memory may be read and written.
        Returns what it reads, and where it writes. Shapes: [T, D] both."""
        span = self._spans[index]
        return self.input(layer)[span], self.output(layer)[span]

    def after_forward(self, layer: int, index: int) -> None:
        """Compute has run a layer, or the embedding, on a micro-batch."""

    def before_head(self) -> None:
        """Compute is about to run the head."""

    def after_head(self, numbers: range) -> None:
        """Compute has the head's gradient of some of the micro-batches that this rank has at the edges."""

    def start_backward(self) -> None:
        """All of the head's work is submitted, and backward begins."""

    def before_backward(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        """Compute is about to recompute a layer on a micro-batch: let it wait until what it reads is there. Returns
        its input, and the gradient of its output, in whose place that of its input goes. Shapes: [T, D] both."""
        span = self._spans[index]
        return self.input(layer)[span], self.gradient[span]

    def after_backward(self, layer: int, index: int) -> None:
        """Compute is done with a micro-batch in the backward of a layer."""

    def before_embedding_backward(self) -> None:
        """Compute is about to calculate the embedding's gradient."""

    def edge_visits(self, numbers: range, spans: Sequence[slice], work: EdgeWork) -> Iterator[EdgeVisit]:
        """What is there at once of some micro-batches, neighbours, whose tokens at the edge `spans` say. Work on a
        visit is submitted before the next one is asked for."""
        groups = [range(number, number + 1) for number in numbers] if self._by_part else [numbers] if numbers else []
        for group in groups:
            tokens = slice(spans[group[0]].start, spans[group[-1]].stop)
            yield EdgeVisit(
                numbers=group, tokens=tokens, input=self.head_input[tokens], gradient=self.edge_gradient[tokens]
            )
        if work == "head":
            self.after_head(numbers)

    def finish(self) -> None:
        """All that was submitted is done, on this rank."""

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

    def _place(self, layer: int) -> int:
        """Where a layer's input is, among those that are kept."""
        match self._purpose:
            case "training":
                # The skipped layers write their outputs into one place, the input of the first that is not.
                return max(0, layer - self._num_skipped)
            case "evaluation":
                return 0
            case "trial":
                # The first layer writes from 0 to 1 and all others within 1, so that 0 still holds what went in.
                return min(layer, 1)

    def _allocate(self, num_tokens: int) -> Tensor:
        num_planes = self._num_planes + self._num_expert_planes
        num_elements = num_planes * num_tokens * self._hidden_size
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

    def __init__(
        self, device: Device, *, num_layers: int, num_skipped: int, hidden_size: int, pages_experts: bool = False
    ) -> None:
        super().__init__(
            device,
            num_layers=num_layers,
            num_skipped=num_skipped,
            hidden_size=hidden_size,
            num_planes=3,
            pages_experts=pages_experts,
        )
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
                "activations", (self._num_kept - 1) * stride, self._device.compute_dtype, piece_elements=stride
            )

    def before_forward(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        event = self._gone.get((self._place(layer + 1) - 2, index))
        # What is there must have been copied to the host first.
        if event is not None:
            self._device.compute.wait(event)
            self._device.poison(self._device.compute, self.output(layer)[self._spans[index]])
        return super().before_forward(layer, index)

    def after_forward(self, layer: int, index: int) -> None:
        place = self._place(layer + 1)
        # The last layer's input is still there when backward begins, and its output is read by the head alone.
        if self._purpose != "training" or layer + 1 < self._num_skipped or place >= self._num_kept - 1:
            return
        device, span = self._device, self._spans[index]
        device.d2h.wait(device.compute.record())
        device.download(self.output(layer)[span], self._host_part(place, span))
        self._gone[place, index] = device.d2h.record()

    def after_head(self, numbers: range) -> None:
        for index in numbers:
            self._bring_back(self._num_layers, index)

    def before_backward(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        event = self._back.get((self._place(layer), index))
        if event is not None:
            self._device.compute.wait(event)
        return super().before_backward(layer, index)

    def after_backward(self, layer: int, index: int) -> None:
        self._bring_back(layer, index)

    def close(self) -> None:
        super().close()
        if self._host is not None:
            self._device.free_host(self._host)
        self._host = None

    def _bring_back(self, layer: int, index: int) -> None:
        # The memory of the layer's input is free now for that two layers before, which had it in forward too.
        wanted, device, span = self._place(layer) - 2, self._device, self._spans[index]
        if wanted < 0:
            return
        part = self.input(layer)[span]
        device.poison(device.compute, part)
        device.h2d.wait(device.compute.record())
        device.upload(self._host_part(wanted, span), part)
        self._back[wanted, index] = device.h2d.record()

    def _host_part(self, index: int, span: slice) -> Tensor:
        assert self._host is not None, "reserve comes first"
        start = index * self._host_stride + span.start * self._hidden_size
        num_elements = (span.stop - span.start) * self._hidden_size
        return self._host[start : start + num_elements].view(-1, self._hidden_size)
