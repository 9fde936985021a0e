"""How jobs and memory plans look as tables and pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from horizon_client.cli.output import View, table, terminal_width
from horizon_client.cli.text import age_text, bytes_text, clean, count_text, duration_text, time_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from horizon_client.resources import Job, MemoryPlan


def _steps(job: Job) -> str:
    return f"{job.step}/{job.num_steps}" if job.num_steps else "-"


def _loss(job: Job) -> str:
    return f"{job.last_step.loss:.4f}" if job.last_step else "-"


def _state(job: Job) -> str:
    return f"{job.state} #{job.queue_position}" if job.queue_position else job.state


def _facts(job: Job) -> list[tuple[str, str]]:
    facts = [
        ("id", job.job_id),
        ("name", job.name),
        ("owner", job.owner),
        ("state", _state(job)),
        ("reason", job.reason),
        ("message", job.message),
        ("model", str(job.spec.get("model", ""))),
        ("dataset", str(job.spec.get("dataset", ""))),
        ("step", _steps(job)),
        ("attempt", str(job.attempt) if job.attempt else ""),
        ("submitted", time_text(job.create_time)),
        ("started", time_text(job.start_time) if job.start_time else ""),
        ("ended", time_text(job.end_time) if job.end_time else ""),
        ("left", duration_text(job.eta) if job.eta is not None else ""),
    ]
    if job.last_step is not None:
        step = job.last_step
        facts += [
            ("loss", f"{step.loss:.4f}"),
            ("speed", f"{step.tokens_per_second:,.0f} tokens/s"),
            ("overlap", f"{100 * step.overlap_ratio:.0f}%"),
        ]
    facts.append(("data", data_text(job.data_report)))
    if job.plan is not None:
        device = f", {bytes_text(job.plan.device_total_bytes)} on the device" if job.plan.device == "cuda" else ""
        facts.append(("planned memory", f"{bytes_text(job.plan.host_total_bytes)} on the host{device}"))
        facts.append(("predicted speed", speed_text(job.plan)))
    return [(label, value) for label, value in facts if value]


JOB_VIEW: View[Job] = View(
    columns=[
        ("ID", lambda j: j.job_id),
        ("NAME", lambda j: j.name),
        ("STATE", _state),
        ("STEP", _steps),
        ("LOSS", _loss),
        ("OWNER", lambda j: j.owner),
        ("AGE", lambda j: age_text(j.create_time)),
    ],
    details=_facts,
    name=lambda j: j.job_id,
)


def print_plan(plan: MemoryPlan) -> None:
    """Print the ledger and whether it fits."""
    components = sorted({*plan.host_bytes, *plan.device_bytes})
    rows = [[c, _amount(plan.host_bytes.get(c)), _amount(plan.device_bytes.get(c))] for c in components]
    rows.append(["total", bytes_text(plan.host_total_bytes), bytes_text(plan.device_total_bytes)])
    rows.append(["limit", bytes_text(plan.host_limit_bytes), _amount(plan.device_limit_bytes or None)])
    click.echo(table(["COMPONENT", "HOST", "DEVICE"], rows, terminal_width()))
    click.echo(
        f"\n{count_text(plan.num_parameters)} parameters, computed on {clean(plan.device) or 'the node'}: {_verdict(plan)}"
    )
    if plan.prediction is None:
        click.echo("no prediction: the node has not measured its speed yet; it does in a quiet moment")
    else:
        total_s = plan.prediction.total_s
        in_all = f", about {duration_text(total_s)} for all steps" if total_s is not None else ""
        click.echo(f"predicted: {speed_text(plan)}, {plan.prediction.step_s:.3g} s a step{in_all}")


def speed_text(plan: MemoryPlan) -> str:
    """Return the predicted speed in words; empty where the node's speed is not known."""
    if plan.prediction is None:
        return ""
    return f"{plan.prediction.tokens_per_second:,.0f} tokens/s (bound by {clean(plan.prediction.bound)})"


def data_text(report: Mapping[str, int]) -> str:
    """Return what the preparation made of the dataset in words; empty until there is something to say."""
    if not report:
        return ""
    told = [
        f"{count_text(report.get('rows', 0))} rows",
        f"{count_text(report.get('tokens', 0))} tokens ({count_text(report.get('trained_tokens', 0))} trained)",
    ]
    rest = (("truncated_rows", "truncated"), ("error_rows", "left out"), ("eval_rows", "held out"))
    told += [f"{count_text(report[name])} {word}" for name, word in rest if report.get(name)]
    room = report.get("packed_rows", 0) * report.get("sequence_length", 0)
    if room:
        told.append(f"packed to {report.get('tokens', 0) / room:.1%}")
    return ", ".join(told)


def _verdict(plan: MemoryPlan) -> str:
    if plan.fits:
        return f"it fits{f'; {clean(plan.message)}' if plan.message else ''}"
    return f"it does NOT fit; {clean(plan.message)}"


def _amount(num_bytes: int | None) -> str:
    return "-" if num_bytes is None else bytes_text(num_bytes)
