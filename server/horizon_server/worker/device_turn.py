"""The worker's turn on its device: asked for, waited for, and given back when the daemon wants it for another job."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from horizon_server import cpu_priority, progress
from horizon_server.children.entry import EventWriter
from horizon_server.events import MemoryReleased, TurnEnded, TurnWanted
from horizon_server.records.job import StopRequest
from horizon_server.worker_link.orders import Orders

# Between two tries to lock a device that another worker still has.
_LOCK_POLL_S = 0.005


class DeviceLock:
    """Held while this worker uses its devices. It decides between workers while no daemon does, and a new daemon finds
    them as they are."""

    def __init__(self, files: Sequence[Path]) -> None:
        """One file for each device, in the order of the node; without any, nothing else uses them."""
        self._descriptors = [os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for file in files]

    def take(self) -> bool:
        """Take all of them, or return False where another worker has one."""
        for place, descriptor in enumerate(self._descriptors):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                for taken in self._descriptors[:place]:
                    fcntl.flock(taken, fcntl.LOCK_UN)
                return False
        return True

    def give_back(self) -> None:
        """Let the next worker have them."""
        for descriptor in self._descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_UN)


class DeviceTurn:
    """Says when this worker may use its device. Where no daemon grants turns (`shared` False), it always may.

    While the daemon is away, a worker keeps its turn, and takes one where the device has memory for it for certain: on
    the host, where no other job is on the device, or where it holds its memory already.

    Thread: the worker's main thread, between steps, so that nothing of this worker runs on the device when its turn
    ends.
    """

    def __init__(
        self,
        *,
        orders: Orders,
        events: EventWriter,
        shared: bool,
        deadline_s: float | None,
        release: Callable[[], None],
        locks: Sequence[Path] = (),
        is_host: bool = True,
    ) -> None:
        """`release` frees the memory on the device until its next use; `deadline_s` (Unix) ends every wait; `locks` are
        the files of its devices."""
        self._orders, self._events, self._shared = orders, events, shared
        self._deadline_s, self._release = deadline_s, release
        # From asking for a turn until it is given back, or no longer wanted.
        self._asked = False
        self._began_s = 0.0
        self._holds_memory, self._is_host = False, is_host
        self._is_restored = False
        self._lock = DeviceLock(locks)

    def take(self) -> bool:
        """Have the device, after a wait where another job has it. False: an order or the deadline ended the wait."""
        orders = self._orders
        if not self._shared:
            return True
        if self._asked and orders.has_turn:
            self._restore_priority()
            return True
        self._asked = True
        self._events.send(TurnWanted())
        while True:
            left_s = None if self._deadline_s is None else max(0.0, self._deadline_s - time.time())
            in_time = orders.wait(left_s)
            if not in_time or orders.current is not StopRequest.NOTHING:
                # It may have been granted just now: the checkpoint that follows must not hold up the next job.
                self.give_back(release=True)
                return False
            if orders.take_release():
                self._free()
                self._events.send(MemoryReleased())
            elif self._has_device():
                self._restore_priority()
                self._began_s = time.monotonic()
                self._holds_memory = True
                return True

    def boundary(self) -> None:
        """Between two pieces of work: give the device back where the daemon wants it."""
        if self._asked and self._orders.is_turn_wanted_back:
            self.give_back()

    def give_back(self, *, release: bool = False) -> None:
        """Let the next job have the device; with `release` its memory too, also where the daemon has not asked for
        that."""
        if not self._shared:
            return
        had_turn, self._asked = self._asked, False
        began_s, self._began_s = self._began_s, 0.0
        ended_s = time.monotonic() if began_s else 0.0
        self._orders.end_turn()
        self._lock.give_back()
        released = self._orders.take_release() or (release and self._holds_memory)
        if released:
            self._free()
        if had_turn:
            self._events.send(TurnEnded(released=released, began_s=began_s, ended_s=ended_s))
        elif released:
            self._events.send(MemoryReleased())

    def rest(self) -> None:
        """Without work for now: let the next job have the device, and free its memory where the daemon wants that."""
        if self._asked:
            self.give_back()
        elif self._shared and self._orders.take_release():
            self._free()
            self._events.send(MemoryReleased())

    def _has_device(self) -> bool:
        """Whether the device is this worker's from now on; after a short pause where it is not."""
        orders = self._orders
        has_room = orders.is_alone or self._holds_memory or self._is_host
        if (orders.has_turn or (has_room and not orders.is_daemon_there)) and self._lock.take():
            if orders.take_turn():
                return True
            self._lock.give_back()  # a daemon has come meanwhile
        progress.advance()
        orders.pause(_LOCK_POLL_S)
        return False

    def _restore_priority(self) -> None:
        """End what a job that is being loaded has, little of the processors. Again at the next step where that did not
        work."""
        if not self._is_restored:
            self._is_restored = cpu_priority.restore()

    def _free(self) -> None:
        self._release()
        self._holds_memory = False
