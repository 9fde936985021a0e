"""What a transfer tells while it runs, and how long local work is cut into pieces that can be interrupted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

PIECE_BYTES = 4 * 2**20
"""Local files are read in pieces of this size, so that an interrupt is heard between two of them."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a transfer is. `finalize` has no bytes: the server checks what has arrived."""

    phase: Literal["check", "hash", "upload", "finalize", "download"]
    name: str
    done_bytes: int
    total_bytes: int


OnProgress: TypeAlias = Callable[[Progress], None]
"""Thread: called in the event loop of the client; for the blocking `Client` that is a thread of its own."""

OnNotice: TypeAlias = Callable[[str], None]
"""One sentence for people, such as that a connection was cut and is being made again."""


def ignore_progress(progress: Progress) -> None:
    """Tell nobody."""


def ignore_notice(sentence: str) -> None:
    """Tell nobody."""


async def in_pieces(steps: Iterator[int], on_bytes: Callable[[int], None]) -> None:
    """Run a generator that yields the bytes it has worked through: each step in a thread, so that the loop gets its turn in between."""
    while (num_bytes := await asyncio.to_thread(next, steps, None)) is not None:
        on_bytes(num_bytes)
