"""`horizon top`: the machine and its jobs at a glance, live."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from horizon_client.cli.job_views import share_text, steps_text
from horizon_client.cli.output import (
    about_text,
    bytes_text,
    clean,
    output_option,
    print_result,
    table,
    terminal_width,
    uses_colour,
)
from horizon_client.cli.session import connected
from horizon_client.errors import HorizonClientError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from horizon_client.resources import Job, Node, QueueEntry
    from horizon_client.sync_client import Client

_ACTIVE = ("queued", "preparing", "starting", "running", "paused", "stopping")
_MOST_JOBS = 1000
_BAR = 30


@dataclass(frozen=True, kw_only=True)
class Glance:
    """What the machine does now: all jobs, and of those that the caller may see the figures too."""

    node: Node
    queue: Sequence[QueueEntry]
    jobs: Mapping[str, Job]

    @classmethod
    def of(cls, client: Client) -> Glance:
        """Ask the daemon."""
        jobs = client.jobs.list(states=_ACTIVE, limit=_MOST_JOBS)
        return cls(node=client.node.status(), queue=client.jobs.queue(), jobs={job.job_id: job for job in jobs})


@click.command(
    epilog="""\b
Example:
  horizon top
  horizon top --interval 10
  horizon top --once -o json

\b
Of other users' jobs you see owner, state and times. Ctrl-C ends it. Where the
output is not a terminal, it is printed once."""
)
@click.option("--once", is_flag=True, help="Print it once and end.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.5),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
@output_option
@connected
def top(client: Client, once: bool, interval: float, output: str) -> None:
    """Show the machine, its memory, and every job's share, speed and end, live."""
    if once or output != "table" or not sys.stdout.isatty():
        glance = Glance.of(client)
        names = [entry.job_id for entry in glance.queue]
        print_result(glance, output, names=names, page=lambda: page(glance))
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(no_color=not uses_colour())
    with Live(Text(page(Glance.of(client))), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                try:
                    text = page(Glance.of(client))
                except HorizonClientError as error:  # such as a daemon that restarts: the next look may find it
                    text = f"{clean(error.message)}\nlooking again every {interval:g} s; Ctrl-C ends this"
                # A line more than the screen has would scroll it
                live.update(Text("\n".join(text.splitlines()[: console.height])), refresh=True)
        except KeyboardInterrupt:
            return


def page(glance: Glance) -> str:
    """Return the machine's line of facts, then a row for each job: those on the device first, then the queue."""
    node = glance.node
    limit = node.host_memory_limit_bytes
    used = max(limit - node.host_memory_available_bytes, 0)
    resident = sum(not entry.position for entry in glance.queue)
    state = "the daemon is shutting down" if node.draining else node.mode or "open"
    memory = f"{_bar(used, limit)} {bytes_text(used)} of {bytes_text(limit)}"
    lines = [
        f"{clean(node.hostname)}  {state}  {resident} on the device, {len(glance.queue) - resident} waiting  "
        f"{time.strftime('%H:%M:%S')}",
        f"memory  {memory}; {bytes_text(node.host_memory_promised_bytes)} promised",
        f"disk    {bytes_text(node.disk_free_bytes)} free",
        *(f"{clean(device.name)}  turn of {clean(device.holder) or 'nobody'}" for device in node.devices),
        "",
    ]
    if not glance.queue:
        return "\n".join([*lines, "no job runs or waits"])
    return "\n".join([*lines, table(_HEADERS, [_row(entry, glance.jobs.get(entry.job_id)) for entry in glance.queue])])


_HEADERS = ("JOB", "OWNER", "STATE", "SHARE", "STEP", "LOSS", "TOKENS/S", "MEMORY", "END", "WHY")


def _row(entry: QueueEntry, job: Job | None) -> list[str]:
    step = job.last_step if job is not None else None
    return [
        entry.name or entry.job_id,
        entry.owner,
        f"{entry.state} #{entry.position}" if entry.position else entry.state,
        share_text(entry),
        steps_text(entry),
        f"{step.loss:.4f}" if step else "-",
        f"{step.tokens_per_second:,.0f}" if step else "-",
        bytes_text(sum(step.host_memory_bytes.values())) if step and not entry.position else "-",
        about_text(entry.outlook.estimated_end_time) if entry.outlook else "-",
        (entry.outlook.why if entry.outlook else "") or "-",
    ]


def _bar(used: int, limit: int) -> str:
    width = _BAR if (terminal_width() or 100) >= 80 else 10
    full = round(width * min(used / limit, 1.0)) if limit else 0
    return f"[{'#' * full}{'.' * (width - full)}]"
