"""`horizon job`."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from horizon_client.choices import JOB_STATES
from horizon_client.cli.compare import compare
from horizon_client.cli.completion import job_names
from horizon_client.cli.deletion import add_delete
from horizon_client.cli.figures import metrics, plot
from horizon_client.cli.importing import import_config
from horizon_client.cli.job_file import SCHEMA_FILE, header_line, job_schema, template
from horizon_client.cli.job_options import (
    JOB_ARGUMENT,
    JOBS_ARGUMENT,
    NO_PUSH_OPTION,
    SET_OPTION,
    SPEC_ARGUMENT,
    read_spec,
)
from horizon_client.cli.job_views import (
    JOB_VIEW,
    OUTLOOK_COLUMNS,
    DataView,
    advice_lines,
    places_page,
    plan_page,
    speed_text,
    state_text,
)
from horizon_client.cli.output import (
    clean,
    limit_option,
    output_option,
    print_list,
    print_one,
    print_result,
    state_option,
)
from horizon_client.cli.root import Commands, Interrupted
from horizon_client.cli.session import Notices, TransferReporter, connected, find_job
from horizon_client.cli.trackers import NO_TRACKERS, Trackers, tracker_options
from horizon_client.cli.watching import continues, watch_job, watch_several
from horizon_client.errors import BadFile, WrongJobState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from horizon_client.job_spec_types import JobSpec
    from horizon_client.resources import Job
    from horizon_client.sync_client import Client


@click.group(cls=Commands)
def job() -> None:
    """Plan, submit, watch and control fine-tuning jobs.

    JOB is the id of a job, the beginning of an id, or a name. A name means the newest job with that name.
    """


@job.command(
    epilog="""\b
Example:
  horizon job plan job.yaml --set train.sequence_length=4096

\b
Exit code 0 when the job fits, 1 when it does not."""
)
@SPEC_ARGUMENT
@SET_OPTION
@NO_PUSH_OPTION
@output_option
@connected
def plan(client: Client, spec: str, overrides: tuple[str, ...], no_push: bool, output: str) -> int:
    """Show how much memory and time a job needs and whether it fits.

    Refuses what 'job submit' refuses, with the same words. Queues nothing; local files given as dataset or model are
    pushed first, because the server needs them to plan.
    """
    with TransferReporter("interrupted; what was uploaded is kept") as reporter:
        planned = client.jobs.plan(read_spec(spec), overrides=overrides, push=not no_push, reporter=reporter)
    names = ["fits" if planned.plan.fits else "does-not-fit"]
    pages = plan_page(planned.plan), places_page(planned.places)
    print_result(planned, output, names=names, page=lambda: "\n\n".join(page for page in pages if page))
    return 0 if planned.plan.fits else 1


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
@SPEC_ARGUMENT
@SET_OPTION
@click.option("--watch", "then_watch", is_flag=True, help="Show progress until the job has ended.")
@tracker_options
@click.option("--request-id", metavar="UUID", help="Repeating a request with the same id does not create a second job.")
@NO_PUSH_OPTION
@output_option
@connected
def submit(
    client: Client,
    spec: str,
    overrides: tuple[str, ...],
    then_watch: bool,
    trackers: Trackers,
    request_id: str | None,
    no_push: bool,
    output: str,
) -> int:
    """Queue a job."""
    if trackers.names and not then_watch:
        raise click.UsageError(
            "--to is for --watch: trackers follow while this command watches; or write report_to in the job file"
        )
    interrupted = (
        "interrupted; what was uploaded is kept. 'horizon job list' shows whether the job was queued before that"
    )
    with TransferReporter(interrupted) as reporter:
        queued = client.jobs.submit(
            read_spec(spec), overrides=overrides, request_id=request_id, push=not no_push, reporter=reporter
        )
    _print_submitted(queued, output)
    if not then_watch:
        return 0
    sys.stdout.flush()  # a program that reads the id need not wait for the job's end
    return watch_job(client, queued, output, sys.stderr if output == "name" else sys.stdout, trackers)


@job.command(
    name="list",
    epilog="""\b
