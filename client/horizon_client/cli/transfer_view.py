"""Shows how far a transfer is, on stderr: a bar with rate and remaining time on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING

import click

from horizon_client.cli.text import bytes_text, clean, duration_text

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

    from horizon_client.progress import Progress

_VERBS = {
    "check": "checking",
    "hash": "hashing",
    "upload": "uploading",
    "finalize": "the server checks",
    "download": "downloading",
}
_PLAIN_INTERVAL_S = 5.0
_SHORTEST_FOR_A_RATE_S = 0.5


class TransferView:
    """A context in which progress and notices are shown.

    Thread: `on_progress` and `on_notice` are called from the client's thread while the command's own waits.
    """

    def __init__(self) -> None:
        self._phase = ""
        self._bar: RichProgress | None = None
        self._task: TaskID | None = None
        self._last_line_at = 0.0
        self._phase_began = (0.0, 0)

    def __enter__(self) -> TransferView:
        if sys.stderr.isatty():
            self._bar = _rich_bar()
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def on_progress(self, progress: Progress) -> None:
        """Show one report."""
        if self._bar is None:
            self._line(progress)
        else:
            self._draw(self._bar, progress)

    def on_notice(self, sentence: str) -> None:
        """Show one sentence above the bar."""
        if self._bar is None:
            click.echo(clean(sentence), err=True)
        else:
            self._bar.console.print(clean(sentence), markup=False, highlight=False)

    def _draw(self, bar: RichProgress, progress: Progress) -> None:
        total = progress.total_bytes or None
        if self._task is None or self._phase != progress.phase:
            if self._task is not None:
                bar.remove_task(self._task)
            self._phase = progress.phase
            self._task = bar.add_task(_VERBS[progress.phase], total=total, completed=progress.done_bytes)
            return
        bar.update(self._task, completed=progress.done_bytes, total=total)

    def _line(self, progress: Progress) -> None:
        """Print at once where bytes travel or the server works; local reading only where it takes long."""
        now = time.monotonic()
        is_new_phase = progress.phase != self._phase
        if is_new_phase:
            self._phase, self._last_line_at = progress.phase, now
            self._phase_began = (now, progress.done_bytes)
        is_due = now - self._last_line_at >= _PLAIN_INTERVAL_S
        is_end = 0 < progress.total_bytes == progress.done_bytes
        if is_due or (progress.phase not in ("check", "hash") and (is_new_phase or is_end)):
            self._last_line_at = now
            began_at, began_bytes = self._phase_began
            click.echo(sentence(progress, progress.done_bytes - began_bytes, now - began_at), err=True)


def sentence(progress: Progress, moved_bytes: int, elapsed_s: float) -> str:
    """Return one line: how far it is, and the rate and the remaining time once they can be told."""
    line = f"{_VERBS[progress.phase]} {clean(progress.name)}"
    if not progress.total_bytes:
        return line
    line += f": {100 * progress.done_bytes // progress.total_bytes}% of {bytes_text(progress.total_bytes)}"
    if moved_bytes <= 0 or elapsed_s < _SHORTEST_FOR_A_RATE_S:
        return line
    rate = moved_bytes / elapsed_s
    left_s = (progress.total_bytes - progress.done_bytes) / rate
    return f"{line}, {bytes_text(rate)}/s" + (f", {duration_text(left_s)} left" if left_s > 0 else "")


def _rich_bar() -> RichProgress:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
