"""How jobs, memory plans and events look: tables and pages, live figures on a terminal, plain lines in a pipe, JSON
lines for programs."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime, timezone
from fractions import Fraction
from typing import IO, TYPE_CHECKING

from horizon_client.cli.evaluation_views import evaluation_facts, evaluation_text, method_figures_text
from horizon_client.cli.output import (
    View,
    about_text,
    age_text,
    bytes_text,
    clean,
    details,
    duration_text,
    rough_text,
    table,
    time_text,
    to_plain,
)
from horizon_client.cli.session import Notices
from horizon_client.reporter import Reporter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.live import Live
    from rich.table import Table

    from horizon_client.resources import (
        DriveUse,
        Job,
        JobEvent,
        KeptMemory,
        MemoryPlan,
        Outlook,
        Place,
        PlannedJob,
        QueueEntry,
        StepEvent,
    )

_NOW_S = 5.0
# Of moments nearer than this, seconds are shown too
_SOON_S = 600.0
_PLAIN_INTERVAL_S = 1.0
# A limit from here on means that none was given
_NO_LIMIT_BYTES = 1 << 60


def state_text(job: Job) -> str:
    """Return the state with what a person asks next: the place in the queue, or why the job is stopping."""
    if job.queue_position:
        return f"{job.state} #{job.queue_position}"
    # A drain is a reason only; what a user has asked for before it stays
    wanted = clean(job.wanted or job.reason).lower() if job.state == "STOPPING" else ""
    return f"{job.state} (to {wanted})" if wanted else job.state


def has_device(job: Job) -> bool:
    """Whether layers are computed on a device; else transfers to it and its memory mean nothing."""
    return job.plan is None or not _is_on_host(job.plan)


def _is_on_host(plan: MemoryPlan) -> bool:
    """Return whether the processors compute the job: the part of a device's name before its number is its kind."""
    return plan.device.partition(":")[0] == "host"


def host_memory_text(memory_bytes: Mapping[str, int]) -> str:
    """Return the host memory in use and what is counted: the worker process is `other`, the rest is the host store."""
    counted = "host memory" if memory_bytes.get("other") else "host store"
    return f"{counted} {bytes_text(sum(memory_bytes.values()))}"


def speed_text(plan: MemoryPlan) -> str:
    """Return the predicted speed; empty when the node's speed is not known."""
    if plan.prediction is None:
        return ""
    return f"{plan.prediction.tokens_per_second:,.0f} tokens/s (limited by {clean(plan.prediction.bound)})"


def references_text(plan: MemoryPlan) -> str:
    """Return the predicted pass over the data before the first step; empty where there is none, or nothing is
    predicted."""
    found = plan.references
    if found is None:
        return ""
    speed = f"at {found.tokens_per_second:,.0f} tokens/s"
    if found.num_tokens is None or found.total_s is None:
        return f"reference log-probabilities, {speed}"
    tokens = f"{found.num_tokens:,} tokens" + (
        ", estimated from the size of the files," if found.tokens_estimated else ""
    )
    done = f", {found.done_share:.0%} done" if found.done_share else ""
    return f"reference log-probabilities of {tokens} {speed}, about {duration_text(found.total_s)}{done}"


def data_text(report: Mapping[str, int]) -> str:
    """Return the result of the data preparation; empty before it."""
    if not report:
        return ""
    parts = [
        f"{report.get('rows', 0):,} rows",
        f"{report.get('tokens', 0):,} tokens ({report.get('trained_tokens', 0):,} trained)",
    ]
    rest = (("truncated_rows", "truncated"), ("error_rows", "skipped"), ("eval_rows", "held out"))
    parts += [f"{report[name]:,} {word}" for name, word in rest if report.get(name)]
    # Tokens in the rows that an epoch is packed into
    room = report.get("packed_rows", 0) * report.get("sequence_length", 0)
    if room:
        parts.append(f"packed to {report.get('tokens', 0) / room:.1%}")
    return ", ".join(parts)