Example:
  horizon job list --state running --state queued
  horizon job list --search qwen
  horizon job list --owner ada --project lab""",
)
@state_option(JOB_STATES)
@click.option("--owner", default="", metavar="USER", help="Only jobs of this user.")
@click.option("--project", default="", metavar="NAME", help="Only jobs that this project is charged for.")
@click.option("--search", default="", metavar="TEXT", help="Only jobs with this in name, id, owner, model or dataset.")
@limit_option
@output_option
@connected
def list_jobs(
    client: Client, states: tuple[str, ...], owner: str, project: str, search: str, limit: int, output: str
) -> None:
    """List your jobs and those of your projects, newest first."""
    jobs = client.jobs.list(states=states, owner=owner, project=project, search=search, limit=limit)
    # An admin sees the jobs of all; for everybody else OWNER would be the same name in every row
    many_owners = len({job.owner for job in jobs}) > 1
    # The time to the end at full speed would contradict the end under sharing
    hidden = {"OWNER": not many_owners, "ETA": any(job.outlook for job in jobs)}
    columns = [c for c in JOB_VIEW.columns if not hidden.get(c[0])]
    columns += [c for c in OUTLOOK_COLUMNS if any(c[1](job) != "-" for job in jobs)]
    print_list(jobs, replace(JOB_VIEW, columns=columns), output)


@job.command(epilog="\b\nExample:\n  horizon job get JOB -o yaml")
@JOB_ARGUMENT
@output_option
@connected
def get(client: Client, job_id: str, output: str) -> None:
    """Show one job."""
    print_one(find_job(client, job_id), JOB_VIEW, output)


@job.command(
    epilog="""\b
Example:
  horizon job watch JOB
  horizon job watch JOB -o json | jq 'select(.event == "step") | .loss'
  horizon job watch JOB --to wandb --to tensorboard
  horizon job watch JOB OTHER

\b
Exit code 0 when every job has succeeded, 1 when one failed or was cancelled, 5
when a tracker did not take everything. Reconnects automatically. Ctrl-C leaves
the job running; the same command continues the same runs."""
)
@JOBS_ARGUMENT
@tracker_options
@output_option
@connected
def watch(client: Client, job_ids: tuple[str, ...], trackers: Trackers, output: str) -> int:
    """Show the progress of a job, or of several in one view, until they have ended."""
    jobs = [find_job(client, text) for text in job_ids]
    if len(jobs) == 1:
        return watch_job(client, jobs[0], output, sys.stdout, trackers)
    if trackers.names:
        raise click.UsageError("--to follows one job; run the command once for each")
    return watch_several(client, jobs, output)


@job.command(
    epilog="""\b
Example:
  horizon job logs JOB --follow
  horizon job logs JOB -o json

\b
The log says in words what an attempt has done. -o json prints the job's events
instead, of all attempts, one JSON object a line, with all figures and answers."""
)
@JOB_ARGUMENT
@click.option("--follow", "-f", is_flag=True, help="Wait for more until the attempt has ended.")
@click.option(
    "--attempt", type=click.IntRange(min=0), default=0, metavar="N", help="Number of the attempt. Default: the newest."
)
@click.option(
    "--output",
    "-o",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="The log as text, or the job's events as JSON.",
)
@connected
def logs(client: Client, job_id: str, follow: bool, attempt: int, output: str) -> None:
    """Print the log of a job's worker."""
    if output == "json" and attempt:
        raise click.UsageError("-o json prints the events of all attempts; leave out --attempt")
    found = find_job(client, job_id)
    if output == "json":
        _print_events(client, found, follow=follow)
        return
    out = sys.stdout.buffer
    is_terminal = sys.stdout.isatty()
    try:
        for piece in client.jobs.logs(found.job_id, attempt=attempt, follow=follow, reporter=Notices()):
            # Without control bytes other than tab, line feed and carriage return, a log cannot control the terminal
            out.write(bytes(b for b in piece if (b >= 32 and b != 127) or b in b"\t\n\r") if is_terminal else piece)
            out.flush()
    except KeyboardInterrupt:
        raise Interrupted(continues(found.job_id, "logs")) from None


def _print_events(client: Client, job: Job, *, follow: bool) -> None:
    """Print the events that there are, with `follow` those to come too."""
    if not job.last_sequence and not follow:
        return
    try:
        with closing(DataView(sys.stdout, "json")) as view, closing(client.jobs.watch(job.job_id)) as events:  # type: ignore[type-var]
            for event in events:
                view.show(event)
                if event.sequence >= job.last_sequence and not follow:
                    return
    except KeyboardInterrupt:
        raise Interrupted(continues(job.job_id, "logs")) from None


