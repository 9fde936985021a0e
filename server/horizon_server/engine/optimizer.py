"""AdamW at the end of the schedule: a step's updates run in the order of the next step's reads, just ahead of them; on
the host, but for the units whose states are on the device, which it updates meanwhile.

That order is: layer 0, the embedding, the other layers, the head. A pass uses few rows of a large table, and which ones
is known when it begins. So where the model looks its table up by rows, the table's update is held back until then: the
rows in use are updated first, on a queue of their own, next to layer 0; all other rows come after the head, when
nothing waits for them. A table whose states are on drives is updated as a whole in its place, span by span: its rows in
use are all over the drives.

Where gradients are kept until the norm is known, the update is deferred: `submit` takes a whole step, which is finite.
Where they are not, each unit is updated in backward, as its gradient lands: `begin` and then `update_landed`, in the
order of backward. What is known to be finite then is the loss and the gradients so far. From the first unit that is
not, all later units of the step are left alone; the earlier ones cannot be taken back, and `num_updated_in_backward`
says how many they are.

Shapes: R = rows of the embedding with a gradient, D = hidden size, V = vocabulary, U = rows of the embedding that a
pass reads. Source: AdamW, Loshchilov and Hutter (arXiv 1711.05101), as torch.optim.AdamW computes it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from horizon_server import progress
from horizon_server.engine.device.protocol import Device, Event, Queue
from horizon_server.engine.device_states import DeviceStates
from horizon_server.engine.ranks import ALONE, RankEvent, Ranks
from horizon_server.recipe import Recipe
from horizon_server.store.adamw import AdamWStep, RowGradient, update_rows, update_unit
from horizon_server.store.host_store import HostStore

IsFinite = Callable[[], bool]


@dataclass(frozen=True, kw_only=True)
class _HeldUpdate:
    """The update of the embedding table, which may run for some rows at a time, once `ready` has happened if there is
    one."""

    update: Callable[[Tensor], None]
    generation: int
    ready: Event | None = None


class Optimizer:
    """Updates every unit of the store once per submitted step, on a queue of its own, and rows in use on another.

    `table` names the embedding table where a pass reads rows of it; None where it is frozen, or read and updated as a
    whole. Of several ranks, each updates what it owns. Thread: one driving thread submits; updates of one unit, or of
    one row, never overlap.
    """

    def __init__(
        self,
        store: HostStore,
        device: Device,
        *,
        num_threads: int,
        table: str | None,
        ranks: Ranks = ALONE,
        states: DeviceStates | None = None,
    ) -> None:
        self._store, self._num_threads, self._ranks = store, num_threads, ranks
        # Of the table whose update is held back.
        self._table = None if store.is_on_drives(0) else table
        self._device = device
        self._ownership = ranks.ownership(store.layout)
        self.queue = device.host_queue("optimizer")
        # Another queue, because the rows are known when the first one is full of layers already.
        self._rows_queue = device.host_queue("optimizer rows")
        self.states = states or DeviceStates(store, device)
        """Those of the units that the device updates itself."""
        assert ranks.is_alone or not self.states.holds_any, "what several ranks update is in memory that they share"
        # Another queue, because these updates take nothing that those of the host wait for.
        self._states_queue = device.host_queue("optimizer on the device") if self.states.holds_any else self.queue
        self._updated: dict[int, Event] = {}
        self._num_updates: Counter[int] = Counter()
        self._generation_of: dict[int, int] = {}
        self._held: _HeldUpdate | None = None
        self._rows_in_use: tuple[Tensor, Event] | None = None
        self._hyper: AdamWStep | None = None
        # As the store says: its units may have updates of an earlier process.
        generation = store.generations.generation
        assert generation is not None, "the store's units have the same updates"
        self.generation = generation
        """The generation of the store's units after all that was submitted."""

    def submit(self, hyper: AdamWStep, reached: Set[str], gradient: RowGradient | None = None) -> None:
        """Queue the update of all trained units. The gradients must be in the store and stay until updated.

        `reached` are the tensors that have a gradient; the others stay as they are. `gradient` is the embedding's,
        where the store has no room for it.
        """
        self.generation += 1
        embedding, first, *others = self._store.layout.units
        # The order in which the next step asks for the weights (see LayerStream.walk).
        for unit in (first, embedding, *others):
            if not unit.trained_elements or (unit is embedding and self._table is not None):
                continue
            if self.states.holds(unit.index):
                self._queue_update_on_device(unit.index, hyper, lambda: True, lambda: reached)
                continue
            of_unit = gradient if unit is embedding else None
            self._queue_update(unit.index, partial(self._update_part, unit.index, hyper, of_unit, reached))
        if self._table is not None:
            if gradient is None:
                table_VD = self._store.tensor(self._table, "grad")
                gradient = RowGradient(rows_R=torch.arange(table_VD.shape[0]), values_RD=table_VD)
            self._hold(
                _HeldUpdate(update=partial(self._update_rows, hyper, gradient, reached), generation=self.generation)
            )

    def begin(self, hyper: AdamWStep) -> None:
        """A step whose units come by `update_landed`."""
        self.generation += 1
        self._hyper = hyper

    def update_landed(
        self,
        unit_index: int,
        gradient: Tensor | RowGradient,
        landed: Event,
        is_finite: IsFinite,
        reached: Callable[[], Set[str]],
    ) -> None:
        """Queue the update of one unit, or of what this rank owns of it, from a gradient that is there after `landed`,
        and with it what `is_finite` and `reached` look at. The gradient of a unit of `states` is theirs.

        `is_finite` says whether the loss and all gradients of the step down to this one are. `reached` returns what it
        is in `submit`; it is complete for the unit when the gradient has landed.
        """
        hyper = self._hyper
        assert hyper is not None, "begin comes first"
        if self.states.holds(unit_index):
            self._states_queue.wait(landed)
            self._queue_update_on_device(unit_index, hyper, is_finite, reached)
            return
        self.queue.wait(landed)
        if isinstance(gradient, RowGradient) and self._table is not None:

            def update_table(rows_U: Tensor) -> None:
                if is_finite():
                    self._update_rows(hyper, gradient, reached(), rows_U)

            # The event comes after the units above too, whose gradients decide whether this one counts.
            self._hold(_HeldUpdate(update=update_table, generation=self.generation, ready=self.queue.record()))
            return

        def update(part: slice) -> None:
            if is_finite():
                self._update_part(unit_index, hyper, gradient, reached(), part)

        self._queue_update(unit_index, update)

    def wait_for_update(self, queue: Queue, unit_index: int, rows_U: Tensor | None = None) -> None:
        """Let `queue` wait until the last step's update of a unit is done, where there is one; with `rows_U`, of these
        rows at least. Of several ranks, it waits for this one's part alone.

        The first call for the table releases its update, with `rows_U` ahead of everything else.
        """
        if unit_index == 0:
            self._release(rows_U)
        event = self._updated.get(unit_index)
        # Backward reads the rows of its forward, and need not wait for the others either.
        if rows_U is not None and self._rows_in_use is not None and self._rows_in_use[0] is rows_U:
            event = self._rows_in_use[1]
        if event is not None:
            queue.wait(event)

    def num_updates(self, unit_index: int) -> int:
        """How many updates of a unit in the store have been queued or held back: where it has not grown, a copy of the
        unit is still what the store holds, or has been updated itself."""
        return self._num_updates[unit_index] + (unit_index == 0 and self._held is not None)

    def wait_for_ranks(self, queue: Queue, unit_index: int) -> None:
        """Let `queue` wait until all ranks have done the last update of a unit, where there is one."""
        # Not by a collective: the ranks share the store's memory, and its numbers say how far it is.
        generation = self._generation_of.get(unit_index)
        # What one rank owns as a whole, no other reads.
        if not self._ranks.is_alone and generation is not None and not self._ownership.is_whole(unit_index):
            done = partial(self._store.generations.has_reached, unit_index, generation)
            queue.wait(RankEvent(done, self._ranks, self._device))

    def finish(self) -> Event:
        """An event after all that was submitted, the table's rows included, and what is written to drives."""
        self._release()
        self.queue.submit(self._store.flush, label="states on drives")
        self.wait_for_states(self.queue)
        return self.queue.record()

    def wait_for_states(self, queue: Queue) -> None:
        """Let `queue` wait until no update that was submitted reads or writes the device's memory."""
        queue.wait(self._states_queue.record())

    def send_home(self) -> None:
        """Block until the store has what the device has updated. Raises as `DeviceStates.send_home`."""
        if self.states.holds_any:
            self._states_queue.record().wait()
            self.states.send_home()

    def replace(self, write: Callable[[], None]) -> None:
        """Have `write` give the store other weights, which count as one update of every unit: whoever is killed
        meanwhile leaves weights of no generation. No update is under way."""
        self.generation += 1
        trained = [unit.index for unit in self._store.layout.units if unit.trained_elements]
        for index in trained:
            self._store.generations.begin(index, self.generation)
        write()
        self._store.flush()
        for index in trained:
            self._store.generations.end(index, self.generation)

    def read_ahead(self) -> None:
        """Begin to read what the next updates take from drives. Raises DriveFailed: a drive has failed meanwhile."""
        self._store.read_ahead()

    def _owned(self, unit_index: int) -> slice:
        return self._ownership.trained(unit_index)[self._ranks.rank]

    def _update_part(
        self, unit_index: int, hyper: AdamWStep, gradient: Tensor | RowGradient | None, reached: Set[str], part: slice
    ) -> None:
        """Update these elements of what this rank owns of a unit. `gradient` has all that it owns, or is in the
        store."""
        owned = self._owned(unit_index)
        if isinstance(gradient, RowGradient):
            gradient = gradient.part(part)
        elif gradient is not None:
            gradient = gradient[part.start - owned.start : part.stop - owned.start]
        update_unit(
            self._store, unit_index, hyper, num_threads=self._num_threads, grad=gradient, only=reached, part=part
        )

    def _queue_update(self, unit_index: int, work: Callable[[slice], None], generation: int | None = None) -> None:
        """Queue `work` on what this rank owns of a unit, part by part."""
        number = self.generation if generation is None else generation

        def update() -> None:
            self._store.generations.begin(unit_index, number)
            done = partial(self._store.generations.end, unit_index, number)
            self._store.update(unit_index, self._owned(unit_index), work, done)
            progress.advance()

        self.queue.submit(update, label=f"update {unit_index}")
        self._updated[unit_index] = self.queue.record()
        self._num_updates[unit_index] += 1
        self._generation_of[unit_index] = number

    def _queue_update_on_device(
        self, unit_index: int, hyper: AdamWStep, is_finite: IsFinite, reached: Callable[[], Set[str]]
    ) -> None:
        number = self.generation

        def update() -> None:
            if is_finite():
                self.states.update(unit_index, hyper, reached(), number)
            else:
                self.states.skip(unit_index, number)
            progress.advance()

        self._states_queue.submit(update, label=f"update {unit_index} on the device")
        self._updated[unit_index] = self._states_queue.record()

    def _hold(self, held: _HeldUpdate) -> None:
        assert self._held is None, "a pass or `finish` comes between two steps"
        self._held, self._rows_in_use = held, None

    def _release(self, rows_U: Tensor | None = None) -> None:
        """Queue the held update: `rows_U` at once, and every row that is not among them after all layers."""
        if self._held is None or self._table is None:
            return
        held, self._held = self._held, None
        num_rows = self._store.layout.find(self._table)[1].shape[0]
        # Neither in use nor, of several ranks, another one's: all others.
        done_V = torch.zeros(num_rows, dtype=torch.bool)
        if not self._ranks.is_alone:
            owned = self._ownership.rows()[self._ranks.rank]
            done_V[: owned.start] = done_V[owned.stop :] = True
        if rows_U is not None:
            if held.ready is not None:
                self._rows_queue.wait(held.ready)

            def update_rows_in_use() -> None:
                self._store.generations.begin(0, held.generation)
                held.update(rows_U)

            self._rows_queue.submit(update_rows_in_use, label="update rows in use")
            self._rows_in_use = rows_U, self._rows_queue.record()
            # So that whatever waits for the rest has waited for these rows too.
            self.queue.wait(self._rows_in_use[1])
            done_V[rows_U] = True
        self._queue_update(0, lambda _: held.update((~done_V).nonzero()[:, 0]), held.generation)

    def _update_rows(self, hyper: AdamWStep, gradient: RowGradient, reached: Set[str], rows_U: Tensor) -> None:
        assert self._table is not None
        if self._table in reached:
            update_rows(self._store, self._table, hyper, gradient, rows_U, num_threads=self._num_threads)


