"""`horizon job`."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

import click

from horizon_client.cli.job_pages import JOB_VIEW, print_plan, speed_text
from horizon_client.cli.output import notice, output_option, print_list, print_one, print_plain
from horizon_client.cli.root import Interrupted
from horizon_client.cli.session import connected
from horizon_client.cli.text import clean
from horizon_client.cli.transfer_view import TransferView
from horizon_client.errors import InvalidRequest

if TYPE_CHECKING:
    from horizon_client.resources import Job
    from horizon_client.sync_client import Client

_STATES = ["queued", "preparing", "starting", "running", "paused", "stopping", "succeeded", "failed", "cancelled"]
_SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Change a field, such as train.learning_rate=1e-5; may be repeated.",
)
_NO_PUSH = click.option(
    "--no-push", is_flag=True, help="Send model and dataset as written, even where local files have these names."
)


@click.group()
def job() -> None:
    """Plan, submit, watch and steer fine-tuning jobs. JOB is an id, or a name that only one of your jobs has."""


@job.command(epilog="\b\nExample:\n  horizon job plan job.yaml --set train.sequence_length=4096")
@click.argument("spec", metavar="SPEC.yaml")
@_SET
@_NO_PUSH
@output_option
@connected
def plan(client: Client, spec: str, overrides: tuple[str, ...], no_push: bool, output: str) -> None:
    """Show how much memory a job would take, whether it fits, and how fast it should be; queues nothing.

    Local files named as dataset or model are pushed, because the server needs them to answer.
    """
    with TransferView() as view:
        planned = client.jobs.plan(
            _spec(spec), overrides=overrides, push=not no_push, on_progress=view.on_progress, on_notice=view.on_notice
        )
    if output in ("json", "yaml"):
        print_plain(planned, output)
    elif output == "name":
        click.echo("fits" if planned.plan.fits else "does-not-fit")
    else:
        print_plan(planned.plan)


@job.command(
    epilog="""\b
Example:
  horizon job submit job.yaml --watch
  horizon job submit job.yaml --set train.learning_rate=2e-5 --set name=second-try
  JOB=$(horizon job submit job.yaml -o name)

\b
A dataset or model that exists on this disk is pushed first. SPEC may be '-'
for stdin. The same --request-id with the same spec gives the same job."""
)
@click.argument("spec", metavar="SPEC.yaml")
@_SET
@click.option("--watch", "then_watch", is_flag=True, help="Show progress until the job has ended.")
@click.option("--request-id", metavar="UUID", help="Repeats with the same id make no second job.")
@_NO_PUSH
@output_option
@connected
def submit(
    client: Client,
    spec: str,
    overrides: tuple[str, ...],
    then_watch: bool,
    request_id: str | None,
    no_push: bool,
    output: str,
) -> int:
    """Queue a job."""
    with TransferView() as view:
        try:
            queued = client.jobs.submit(
                _spec(spec),
                overrides=overrides,
                request_id=request_id,
                push=not no_push,
                on_progress=view.on_progress,
                on_notice=view.on_notice,
            )
        except KeyboardInterrupt:
            raise Interrupted(
                "interrupted; what was uploaded is kept. See 'horizon job list' for whether the job was queued already"
            ) from None
    if output == "table":
        speed = speed_text(queued.plan) if queued.plan else ""
        told = f"; predicted {speed}" if speed else ""
        click.echo(f"submitted {clean(queued.name)} as {queued.job_id}: {_standing(queued)}{told}")
    else:
        print_one(queued, JOB_VIEW, output)
    if not then_watch:
        return 0
    sys.stdout.flush()
    return _watch(client, queued, output, sys.stderr if output == "name" else sys.stdout)


@job.command(name="list", epilog="\b\nExample:\n  horizon job list --state running --state queued")
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(_STATES, case_sensitive=False),
    help="Only such jobs; may be repeated.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, help="At most so many, newest first."
)
@output_option
@connected
def list_jobs(client: Client, states: tuple[str, ...], limit: int, output: str) -> None:
    """List your jobs, newest first."""
    print_list(client.jobs.list(states=states, limit=limit), JOB_VIEW, output)


@job.command(epilog="\b\nExample:\n  horizon job get JOB -o yaml")
@click.argument("job_id", metavar="JOB")
@output_option
@connected
def get(client: Client, job_id: str, output: str) -> None:
    """Show one job."""
    print_one(client.jobs.get(job_id), JOB_VIEW, output)


@job.command(
    epilog="""\b
Example:
  horizon job watch JOB
  horizon job watch JOB -o json | jq 'select(.event == "step") | .loss'