@job.command(
    epilog="""\b
Example:
  horizon job clone JOB --set train.learning_rate=2e-5 --watch
  horizon job clone JOB --set name=second-try --edit
  horizon job compare JOB second-try

\b
The clone has the spec that JOB was submitted with, defaults filled in, and
starts from the beginning, in your name. --edit opens it in your editor
(EDITOR) first, with the changes of --set."""
)
@JOB_ARGUMENT
@SET_OPTION
@click.option("--edit", is_flag=True, help="Change the spec in an editor before it is submitted.")
@click.option("--watch", "then_watch", is_flag=True, help="Show progress until the new job has ended.")
@NO_PUSH_OPTION
@output_option
@connected
def clone(
    client: Client, job_id: str, overrides: tuple[str, ...], edit: bool, then_watch: bool, no_push: bool, output: str
) -> int:
    """Submit a job again as a new one, with some fields changed."""
    spec = find_job(client, job_id).spec
    if edit:
        spec, overrides = _edited(spec, overrides), ()
    return _submit_again(client, spec, overrides, then_watch=then_watch, push=not no_push, output=output)


@job.command(
    epilog="""\b
Example:
  horizon job retry JOB
  horizon job retry JOB --from-start

\b
A failed job continues from its newest checkpoint, as with 'job resume'; it
stays the same job. A cancelled job cannot be continued, so its spec is
submitted as a new job, which starts from the beginning; --from-start does that
for a failed one too. For a job that has succeeded: job clone."""
)
@JOB_ARGUMENT
@click.option("--from-start", is_flag=True, help="Submit a new job instead of continuing this one.")
@click.option("--watch", "then_watch", is_flag=True, help="Show progress until the job has ended.")
@output_option
@connected
def retry(client: Client, job_id: str, from_start: bool, then_watch: bool, output: str) -> int:
    """Run a failed or cancelled job again."""
    found = find_job(client, job_id)
    if found.state not in ("FAILED", "CANCELLED"):
        instead = "horizon job clone" if found.ended else "horizon job resume" if found.state == "PAUSED" else ""
        hint = f"; see {instead}" if instead else "; it has not ended"
        raise WrongJobState(f"job {found.job_id} is {found.state}; a failed or cancelled job can be retried{hint}")
    if found.state == "CANCELLED" or from_start:
        return _submit_again(client, found.spec, (), then_watch=then_watch, push=False, output=output)
    resumed = client.jobs.resume(found.job_id)
    where = f"after step {found.step}'s checkpoint or the newest before it" if found.step else "from its start"
    message = f"{clean(resumed.name)} ({resumed.job_id}) continues {where}: {state_text(resumed)}"
    print_one(resumed, JOB_VIEW, output, message=message)
    return _watched(client, resumed, output) if then_watch else 0


def _submit_again(
    client: Client, spec: JobSpec, overrides: Sequence[str], *, then_watch: bool, push: bool, output: str
) -> int:
    with TransferReporter("interrupted; 'horizon job list' shows whether the job was queued before that") as reporter:
        queued = client.jobs.submit(spec, overrides=overrides, push=push, reporter=reporter)
    _print_submitted(queued, output)
    return _watched(client, queued, output) if then_watch else 0


def _watched(client: Client, queued: Job, output: str) -> int:
    sys.stdout.flush()  # a program that reads the id need not wait for the job's end
    return watch_job(client, queued, output, sys.stderr if output == "name" else sys.stdout, NO_TRACKERS)


def _print_submitted(queued: Job, output: str) -> None:
    speed = speed_text(queued.plan) if queued.plan else ""
    predicted = f"; predicted {speed}" if speed else ""
    for line in advice_lines(queued.plan) if queued.plan else ():
        click.echo(line, err=True)
    submitted = f"submitted {clean(queued.name)} as {queued.job_id}: {state_text(queued)}{predicted}"
    print_one(queued, JOB_VIEW, output, message=submitted)


def _edited(spec: JobSpec, overrides: Sequence[str]) -> JobSpec:
    """Return a spec as it is after the user's editor."""
    import yaml

    from horizon_client.job_spec import parse_spec, with_overrides  # only here, because it loads grpc

    text = yaml.safe_dump(with_overrides(spec, overrides), sort_keys=False, allow_unicode=True)
    edited = click.edit(f"# Save and close to submit; an empty file submits nothing.\n{text}", extension=".yaml")
    if edited is None or not edited.strip():
        raise click.UsageError("the file was not saved, or is empty; nothing was submitted")
    return cast("JobSpec", parse_spec(edited, name="the edited spec"))


@job.command(epilog="\b\nExample:\n  horizon job cancel JOB")
@JOB_ARGUMENT
@output_option
@connected
def cancel(client: Client, job_id: str, output: str) -> None:
    """End a job; a running one stops after its current step."""
    found = find_job(client, job_id)
    if found.ended:
        Notices().notice(f"{found.name} ({found.job_id}) has already ended ({found.state}); nothing to cancel")
        if output != "table":  # programs get the job as after any other change
            print_one(found, JOB_VIEW, output)
        return
    _print_changed(client.jobs.cancel(found.job_id), output)