def adamw_step(recipe: Recipe, learning_rate: float, *, step: int, grad_scale: float = 1.0) -> AdamWStep:
    """The update number `step`, counted from 1, of a job with this recipe."""
    beta1, beta2 = recipe.betas
    return AdamWStep(
        step=step,
        learning_rate=learning_rate,
        beta1=beta1,
        beta2=beta2,
        eps=recipe.eps,
        weight_decay=recipe.weight_decay,
        grad_scale=grad_scale,
    )


def num_updated_in_backward(loss: float, square_sums: Tensor) -> int:
    """How many units a step updates in backward: from the head down to the first gradient that is not finite."""
    if not math.isfinite(loss):
        return 0
    # Backward begins with the head, which is the last unit.
    finite = torch.isfinite(square_sums).flip(0).tolist()
    return finite.index(False) if False in finite else len(finite)


def global_norm(square_sums: Tensor) -> float:
    """Norm over all units, from their float64 square sums in unit order; not finite if any element was not."""
    # One by one in float64: torch may sum in another order, with another last bit.
    return math.sqrt(sum(float(value) for value in square_sums))


def clip_coefficient(grad_norm: float, max_grad_norm: float | None) -> float:
    """What to scale every gradient by so that their norm is at most `max_grad_norm`, as torch.nn.utils.clip_grad_norm_
    does."""
    if max_grad_norm is None:
        return 1.0
    # The 1e-6 is torch's.
    return min(1.0, max_grad_norm / (grad_norm + 1e-6))


