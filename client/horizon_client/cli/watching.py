"""How commands follow jobs to their end: one with its figures in place, or several in one view."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from typing import IO, TYPE_CHECKING

import click

from horizon_client.cli.job_views import PlainView, event_line, has_device, open_view
from horizon_client.cli.output import clean, duration_text, to_plain, uses_colour
from horizon_client.cli.root import Interrupted
from horizon_client.cli.session import Notices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from horizon_client.cli.trackers import Trackers
    from horizon_client.resources import Job, JobEvent, StepEvent
    from horizon_client.sync_client import Client


def watch_job(client: Client, job: Job, output: str, stream: IO[str], trackers: Trackers) -> int:
    """Show events until the job has ended; return 0 when it has succeeded, else 1."""
    try:
        # Trackers first: what they say when they are opened and closed is outside the live figures.
        with trackers.following(job) as send, closing(open_view(job, output, stream)) as view:
            for event in client.jobs.watch(job.job_id, reporter=view):
                view.show(event)
                send(event)
        ended = client.jobs.get(job.job_id)
    except KeyboardInterrupt:
        raise Interrupted(continues(job.job_id, "watch")) from None
    # With json or yaml the last event has said it, as data
    if output == "table":
        click.echo(_end_text(ended), file=stream)
    elif output == "name" and stream is sys.stdout:
        click.echo(ended.job_id)
    return 0 if ended.state == "SUCCEEDED" else 1


def watch_several(client: Client, jobs: Sequence[Job], output: str) -> int:
    """Show the events of several jobs until all have ended; return 0 when all have succeeded, else 1."""
    by_id = {job.job_id: job for job in jobs}
    view = _open_view(list(by_id.values()), output)
    try:
        with closing(view):
            for job_id, event in client.jobs.watch_several(list(by_id), reporter=view):
                view.show(job_id, event)
        ended = [client.jobs.get(job_id) for job_id in by_id]
    except KeyboardInterrupt:
        raise Interrupted(f"the jobs continue; to return to them: horizon job watch {' '.join(by_id)}") from None
    for job in ended:
        if output == "table":
            click.echo(_end_text(job))
        elif output == "name":
            click.echo(job.job_id)
    return 0 if all(job.state == "SUCCEEDED" for job in ended) else 1


def continues(job_id: str, command: str) -> str:
    """Return what to say to a user who has interrupted a command that follows a job."""
    return f"the job continues; to return to it: horizon job {command} {job_id}"


def _end_text(ended: Job) -> str:
    steps = f" after {ended.step} of {ended.num_steps} steps" if ended.num_steps else ""
    why = f": {ended.message}" if ended.message else ""
    return clean(f"{ended.name} ({ended.job_id}) {ended.state}{steps}{why}")


def _heads(jobs: Sequence[Job]) -> dict[str, str]:
    """Return what each job is called: by its id where two have one name."""
    names = [job.name for job in jobs]
    return {job.job_id: clean(job.name) if names.count(job.name) == 1 else job.job_id for job in jobs}


class _SeveralData(Notices):
    """For programs: one JSON object or YAML document per event, with the id of its job; `name` shows none."""

    def __init__(self, output: str) -> None:
        self._output = output

    def show(self, job_id: str, event: JobEvent) -> None:
        """Print the event."""
        plain = {"job_id": job_id, **to_plain(event)}
        if self._output == "json":
            click.echo(json.dumps(plain, ensure_ascii=False, allow_nan=False))
        elif self._output == "yaml":
            import yaml

            click.echo(f"---\n{yaml.safe_dump(plain, sort_keys=False, allow_unicode=True).rstrip()}")

    def close(self) -> None:
        """Nothing is held back."""


class _SeveralLines(Notices):
    """One line per event, with the name of its job first."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        heads = _heads(jobs)
        width = max(map(len, heads.values()))
        self._views = {
            job.job_id: PlainView(sys.stdout, on_device=has_device(job), head=f"{heads[job.job_id]:<{width}}  ")
            for job in jobs
        }

    def show(self, job_id: str, event: JobEvent) -> None:
        """Print the event, or hold a step back as the view of one job does."""
        self._views[job_id].show(event)

    def close(self) -> None:
        """Print the steps that are held back."""
        for view in self._views.values():
            view.close()


class _SeveralLive(Notices):
    """A row of figures for each job in place, with all other events scrolling above them."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        from rich.console import Console
        from rich.live import Live

        self._heads = _heads(jobs)
        self._on_device = {job.job_id: has_device(job) for job in jobs}
        self._states: dict[str, str] = {job.job_id: job.state for job in jobs}
        self._steps: dict[str, StepEvent | None] = {job.job_id: job.last_step for job in jobs}
        self._console = Console(no_color=not uses_colour())
        self._live: Live = Live(console=self._console, refresh_per_second=4, get_renderable=self._figures)
        self._live.start()

    def show(self, job_id: str, event: JobEvent) -> None:
        """Update the row from a step, print anything else."""
        if event.kind == "step":
            self._steps[job_id] = event
        elif event.kind == "state":
            self._states[job_id] = event.state
        if event.kind != "step" or event.skipped:
            self.notice(f"{self._heads[job_id]}  {event_line(event, on_device=self._on_device[job_id])}")

    def notice(self, message: str) -> None:
        """Print a message above the rows."""
        lines = "\n".join(map(clean, message.splitlines()))
        self._console.print(lines, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the newest figures on the screen."""
        self._live.stop()

    def _figures(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 2, 0, 0))
        for job_id, head in self._heads.items():
            step = self._steps[job_id]
            done, steps = (step.step, step.num_steps) if step else (0, 0)
            figures = f"loss {step.loss:.4f}  {step.tokens_per_second:,.0f} tokens/s" if step else ""
            eta = f"ETA {duration_text(step.eta_s)}" if step and self._states[job_id] == "RUNNING" else ""
            grid.add_row(
                Text(head),
                Text(self._states[job_id]),
                ProgressBar(total=max(steps, 1), completed=done, width=20),
                Text(f"{done}/{steps or '?'}"),
                Text(figures),
                Text(eta),
            )
        return grid


def _open_view(jobs: Sequence[Job], output: str) -> _SeveralData | _SeveralLines | _SeveralLive:
    if output != "table":
        return _SeveralData(output)
    return _SeveralLive(jobs) if sys.stdout.isatty() else _SeveralLines(jobs)
