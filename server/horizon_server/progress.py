"""How much work this process has done, as a number that only grows: one that works counts, one that hangs does not.

A worker's link reports to the daemon that the number has changed. So the daemon can tell a worker that loads, evaluates
or writes a checkpoint for an hour from one that hangs. A heartbeat by time could not: its thread continues while the
training thread is stuck.
"""

from __future__ import annotations

_count = 0


def advance() -> None:
    """Count one more bounded piece of work (a unit of the model, some megabytes of a file), or one look while waiting
    on purpose."""
    global _count
    # Several threads count without a lock: an addition that is lost does not matter, as the number still changes.
    _count += 1


def count() -> int:
    """Return the number."""
    return _count
