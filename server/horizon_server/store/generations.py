"""How far each trained unit of the host store is, in shared memory next to its planes: what a new worker continues from
after a kill.

A unit's number is 2 * g once the update of generation g is done, and 2 * g - 1 while it is being done. Where several
ranks update parts of it, each has a number of its own for it. Each optimizer step that updates is one generation. Next
to the numbers are the last two states that the trainer kept, each with the generation whose weights it is of: the older
one too, because a state is kept before the update that leads to it begins. So where all units agree on a whole
generation that a state is of, both belong together, whenever the worker was killed.

The kernel keeps what a killed process has written to shared memory, in the order in which it was written; every number
is one store of eight bytes. A power cut is another matter: the memory is gone then.

Thread: units from any thread, one thread at a time for each; the states from the trainer's.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

from horizon_server.store.layout import StoreLayout, plane_sizes

PLANE = "generations"

_FORMAT = 2
# Format, the slot of the newest state, and how many ranks have numbers.
_HEADER_WORDS = 3
# Generation (from 1, so that zeroed memory holds no state), length, and whether the step was reported.
_SLOT_WORDS = 3
_TEXT_BYTES = 1 << 16
# The keys of a model's compiled layers are most of a state.
_UNIT_TEXT_BYTES = 256


@dataclass(frozen=True, kw_only=True)
class KeptState:
    """A state that belongs to the weights in memory; `reported`: whether `mark_reported` was called for it."""

    text: str
    reported: bool


def plane_bytes(layout: StoreLayout, *, max_ranks: int = 1) -> int:
    """Bytes of the memory file."""
    num_units = len(layout.units)
    return 8 * (_HEADER_WORDS + 2 * _SLOT_WORDS + max_ranks * num_units) + 2 * _slot_bytes(num_units)


def lent_planes(layout: StoreLayout, *, grad_dtype_bytes: int, max_ranks: int = 1) -> dict[str, int]:
    """Bytes of every memory file that a worker of up to `max_ranks` ranks is lent, by name: the store's planes and the
    generations."""
    planes = plane_sizes(layout, grad_dtype_bytes=grad_dtype_bytes)
    return {**planes, PLANE: plane_bytes(layout, max_ranks=max_ranks)}


class Generations:
    """The numbers and states of one store, in a memory file or, without a descriptor, in memory of this process
    alone. `rank` is that of this process, of at most `max_ranks`."""

    def __init__(self, layout: StoreLayout, fd: int | None, *, rank: int = 0, max_ranks: int = 1) -> None:
        self._rank, self._max_ranks = rank, max_ranks
        self._num_units, size_bytes = len(layout.units), plane_bytes(layout, max_ranks=max_ranks)
        self._trained = [unit.index for unit in layout.units if unit.trained_elements]
        self.is_shared = fd is not None and os.fstat(fd).st_size == size_bytes
        memory = mmap.mmap(fd, size_bytes) if fd is not None and self.is_shared else mmap.mmap(-1, size_bytes)
        num_words = _HEADER_WORDS + 2 * _SLOT_WORDS + max_ranks * self._num_units
        view = memoryview(memory)
        self._words = view[: 8 * num_words].cast("q")
        self._texts = view[8 * num_words :]

    @property
    def generation(self) -> int | None:
        """The generation that all trained units have in full; None where they differ, or one is being updated."""
        if not self._trained:
            return 0
        ranks = range(max(1, self._words[2]))
        numbers = {self._words[self._number(unit_index, rank)] for unit_index in self._trained for rank in ranks}
        number = numbers.pop()
        return None if numbers or number % 2 else number // 2

    def share(self, num_ranks: int) -> None:
        """From now on, this many ranks have numbers: those of the generation that is there in full. The first rank
        calls it, before any of them updates."""
        generation = self.generation
        assert generation is not None and num_ranks <= self._max_ranks, "loading comes first"
        # The numbers first, so that a kill in between leaves them whole.
        for rank in range(num_ranks):
            for unit_index in self._trained:
                self._words[self._number(unit_index, rank)] = 2 * generation
        self._words[2] = num_ranks

    def has_reached(self, unit_index: int, generation: int) -> bool:
        """Whether all ranks have done their part of a unit's update of that generation."""
        return all(self._words[self._number(unit_index, rank)] >= 2 * generation for rank in range(self._words[2]))

    def reset(self) -> None:
        """Forget all states, and count from 0 again: before other weights are loaded."""
        for slot in (0, 1):
            self._words[self._slot(slot)] = 0
        for rank in range(self._max_ranks):
            for unit_index in range(self._num_units):
                self._words[self._number(unit_index, rank)] = 0
        self._words[2] = 1
        self._words[0] = _FORMAT

    def begin(self, unit_index: int, generation: int) -> None:
        """A unit's update begins; it may be said several times."""
        self._words[self._number(unit_index, self._rank)] = 2 * generation - 1

    def end(self, unit_index: int, generation: int) -> None:
        """A unit's update is done."""
        self._words[self._number(unit_index, self._rank)] = 2 * generation

    def keep(self, text: str, *, generation: int) -> None:
        """Keep a state that belongs to the weights of `generation`, in place of the older one of two."""
        data, slot = text.encode("ascii"), 1 - self._words[1]
        word, start = self._slot(slot), slot * _slot_bytes(self._num_units)
        # Taken out of use first, so that a partially written text is never read. One that is too long stays out of use.
        self._words[word] = 0
        if len(data) > _slot_bytes(self._num_units):
            return
        self._texts[start : start + len(data)] = data
        self._words[word + 1], self._words[word + 2] = len(data), 0
        self._words[word] = generation + 1
        self._words[1] = slot

    def mark_reported(self) -> None:
        """The daemon has what there is to know of the step that led to the newest state."""
        self._words[self._slot(self._words[1]) + 2] = 1

    @property
    def is_valid(self) -> bool:
        """Whether the memory is shared, and weights were loaded next to it."""
        return self.is_shared and self._words[0] == _FORMAT

    def find(self) -> KeptState | str:
        """Return the state of the weights in memory, or why there is none. States of other weights are forgotten."""
        if not self.is_valid:
            return "nothing was kept there"
        if (generation := self.generation) is None:
            return "the worker was killed in the middle of an update of the weights, or while its device had newer ones"
        newest = self._words[1]
        for slot in (newest, 1 - newest):
            word, start = self._slot(slot), slot * _slot_bytes(self._num_units)
            if self._words[word] == generation + 1:
                self._words[self._slot(1 - slot)] = 0
                self._words[1] = slot
                text = bytes(self._texts[start : start + self._words[word + 1]]).decode("ascii")
                return KeptState(text=text, reported=bool(self._words[word + 2]))
        return "the weights there are not those of a step that was kept"

    def _slot(self, slot: int) -> int:
        return _HEADER_WORDS + _SLOT_WORDS * slot

    def _number(self, unit_index: int, rank: int) -> int:
        return _HEADER_WORDS + 2 * _SLOT_WORDS + rank * self._num_units + unit_index


def _slot_bytes(num_units: int) -> int:
    return _TEXT_BYTES + _UNIT_TEXT_BYTES * num_units