@job.command(epilog="\b\nExample:\n  horizon job pause JOB")
@JOB_ARGUMENT
@output_option
@connected
def pause(client: Client, job_id: str, output: str) -> None:
    """Checkpoint a job after its current step and free its memory."""
    _print_changed(client.jobs.pause(find_job(client, job_id).job_id), output)


@job.command(epilog="\b\nExample:\n  horizon job resume JOB")
@JOB_ARGUMENT
@output_option
@connected
def resume(client: Client, job_id: str, output: str) -> None:
    """Continue a paused or failed job.

    It is queued again and continues from its newest checkpoint.
    """
    _print_changed(client.jobs.resume(find_job(client, job_id).job_id), output)


@job.command(
    name="set-priority",
    context_settings={"ignore_unknown_options": True},  # a negative priority looks like an option
    epilog="""\b
Example:
  horizon job set-priority JOB 10

\b
From -100 to 100, higher first. Priorities order the jobs of one user; whose
turn it is among users depends on what they have used. Only admins may set more
than 100, up to 1000: such a job is served before the jobs of all users.""",
)
@JOB_ARGUMENT
@click.argument("priority", type=int)
@output_option
@connected
def set_priority(client: Client, job_id: str, priority: int, output: str) -> None:
    """Change the priority of a job that has not ended."""
    _print_changed(client.jobs.set_priority(find_job(client, job_id).job_id, priority), output)


@job.command(
    epilog="""\b
Example:
  horizon job keep JOB

\b
The checkpoints of ended jobs are deleted after checkpoint.keep_days, or where
you keep more than an admin allows; 'job get' shows when. This takes it back."""
)
@JOB_ARGUMENT
@output_option
@connected
def keep(client: Client, job_id: str, output: str) -> None:
    """Keep the checkpoints of an ended job from being deleted automatically."""
    kept = client.housekeeping.keep(find_job(client, job_id).job_id)
    message = f"the checkpoints of {clean(kept.name)} ({kept.job_id}) are kept until you delete them"
    print_one(kept, JOB_VIEW, output, message=message)


job.add_command(import_config)
job.add_command(metrics)
job.add_command(plot)
job.add_command(compare)
add_delete(job, "job", job_names, "first-try job_3f2a9c")


def _print_changed(changed: Job, output: str) -> None:
    priority = f", priority {changed.priority}" if changed.priority else ""
    message = f"{clean(changed.name)} ({changed.job_id}): {state_text(changed)}{priority}"
    print_one(changed, JOB_VIEW, output, message=message)


@job.command(epilog="\b\nExample:\n  horizon job schema --to job.schema.json")
@click.option("--to", "target", type=click.Path(path_type=Path), help="Write the schema to this file.")
def schema(target: Path | None) -> None:
    """Print the JSON Schema of a job spec.

    Editors use it for completion and checks.
    """
    text = json.dumps(job_schema(), indent=1)
    if target is None:
        click.echo(text)
    else:
        _write(target, text + "\n", mode="w")
    note = "make this the first line of the job file, so that an editor with YAML support checks it:"
    click.echo(f"{note}\n{header_line(str(target) if target else SCHEMA_FILE)}", err=True)


@job.command(epilog="\b\nExample:\n  horizon job init --to job.yaml")
@click.option("--to", "target", type=click.Path(path_type=Path), help="Write it to this file, which must not exist.")
def init(target: Path | None) -> None:
    """Print a job spec to start from.

    It contains the required fields, and every other field with its default as a comment. With --to, the schema that
    editors check it with is written next to it, as job.schema.json.
    """
    if target is None:
        click.echo(template(), nl=False)
        click.echo(
            f"for the first line, write the schema next to the file: horizon job schema --to {SCHEMA_FILE}", err=True
        )
        return
    _write(target, template(), mode="x")
    # Its first line names this file; one that is there may be of another version
    _write(target.with_name(SCHEMA_FILE), json.dumps(job_schema(), indent=1) + "\n", mode="w")
    click.echo(
        f"wrote {target} and {SCHEMA_FILE}; set name, model and dataset, then: horizon job plan {target}", err=True
    )


def _write(target: Path, text: str, *, mode: str) -> None:
    try:
        with target.open(mode, encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise BadFile(f"{target} exists; choose another name") from None
    except OSError as error:
        raise BadFile(f"cannot write {target}: {error.strerror}") from error
