"""What a job has measured: `JobMetrics`, rows of figures by step, kept as columns."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from operator import lt
from typing import TYPE_CHECKING, Any, overload

from horizon_client.errors import InvalidRequest, did_you_mean

if TYPE_CHECKING:
    import pandas

    from horizon_proto.v1 import job_pb2

_SHOWN = ("loss", "eval_loss", "grad_norm", "learning_rate", "tokens_per_second")
_SHOWN_ROWS = 10
_NAN = math.nan


@dataclass(frozen=True, kw_only=True)
class MetricsRow:
    """What was measured in one step, and by the evaluation after it; step 0 is the evaluation before the first step."""

    step: int
    """Number of the step."""
    time: datetime
    """When it was done."""
    figures: Mapping[str, float]
    """Each figure that there is, by name: loss, grad_norm, method/NAME, eval_loss, SET/accuracy, ..."""

    @property
    def loss(self) -> float | None:
        """Loss of the step; None in a row of an evaluation alone."""
        return self.figures.get("loss")

    @property
    def eval_loss(self) -> float | None:
        """Loss of the evaluation after the step; None where there was none."""
        return self.figures.get("eval_loss")


class JobMetrics(Sequence[MetricsRow]):
    """The figures of a job, a row for each step; a step that was done again after a restart counts once, as it was done
    last."""

    def __init__(
        self, job_id: str, steps: Sequence[int], times_s: Sequence[float], columns: Mapping[str, Sequence[float]]
    ) -> None:
        self.job_id = job_id
        self.steps = steps
        """The step of each row, ascending."""
        self.columns = columns
        """The figures by name, a number for each row; NaN where a row has none."""
        self._times_s = times_s

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the figures."""
        return tuple(self.columns)

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a figure, and its values there.

        Raises:
            InvalidRequest: with the names that there are, when there is no such figure.
        """
        if name not in self.columns:
            hint = did_you_mean(name, self.names) or f"figures: {', '.join(self.names) or 'none yet'}"
            raise InvalidRequest.of("figure", f"job {self.job_id} has no figure {name!r}; {hint}")
        found = [(step, value) for step, value in zip(self.steps, self.columns[name], strict=True) if value == value]
        return [step for step, _ in found], [value for _, value in found]

    def last(self) -> dict[str, float]:
        """Return the newest value of each figure."""
        newest: dict[str, float] = {}
        for name, column in self.columns.items():
            value = next((value for value in reversed(column) if value == value), None)
            if value is not None:
                newest[name] = value
        return newest

    def to_rows(self) -> list[dict[str, Any]]:
        """Return a plain dict for each row: step, time and each figure, None where there is none."""
        return [
            {"step": step, "time": time, **{name: None if value != value else value for name, value in figures}}
            for step, time, figures in self._each()
        ]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a DataFrame with the columns step, time and each figure, NaN where there is none.

        Raises:
            InvalidRequest: when pandas is not installed.
        """
        try:
            import pandas
        except ImportError:
            raise InvalidRequest("to_pandas needs pandas: pip install pandas; or use to_rows()") from None
        times = pandas.to_datetime(self._times_s, unit="s", utc=True)
        return pandas.DataFrame({"step": self.steps, "time": times, **self.columns})

    def _each(self) -> Iterator[tuple[int, datetime, Iterator[tuple[str, float]]]]:
        for place, (step, time_s) in enumerate(zip(self.steps, self._times_s, strict=True)):
            figures = ((name, column[place]) for name, column in self.columns.items())
            yield step, datetime.fromtimestamp(time_s, timezone.utc), figures

    def __len__(self) -> int:
        return len(self.steps)

    @overload
    def __getitem__(self, place: int) -> MetricsRow: ...

    @overload
    def __getitem__(self, place: slice) -> JobMetrics: ...

    def __getitem__(self, place: int | slice) -> MetricsRow | JobMetrics:
        if isinstance(place, slice):
            columns = {name: column[place] for name, column in self.columns.items()}
            return JobMetrics(self.job_id, self.steps[place], self._times_s[place], columns)
        return MetricsRow(
            step=self.steps[place],
            time=datetime.fromtimestamp(self._times_s[place], timezone.utc),
            figures={name: value for name, column in self.columns.items() if (value := column[place]) == value},
        )

    def __repr__(self) -> str:
        return f"JobMetrics({self.job_id!r}, {len(self):,} rows, figures: {', '.join(self.names)})"

    def _repr_html_(self) -> str:
        from horizon_client.notebook import table_html

        names = [name for name in _SHOWN if name in self.columns]
        rows = [
            [str(row.step), *(f"{row.figures[n]:.5g}" if n in row.figures else "" for n in names)]
            for row in self[-_SHOWN_ROWS:]
        ]
        return table_html(f"{self!r}, the last {len(rows)}:", ["step", *names], rows)


class MetricsTable:
    """Takes in the parts of an answer, and becomes a `JobMetrics`."""

    def __init__(self) -> None:
        self.last_sequence = 0
        self._steps = array("q")
        self._times_s = array("d")
        self._columns: dict[str, array[float]] = {}

    def add(self, part: job_pb2.GetJobMetricsResponse) -> None:
        """Take in the next part."""
        if part.last_sequence <= self.last_sequence:  # sent again after a cut
            return
        self.last_sequence = part.last_sequence
        for column in part.columns:
            if column.name not in self._columns:
                self._columns[column.name] = array("d", [_NAN]) * len(self._steps)
        incoming = [(self._columns[column.name], list(column.values)) for column in part.columns]
        steps, times_s = list(part.steps), list(part.times_s)
        # Most parts of a long job: steps alone, each later than the one before
        in_order = [*self._steps[-1:], *steps]
        if not any(part.are_evals) and all(map(lt, in_order, in_order[1:])):
            self._steps.extend(steps)
            self._times_s.extend(times_s)
            for column_of_all, values in incoming:
                column_of_all.extend(values)
            for column_of_all in self._columns.values():
                column_of_all.extend([_NAN] * (len(self._steps) - len(column_of_all)))
            return
        for place, (step, time_s, is_eval) in enumerate(zip(steps, times_s, part.are_evals, strict=True)):
            self._make_row(step, time_s, is_eval=is_eval)
            for column_of_all, values in incoming:
                if (value := values[place]) == value:
                    column_of_all[-1] = value

    def metrics(self, job_id: str) -> JobMetrics:
        """Return what has come."""
        return JobMetrics(job_id, self._steps, self._times_s, self._columns)

    def _make_row(self, step: int, time_s: float, *, is_eval: bool) -> None:
        """Add the row of a step, unless this is the evaluation after the last one; drop what is done again."""
        if self._steps and self._steps[-1] >= step:
            kept = bisect_left(self._steps, step + 1 if is_eval else step)
            del self._steps[kept:]
            for column in (self._times_s, *self._columns.values()):
                del column[kept:]
        if not (is_eval and self._steps and self._steps[-1] == step):
            self._steps.append(step)
            self._times_s.append(time_s)
            for column in self._columns.values():
                column.append(_NAN)
