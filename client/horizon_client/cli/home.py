"""A plain `horizon`: what a user would ask first. My jobs, the machine, and what to type next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from horizon_client.cli.job_views import state_text, steps_text
from horizon_client.cli.output import about_text, age_text, bytes_text, clean, table
from horizon_client.cli.session import open_client
from horizon_client.errors import BadConfig
from horizon_client.profiles import NO_SERVER

if TYPE_CHECKING:
    from horizon_client.resources import Job, Node, QueueEntry
    from horizon_client.sync_client import Client

_MOST_JOBS = 200
_MOST_SHOWN = 10

NOT_LOGGED_IN = """You are not logged in to a machine yet.

An administrator of the machine gives you its address, a token file and its CA file:

  horizon login HOST:7171 --token-file token.txt --ca ca.pem

All commands: horizon --help"""


def show_home(ctx: click.Context) -> None:
    """Print it."""
    try:
        client = open_client(ctx)
    except BadConfig as error:
        if error.reason != NO_SERVER:  # a broken configuration is not the same as none
            raise
        click.echo(NOT_LOGGED_IN)
        return
    with client:
        click.echo(_page(client))


def _page(client: Client) -> str:
    node, jobs, queue = client.node.status(), client.jobs.list(limit=_MOST_JOBS), client.jobs.queue()
    mine = [job for job in jobs if job.owner == node.user]
    active = [job for job in mine if not job.ended]
    parts = [
        f"{clean(node.hostname)}, logged in as {clean(node.user)}",
        _machine(node, queue),
        "",
        _jobs(active) if active else "You have no job that runs or waits.",
    ]
    ended = next((job for job in mine if job.ended), None)
    if ended is not None:
        why = f": {clean(ended.message)}" if ended.message and ended.state != "SUCCEEDED" else ""
        parts.append(f"\nYour last: {clean(ended.name)} {ended.state} {age_text(ended.end_time)} ago{why}")
    return "\n".join([*parts, "", _next(active, ended)])


def _machine(node: Node, queue: list[QueueEntry]) -> str:
    resident = sum(not entry.position for entry in queue)
    free = f"{bytes_text(node.host_memory_available_bytes)} of {bytes_text(node.host_memory_limit_bytes)} memory free"
    state = "" if node.mode in ("", "open") else f"; {node.mode}: no job starts"
    return f"{free}; {_number(resident)} on the device, {_number(len(queue) - resident)} wait{state}"


def _number(jobs: int) -> str:
    return f"{jobs} job{'' if jobs == 1 else 's'}"


def _jobs(active: list[Job]) -> str:
    rows = [
        [
            job.name,
            state_text(job),
            steps_text(job),
            f"{job.last_step.loss:.4f}" if job.last_step else "-",
            about_text(job.outlook.estimated_end_time) if job.outlook else "-",
            job.outlook.why if job.outlook else "-",
        ]
        for job in active[:_MOST_SHOWN]
    ]
    more = f"\n... and {len(active) - _MOST_SHOWN} more: horizon job list" if len(active) > _MOST_SHOWN else ""
    return table(["YOUR JOB", "STATE", "STEP", "LOSS", "END", "WHY"], rows) + more


def _next(active: list[Job], ended: Job | None) -> str:
    """Return the commands that make sense now."""
    lines = []
    if active:
        lines.append(("job watch " + clean(active[0].name), "its figures, live"))
    elif ended is not None and ended.state == "SUCCEEDED":
        lines.append((f"checkpoint sample {clean(ended.name)} --prompt TEXT", "what it has learnt"))
    elif ended is not None:
        lines.append((f"job logs {clean(ended.name)}", "what happened"))
    lines += [
        ("job submit job.yaml --watch", "train; job init writes a job file"),
        ("queue", "who waits for what, and until when"),
        ("top", "the machine, live"),
        ("--help", "all commands"),
    ]
    width = max(len(command) for command, _ in lines)
    return "\n".join(f"  horizon {command:<{width}}  {about}" for command, about in lines)
