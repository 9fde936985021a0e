"""Importing large libraries in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_WHILE_IMPORTING = (100_000, 50, 100)
"""New objects before a pass of the collector over the youngest, and passes before one over older ones; Python's own are
700, 10 and 10."""


@contextmanager
def seldom_collecting() -> Iterator[None]:
    """Have Python look for garbage seldom in the block, which imports libraries.

    Nearly all that an import makes stays, and every pass over it finds nothing: with torch and transformers that is a
    tenth to a fifth of the time. Not for code that computes: memory in cycles is freed later.
    """
    # Not `gc.disable` and `gc.freeze`: what is frozen stays at the interpreter's end too, of which triton complains.
    usual = gc.get_threshold()
    gc.set_threshold(*_WHILE_IMPORTING)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
