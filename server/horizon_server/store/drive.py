"""States that are on drives: read ahead into a ring of memory, updated there, and written behind.

A block is what one plane has of one span of a unit (`drive_layout`). The ring has as many slots for each plane, and a
block is in one of them while it is read, used or written: so the ring is as large for layers of any size. The optimizer
takes the spans of a unit one after the other, and units in its own order; blocks that come next in that order are read
meanwhile, as far as slots are free. Checkpoints, loading and everything else open blocks one by one, through the same
slots.

Files hold nothing of their own: each piece's checksum is in a memory file next to the weights that the files belong to,
and is compared when the piece is read. So what is torn, lost, stale or in another place is found, whatever the drive
says. 0 there means that the piece was never written: it is zero, and not read.

A unit counts as updated once its last span is written: a worker that is killed earlier leaves weights of no generation,
as in the middle of any update.

Thread: any. One lock guards what is known of the slots; reading, writing and checksums run on six threads a drive.
Source: ZeRO-Infinity (arXiv 2104.07857) for states on drives behind a ring of buffers.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from horizon_server import progress
from horizon_server.errors import DriveFailed, os_problem
from horizon_server.figures import DriveFigures
from horizon_server.records.execution import OnDrives
from horizon_server.store import planes
from horizon_server.store.checksum import checksum
from horizon_server.store.drive_files import THREADS_PER_DRIVE
from horizon_server.store.drive_layout import INDEX_PLANE, DriveLayout, DriveSpan, Piece, file_name
from horizon_server.store.layout import StoreLayout

SILENCE_S = 120.0
"""A drive that does not finish one piece in this time has failed."""
_POLL_S = 1.0
_ADVICE = "replace the drive or take it out of tier_dirs, then resume the job from its checkpoint"
_NOTHING = DriveSpan(-1, 0)


@dataclass(eq=False)
class _Slot:
    """Memory for one block of a plane. `pending` are pieces on their way; `is_changed`: the drive has older data."""

    plane: str
    memory: mmap.mmap
    span: DriveSpan = _NOTHING
    num_users: int = 0
    pending: int = 0
    is_changed: bool = False
    is_written: bool = False
    """Whether the pieces on their way go to the drive."""
    used_at: int = 0
    after: list[Callable[[], None]] = field(default_factory=list)
    """What to do once it is written."""

    @property
    def is_free(self) -> bool:
        """Whether another block may take its place."""
        return not (self.num_users or self.pending or self.is_changed)


class DriveStates:
    """The blocks of one store that are on drives. Closed once."""

    def __init__(
        self, layout: StoreLayout, on: OnDrives, fds: Mapping[str, int], *, order: Sequence[int], num_threads: int
    ) -> None:
        """`order` is that in which units are updated. `fds` are the files of `drive_layout.file_name` and the memory
        file `INDEX_PLANE`; all stay the caller's."""
        self._layout, self._on = DriveLayout(layout, on), on
        self._files = [fds[file_name(number)] for number in range(len(on.folders))]
        index = mmap.mmap(fds[INDEX_PLANE], self._layout.index_bytes)
        # The view keeps the mapping.
        self._checksums = memoryview(index).cast("Q")
        self._parts = {unit: self._layout.parts(unit) for unit in on.units}
        self._slots = {
            plane: [_Slot(plane, planes.map_anonymous(num_bytes)) for _ in range(on.ring_slots)]
            for plane, num_bytes in self._layout.slot_bytes.items()
        }
        for slot in self._all_slots():
            planes.touch(slot.memory, num_threads=num_threads)
        # Rings may have hundreds of slots.
        self._held: dict[tuple[DriveSpan, str], _Slot] = {}
        self._pools = [
            ThreadPoolExecutor(max_workers=THREADS_PER_DRIVE, thread_name_prefix=file_name(number))
            for number in range(len(on.folders))
        ]
        self._changed = threading.Condition()
        self._failure: DriveFailed | None = None
        self._last_progress_s = time.monotonic()
        self._clock = 0
        self._order = [DriveSpan(unit, number) for unit in order for number in range(len(self._parts[unit]))]
        self._place, self._next = {span: place for place, span in enumerate(self._order)}, 0
        self._is_closed, self._is_silent = False, False
        self._read, self._written = Counter[int](), Counter[int]()

    def parts(self, unit: int) -> Sequence[slice]:
        """The elements of each span of a unit, in order; none where it has nothing on drives."""
        return self._parts.get(unit, ())

    def holds(self, unit: int, plane: str) -> bool:
        """Whether a plane of a unit is on drives."""
        return unit in self._parts and plane in self._slots

    def view(self, unit: int, plane: str, part: slice, dtype: torch.dtype) -> torch.Tensor:
        """What a plane has of these elements of a unit, which are of one span that is open. Shapes: [what that is]."""
        layout = self._layout.store
        found = layout.part_in(plane, layout.units[unit], part)
        if found.start == found.stop:
            return torch.empty(0, dtype=dtype)
        span = self._span_of(unit, part)
        with self._changed:
            slot = self._slot_of(span, plane)
            assert slot is not None and slot.num_users and not slot.pending, f"{plane} of {span} is not open"
        begin = layout.part_in(plane, layout.units[unit], self._parts[unit][span.number]).start
        offset, count = (found.start - begin) * dtype.itemsize, found.stop - found.start
        return torch.frombuffer(slot.memory, dtype=dtype, offset=offset, count=count)

    @contextmanager
    def opened(self, unit: int, plane: str, part: slice, *, writes: bool) -> Iterator[None]:
        """Have these elements of a unit, which are of one span, in memory within the block; what is written to them is
        on the drive after the next `flush`.

        Raises:
            DriveFailed: a drive cannot be read or written, or its data is not what was written to it.
        """
        span = self._span_of(unit, part)
        if not self._layout.blocks[span, plane]:
            yield
            return
        slot = self._open(span, plane)
        try:
            yield
        finally:
            with self._changed:
                slot.is_changed |= writes
                self._leave(slot)

    @contextmanager
    def updating(self, unit: int, part: slice, done: Callable[[], None]) -> Iterator[None]:
        """Have all blocks of a span, which has these elements, in memory within the block, and write them behind it;
        `done` is called when they are on the drives. Raises as `opened`."""
        slots: list[_Slot] = []
        span = self._span_of(unit, part)
        try:
            # One by one, so that those before one that fails are given back.
            slots.extend(self._open(span, plane) for plane in self._on.planes if self._layout.blocks[span, plane])
            yield
        except BaseException:
            with self._changed:
                for slot in slots:
                    self._leave(slot)
            raise
        left = len(slots)

        def written() -> None:
            nonlocal left
            left -= 1
            if not left:
                done()

        with self._changed:
            for slot in slots:
                slot.is_changed = True
                slot.after.append(written)
                self._leave(slot)
                self._write(slot)
            self._next = (self._place[span] + 1) % len(self._order)
            self._read_ahead()

    def leave_out(self, units: Collection[int]) -> None:
        """Read nothing ahead for these units: they are updated elsewhere. Before the first update."""
        self._order = [span for span in self._order if span.unit not in units]
        self._place, self._next = {span: place for place, span in enumerate(self._order)}, 0

    def read_ahead(self) -> None:
        """Begin to read what the optimizer takes next, as far as there is room. Raises DriveFailed: a drive has failed
        meanwhile."""
        with self._changed:
            self._raise_failure()
            self._read_ahead()

    def forget(self, plane: str | None = None) -> None:
        """All of a plane, or of all of them, is zero from now on. Nothing is open."""
        self.flush(is_kept=False)
        with self._changed:
            for (_, of), pieces in self._layout.blocks.items():
                for piece in pieces if plane in (None, of) else ():
                    self._checksums[piece.number] = 0
            for slot in self._all_slots():
                if plane in (None, slot.plane):
                    assert not slot.num_users, "nothing is open"
                    self._held.pop((slot.span, slot.plane), None)
                    slot.span, slot.is_changed = _NOTHING, False

    def flush(self, *, is_kept: bool = True) -> None:
        """Wait until all that was written is on the drives; without `is_kept`, until no piece is on its way.

        Raises as `opened`.
        """
        with self._changed:
            while True:
                if is_kept:
                    self._raise_failure()
                    for slot in self._all_slots():
                        if slot.is_changed and not slot.num_users and not slot.pending:
                            self._write(slot)
                if not any(slot.pending for slot in self._all_slots()):
                    return
                self._wait()

    def take_traffic(self) -> tuple[DriveFigures, ...]:
        """What each drive has read and written since the last call."""
        with self._changed:
            found = tuple(
                DriveFigures(read_bytes=self._read[number], written_bytes=self._written[number])
                for number in range(len(self._files))
            )
            self._read.clear()
            self._written.clear()
        return found

    def close(self) -> None:
        """Wait for what is on its way, unless a drive does not answer. What was written and not flushed is lost, as
        what is in memory."""
        with self._changed:
            self._is_closed, is_silent = True, self._is_silent
        for pool in self._pools:
            # A thread that a drive does not answer may never end: the worker is to say so before it is killed.
            pool.shutdown(wait=not is_silent, cancel_futures=is_silent)

    def _all_slots(self) -> Iterator[_Slot]:
        return (slot for of_plane in self._slots.values() for slot in of_plane)

    def _span_of(self, unit: int, part: slice) -> DriveSpan:
        number = part.start // self._on.span_elements
        assert part.stop <= self._parts[unit][number].stop, f"{part} of unit {unit} is not of one span"
        return DriveSpan(unit, number)

    def _slot_of(self, span: DriveSpan, plane: str) -> _Slot | None:
        return self._held.get((span, plane))

    def _open(self, span: DriveSpan, plane: str) -> _Slot:
        with self._changed:
            while True:
                self._raise_failure()
                slot = self._slot_of(span, plane)
                if slot is None:
                    slot = self._room(span, plane)
                if slot is not None and not slot.pending:
                    slot.num_users += 1
                    self._clock += 1
                    slot.used_at = self._clock
                    return slot
                self._wait()

    def _room(self, span: DriveSpan, plane: str) -> _Slot | None:
        """A slot that a block is being read into now; None where all are in use. The lock is held."""
        free = [slot for slot in self._slots[plane] if slot.is_free]
        if free:
            # What was read ahead is the last to go, and of that what is wanted last.
            slot = max(free, key=self._distance)
            self._read_into(slot, span)
            return slot
        for slot in self._slots[plane]:
            if slot.is_changed and not slot.num_users and not slot.pending:
                self._write(slot)
        return None

    def _distance(self, slot: _Slot) -> int:
        """How far what is in a slot is from what the optimizer takes next, in spans."""
        place = self._place.get(slot.span)
        return len(self._order) if place is None else (place - self._next) % len(self._order)

    def _leave(self, slot: _Slot) -> None:
        slot.num_users -= 1
        self._changed.notify_all()

    def _read_ahead(self) -> None:
        """The lock is held."""
        if self._failure is not None or self._is_closed:
            return
        order = self._order
        coming = [order[(self._next + ahead) % len(order)] for ahead in range(min(self._on.ring_slots, len(order)))]
        places = {span: place for place, span in enumerate(coming)}

        def rank(slot: _Slot) -> tuple[bool, int]:
            """The highest may go first: what is not coming, the longest unused; then what comes last."""
            place = places.get(slot.span)
            return (True, -slot.used_at) if place is None else (False, place)

        free = {plane: sorted((s for s in slots if s.is_free), key=rank) for plane, slots in self._slots.items()}
        for place, span in enumerate(coming):
            for plane in self._on.planes:
                if not self._layout.blocks[span, plane] or self._slot_of(span, plane) is not None:
                    continue
                # Never in the place of what is wanted before it.
                if free[plane] and places.get(free[plane][-1].span, len(coming)) > place:
                    self._read_into(free[plane].pop(), span)

    def _read_into(self, slot: _Slot, span: DriveSpan) -> None:
        self._held.pop((slot.span, slot.plane), None)
        slot.span = span
        self._held[span, slot.plane] = slot
        self._start(slot, is_written=False)

    def _write(self, slot: _Slot) -> None:
        self._start(slot, is_written=True)

    def _start(self, slot: _Slot, *, is_written: bool) -> None:
        pieces = self._layout.blocks[slot.span, slot.plane]
        slot.pending, slot.is_written = len(pieces), is_written
        self._last_progress_s = time.monotonic()
        for piece in pieces:
            self._pools[piece.drive].submit(partial(self._move, slot, piece, is_written=is_written))

    def _move(self, slot: _Slot, piece: Piece, *, is_written: bool) -> None:
        """One piece, on a thread of its drive."""
        failure, num_moved = None, 0
        try:
            with memoryview(slot.memory)[piece.start : piece.start + piece.num_bytes] as memory:
                if is_written:
                    self._checksums[piece.number] = checksum(memory, place=piece.number)
                    num_moved = _all_of(os.pwritev, self._files[piece.drive], memory, piece.offset)
                elif expected := self._checksums[piece.number]:
                    num_moved = _all_of(os.preadv, self._files[piece.drive], memory, piece.offset)
                    if checksum(memory, place=piece.number) != expected:
                        failure = DriveFailed(
                            f"the drive of {self._folder(piece)} (tier_dirs) returned other data than was written to "
                            f"it: {slot.plane} of unit {slot.span.unit}; {_ADVICE}"
                        )
                else:
                    memory[:] = bytes(piece.num_bytes)
        except OSError as error:
            failure = DriveFailed(
                f"the drive of {self._folder(piece)} (tier_dirs) failed: {os_problem(error)}; {_ADVICE}"
            )
        except Exception as error:  # noqa: BLE001 - what waits for the piece must learn of it
            failure = DriveFailed(f"states on the drive of {self._folder(piece)} were not moved: {error!r}")
        progress.advance()
        with self._changed:
            (self._written if is_written else self._read)[piece.drive] += num_moved
            self._failure = self._failure or failure
            self._last_progress_s = time.monotonic()
            slot.pending -= 1
            if not slot.pending:
                self._arrived(slot)
            self._changed.notify_all()

    def _arrived(self, slot: _Slot) -> None:
        """All pieces of a block are there. The lock is held."""
        if self._failure is not None:
            return
        if slot.is_written:
            slot.is_changed = False
            after, slot.after = slot.after, []
            for work in after:
                work()
            self._read_ahead()

    def _folder(self, piece: Piece) -> str:
        return self._on.folders[piece.drive]

    def _wait(self) -> None:
        """Until something has changed. The lock is held. Raises DriveFailed: nothing does for too long."""
        self._changed.wait(_POLL_S)
        is_moving = any(slot.pending for slot in self._all_slots())
        if is_moving and time.monotonic() - self._last_progress_s > SILENCE_S:
            waiting = sorted(
                {
                    self._on.folders[piece.drive]
                    for slot in self._all_slots()
                    if slot.pending
                    for piece in self._layout.blocks[slot.span, slot.plane]
                }
            )
            self._is_silent = True
            self._failure = self._failure or DriveFailed(
                f"a drive of tier_dirs has not answered for {SILENCE_S:.0f} s, one of: {', '.join(waiting)}; {_ADVICE}"
            )
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _all_of(move: Callable[[int, Sequence[memoryview], int], int], file: int, memory: memoryview, offset: int) -> int:
    """Read or write all of a piece: the kernel may do a part at once."""
    done = 0
    while done < len(memory):
        count = move(file, [memory[done:]], offset + done)
        if not count:
            raise OSError(0, "the file ended early")
        done += count
    return done
