"""Optimizer states of some layers in the device's memory: master, moments and gradient stay there, and the device
updates them itself. What never leaves the device crosses neither the link nor the host's memory.

The store's planes, or its drives, are these layers' home. They are up to date after `send_home` alone; until then the
store's `generations` say that the units have an older update, so that nobody continues from them. Of a layer whose home
is on drives, no step reads or writes there.

Shapes: flat, of a unit's trained elements. Of each, `lo` takes 2 bytes, the moments 8, and the gradient of a store that
keeps gradients what it takes there. `hi` is in the layer's weights; where those are in fp32, it takes 2 more.
Source: Deep Optimizer States (arXiv 2410.21316), with which layers by plan and without any exchange within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from horizon_server.engine.binding import Exact
from horizon_server.engine.device.protocol import Device, Queue
from horizon_server.store.adamw import STATE_PLANES, AdamWStep, UnitStates, update_states
from horizon_server.store.host_store import HostStore, join_halves, merge_master


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """One unit's memory besides its weights: `halves` are `lo`, after `hi` where the weights are in fp32; `moments` are
    both, one after the other. The gradient is the unit's own, or there is one for all units."""

    halves: Tensor
    moments: Tensor
    gradient: Tensor | None


class DeviceStates:
    """The states of `units`, each of which has a slot of its own for its weights.

    Thread: the driving thread, but for `update`.
    """

    def __init__(
        self,
        store: HostStore,
        device: Device,
        units: Collection[int] = (),
        *,
        exact_pieces: Callable[[int], Sequence[Exact]] = lambda _: (),
        num_threads: int = 1,
    ) -> None:
        """`exact_pieces` are those of a unit's trained parameters that are computed with in fp32 where others are in
        bf16."""
        self._store, self._device, self._num_threads = store, device, num_threads
        assert not units or not store.layout.is_compressed, "the device has no kernel for compressed states"
        of_store = [store.layout.units[index] for index in units]
        self._units = {unit.index: unit for unit in of_store if unit.trained_elements}
        store.leave_out(self._units)
        self._is_fp32 = device.compute_dtype is torch.float32
        self._exact_pieces: Callable[[int], Sequence[Exact]] = (lambda _: ()) if self._is_fp32 else exact_pieces
        self._kept: dict[int, _Kept] = {}
        self._gradient: Tensor | None = None
        # The memory of its weights, of a unit whose states are there.
        self._weights: dict[int, Tensor] = {}
        # Unit -> the generation of its newest update, where its home has an older one.
        self._ahead: dict[int, int] = {}
        self.open()

    def holds(self, unit_index: int) -> bool:
        """Whether a unit's states are here."""
        return unit_index in self._units

    @property
    def holds_any(self) -> bool:
        """Whether there are any."""
        return bool(self._units)

    def open(self) -> None:
        """Take the memory; also after `close`."""
        device, dtype = self._device, self._store.grad_dtype
        for index, unit in self._units.items():
            size = unit.trained_elements
            self._kept[index] = _Kept(
                halves=device.allocate("weights", (2 if self._is_fp32 else 1) * size, torch.int16),
                moments=device.allocate("moments", 2 * size, torch.float32),
                gradient=None if dtype is None else device.allocate("gradients", size, dtype),
            )
        if self._units and dtype is None:
            largest = max(unit.trained_elements for unit in self._units.values())
            self._gradient = device.allocate("gradients", largest, device.gradient_dtype)

    def fill(self, unit_index: int, weights: Tensor) -> None:
        """Append the copy of a unit's states from their home to h2d; what comes from drives has arrived when this
        returns. `weights` is its slot, which has been filled. Raises DriveFailed."""
        self._ahead.pop(unit_index, None)
        self._weights[unit_index] = weights
        states = self._states(unit_index)
        for plane in STATE_PLANES if self._is_fp32 else STATE_PLANES[1:]:
            for home, part in self._at_home(unit_index, plane, self._device.h2d, writes=False):
                self._device.upload(home, getattr(states, plane)[part], label=f"states of unit {unit_index}")

    def gradient(self, unit_index: int) -> Tensor:
        """Where a unit's gradient is to be, in the dtype that gradients leave the device in: its own memory where the
        store keeps gradients, else it is free after the update before it."""
        own = self._kept[unit_index].gradient
        if own is not None:
            return own
        assert self._gradient is not None, "open comes first"
        return self._gradient[: self._units[unit_index].trained_elements]

    def update(self, unit_index: int, hyper: AdamWStep, reached: Set[str], generation: int) -> None:
        """Update a unit from its gradient, with what else is made of its master. The states have been filled, and no
        work uses them or the weights meanwhile. Thread: of a host queue, which this blocks until it is done."""
        unit, states, weights = self._units[unit_index], self._states(unit_index), self._weights[unit_index]
        gradient = self.gradient(unit_index)

        def work() -> None:
            update_states(unit, states, gradient, hyper, num_threads=self._num_threads, only=reached)
            if self._is_fp32:
                out = weights[: unit.trained_elements]
                merge_master(states.hi, states.lo, out, num_threads=self._num_threads)
            for exact in self._exact_pieces(unit_index):
                values = join_halves(exact.piece.read(states.hi), exact.piece.read(states.lo))
                exact.end_of(weights).copy_(values.view(-1))

        # Also where the work fails: the home is no longer what belongs to the other units.
        self._ahead[unit_index] = generation
        self._device.run(work)

    def skip(self, unit_index: int, generation: int) -> None:
        """Leave a unit as it is in the update of this generation, because the step is not finite. Thread: as
        `update`."""
        self._ahead[unit_index] = generation

    def send_home(self) -> None:
        """Block until the store has the newest update of every unit. All updates are over.

        Raises:
            HorizonError: the first error that a queue of the device met, or a drive; what was not copied, the store's
                generations do not claim.
        """
        if not self._ahead:
            return
        device, generations, ahead = self._device, self._store.generations, dict(self._ahead)
        for index, generation in ahead.items():
            generations.begin(index, generation)
            states = self._states(index)
            for plane in STATE_PLANES:
                for home, part in self._at_home(index, plane, device.d2h, writes=True):
                    device.download(getattr(states, plane)[part], home, label=f"states of unit {index}")
        device.d2h.record().wait()
        device.raise_failure()
        self._store.flush()
        for index, generation in ahead.items():
            generations.end(index, generation)
        self._ahead.clear()

    def close(self) -> None:
        """Free the memory, whether its states are at home or not. The queues must be idle."""
        for kept in self._kept.values():
            for tensor in (kept.halves, kept.moments, kept.gradient):
                if tensor is not None:
                    self._device.free(tensor)
        if self._gradient is not None:
            self._device.free(self._gradient)
        self._kept.clear()
        self._weights.clear()
        self._ahead.clear()
        self._gradient = None

    def _states(self, unit_index: int) -> UnitStates:
        size, kept = self._units[unit_index].trained_elements, self._kept[unit_index]
        # In bf16, what is computed with is the high half itself.
        hi = kept.halves[:size].view(torch.bfloat16) if self._is_fp32 else self._weights[unit_index][:size]
        return UnitStates(hi=hi, lo=kept.halves[-size:], exp_avg=kept.moments[:size], exp_avg_sq=kept.moments[size:])

    def _at_home(self, unit_index: int, plane: str, queue: Queue, *, writes: bool) -> Iterator[tuple[Tensor, slice]]:
        """What a plane of a unit is to be copied from or to, with the elements of the unit that it is of. What is on
        drives is in memory until the next one is asked for, which waits until `queue` has copied it."""
        store, unit = self._store, self._units[unit_index]
        if store.is_in_memory(unit_index, plane):
            yield store.unit(unit_index, plane)[: unit.trained_elements], slice(0, unit.trained_elements)
            return
        for tensor in unit.tensors:
            if not tensor.trained:
                continue
            opened = store.writing if writes else store.reading
            for part in store.stretches(tensor.name):
                with opened(tensor.name, plane, part):
                    home = store.flat(tensor.name, plane, part)
                    yield home, slice(tensor.offset + part.start, tensor.offset + part.start + len(home))
                    queue.record().wait()
