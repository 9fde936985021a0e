"""A contest: entrants that take turns, what was measured of them, and its table."""

from __future__ import annotations

import datetime
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.process import PeerFailed, PeerProcess, Turn


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
    turns: list[Turn] = field(default_factory=list)
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
                turn = entrant.process.steps(num_steps)
                if number:
                    entrant.turns.append(turn)
                else:
                    entrant.first_s = turn.seconds
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
    columns = (
        "what",
        "tokens/s",
        "ours is times as fast",
        "by processor seconds",
        "peak MiB, steps",
        "ours / its",
        "peak MiB, whole life",
        "ours / its",
        "MiB on the GPU",
        "held-out loss",
        "preparing s",
    )
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    ours = entrants[0]
    for entrant in entrants:
        if entrant.refusal or entrant.process is None:
            lines.append(f"| {entrant.title} | failed: {entrant.refusal} {'| ' * (len(columns) - 2)}|")
            continue
        seconds = statistics.median(turn.seconds for turn in entrant.turns)
        peaks = [entrant.process.memory.steps_bytes, entrant.process.memory.whole_bytes]
        ratios = [""] * 4
        if entrant is not ours and ours.process is not None and not ours.refusal:
            pairs = list(zip(ours.turns, entrant.turns, strict=True))
            ratios[0] = _median_and_range(its.seconds / own.seconds for own, its in pairs)
            ratios[1] = _median_and_range(its.processor_s / own.processor_s for own, its in pairs)
            own_peaks = [ours.process.memory.steps_bytes, ours.process.memory.whole_bytes]
            ratios[2:] = [f"{own / its:.2f}" for own, its in zip(own_peaks, peaks, strict=True)]
        # What the first turn took beyond another one is preparation too: torch.compile works in it.
        preparing_s = entrant.ready_s + entrant.compile_s + entrant.first_s - seconds
        cells = [entrant.title, f"{tokens_per_turn / seconds:,.0f}", *ratios[:2]]
        cells += [f"{peaks[0] >> 20:,}", ratios[2], f"{peaks[1] >> 20:,}", ratios[3]]
        cells += [f"{entrant.turns[-1].device_bytes >> 20:,}", f"{entrant.loss:.4f}", f"{preparing_s:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _median_and_range(ratios: Iterable[float]) -> str:
    found = sorted(ratios)
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"