def _memory_page(plan: MemoryPlan) -> str:
    """Return the memory by component and whether the job fits."""
    # On the host the device's memory is part of the host's, and the host column counts it
    on_device = not _is_on_host(plan)
    headers = ["COMPONENT", "HOST", *(["DEVICE"] if on_device else [])]
    components = sorted({*plan.host_bytes, *plan.device_bytes} if on_device else plan.host_bytes)
    rows = [[c, _amount(plan.host_bytes.get(c)), _amount(plan.device_bytes.get(c))] for c in components]
    rows.append(["total", bytes_text(plan.host_total_bytes), bytes_text(plan.device_total_bytes)])
    host_limit = "-" if plan.host_limit_bytes >= _NO_LIMIT_BYTES else bytes_text(plan.host_limit_bytes)
    rows.append(["limit", host_limit, _amount(plan.device_limit_bytes or None)])
    amounts = table(headers, [row[: len(headers)] for row in rows])
    fits = "it fits" if plan.fits else "it does not fit"
    message = f"; {clean(plan.message)}" if plan.message and not plan.fits else ""
    warnings = "".join(f"\n{line}" for line in warning_lines(plan))
    where = clean(plan.device).replace(",", " and ") or "the node"
    if plan.compute_dtype:
        where += f" in {clean(plan.compute_dtype)}"
    if plan.num_nodes > 1:
        each = f"{plan.num_devices} device{'' if plan.num_devices == 1 else 's'}"
        where += f" by {each} of each of {plan.num_nodes} nodes in {plan.lanes} lanes"
    elif plan.num_devices > 1:
        where += f" by {plan.num_devices} devices in {plan.lanes} lanes{_division_text(plan)}"
    if span := plan.device_range:
        where += f", planned for {plan.num_devices} of {span.least} to {span.most} devices"
        where += f" ({bytes_text(span.host_bytes)} of host memory are kept for any number of them)"
    if span := plan.node_range:
        where += f", planned for {plan.num_nodes} of {span.least} to {span.most} nodes"
        where += f" ({bytes_text(span.host_bytes)} of this node's memory are kept for any number of them)"
    kept = f"\nkept on the device: {_kept_text(plan.kept)}" if plan.kept else ""
    kept += f"\non drives: {_drives_text(plan.drives)}" if plan.drives else ""
    if base := plan.base:
        others = f", with {base.num_jobs} job{'' if base.num_jobs == 1 else 's'} when planned" if base.num_jobs else ""
        kept += f"\nbase: {bytes_text(base.num_bytes)}, in memory once for all jobs on it{others}"
    parameters = f"{plan.num_parameters:,} parameters"
    if 0 < plan.num_trained_parameters < plan.num_parameters:
        parameters += f" ({plan.num_trained_parameters:,} trained, the others frozen)"
    return f"{amounts}\n\n{parameters}, computed on {where}: {fits}{message}{kept}{warnings}"


def warning_lines(plan: MemoryPlan) -> list[str]:
    """Return each warning of a plan as a line of its own."""
    return [f"warning: {clean(warning)}" for warning in plan.warnings]


def advice_lines(plan: MemoryPlan) -> list[str]:
    """Return each warning of a plan and its hint as a line of its own."""
    return [*warning_lines(plan), *_hint_lines(plan)]


def _hint_lines(plan: MemoryPlan) -> list[str]:
    return [f"hint: {clean(plan.hint)}"] if plan.hint else []


def places_page(places: Sequence[Place]) -> str:
    """Return what a job would be on each machine of a fleet, the chosen one marked; empty where there is only one."""
    if not places:
        return ""
    rows = []
    for place in places:
        facts = ["-"] * 5
        if not place.why_not:
            facts = [
                place.devices,
                "-" if place.step_s is None else f"{place.step_s:.3g} s",
                bytes_text(place.copied_bytes) if place.copied_bytes else "-",
                about_text(place.estimated_start_time),
                about_text(place.estimated_end_time),
            ]
        rows.append([f"{clean(place.box)}{'*' if place.chosen else ''}", *facts, clean(place.why_not) or "-"])
    return table(["MACHINE", "DEVICES", "STEP", "TO COPY", "START", "END", "WHY NOT"], rows)


