"""`horizon queue`, `horizon usage` and `horizon quota`: how the node is shared."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import click

from horizon_client.cli.job_options import NO_PUSH_OPTION, SET_OPTION, SPEC_ARGUMENT, read_spec
from horizon_client.cli.job_views import advice_lines, places_page, share_text, steps_text, total_text, when_text
from horizon_client.cli.output import (
    View,
    about_text,
    bytes_text,
    clean,
    details,
    duration_text,
    output_option,
    print_list,
    print_result,
    table,
)
from horizon_client.cli.root import Commands, connection_options
from horizon_client.cli.session import TransferReporter, connected, open_client
from horizon_client.cli.times import duration

if TYPE_CHECKING:
    from horizon_client.resources import AllowanceUse, QueueEntry, SimulatedJob, Usage
    from horizon_client.sync_client import Client

_OUTCOMES = ("SUCCEEDED", "FAILED", "CANCELLED")

QUEUE_VIEW: View[QueueEntry] = View(
    columns=[
        # First, as the first column is not shortened in a narrow terminal
        ("JOB", lambda e: e.name or e.job_id),
        ("PLACE", lambda e: str(e.position or "-")),
        ("OWNER", lambda e: e.owner),
        ("STATE", lambda e: e.state),
        ("PRIORITY", lambda e: "-" if e.priority is None else str(e.priority)),
        ("STEP", steps_text),
        ("SHARE", share_text),
        ("START", lambda e: about_text(e.outlook.estimated_start_time) if e.outlook else "-"),
        ("END", lambda e: about_text(e.outlook.estimated_end_time) if e.outlook else "-"),
        ("WHY", lambda e: (e.outlook.why if e.outlook else "") or "-"),
    ],
    details=lambda e: [],
    name=lambda e: e.job_id,
)

_USAGE_VIEW: View[Usage] = View(
    columns=[
        ("PROJECT", lambda u: u.project),
        ("USER", lambda u: u.user),
        ("DEVICE TIME", lambda u: duration_text(u.device_s)),
        ("TOKENS", lambda u: f"{u.num_tokens:,}"),
        ("STORED", lambda u: bytes_text(u.stored_bytes)),
        *((state, lambda u, state=state: str(u.jobs.get(state, 0))) for state in _OUTCOMES),
    ],
    details=lambda u: [],
    name=lambda u: f"{u.project}/{u.user}",
)


@click.group(
    cls=Commands,
    invoke_without_command=True,
    epilog="""\b
Example:
  horizon queue
  horizon queue simulate job.yaml""",
)
@output_option
@connection_options
@click.pass_context
def queue(ctx: click.Context, /, output: str, **options: str | None) -> None:
    """Show the resident and the waiting jobs of all users, and why each is where it is.

    Of other users' jobs you see id, owner, state and times. Times are estimates, in local time; jobs that
    will be submitted are not counted in them.
    """
    if ctx.invoked_subcommand is None:
        with open_client(ctx) as client:
            print_list(client.jobs.queue(), QUEUE_VIEW, output)


@queue.command(
    epilog="""\b
Example:
  horizon queue simulate job.yaml
  horizon queue simulate job.yaml --set train.max_steps=2000 -o json

\b
A dataset or model that exists on this disk is pushed first. SPEC may be '-'
for stdin."""
)
@SPEC_ARGUMENT
@SET_OPTION
@NO_PUSH_OPTION
@output_option
@connected
def simulate(client: Client, spec: str, overrides: tuple[str, ...], no_push: bool, output: str) -> None:
    """Show when a job would start and end if you submitted it now.

    The daemon simulates itself with the present jobs and shares. Queues nothing.
    """
    with TransferReporter("interrupted; what was uploaded is kept") as reporter:
        found = client.jobs.simulate(read_spec(spec), overrides=overrides, push=not no_push, reporter=reporter)
    start = found.outlook.estimated_start_time
    names = [start.isoformat() if start else "-"]
    print_result(found, output, names=names, page=lambda: _simulated_page(found))


def _simulated_page(found: SimulatedJob) -> str:
    """Return when the job would start and end, why, with what share, and what it would advise."""
    facts = [("why", found.outlook.why), ("when", when_text(found.outlook)), ("total", total_text(found.plan))]
    places = places_page(found.places)
    rest = [*advice_lines(found.plan), *(["", places] if places else [])]
    return "\n".join([details([fact for fact in facts if fact[1]]), *rest])


@click.command(
    epilog="""\b
Example:
  horizon usage --since 30d
  horizon usage -o json"""
)
@click.option(
    "--since",
    type=duration,
    default="7d",
    show_default=True,
    metavar="DURATION",
    help="How far back, such as 12h or 30d.",
)
@output_option
@connected
def usage(client: Client, since: timedelta, output: str) -> None:
    """Show what was used of the node: device time, tokens, storage, jobs by outcome.

    By project and user: your own; admins and viewers see everybody's. STORED is what a user stores now, in whatever
    project.
    """
    print_list(client.sharing.usage(since=datetime.now(timezone.utc) - since), _USAGE_VIEW, output)


@click.command(epilog="\b\nExample:\n  horizon quota -o yaml")
@output_option
@connected
def quota(client: Client, output: str) -> None:
    """Show your weight and quotas, those of your projects, and what frees them."""
    allowances = client.sharing.quota()
    names = [f"{allowance.holder}/{allowance.name}" for allowance in allowances]
    print_result(allowances, output, names=names, page=lambda: _quota_page(allowances))


def _quota_page(allowances: list[AllowanceUse]) -> str:
    weights = [(f"{a.holder} {clean(a.name)}", f"weight {a.weight:g}") for a in allowances]
    rows = [
        [
            f"{a.holder} {a.name}",
            use.quota,
            _amount(use.quota, use.limit),
            _amount(use.quota, use.used),
            use.frees or "-",
        ]
        for a in allowances
        for use in a.quotas
    ]
    return f"{details(weights)}\n\n{table(['OF', 'QUOTA', 'LIMIT', 'USED', 'WHAT FREES IT'], rows)}"


def _amount(quota: str, amount: float | None) -> str:
    if amount is None:
        return "-"  # no limit
    if quota.endswith("_bytes"):
        return bytes_text(amount)
    # Of hours the first digits count: 0.011 hours are 38 s
    return f"{amount:,.0f}" if amount == int(amount) or amount >= 100 else f"{amount:.3g}"
