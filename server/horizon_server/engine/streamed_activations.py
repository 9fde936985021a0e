"""Hidden states that come to the device by chunk, for rows of which not even one plane of them is to be there.

Shapes: N = tokens of the step, T = tokens of a part, D = hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from horizon_server.engine.activations import Activations, EdgeVisit, EdgeWork
from horizon_server.engine.device.protocol import Device, Event
from horizon_server.planning.ledger import CHUNK_TRIAL_TOKENS, NUM_STREAMED_SLOTS, num_shared_planes, plane_elements_of

_INPUT, _OUTPUT = 0, 1


class StreamedActivations(Activations):
    """All hidden states on the host, and room on the device for two parts that a layer reads and two that it writes,
    whatever the length of a row: one is copied while the other is computed.

    A part has up to `slot_tokens` tokens. The host has a plane for the input of each layer that backward wants, and one
    for the last output, which becomes the gradient. Every plane crosses the link up once and down once in forward; in
    backward the inputs come up again, and the gradient up and down.
    """

    def __init__(
        self, device: Device, *, num_layers: int, num_skipped: int, hidden_size: int, slot_tokens: int
    ) -> None:
        super().__init__(
            device,
            num_layers=num_layers,
            num_skipped=num_skipped,
            hidden_size=hidden_size,
            num_planes=NUM_STREAMED_SLOTS,
        )
        self._slot_tokens = max(slot_tokens, CHUNK_TRIAL_TOKENS)
        self._host: Tensor | None = None
        self._stride = 0
        # How often each kind of slot was taken, what the next use of a slot waits for, and the copies down.
        self._taken = [0, 0]
        self._free: dict[tuple[int, int], Event] = {}
        self._gone: dict[tuple[int, int], Event] = {}

    def reserve(self, num_tokens: int) -> None:
        # The last step's events have happened, and this one may cut its tokens differently.
        self._free.clear()
        self._gone.clear()
        super().reserve(num_tokens)
        if self._host is None:
            # Each plane begins on a page of its own, because a GPU's driver registers them one by one.
            stride = self._stride = plane_elements_of(self.capacity_tokens, self._hidden_size)
            self._host = self._device.allocate_host(
                "activations",
                num_shared_planes(self._num_kept) * stride,
                self._device.compute_dtype,
                piece_elements=stride,
            )

    @property
    def trial_ends(self) -> tuple[Tensor, Tensor]:
        whole = slice(0, self._num_tokens)
        return self._host_part(0, whole).clone(), self._host_part(1, whole).clone()

    def before_embedding(self, index: int) -> Tensor:
        return self._empty(index)

    def before_forward(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        return self._brought(_INPUT, self._place(layer), index), self._empty(index)

    def after_forward(self, layer: int, index: int) -> None:
        self._send(self._place(layer + 1), index)

    def before_backward(self, layer: int, index: int) -> tuple[Tensor, Tensor]:
        given = self._brought(_INPUT, self._place(layer), index)
        return given, self._brought(_OUTPUT, self._gradient_place, index)

    def after_backward(self, layer: int, index: int) -> None:
        self._send(self._gradient_place, index)

    def edge_visits(self, numbers: range, spans: Sequence[slice], work: EdgeWork) -> Iterator[EdgeVisit]:
        for index in numbers:
            if work == "embedding":
                given = gradient = self._brought(_OUTPUT, self._gradient_place, index)
            else:
                given = self._brought(_INPUT, self._place(self._num_layers), index)
                gradient = self._empty(index)
            yield EdgeVisit(numbers=range(index, index + 1), tokens=spans[index], input=given, gradient=gradient)
            if work == "head":
                self._send(self._gradient_place, index)
            else:
                self._leave()

    def close(self) -> None:
        super().close()
        if self._host is not None:
            self._device.free_host(self._host)
        self._host = None

    @property
    def _gradient_place(self) -> int:
        """That of the last output, which the head alone reads."""
        return self._place(self._num_layers)

    def _allocate(self, num_tokens: int) -> Tensor:
        return super()._allocate(min(num_tokens, self._slot_tokens))

    def _take(self, kind: int) -> tuple[int, int]:
        self._taken[kind] += 1
        return self._current(kind)

    def _current(self, kind: int) -> tuple[int, int]:
        return kind, self._taken[kind] % 2

    def _slot(self, key: tuple[int, int], index: int) -> Tensor:
        assert self._block is not None, "reserve comes first"
        kind, half = key
        elements = self._block.numel() // NUM_STREAMED_SLOTS
        start, span = (2 * kind + half) * elements, self._spans[index]
        num_elements = (span.stop - span.start) * self._hidden_size
        return self._block[start : start + num_elements].view(-1, self._hidden_size)

    def _brought(self, kind: int, place: int, index: int) -> Tensor:
        """Copy a part of a plane to the device, and let compute wait for it."""
        device, key = self._device, self._take(kind)
        for event in (self._free.get(key), self._gone.get((place, index))):
            if event is not None:
                device.h2d.wait(event)
        slot = self._slot(key, index)
        device.upload(self._host_part(place, self._spans[index]), slot)
        device.compute.wait(device.h2d.record())
        return slot

    def _empty(self, index: int) -> Tensor:
        """Room for what compute writes of a part, once the copy of what was there is done."""
        key = self._take(_OUTPUT)
        if key in self._free:
            self._device.compute.wait(self._free[key])
        slot = self._slot(key, index)
        self._device.poison(self._device.compute, slot)
        return slot

    def _send(self, place: int, index: int) -> None:
        """Copy what compute has written of a part to its plane."""
        device, key = self._device, self._current(_OUTPUT)
        self._leave()
        device.d2h.wait(device.compute.record())
        device.download(self._slot(key, index), self._host_part(place, self._spans[index]), label="hidden states")
        self._free[key] = self._gone[place, index] = device.d2h.record()

    def _leave(self) -> None:
        """Compute has done all it does with the parts that are there."""
        event = self._device.compute.record()
        self._free[self._current(_INPUT)] = self._free[self._current(_OUTPUT)] = event

    def _host_part(self, place: int, span: slice) -> Tensor:
        assert self._host is not None, "reserve comes first"
        start = place * self._stride + span.start * self._hidden_size
        num_elements = (span.stop - span.start) * self._hidden_size
        return self._host[start : start + num_elements].view(-1, self._hidden_size)