def total_text(plan: MemoryPlan) -> str:
    """Return how many steps the whole job has and how long they take; empty while nothing is known of its data."""
    if plan.num_steps is None:
        return ""
    steps = f"{'about ' if plan.steps_estimated else ''}{plan.num_steps:,} step{'' if plan.num_steps == 1 else 's'}"
    total_s = plan.prediction.total_s if plan.prediction else None
    time = "" if total_s is None else f", about {rough_text(total_s)}"
    return f"{steps}{time}{', estimated from the size of the files' if plan.steps_estimated else ''}"


def _division_text(plan: MemoryPlan) -> str:
    """Return how the devices divide a step, and the seconds of both ways where they are known."""
    way = clean(plan.parallel)
    seconds = {} if plan.ways is None else {"rows": plan.ways.rows_s, "layers": plan.ways.layers_s}
    taken_s = seconds.pop(way, None)
    facts = [] if taken_s is None else [f"{taken_s:.3g} s a step"]
    facts += [f"by {other} {step_s:.3g} s" for other, step_s in seconds.items() if step_s is not None]
    # An older daemon names no way
    return (f", by {way}" if way else "") + (f" ({', '.join(facts)})" if facts else "")


def _drives_text(use: DriveUse) -> str:
    layers = f"states of {use.num_layers} layer{'' if use.num_layers == 1 else 's'}"
    layers += ("", " and of the head", ", the head and the embedding")[use.num_ends]
    text = f"{layers} ({bytes_text(use.num_bytes)}), read and written once a step"
    if use.written_bytes is not None:
        text += f"; the job writes {bytes_text(use.written_bytes)}"
    if use.endurance_share is not None:
        text += f", {use.endurance_share:.2%} of what the drives are rated for"
    return text


def _kept_text(kept: KeptMemory) -> str:
    parts = [
        f"{what} of {layers:,} layer{'' if layers == 1 else 's'} ({bytes_text(size)})"
        for what, layers, size in (
            ("weights", kept.resident_layers, kept.resident_bytes),
            ("optimizer states", kept.state_layers, kept.state_bytes),
            ("packed weights", kept.packed_layers, kept.packed_bytes),
            ("activations", kept.product_layers, kept.product_bytes),
        )
        if layers
    ]
    ends = [name for name, stays in (("head", kept.resident_head), ("embedding", kept.resident_table)) if stays]
    if ends:
        parts.append(f"weights of {' and '.join(ends)} ({bytes_text(kept.end_bytes)})")
    return f"{', '.join(parts)}; saves about {kept.saved_share:.0%} of a step"


def plan_page(plan: MemoryPlan) -> str:
    """Return the memory by component, whether the job fits, its predicted speed, and how long it takes."""
    memory = _memory_page(plan)
    total = f"\ntotal: {total_text(plan)}" if total_text(plan) else ""
    hint = "".join(f"\n{line}" for line in _hint_lines(plan))
    if plan.prediction is None:
        return f"{memory}\nno prediction yet: the node measures its speed when no job is running{total}{hint}"
    step_s = plan.prediction.step_s
    step = f"{step_s:.3g} s" if step_s < 60 else duration_text(step_s)
    before = f"\nbefore step 1: {references_text(plan)}" if plan.references else ""
    return f"{memory}\npredicted: {speed_text(plan)}, {step} per step{before}{total}{hint}"


def prediction_page(planned: PlannedJob, machine: str) -> str:
    """Return the prediction for a machine that was asked about, by part, and the memory that the job takes there."""
    plan, prediction = planned.plan, planned.plan.prediction
    assert prediction is not None  # noqa: S101 - a machine that is asked about always has one
    basis = (
        f"measured on this node ({clean(prediction.machine)}); host memory and a given link as asked"
        if prediction.measured
        else "estimated from data sheets, NOT measured; expect it to be off by ten percent and more"
    )
    train = planned.spec.get("train", {})
    facts = [
        ("machine", machine),
        ("speeds", basis),
        ("step", f"{prediction.step_s:.3g} s for {train.get('tokens_per_step'):,} tokens"),
        ("rows", f"{train.get('sequence_length'):,} tokens"),
        ("speed", speed_text(plan)),
        ("useful", f"{prediction.model_flops_per_s / 1e12:.3g} TFLOP/s"),
        *([("before step 1", references_text(plan))] if plan.references else []),
    ]
    # They overlap, so they do not add up to the step
    parts = sorted(prediction.parts_s.items(), key=lambda part: part[1], reverse=True)
    seconds = table(
        ["SECONDS PER STEP", "OF WORK"], [[f"{part_s:.3g}", clean(name)] for name, part_s in parts if part_s > 0]
    )
    return f"PREDICTION\n{details(facts)}\n\n{seconds}\n\n{_memory_page(plan)}"