\b
Exit code 0 when the job has succeeded, 1 when it failed or was cancelled. A
connection that is cut is made again by itself. Ctrl-C leaves the job running."""
)
@click.argument("job_id", metavar="JOB")
@output_option
@connected
def watch(client: Client, job_id: str, output: str) -> int:
    """Show the progress of a job until it has ended."""
    return _watch(client, client.jobs.get(job_id), output, sys.stdout)


@job.command(epilog="\b\nExample:\n  horizon job logs JOB --follow")
@click.argument("job_id", metavar="JOB")
@click.option("--follow", "-f", is_flag=True, help="Go on until the attempt has ended.")
@click.option(
    "--attempt", type=click.IntRange(min=0), default=0, metavar="N", help="Which attempt. Default: the newest."
)
@connected
def logs(client: Client, job_id: str, follow: bool, attempt: int) -> None:
    """Print the log of a job's worker."""
    out = sys.stdout.buffer
    is_terminal = sys.stdout.isatty()
    try:
        for piece in client.jobs.logs(job_id, attempt=attempt, follow=follow, on_notice=notice):
            out.write(_printable(piece) if is_terminal else piece)
            out.flush()
    except KeyboardInterrupt:
        raise Interrupted(_runs_on(job_id, "logs")) from None


@job.command(epilog="\b\nExample:\n  horizon job cancel JOB")
@click.argument("job_id", metavar="JOB")
@output_option
@connected
def cancel(client: Client, job_id: str, output: str) -> None:
    """End a job; a running one stops at its next step boundary."""
    _print_changed(client.jobs.cancel(job_id), output)


@job.command(epilog="\b\nExample:\n  horizon job pause JOB")
@click.argument("job_id", metavar="JOB")
@output_option
@connected
def pause(client: Client, job_id: str, output: str) -> None:
    """Checkpoint a job and free the device."""
    _print_changed(client.jobs.pause(job_id), output)


@job.command(epilog="\b\nExample:\n  horizon job resume JOB")
@click.argument("job_id", metavar="JOB")
@output_option
@connected
def resume(client: Client, job_id: str, output: str) -> None:
    """Put a paused job back in the queue."""
    _print_changed(client.jobs.resume(job_id), output)


@job.command(
    name="set-priority",
    context_settings={"ignore_unknown_options": True},
    epilog="\b\nExample:\n  horizon job set-priority JOB 10",
)
@click.argument("job_id", metavar="JOB")
@click.argument("priority", type=int)
@output_option
@connected
def set_priority(client: Client, job_id: str, priority: int, output: str) -> None:
    """Change a job's priority: higher first, within the project's share."""
    _print_changed(client.jobs.set_priority(job_id, priority), output)


def _print_changed(changed: Job, output: str) -> None:
    if output == "table":
        click.echo(f"{clean(changed.name)} ({changed.job_id}): {_standing(changed)}")
    else:
        print_one(changed, JOB_VIEW, output)


def _watch(client: Client, job: Job, output: str, stream: IO[str]) -> int:
    """Show events until the job has ended; return 0 when it has succeeded, else 1."""
    from horizon_client.cli.watch_view import open_view

    try:
        with open_view(job, output, stream) as view:
            for event in client.jobs.watch(job.job_id, on_notice=view.note):
                view.show(event)
        ended = client.jobs.get(job.job_id)
    except KeyboardInterrupt:
        raise Interrupted(_runs_on(job.job_id, "watch")) from None
    if output == "table":
        steps = f" after {ended.step} of {ended.num_steps} steps" if ended.num_steps else ""
        why = f": {ended.message}" if ended.message else ""
        click.echo(clean(f"{ended.name} ({ended.job_id}) {ended.state}{steps}{why}"), file=stream)
    elif output == "name" and stream is sys.stdout:
        click.echo(ended.job_id)
    return 0 if ended.state == "SUCCEEDED" else 1


def _spec(text: str) -> str | dict[str, object]:
    """Return the path, or the mapping on stdin."""
    if text != "-":
        return text
    from horizon_client.spec_file import parse_spec

    try:
        return parse_spec(sys.stdin.read(), name="stdin")
    except UnicodeDecodeError as error:
        raise InvalidRequest("stdin is not UTF-8 text") from error


def _standing(job: Job) -> str:
    place = f", place {job.queue_position} in the queue" if job.queue_position else ""
    priority = f", priority {job.spec['priority']}" if job.spec.get("priority") else ""
    return f"{job.state}{place}{priority}"


def _runs_on(job_id: str, command: str) -> str:
    return f"the job runs on; {command} it again with: horizon job {command} {job_id}"


def _printable(piece: bytes) -> bytes:
    """Drop control bytes other than tab, line feed and carriage return, so that a log cannot steer the terminal."""
    return bytes(b for b in piece if (b >= 32 and b != 127) or b in b"\t\n\r")
