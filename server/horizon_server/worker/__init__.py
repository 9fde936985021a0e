"""The child process of one attempt: spec in, events out. The only place that joins spec and engine."""

from __future__ import annotations

import sys

# Python's own is 5 ms. A thread that launches work on a GPU gives up the lock at every launch, and while another thread
# computes in Python it got it back only after that time: 9,000 launches a second instead of 240,000.
_SWITCH_INTERVAL_S = 1e-4


def let_launchers_run() -> None:
    """Have the interpreter's lock change hands quickly in this process, whose threads feed a device."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
