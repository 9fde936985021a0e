"""How jobs and memory plans look as tables and pages."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from horizon_client.cli.output import (
    View,
    age_text,
    bytes_text,
    clean,
    count_text,
    duration_text,
    table,
    terminal_width,
    time_text,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from horizon_client.resources import Job, MemoryPlan


def state_text(job: Job) -> str:
    """Return the state with what a person asks next: the place in the queue, or why the job is stopping."""
    if job.queue_position:
        return f"{job.state} #{job.queue_position}"
    wanted = clean(job.wanted or job.reason).lower() if job.state == "STOPPING" else ""
    return f"{job.state} (to {wanted})" if wanted else job.state


def has_device(job: Job) -> bool:
    """Whether layers are computed on a device, so that transfers to it and its memory mean something."""
    return job.plan is None or job.plan.device != "host"


def host_memory_text(memory_bytes: Mapping[str, int]) -> str:
    """Return the host memory in use and what is counted: the worker process is `other`, the rest is the host store."""
    counted = "host memory" if memory_bytes.get("other") else "host store"
    return f"{counted} {bytes_text(sum(memory_bytes.values()))}"


def speed_text(plan: MemoryPlan) -> str:
    """Return the predicted speed; empty when the node's speed is not known."""
    if plan.prediction is None:
        return ""
    return f"{plan.prediction.tokens_per_second:,.0f} tokens/s (limited by {clean(plan.prediction.bound)})"


def data_text(report: Mapping[str, int]) -> str:
    """Return the result of the data preparation; empty before it."""
    if not report:
        return ""
    parts = [
        f"{count_text(report.get('rows', 0))} rows",
        f"{count_text(report.get('tokens', 0))} tokens ({count_text(report.get('trained_tokens', 0))} trained)",
    ]
    rest = (("truncated_rows", "truncated"), ("error_rows", "skipped"), ("eval_rows", "held out"))
    parts += [f"{count_text(report[name])} {word}" for name, word in rest if report.get(name)]
    room = report.get("packed_rows", 0) * report.get("sequence_length", 0)
    if room:
        parts.append(f"packed to {report.get('tokens', 0) / room:.1%}")
    return ", ".join(parts)


def job_list_view(jobs: Sequence[Job]) -> View[Job]:
    """Return the view for a list; OWNER is a column only where the owners differ."""
    many_owners = len({job.owner for job in jobs}) > 1
    return replace(JOB_VIEW, columns=[c for c in JOB_VIEW.columns if c[0] != "OWNER" or many_owners])


def print_plan(plan: MemoryPlan) -> None:
    """Print the memory by component, whether the job fits, and its predicted speed."""
    # on the host the device's memory is part of the host's, and the host column counts it
    on_device = plan.device != "host"
    headers = ["COMPONENT", "HOST", *(["DEVICE"] if on_device else [])]
    components = sorted({*plan.host_bytes, *plan.device_bytes} if on_device else plan.host_bytes)
    rows = [[c, _amount(plan.host_bytes.get(c)), _amount(plan.device_bytes.get(c))] for c in components]
    rows.append(["total", bytes_text(plan.host_total_bytes), bytes_text(plan.device_total_bytes)])
    rows.append(["limit", bytes_text(plan.host_limit_bytes), _amount(plan.device_limit_bytes or None)])
    click.echo(table(headers, [row[: len(headers)] for row in rows], terminal_width()))
    fits = "it fits" if plan.fits else "it does not fit"
    message = f"; {clean(plan.message)}" if plan.message else ""
    where = clean(plan.device) or "the node"
    click.echo(f"\n{count_text(plan.num_parameters)} parameters, computed on {where}: {fits}{message}")
    if plan.prediction is None:
        click.echo("no prediction yet: the node measures its speed when no job is running")
        return
    step_s, total_s = plan.prediction.step_s, plan.prediction.total_s
    step = f"{step_s:.3g} s" if step_s < 60 else duration_text(step_s)
    total = f", about {duration_text(total_s)} in total" if total_s is not None else ""
    click.echo(f"predicted: {speed_text(plan)}, {step} per step{total}")


def _steps(job: Job) -> str:
    return f"{job.step}/{job.num_steps}" if job.num_steps else "-"


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
        ("model", str(job.spec.get("model", ""))),
        ("dataset", str(job.spec.get("dataset", ""))),
        ("step", _steps(job)),
        ("attempt", str(job.attempt) if job.attempt else ""),
        ("submitted", time_text(job.create_time)),
        ("started", time_text(job.start_time) if job.start_time else ""),
        ("ended", time_text(job.end_time) if job.end_time else ""),
        ("ETA", duration_text(job.eta) if job.eta is not None and not job.ended else ""),
    ]
    if job.last_step is not None:
        step = job.last_step
        facts += [("loss", f"{step.loss:.4f}"), ("speed", f"{step.tokens_per_second:,.0f} tokens/s")]
        if has_device(job):
            facts.append(("overlap", f"{100 * step.overlap_ratio:.0f}% of the transfers hidden by compute"))
        if step.host_memory_bytes:
            facts.append(("memory used", host_memory_text(step.host_memory_bytes)))
    facts.append(("data", data_text(job.data_report)))
    if job.plan is not None:
        plan = job.plan
        worker = plan.host_bytes.get("other")
        of_worker = f", of which {bytes_text(worker)} for the worker process" if worker else ""
        device = f"; {bytes_text(plan.device_total_bytes)} device memory" if has_device(job) else ""
        facts.append(("memory planned", f"{bytes_text(plan.host_total_bytes)} host memory in total{of_worker}{device}"))
        facts.append(("predicted speed", speed_text(plan)))
    return [(label, value) for label, value in facts if value]


JOB_VIEW: View[Job] = View(
    columns=[
        ("ID", lambda j: j.job_id),
        ("NAME", lambda j: j.name),
        ("STATE", state_text),
        ("MODEL", lambda j: str(j.spec.get("model") or "-")),
        ("DATASET", lambda j: str(j.spec.get("dataset") or "-")),
        ("STEP", _steps),
        ("LOSS", lambda j: f"{j.last_step.loss:.4f}" if j.last_step else "-"),
        ("ETA", lambda j: duration_text(j.eta) if not j.ended else "-"),
        ("OWNER", lambda j: j.owner),
        ("AGE", lambda j: age_text(j.create_time)),
    ],
    details=_facts,
    name=lambda j: j.job_id,
)
