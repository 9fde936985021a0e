"""Shows the events of a job: live figures on a terminal, plain lines in a pipe, JSON lines for programs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import IO, TYPE_CHECKING

from horizon_client.cli.job_pages import data_text, has_device, host_memory_text
from horizon_client.cli.output import bytes_text, clean, count_text, duration_text
from horizon_client.transfer.reporter import Reporter

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from horizon_client.resources import Job, JobEvent, StepEvent

_PLAIN_INTERVAL_S = 1.0


class PlainView(Reporter):
    """One line per event; of quick steps about one per second, and always the last."""

    def __init__(self, stream: IO[str], *, on_device: bool = True, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._on_device = on_device
        self._clock = clock
        self._held: StepEvent | None = None
        self._next_at = float("-inf")

    def show(self, event: JobEvent) -> None:
        """Print the event, or hold a step back until the next event shows whether it was the last step."""
        if event.kind != "step":
            self._release()
            self._print(event_line(event, on_device=self._on_device))
            return
        # a line for each of ten steps a second would only hide the other events
        if event.skipped or self._clock() >= self._next_at:
            self._held = None
            self._next_at = self._clock() + _PLAIN_INTERVAL_S
            self._print(event_line(event, on_device=self._on_device))
        else:
            self._held = event

    def notice(self, message: str) -> None:
        """Print a message on stderr."""
        print(clean(message), file=sys.stderr, flush=True)

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *leaving: object) -> None:
        self._release()

    def _release(self) -> None:
        if self._held is not None:
            self._print(event_line(self._held, on_device=self._on_device))
            self._held = None

    def _print(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class DataView(PlainView):
    """For programs: one JSON object or YAML document per event, with the field names of the Python client; `name` shows none."""

    def __init__(self, stream: IO[str], output: str) -> None:
        super().__init__(stream)
        self._output = output

    def show(self, event: JobEvent) -> None:
        """Print the event."""
        from horizon_client.conversion import to_plain

        if self._output == "json":
            self._print(json.dumps(to_plain(event), ensure_ascii=False, allow_nan=False))
        elif self._output == "yaml":
            import yaml

            self._print("---\n" + yaml.safe_dump(to_plain(event), sort_keys=False, allow_unicode=True).rstrip())


class LiveView(Reporter):
    """The figures of the newest step in place, with all other events scrolling above them."""

    def __init__(self, job: Job, *, stderr: bool) -> None:
        from rich.console import Console
        from rich.live import Live

        self._name = job.name
        self._state = job.state
        self._step = job.last_step
        self._on_device = has_device(job)
        self._console = Console(stderr=stderr)
        self._live: Live = Live(console=self._console, refresh_per_second=8, get_renderable=self._figures)
        self._exit = ExitStack()

    def show(self, event: JobEvent) -> None:
        """Update the figures from a step, print anything else."""
        if event.kind == "step":
            self._step = event
        elif event.kind == "state":
            self._state = event.state
        if event.kind != "step" or event.skipped:
            self._console.print(event_line(event, on_device=self._on_device), markup=False, highlight=False)

    def notice(self, message: str) -> None:
        """Print a message above the figures."""
        self._console.print(clean(message), markup=False, highlight=False)

    def __enter__(self) -> LiveView:
        self._exit.enter_context(self._live)
        return self

    def __exit__(self, *leaving: object) -> None:
        self._exit.close()

    def _figures(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        step = self._step
        if step is None:
            grid.add_row(Text(f"{clean(self._name)}  {self._state}"))
            return grid
        head = Text(f"{clean(self._name)}  {self._state}  step {step.step}/{step.num_steps or '?'}")
        grid.add_row(head, ProgressBar(total=max(step.num_steps, 1), completed=step.step, width=24))
        outer = Table.grid()
        outer.add_row(grid)
        outer.add_row(Text(_training_figures(step)))
        outer.add_row(Text(_machine_figures(step, on_device=self._on_device)))
        return outer


def open_view(job: Job, output: str, stream: IO[str]) -> PlainView | LiveView:
    """Return the view for an output format on a stream."""
    # `-o name` on stdout is the id alone, so the events of `submit --watch -o name` are on stderr
    if output in ("json", "yaml") or (output == "name" and stream is sys.stdout):
        return DataView(stream, output)
    if stream.isatty():
        return LiveView(job, stderr=stream is sys.stderr)
    return PlainView(stream, on_device=has_device(job))


def event_line(event: JobEvent, *, on_device: bool = True) -> str:
    """Return one event as one line; figures of the device only where the job runs on one."""
    if event.kind == "step":
        skipped = f"  SKIPPED: {clean(event.skipped)}" if event.skipped else ""
        figures = f"{_training_figures(event)}  {_machine_figures(event, on_device=on_device)}"
        return f"step {event.step}/{event.num_steps or '?'}  {figures}{skipped}"
    if event.kind == "state":
        reason = f" ({event.reason})" if event.reason else ""
        return clean(f"{event.state}{reason}{f': {event.message}' if event.message else ''}")
    if event.kind == "eval":
        took = f"  in {event.duration_s:.1f} s" if event.duration_s else ""
        return f"step {event.step}  eval_loss {event.eval_loss:.4f}  on {count_text(event.num_targets)} tokens{took}"
    if event.kind == "checkpoint":
        return f"step {event.step}  checkpoint written: {bytes_text(event.size_bytes)} in {event.duration_s:.1f} s"
    if event.kind == "prepare":
        if event.report:
            return f"data prepared: {data_text(event.report)}"
        of_total = f" of {count_text(event.total_rows)}" if event.total_rows else ""
        return f"preparing data: {count_text(event.done_rows)}{of_total} rows"
    level = "" if event.level == "info" else f"{clean(event.level)}: "
    return level + "\n  ".join(map(clean, event.text.splitlines()))


def _training_figures(step: StepEvent) -> str:
    return (
        f"loss {step.loss:.4f}  grad_norm {step.grad_norm:.3f}  lr {step.learning_rate:.2e}  "
        f"{step.tokens_per_second:,.0f} tokens/s  ETA {duration_text(step.eta_s)}"
    )


def _machine_figures(step: StepEvent, *, on_device: bool) -> str:
    host = host_memory_text(step.host_memory_bytes)
    if not on_device:
        return host
    device = bytes_text(sum(step.device_memory_bytes.values()))
    return f"{host}  device memory {device}  overlap {100 * step.overlap_ratio:.0f}%"
