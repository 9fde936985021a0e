"""What a command works with: the client for its options, and progress and notices on stderr.

Progress is a bar with rate and remaining time on a terminal, a line every few seconds elsewhere.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

from horizon_client.cli.output import bytes_text, clean, duration_text
from horizon_client.cli.root import Interrupted, connection_options
from horizon_client.profiles import SYSTEM_CA, Endpoint, is_open_to_others, read_token_file, resolve_endpoint
from horizon_client.reporter import Progress, Reporter

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from horizon_client.resources import Job
    from horizon_client.sync_client import Client

_SEARCHED_JOBS = 200
_OPTIONS = ("server", "token_file", "ca", "profile_name")
_VERBS = {
    "check": "checking",
    "hash": "hashing",
    "upload": "uploading",
    "finalize": "verifying on the server:",
    "merge": "merging on the server",
    "download": "downloading",
}
_PLAIN_INTERVAL_S = 5.0
_SHORTEST_FOR_A_RATE_S = 0.5


def connected(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the connection options to a command, and pass it an open client as its first argument."""

    # The decorator next to the function, so that help lists these options last
    @connection_options
    @functools.wraps(command)
    def run(**values: Any) -> Any:
        with open_client(click.get_current_context()) as client:
            return command(client, **{name: value for name, value in values.items() if name not in _OPTIONS})

    return run


def find_job(client: Client, text: str) -> Job:
    """Return the job that `text` means, and say so where it is the newest of several with that name."""
    job = client.jobs.get(text)
    if job.name == text and job.job_id != text:
        jobs = client.jobs.list(limit=_SEARCHED_JOBS)
        number = sum(other.name == text and other.owner == job.owner for other in jobs)
        if number > 1:
            Notices().notice(f"{number} jobs are named {text}; this is the newest, {job.job_id}")
    return job


def open_client(ctx: click.Context) -> Client:
    """Return the client for the options of `ctx`."""
    from horizon_client.sync_client import Client  # only here, because it loads grpc

    return Client(**client_arguments(ctx), reporter=Notices())


def client_arguments(ctx: click.Context) -> dict[str, Any]:
    """Return the arguments of `Client` for the options of a command, or those before the command."""
    # `horizon --server A job list` and `horizon job list --server A` mean the same; the nearest to the command is first
    chosen: dict[str, Any] = dict.fromkeys(_OPTIONS)
    level: click.Context | None = ctx
    while level is not None:
        chosen = {name: value or level.params.get(name) for name, value in chosen.items()}
        level = level.parent
    token_file, ca = chosen["token_file"], chosen["ca"]
    return {
        "server": chosen["server"],
        "token": token_of(Path(token_file).expanduser(), quiet=ctx.resilient_parsing) if token_file else None,
        "ca_file": ca if ca in (None, SYSTEM_CA) else str(Path(ca).expanduser()),
        "profile": chosen["profile_name"],
    }


def endpoint_of(ctx: click.Context) -> Endpoint:
    """Return where the client of a command connects to, for a program that speaks with the same daemon."""
    given = client_arguments(ctx)
    return resolve_endpoint(given["server"], token=given["token"], ca_file=given["ca_file"], profile=given["profile"])


def token_of(path: Path, *, quiet: bool = False) -> str:
    """Return the token in a file, with a warning on stderr when other users can read it."""
    token = read_token_file(path)
    if not quiet and is_open_to_others(path):
        click.echo(f"warning: other users of this machine can read your token; run: chmod 600 {path}", err=True)
    return token


class Notices(Reporter):
    """Prints notices only."""

    def notice(self, message: str) -> None:
        """Print one message."""
        click.echo(clean(message), err=True)


class TransferReporter(Reporter):
    """A context in which a command reports transfers. Ctrl-C ends it with `interrupted`, which says how to resume.

    Thread: called from the client's thread while the command's own thread waits.
    """

    def __init__(self, interrupted: str) -> None:
        self._interrupted = interrupted
        self._phase = ""
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._last_line_at = 0.0
        self._phase_began = (0.0, 0)

    def __enter__(self) -> TransferReporter:
        if sys.stderr.isatty():
            self._bar = _rich_bar()
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()  # first, or the message would be drawn over
        if isinstance(error, KeyboardInterrupt):
            raise Interrupted(self._interrupted) from None

    def progress(self, progress: Progress) -> None:
        """Draw the bar, or print a line when one is due."""
        if self._bar is None:
            self._print_if_due(progress)
            return
        total = progress.total_bytes or None  # with None the bar pulses: the server's work has no size
        if self._task is not None and self._phase == progress.phase:
            self._bar.update(self._task, completed=progress.done_bytes, total=total)
            return
        if self._task is not None:
            self._bar.remove_task(self._task)
        self._phase = progress.phase
        # Several files are sent at once, so the name of one would say little
        text = f"{_VERBS[progress.phase]} {clean(progress.name) if progress.phase == 'finalize' else ''}".rstrip()
        self._task = self._bar.add_task(text, total=total, completed=progress.done_bytes)

    def notice(self, message: str) -> None:
        """Print one message above the bar."""
        if self._bar is None:
            click.echo(clean(message), err=True)
        else:
            self._bar.console.print(clean(message), markup=False, highlight=False)

    def _print_if_due(self, progress: Progress) -> None:
        """Print at once for uploads, downloads and the server's work."""
        now = time.monotonic()
        is_new_phase = progress.phase != self._phase
        if is_new_phase:
            self._phase, self._last_line_at = progress.phase, now
            self._phase_began = (now, progress.done_bytes)
        is_due = now - self._last_line_at >= _PLAIN_INTERVAL_S
        is_end = 0 < progress.total_bytes == progress.done_bytes
        # Local reading is worth a line only when it takes long
        if is_due or (progress.phase not in ("check", "hash") and (is_new_phase or is_end)):
            self._last_line_at = now
            began_at, began_bytes = self._phase_began
            click.echo(progress_line(progress, progress.done_bytes - began_bytes, now - began_at), err=True)


def progress_line(progress: Progress, moved_bytes: int, elapsed_s: float) -> str:
    """Return one line: the share that is done, and rate and ETA when they are known."""
    line = f"{_VERBS[progress.phase]} {clean(progress.name)}"
    if not progress.total_bytes:
        return line
    line += f": {100 * progress.done_bytes // progress.total_bytes}% of {bytes_text(progress.total_bytes)}"
    # A rate over less time says little, and the ETA would jump
    if moved_bytes <= 0 or elapsed_s < _SHORTEST_FOR_A_RATE_S:
        return line
    rate = moved_bytes / elapsed_s
    left_s = (progress.total_bytes - progress.done_bytes) / rate
    return f"{line}, {bytes_text(rate)}/s" + (f", ETA {duration_text(left_s)}" if left_s > 0 else "")


def _rich_bar() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    # rich's own column counts rates in units of 1000, sizes everywhere else here in 1024
    class Amount(ProgressColumn):
        """What has moved, of how much, and the rate."""

        def render(self, task: Task) -> Text:
            if not task.total:
                return Text("")
            rate = f" {bytes_text(task.speed)}/s" if task.speed else ""
            return Text(f"{bytes_text(task.completed)} of {bytes_text(task.total)}{rate}")

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), Amount(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)
