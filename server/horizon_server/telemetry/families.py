"""Declares metric families in a registry of their own and remembers what was declared; knows no job and no event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics


@dataclass(frozen=True, kw_only=True)
class Family:
    """One declared family: its name as a query writes it, its kind (counter, gauge, histogram), labels and help."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


class JobGauge:
    """A gauge whose first label is `job_id`; all series of a job go at once."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._labels: dict[str, set[tuple[str, ...]]] = {}

    def set(self, job_id: str, *rest: str, value: float) -> None:
        """Set the series of a job with the remaining label values."""
        self._labels.setdefault(job_id, set()).add(rest)
        self._gauge.labels(job_id, *rest).set(value)

    def set_components(self, job_id: str, *rest: str, values: Mapping[str, float]) -> None:
        """Set one series for each component, the last label; components that are gone from `values` lose theirs."""
        held = self._labels.setdefault(job_id, set())
        for gone in [labels for labels in held if labels[:-1] == rest and labels[-1] not in values]:
            held.discard(gone)
            self._gauge.remove(job_id, *gone)
        for component, value in values.items():
            self.set(job_id, *rest, component, value=value)

    def drop(self, job_id: str) -> None:
        """Remove every series of the job."""
        for rest in self._labels.pop(job_id, set()):
            self._gauge.remove(job_id, *rest)


class Families:
    """A registry and what was declared in it. Only this class constructs metrics."""

    def __init__(self) -> None:
        # Else every counter has one more series, which nobody queries.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=False)
        self.declared: list[Family] = []
        self.job_gauges: list[JobGauge] = []

    def counter(self, name: str, labels: Sequence[str], text: str) -> Counter:
        """Declare a counter; `name` ends in `_total`."""
        assert name.endswith("_total"), name
        self._declare(name, "counter", labels, text)
        return Counter(name.removesuffix("_total"), text, labels, registry=self.registry)

    def gauge(self, name: str, labels: Sequence[str], text: str) -> Gauge:
        """Declare a gauge that lives as long as the daemon."""
        assert "job_id" not in labels, f"{name} has a job_id, so it must be a job_gauge"
        self._declare(name, "gauge", labels, text)
        return Gauge(name, text, labels, registry=self.registry)

    def job_gauge(self, name: str, rest: Sequence[str], text: str) -> JobGauge:
        """Declare a gauge with `job_id` and the labels in `rest`."""
        labels = ("job_id", *rest)
        self._declare(name, "gauge", labels, text)
        gauge = JobGauge(Gauge(name, text, labels, registry=self.registry))
        self.job_gauges.append(gauge)
        return gauge

    def histogram(self, name: str, labels: Sequence[str], text: str, buckets: Sequence[float]) -> Histogram:
        """Declare a histogram."""
        self._declare(name, "histogram", labels, text)
        return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

    def drop_job(self, job_id: str) -> None:
        """Remove every series that carries the job's id."""
        for gauge in self.job_gauges:
            gauge.drop(job_id)

    def _declare(self, name: str, kind: str, labels: Sequence[str], text: str) -> None:
        self.declared.append(Family(name=name, kind=kind, labels=tuple(labels), help=text))
