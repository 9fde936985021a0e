"""Figures over steps in bounded memory: buckets of equally many steps, each with the mean, the least and the greatest
value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
NumberT = TypeVar("NumberT", np.float64, np.int64)

# With room for this many at first; more is made as a job goes on.
_FIRST_ROOM = 64
_NOTHING: Mapping[str, float] = {"sum": 0.0, "count": 0.0, "min": np.inf, "max": -np.inf}
_INTO_ONE = {"sum": np.add, "count": np.add, "min": np.minimum, "max": np.maximum}


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The values of one figure, a number for each point; NaN where there was none."""

    mean: Floats
    min: Floats
    max: Floats


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """Some figures at the same points. A point stands for up to `every_steps` steps and is at the last of them."""

    every_steps: int
    steps: Integers
    curves: Mapping[str, Curve]


@dataclass
class Buckets:
    """Takes steps in and keeps at most `most` buckets of them (an even number), and at most `most_figures` figures.

    Buckets begin with one step each. When there are too many, two become one. A step that repeats an earlier one (after
    a restart) replaces it and all later ones; a bucket that it divides keeps the values of both.

    Thread: one at a time.
    """

    most: int
    most_figures: int
    origin: int = 0
    """No step is earlier."""
    every_steps: int = 1
    last_step: int = -1
    _room: int = 0
    # Of each bucket, in order: its last step, and the number of the event of its first step.
    _steps: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    _sequences: Integers = field(default_factory=lambda: np.zeros(0, np.int64))
    _figures: dict[str, dict[str, Floats]] = field(default_factory=dict)

    def add(self, steps: Integers, sequences: Integers, figures: Mapping[str, Floats]) -> None:
        """Take in steps, in the order of their events: the numbers of those, and the values by figure, NaN where there
        is none."""
        # Where a step is no later than the one before, steps are done again.
        starts = [0, *(np.flatnonzero(np.diff(steps) <= 0) + 1), len(steps)]
        for start, end in pairwise(starts):
            if start < end:
                run = {name: values[start:end] for name, values in figures.items()}
                self._add_run(steps[start:end], sequences[start:end], run)

    def first_event(self, step: int) -> int:
        """Return the number of the first event of the bucket with this step, or of the next one that there is; 0 where
        there is none."""
        place = self._place(step)
        following = np.flatnonzero(self._steps[place:])
        return int(self._sequences[place + following[0]]) if len(following) else 0

    def sampled(self, *, points: int, from_step: int, to_step: int, wanted: Iterable[str] | None = None) -> Sampled:
        """Return at most `points` points of the buckets whose last step is in the range; of the figures that are
        wanted, or of all."""
        chosen = np.flatnonzero((self._steps >= max(1, from_step)) & (self._steps <= to_step))
        together = max(1, -(-len(chosen) // points))
        starts = np.arange(0, len(chosen), together)
        ends = np.minimum(starts + together, len(chosen)) - 1
        names = self._figures.keys() if wanted is None else [name for name in wanted if name in self._figures]
        curves = {}
        for name in names:
            parts = {
                key: into.reduceat(self._figures[name][key][chosen], starts) if len(chosen) else np.zeros(0)
                for key, into in _INTO_ONE.items()
            }
            some = parts["count"] > 0
            mean = np.divide(parts["sum"], parts["count"], out=np.full(len(starts), np.nan), where=some)
            curves[name] = Curve(
                mean=mean, min=np.where(some, parts["min"], np.nan), max=np.where(some, parts["max"], np.nan)
            )
        return Sampled(every_steps=self.every_steps * together, steps=self._steps[chosen[ends]], curves=curves)

    def _add_run(self, steps: Integers, sequences: Integers, figures: Mapping[str, Floats]) -> None:
        if int(steps[0]) <= self.last_step:
            self._forget_from(int(steps[0]))
        self.last_step = int(steps[-1])
        while self._place(self.last_step) >= self.most:
            self._join_pairs()
        self._make_room(self._place(self.last_step) + 1)
        places = (steps - self.origin) // self.every_steps
        starts = np.flatnonzero(np.diff(places, prepend=-1))
        into = places[starts]
        is_new = self._steps[into] == 0
        self._sequences[into] = np.where(is_new, sequences[starts], self._sequences[into])
        self._steps[into] = np.maximum.reduceat(steps, starts)
        for name, values in figures.items():
            if name not in self._figures:
                if len(self._figures) >= self.most_figures:
                    continue
                self._figures[name] = {key: np.full(self._room, nothing) for key, nothing in _NOTHING.items()}
            is_finite = np.isfinite(values)
            parts = {
                "sum": np.where(is_finite, values, 0.0),
                "count": is_finite.astype(np.float64),
                "min": np.where(is_finite, values, np.inf),
                "max": np.where(is_finite, values, -np.inf),
            }
            for key, together in _INTO_ONE.items():
                column = self._figures[name][key]
                column[into] = together(column[into], together.reduceat(parts[key], starts))

    def _forget_from(self, step: int) -> None:
        first = self._place(step)
        first += max(1, self.origin + first * self.every_steps) < step  # that bucket is divided
        self._steps[first:] = 0
        for columns in self._figures.values():
            for key, nothing in _NOTHING.items():
                columns[key][first:] = nothing

    def _place(self, step: int) -> int:
        return (step - self.origin) // self.every_steps

    def _join_pairs(self) -> None:
        self.every_steps *= 2
        is_first = self._steps[0::2] > 0
        sequences = np.where(is_first, self._sequences[0::2], self._sequences[1::2])
        self._sequences = _padded(sequences, self._room, 0)
        self._steps = _padded(np.maximum(self._steps[0::2], self._steps[1::2]), self._room, 0)
        for columns in self._figures.values():
            for key, into in _INTO_ONE.items():
                columns[key] = _padded(into(columns[key][0::2], columns[key][1::2]), self._room, _NOTHING[key])

    def _make_room(self, num_buckets: int) -> None:
        if num_buckets <= self._room:
            return
        self._room = min(self.most, max(_FIRST_ROOM, 2 * num_buckets))
        self._steps, self._sequences = _padded(self._steps, self._room, 0), _padded(self._sequences, self._room, 0)
        for columns in self._figures.values():
            for key, nothing in _NOTHING.items():
                columns[key] = _padded(columns[key], self._room, nothing)


def _padded(values: NDArray[NumberT], size: int, nothing: float) -> NDArray[NumberT]:
    more = np.full(size - len(values), nothing, values.dtype)
    return np.concatenate([values, more])
