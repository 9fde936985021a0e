"""The vocabulary of the boards: charts, annotations, and the parts that their expressions are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

INSTANCE = 'instance=~"$instance"'
DAEMON = 'job="horizond"'
"""The scrape job: these names are shared with other programs, ours begin with horizon_."""
JOB = 'job_id="$job"'
QUEUED = 'state="QUEUED"'
FAILED = 'state="FAILED"'
RESIDENT = 'state=~"PREPARING|STARTING|RUNNING|STOPPING"'

JOB_PAGE = "${page}/jobs/"
JOB_BOARD = "/d/horizon-job?${datasource:queryparam}&${instance:queryparam}&${__url_time_range}&var-job="


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of a table: its title, the label that it shows or the letter of its query, and its unit."""

    title: str
    of: str
    unit: str = "string"
    links: Mapping[str, str] = field(default_factory=dict)
    """Addresses by the name of the link, with `${__data.fields...}` for what the row holds."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One panel: title, what it shows, what good looks like, unit, and (expression, legend) pairs. `width` is of 24
    columns."""

    title: str
    text: str
    good: str
    unit: str
    queries: Sequence[tuple[str, str]]
    width: int = 8
    height: int = 8
    kind: str = "lines"
    """lines, stacked, number, bars (one of each series, over the whole range) or table."""
    minimum: float | None = 0
    maximum: float | None = None
    warn: float | None = None
    """From here on it is orange; with `bad` below it, up to here."""
    bad: float | None = None
    """From here on it is red; with `warn` above it, up to here."""
    columns: Sequence[Column] = ()
    """Of a table, in their order."""
    of_jobs: bool = False
    """Whether each series is a job's: it links to the job's page and to its board."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An annotation: an event or a period that all charts of a board show."""

    name: str
    color: str
    query: str
    title: str
    text: str = ""
    is_time: bool = True
    """Whether the values are Unix milliseconds of events; else the event lasts while the value is above 0."""


@dataclass(frozen=True, kw_only=True)
class Variable:
    """A choice at the top of a board. `pattern` takes text and value out of a series of a query_result."""

    name: str
    label: str
    query: str
    pattern: str = ""
    several: bool = True
    hidden: bool = False


@dataclass(frozen=True, kw_only=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    text: str
    variables: Sequence[Variable]
    rows: Sequence[tuple[str, Sequence[Chart]]]
    marks: Sequence[Mark]
    since: str = "now-6h"
    links: Mapping[str, str] = field(default_factory=dict)


def select(metric: str, *matchers: str) -> str:
    """The series of a metric on the chosen nodes."""
    return f"{metric}{{{', '.join((INSTANCE, *matchers))}}}"


def named(metric: str, *matchers: str) -> str:
    """The series of all resident jobs, with the job's name, owner and project as labels."""
    return f"{select(metric, *matchers)} * on (instance, job_id) group_left (name, owner, project) {_INFO}"


def of_job(metric: str, *matchers: str) -> str:
    """The series of the chosen job."""
    return select(metric, JOB, *matchers)


def rate(counter: str, by: str = "", *matchers: str) -> str:
    """How fast a counter grows, summed by labels."""
    grouped = f"sum by ({by}) " if by else "sum "
    return f"{grouped}(rate({select(counter, *matchers)}[$__rate_interval]))"


def quantile(share: float, histogram: str, by: str = "", *matchers: str, window: str = "$__rate_interval") -> str:
    """A quantile of a histogram over a window."""
    labels = f"le, {by}" if by else "le"
    return (
        f"histogram_quantile({share}, sum by ({labels}) (rate({select(histogram + '_bucket', *matchers)}[{window}])))"
    )


def in_last_hour(counter: str, *matchers: str) -> str:
    """By how much a counter grew in an hour; 0 where it has no series yet."""
    return f"sum(increase({select(counter, *matchers)}[1h])) or vector(0)"


_INFO = select("horizon_job_info")

NODE_VARIABLE = Variable(name="instance", label="Node", query="label_values(horizon_build_info, instance)")
PAGE_VARIABLE = Variable(
    name="page",
    label="Web page",
    query=f"label_values({select('horizon_web_page_info')}, url)",
    several=False,
    hidden=True,
)
DAEMON_STARTED = Mark(
    name="Daemon started",
    color="purple",
    query=f"{select('process_start_time_seconds', DAEMON)} * 1000",
    title="horizond started on {{instance}}",
    text="Workers train on while the daemon is away.",
)
NODE_CLOSED = Mark(
    name="Maintenance",
    color="super-light-orange",
    query=f"1 - {select('horizon_node_open')}",
    title="No job starts on {{instance}}",
    text="Maintenance window, or cordoned or drained by an admin: horizon node status",
    is_time=False,
)
