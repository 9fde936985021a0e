"""How much memory a peer has taken, by the kernel's own count.

A process: the highest of its resident set (VmHWM), pages of memory files included, so that planes in shared memory
count like others. Of several that are alive at once, a peer and its children, the sum of their proportional shares
(PSS) is sampled too, so that what they share counts once; the higher figure is the peer's.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_EVERY_S = 1.0


def processes(pid: int) -> list[int]:
    """A process and all below it that are alive."""
    found = [pid]
    with suppress(OSError, ValueError):
        for file in (_PROC / str(pid) / "task").glob("*/children"):
            for child in file.read_text("ascii").split():
                found += processes(int(child))
    return found


def high_water_bytes(pid: int) -> int:
    """The highest resident set so far; 0 where the process has ended."""
    return _field_bytes(_PROC / str(pid) / "status", "VmHWM:")


def reset_high_water(pid: int) -> None:
    """Begin again from what is resident now (proc(5), clear_refs)."""
    for one in processes(pid):
        with suppress(OSError):
            (_PROC / str(one) / "clear_refs").write_text("5", "ascii")


def _field_bytes(path: Path, field: str) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(path.read_text("ascii").split(field)[1].split()[0]) << 10
    return 0


class MemoryWatch:
    """Samples a process and its children in a thread, until it is stopped."""

    def __init__(self, pid: int) -> None:
        self._pid, self._ended = pid, threading.Event()
        self._peak_bytes = self._earlier_bytes = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self.sample()

    def sample(self) -> None:
        """Look now."""
        alive = processes(self._pid)
        found = [high_water_bytes(pid) for pid in alive]
        if len(alive) > 1:
            found.append(sum(_field_bytes(_PROC / str(pid) / "smaps_rollup", "\nPss:") for pid in alive))
        self._peak_bytes = max(self._peak_bytes, *found)

    def begin_steps(self) -> None:
        """What comes now is the peak of the steps."""
        self.sample()
        self._earlier_bytes = max(self._earlier_bytes, self._peak_bytes)
        reset_high_water(self._pid)
        self._peak_bytes = 0

    @property
    def steps_bytes(self) -> int:
        """The peak since `begin_steps`."""
        return self._peak_bytes

    @property
    def whole_bytes(self) -> int:
        """The peak since the start."""
        return max(self._earlier_bytes, self._peak_bytes)

    def stop(self) -> None:
        """Look once more and end; further calls do nothing."""
        if not self._ended.is_set():
            self._ended.set()
            self._thread.join()
            self.sample()