def learning_rate_at(step: int, recipe: Recipe, *, num_steps: int) -> float:
    """The rate of the step with this 0-based index.

    It rises linearly over `warmup_steps`, from 0 or for wsd from `min_lr_ratio` of the peak. Then it stays (constant),
    falls linearly to 0 at `num_steps` (linear), follows half a cosine to 0 (cosine) or to `min_lr_ratio`
    (cosine_with_min_lr), or stays until half a cosine takes it to `min_lr_ratio` in the last `lr_decay_ratio` of all
    steps (wsd). These are rounded up, and begin after the warmup at the earliest.

    Source: transformers' get_scheduler, and the schedules of the same names there; WSD is that of MiniCPM (arXiv
    2404.06395).
    """
    learning_rate, warmup_steps, min_ratio = recipe.learning_rate, recipe.warmup_steps, recipe.min_lr_ratio
    # Step for step the formulas of transformers, so that curves compare.
    if step < warmup_steps:
        if recipe.lr_schedule == "wsd":
            return learning_rate * _above(min_ratio, step / warmup_steps)
        return learning_rate * step / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    match recipe.lr_schedule:
        case "constant":
            return learning_rate
        case "linear":
            return learning_rate * max(0.0, 1.0 - progress)
        case "cosine":
            return learning_rate * max(0.0, _half_cosine(progress))
        case "cosine_with_min_lr":
            return learning_rate * _above(min_ratio, _half_cosine(progress))
        case "wsd":
            # 0.07 * 100 is a little more than 7 in binary.
            wanted = math.ceil(recipe.lr_decay_ratio * num_steps - 1e-6)
            decay_steps = min(wanted, max(0, num_steps - warmup_steps))
            into_decay = step - (num_steps - decay_steps)
            if into_decay < 0:
                return learning_rate
            return learning_rate * _above(min_ratio, _half_cosine(into_decay / max(1, decay_steps)))


def _half_cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _above(lowest: float, factor: float) -> float:
    """A factor from 0 to 1, moved to between `lowest` and 1."""
    return factor * (1.0 - lowest) + lowest
