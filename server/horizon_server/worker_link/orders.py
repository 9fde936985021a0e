"""What the daemon wants of a worker, as the worker's threads see it."""

from __future__ import annotations

import threading

from horizon_server.records.job import StopRequest

GIVE_UP = b"give-up\n"  # wait no longer for disk space: a checkpoint that has none is not written
TURN = b"turn\n"  # the device may be used now
YIELD = b"yield\n"  # give the device back at the next step boundary
RELEASE = b"release\n"  # free the device's memory: with the turn at the next step boundary, or now without one
ALONE = b"alone\n"  # no other job is on the device
SHARED = b"shared\n"  # other jobs are on the device
CALL = b"call\n"  # a session has a new call


def stop_order(request: StopRequest) -> bytes:
    """Return the order to end at the next step boundary, for that reason: with a checkpoint, unless the job is
    cancelled."""
    return f"{request}\n".encode("ascii")


_STOPS = {stop_order(request): request for request in StopRequest if request}


class Orders:
    """The orders that were heard so far.

    `current` says whether to end. The daemon divides a device between workers by turns: `has_turn` from its grant until
    `end_turn`, `is_turn_wanted_back` once the worker is to end it, `is_release_wanted` once the device's memory is to
    be freed. `is_daemon_there` while a daemon is connected; `is_alone` where it said that no other job is on the
    device; `was_granted` from a grant until the end of that turn is reported. `gives_up_waiting` once a wait for disk
    space is to end; the code that begins such a wait resets it. `was_called` once a session
    has a new call; the code that looks for calls resets it. Thread: they may be read, waited for and given from any
    thread, and given from a signal handler.
    """

    def __init__(self) -> None:
        self.current = StopRequest.NOTHING
        self.has_turn = self.is_turn_wanted_back = self.is_release_wanted = False
        # One is expected: it has just started this worker.
        self.is_daemon_there = True
        self.is_alone = self.was_granted = False
        self.gives_up_waiting = False
        self.was_called = False
        self._changed = (
            threading.Condition()
        )  # its lock can be taken again by a signal handler that interrupts its holder

    def handle(self, lines: bytes) -> None:
        """Take in whole lines of the daemon. Unknown ones, of a newer daemon, are left alone."""
        with self._changed:
            for line in lines.splitlines(keepends=True):
                self._obey(line)
            self._changed.notify_all()

    def meet_daemon(self) -> None:
        """A daemon has connected. What an earlier one wanted of a turn is over."""
        with self._changed:
            self.is_daemon_there = True
            self.is_turn_wanted_back = self.is_release_wanted = False

    def lose_daemon(self) -> None:
        """No daemon is there any more."""
        with self._changed:
            self.is_daemon_there = False
            self.is_turn_wanted_back = self.is_release_wanted = False
            self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> bool:
        """Block until a worker without a turn has something to do; False where nothing came in time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: (
                    self.has_turn
                    or self.is_release_wanted
                    or self.current is not StopRequest.NOTHING
                    or not self.is_daemon_there
                ),
                timeout_s,
            )

    def wait_for_call(self, timeout_s: float) -> None:
        """Block until a session without a turn has something to do, or for that time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self.was_called or self.is_release_wanted or self.current is not StopRequest.NOTHING, timeout_s
            )

    def pause(self, timeout_s: float) -> None:
        """Wait that long, or until something is heard."""
        with self._changed:
            self._changed.wait(timeout_s)

    def take_turn(self) -> bool:
        """Count a turn as granted, where no daemon is there to grant it."""
        with self._changed:
            if not self.is_daemon_there:
                self.has_turn = self.was_granted = True
            return self.has_turn

    def take_release(self) -> bool:
        """Return whether memory is to be freed now, and take that as done."""
        with self._changed:
            # What was ordered after a grant is for the end of that turn.
            is_now = self.is_release_wanted and not self.is_turn_wanted_back
            self.is_release_wanted = self.is_release_wanted and not is_now
            return is_now

    def end_turn(self) -> None:
        """Count a turn as given back, and what the daemon wanted of it as done."""
        with self._changed:
            self.has_turn = self.is_turn_wanted_back = False

    def _obey(self, line: bytes) -> None:
        if line in _STOPS:
            if self.current is not StopRequest.CANCEL:  # which is never taken back
                self.current = _STOPS[line]
        elif line == GIVE_UP:
            self.gives_up_waiting = True
        elif line == TURN:
            self.has_turn = self.was_granted = True
            self.is_turn_wanted_back = False
        elif line == YIELD and self.has_turn:
            # Without a turn, the worker has ended the one that is meant before it read this.
            self.is_turn_wanted_back = True
        elif line == RELEASE:
            self.is_release_wanted, self.is_turn_wanted_back = True, self.has_turn
        elif line == CALL:
            self.was_called = True
        elif line in (ALONE, SHARED):
            self.is_alone = line == ALONE
