"""A contest: entrants that take turns, what was measured of them, and its table."""

from __future__ import annotations

import datetime
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.process import PeerFailed, PeerProcess


def report(text: str) -> None:
    """A line of progress, with the time."""
    print(f"{datetime.datetime.now():%H:%M:%S} {text}", file=sys.stderr, flush=True)


@dataclass
class Entrant:
    """One that takes part in a contest, and what was measured of it."""

    name: str
    title: str
    process: PeerProcess | None = None
    refusal: str = ""
    ready_s: float = 0.0
    compile_s: float = 0.0
    first_s: float = 0.0
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0

    def start(self, command: Sequence[str], log: Path) -> None:
        """Start its process and wait until it is ready; one that fails leaves the contest."""
        report(f"starting {self.title}")
        self.process = PeerProcess(command, log)
        try:
            self.ready_s = self.process.wait_until_ready()
        except PeerFailed as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        """Leave the contest."""
        self.refusal = str(error)
        report(f"{self.title}: {error}")
        if self.process is not None:
            self.process.end()


def take_turns(entrants: Sequence[Entrant], title: str, *, num_rounds: int, num_steps: int) -> None:
    """A first turn that does not count, and that many rounds of turns; then the held-out loss of each.

    Who fails leaves the contest, and the others go on.
    """
    for number in range(num_rounds + 1):
        # Who goes first changes, so that nobody always finds the caches of the same other one.
        for entrant in sorted(entrants, key=lambda entrant: entrant.name, reverse=number % 2 == 1):
            if entrant.process is None or entrant.refusal:
                continue
            try:
                seconds = entrant.process.steps(num_steps)
                if number:
                    entrant.seconds.append(seconds)
                else:
                    entrant.first_s = seconds
                    entrant.process.memory.begin_steps()
                if number == num_rounds:
                    # Before the held-out rows are computed, which not all compute alike.
                    entrant.process.memory.stop()
                    entrant.loss = entrant.process.held_out_loss()
            except PeerFailed as error:
                entrant.fail(error)
        report(f"{title}: round {number} of {num_rounds}")


def table(entrants: Sequence[Entrant], *, tokens_per_turn: int) -> list[str]:
    """The first entrant is the one that the others are compared with."""
    ours = entrants[0]
    lines = [
        "| what | tokens/s | ours is times as fast | peak MiB, steps | ours / its | peak MiB, whole life | "
        "ours / its | held-out loss | preparing s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for entrant in entrants:
        if entrant.refusal or entrant.process is None:
            lines.append(f"| {entrant.title} | failed: {entrant.refusal} | | | | | | | |")
            continue
        speed = tokens_per_turn / statistics.median(entrant.seconds)
        peaks = [entrant.process.memory.steps_bytes, entrant.process.memory.whole_bytes]
        ratios = ["", "", ""]
        if entrant is not ours and ours.process is not None and not ours.refusal:
            found = sorted(theirs / own for own, theirs in zip(ours.seconds, entrant.seconds, strict=True))
            ratios[0] = f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"
            own = [ours.process.memory.steps_bytes, ours.process.memory.whole_bytes]
            ratios[1:] = [f"{mine / its:.2f}" for mine, its in zip(own, peaks, strict=True)]
        # What the first turn took beyond another one is preparation too: torch.compile works in it.
        preparing_s = entrant.ready_s + entrant.compile_s + entrant.first_s - statistics.median(entrant.seconds)
        lines.append(
            f"| {entrant.title} | {speed:,.0f} | {ratios[0]} | {peaks[0] >> 20:,} | {ratios[1]} | "
            f"{peaks[1] >> 20:,} | {ratios[2]} | {entrant.loss:.4f} | {preparing_s:.0f} |"
        )
    return lines