def share_text(job: Job | QueueEntry) -> str:
    """Return the part of its device's time that a resident job has; '-' for others."""
    return f"{job.outlook.share:.0%}" if job.outlook and job.state != "QUEUED" else "-"


def times_of(outlook: Outlook) -> list[tuple[str, str]]:
    """Return why a waiting job waits, and when it starts and ends."""
    start, end = about_text(outlook.estimated_start_time), about_text(outlook.estimated_end_time)
    return [("why", outlook.why), ("starts", start), ("ends", end)]


def when_text(outlook: Outlook, now: datetime | None = None) -> str:
    """Return when a job starts and ends, in a sentence: starts now, ends in about 2 min (12:59:10), share 1/2."""
    now = now or datetime.now(timezone.utc)
    start, end = outlook.estimated_start_time, outlook.estimated_end_time

    def at(moment: datetime) -> str:
        left_s = max((moment - now).total_seconds(), 0.0)
        return f"in about {rough_text(left_s)} ({about_text(moment, now, seconds=left_s < _SOON_S)})"

    if start is None:
        return "its start and its end are not known yet"
    is_now = (start - now).total_seconds() < _NOW_S
    parts = ["starts now" if is_now else f"starts {at(start)}"]
    parts.append("its end is not known yet" if end is None else f"ends {at(end)}")
    if outlook.share:
        parts.append(f"share {fraction_text(outlook.share)}")
    return ", ".join(parts)


def fraction_text(share: float) -> str:
    """Return a share as a fraction where it is a simple one, else in percent."""
    near = Fraction(share).limit_denominator(12)
    return str(near) if abs(near - share) < 1e-6 else f"{share:.0%}"


def outlook_facts(job: Job) -> list[tuple[str, str]]:
    """Return where a job stands; nothing for one that has ended."""
    if job.outlook is None:
        return []
    if job.state == "QUEUED":
        return times_of(job.outlook)
    share, end = f"{share_text(job)} of the device's time", about_text(job.outlook.estimated_end_time)
    return [("why", job.outlook.why), ("share", share), ("ends", end)]


def steps_text(job: Job | QueueEntry) -> str:
    """Return the steps done of all; '-' while their number is not known, or not the caller's to see."""
    # A session has no last step.
    return f"{job.step}/{job.num_steps}" if job.num_steps else f"{job.step}" if job.step else "-"


def _amount(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else bytes_text(num_bytes)


def _facts(job: Job) -> list[tuple[str, str]]:
    facts = [
        ("id", job.job_id),
        ("name", job.name),
        ("owner", job.owner),
        ("state", state_text(job)),
        ("reason", job.reason),
        ("message", job.message),
        ("machine", clean(job.box)),
        *(fact for fact in outlook_facts(job) if fact[1] != "-"),
        ("priority", str(job.priority) if job.priority else ""),
        ("model", job.model),
        ("dataset", job.dataset),
        ("step", steps_text(job)),
        ("attempt", str(job.attempt) if job.attempt else ""),
        ("submitted", time_text(job.create_time)),
        ("started", time_text(job.start_time) if job.start_time else ""),
        ("ended", time_text(job.end_time) if job.end_time else ""),
        ("deletion", f"checkpoints on {time_text(job.deletion_time)}; horizon job keep" if job.deletion_time else ""),
        ("kept", "checkpoints are not deleted automatically" if job.keep_files else ""),
        # At full speed; where jobs share the node, the outlook has the end
        ("ETA", duration_text(job.eta) if job.eta is not None and not job.ended and not job.outlook else ""),
        ("device time", duration_text(job.device_s) if job.device_s else ""),
    ]
    if job.last_step is not None:
        step = job.last_step
        facts.append(("loss", f"{step.loss:.4f}"))
        facts += [(clean(name), f"{value:.4g}") for name, value in sorted(step.method_figures.items())]
        facts += [("speed", f"{step.tokens_per_second:,.0f} tokens/s")]
        if step.noise_scale_tokens is not None:
            facts.append(("noise scale", f"about {step.noise_scale_tokens:,.0f} tokens a step"))
        if has_device(job):  # on the host nothing is transferred
            facts.append(("overlap", f"{100 * step.overlap_ratio:.0f}% of the transfers hidden by compute"))
        if step.host_memory_bytes:
            facts.append(("memory used", host_memory_text(step.host_memory_bytes)))
    facts += evaluation_facts(job)
    facts.append(("data", data_text(job.data_report)))
    if job.plan is not None:
        plan = job.plan
        worker = plan.host_bytes.get("other")
        of_worker = f", of which {bytes_text(worker)} for the worker process" if worker else ""
        device = f"; {bytes_text(plan.device_total_bytes)} device memory" if has_device(job) else ""
        facts.append(("memory planned", f"{bytes_text(plan.host_total_bytes)} host memory in total{of_worker}{device}"))
        facts.append(("predicted speed", speed_text(plan)))
        if not job.num_steps:  # until the pass is done
            facts.append(("before step 1", references_text(plan)))
            facts.append(("total", total_text(plan)))
        facts += [("warning", clean(warning)) for warning in plan.warnings]
    return [(label, value) for label, value in facts if value]


JOB_VIEW: View[Job] = View(
    columns=[
        ("ID", lambda j: j.job_id),
        ("NAME", lambda j: j.name),
        ("STATE", state_text),
        ("MODEL", lambda j: j.model or "-"),
        ("DATASET", lambda j: j.dataset or "-"),
        ("STEP", steps_text),
        ("LOSS", lambda j: f"{j.last_step.loss:.4f}" if j.last_step else "-"),
        ("ETA", lambda j: duration_text(j.eta) if not j.ended else "-"),
        ("OWNER", lambda j: j.owner),
        ("AGE", lambda j: age_text(j.create_time)),
    ],
    details=_facts,
    name=lambda j: j.job_id,
)


OUTLOOK_COLUMNS: list[tuple[str, Callable[[Job], str]]] = [
    ("SHARE", share_text),
    ("START", lambda j: about_text(j.outlook.estimated_start_time) if j.outlook and j.state == "QUEUED" else "-"),
    ("END", lambda j: about_text(j.outlook.estimated_end_time) if j.outlook else "-"),
    ("WHY", lambda j: j.outlook.why if j.outlook else "-"),
    ("DELETION", lambda j: about_text(j.deletion_time)),
]
"""Of lists in which a job has such a thing. A job that is resident has started, so only waiting ones have a START."""


class PlainView(Notices):
    """One line per event; of quick steps about one per second, and always the last."""

    def __init__(self, stream: IO[str], *, on_device: bool = True, head: str = "") -> None:
        self._stream = stream
        self._on_device = on_device
        self._head = head
        self._held: StepEvent | None = None
        self._next_at = float("-inf")

    def show(self, event: JobEvent) -> None:
        """Print the event, or hold a step back until the next event shows whether it was the last step."""
        # A line for each of ten steps a second would only hide the other events
        if event.kind == "step" and not event.skipped and time.monotonic() < self._next_at:
            self._held = event
            return
        if event.kind == "step":
            self._held = None
            self._next_at = time.monotonic() + _PLAIN_INTERVAL_S
        else:
            self.close()  # first, so that events stay in order
        self._print(event)

    def close(self) -> None:
        """Print the step that is held back, if there is one."""
        if self._held is not None:
            self._print(self._held)
            self._held = None

    def _print(self, event: JobEvent) -> None:
        # Flushed, because a pipe would keep minutes of events back
        line = event_line(event, on_device=self._on_device)
        print(f"{self._head}{line}", file=self._stream, flush=True)


class DataView(PlainView):
    """For programs: one JSON object or YAML document per event, with the field names of the Python client; `name` shows
    none."""

    def __init__(self, stream: IO[str], output: str) -> None:
        super().__init__(stream)
        self._output = output

    def show(self, event: JobEvent) -> None:
        """Print the event."""
        if self._output == "json":
            print(json.dumps(to_plain(event), ensure_ascii=False, allow_nan=False), file=self._stream, flush=True)
        elif self._output == "yaml":
            import yaml

            text = yaml.safe_dump(to_plain(event), sort_keys=False, allow_unicode=True)
            print(f"---\n{text.rstrip()}", file=self._stream, flush=True)


class LiveView(Reporter):
    """The figures of the newest step in place, with all other events scrolling above them."""

    def __init__(self, job: Job, *, stderr: bool) -> None:
        # Only here, because `horizon job --help` imports this module
        from rich.console import Console
        from rich.live import Live

        self._name = job.name
        self._state = job.state
        self._step = job.last_step
        self._on_device = has_device(job)
        self._console = Console(stderr=stderr)
        self._live: Live = Live(console=self._console, refresh_per_second=8, get_renderable=self._figures)
        self._live.start()

    def show(self, event: JobEvent) -> None:
        """Update the figures from a step, print anything else."""
        if event.kind == "step":
            self._step = event
        elif event.kind == "state":
            self._state = event.state
        # A skipped step would be overwritten by the next one
        if event.kind != "step" or event.skipped:
            self._console.print(event_line(event, on_device=self._on_device), markup=False, highlight=False)

    def notice(self, message: str) -> None:
        """Print a message above the figures."""
        self._console.print(clean(message), markup=False, highlight=False)

    def close(self) -> None:
        """Leave the newest figures on the screen."""
        self._live.stop()

    def _figures(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        step = self._step
        if step is None:
            grid.add_row(Text(f"{clean(self._name)}  {self._state}"))
            return grid
        # Texts, because rich reads [brackets] in a plain string as markup
        head = Text(f"{clean(self._name)}  {self._state}  step {step.step}/{step.num_steps or '?'}")
        grid.add_row(head, ProgressBar(total=max(step.num_steps, 1), completed=step.step, width=24))
        outer = Table.grid()
        outer.add_row(grid)
        outer.add_row(Text(_training_figures(step)))
        outer.add_row(Text(_machine_figures(step, on_device=self._on_device)))
        return outer


def open_view(job: Job, output: str, stream: IO[str]) -> PlainView | LiveView:
    """Return the view for an output format on a stream; the caller closes it."""
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
        return evaluation_text(event)
    if event.kind == "checkpoint":
        return f"step {event.step}  checkpoint written: {bytes_text(event.size_bytes)} in {event.duration_s:.1f} s"
    if event.kind == "prepare":
        if event.report:
            return f"data prepared: {data_text(event.report)}"
        of_total = f" of {event.total_rows:,}" if event.total_rows else ""
        return f"preparing data: {event.done_rows:,}{of_total} rows"
    # The lines of a quoted log stay lines, each without control characters
    level = "" if event.level == "info" else f"{clean(event.level)}: "
    return level + "\n  ".join(map(clean, event.text.splitlines()))


def _training_figures(step: StepEvent) -> str:
    return (
        f"loss {step.loss:.4f}{method_figures_text(step.method_figures)}  grad_norm {step.grad_norm:.3f}  lr "
        f"{step.learning_rate:.2e}  {step.tokens_per_second:,.0f} tokens/s  ETA {duration_text(step.eta_s)}"
    )


def _machine_figures(step: StepEvent, *, on_device: bool) -> str:
    host = host_memory_text(step.host_memory_bytes)
    if not on_device:
        return host
    device = bytes_text(sum(step.device_memory_bytes.values()))
    return f"{host}  device memory {device}  overlap {100 * step.overlap_ratio:.0f}%"
