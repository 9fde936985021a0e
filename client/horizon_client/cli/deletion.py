"""`delete` of datasets, models, jobs and checkpoints: by name at once, by filter after a look at what would go."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from horizon_client.choices import ENDED_STATES, JOB_STATES
from horizon_client.cli.completion import Completer
from horizon_client.cli.output import bytes_text, clean, output_option, print_result, state_option
from horizon_client.cli.root import Interrupted
from horizon_client.cli.session import connected, find_job
from horizon_client.cli.times import duration

if TYPE_CHECKING:
    from horizon_client.resources import Deletion
    from horizon_client.sync_client import Client

# Keys in one call; a selection may be larger.
_KEYS_AT_ONCE = 1000
_EPILOG = """\b
Example:
  horizon {kind} delete {example}
  horizon {kind} delete --older-than 30d{state} --dry-run

\b
Resources in use are kept, and the message says who uses them. A filtered
selection{jobs} is listed first and needs confirmation or --yes.
Exit code 2 when something that you named was refused."""


def add_delete(group: click.Group, kind: str, complete: Completer, example: str) -> None:
    """Add `delete` to the commands of a kind of resource."""
    of_jobs = kind in ("job", "checkpoint")
    metavar = {"job": "[JOB]...", "checkpoint": "[JOB@STEP]..."}.get(kind, "[NAME]...")
    what = {
        "job": "Delete jobs that have ended, with their checkpoints, logs and events.",
        "checkpoint": "Delete checkpoints, named by their steps.",
    }.get(kind, f"Delete {kind}s that no active job needs.")
    state = " --state failed" if of_jobs else ""
    epilog = _EPILOG.format(kind=kind, example=example, state=state, jobs=", and any job," if kind == "job" else "")

    @connected
    def delete(
        client: Client,
        *,
        keys: tuple[str, ...],
        older_than: timedelta | None,
        owner: str | None,
        dry_run: bool,
        yes: bool,
        output: str,
        states: tuple[str, ...] = (),
        every: bool = False,
    ) -> int:
        is_filtered = bool(states or older_than)
        if not keys and not is_filtered:
            raise click.UsageError(
                f"name what to delete, or select it with --older-than{' or --state' if of_jobs else ''}"
            )
        if keys and owner:
            raise click.UsageError("--owner selects without names; leave it out where you name what to delete")
        if kind == "checkpoint" and not (is_filtered or every) and any("@" not in key for key in keys):
            raise click.UsageError("name the checkpoint to delete by its step: JOB@STEP, or all of a job: JOB --all")
        filters: dict[str, Any] = {"states": states, "older_than": older_than, "owner": owner or ""}
        ids = [_id_of(client, kind, key) for key in keys]
        if not dry_run and not yes and (is_filtered or every or kind == "job"):
            chosen = _confirmed(client, kind, ids, filters)
            if not chosen:
                return 0
            # By id, so that exactly what was shown goes.
            ids, filters = chosen, {}
        return _delete(client, kind, ids, filters, dry_run=dry_run, named=bool(keys), output=output)

    options = [
        click.argument("keys", nargs=-1, metavar=metavar, shell_complete=complete),
        click.option("--older-than", type=duration, metavar="DURATION", help=_AGES[kind]),
        click.option("--owner", metavar="USER", help="Select what belongs to this user instead of you; for admins."),
        click.option(
            "--dry-run", is_flag=True, help="Delete nothing; show what would be deleted and how much it frees."
        ),
        click.option("--yes", "-y", is_flag=True, help="Do not ask."),
    ]
    if of_jobs:
        ended = [state for state in JOB_STATES if state in ENDED_STATES]
        options.insert(2, state_option(ended if kind == "job" else JOB_STATES))
    if kind == "checkpoint":
        options.insert(
            3, click.option("--all", "every", is_flag=True, help="All checkpoints of the jobs that are named.")
        )

    command: Any = output_option(delete)
    for option in reversed(options):
        command = option(command)
    group.command(name="delete", help=what, epilog=epilog)(command)


_AGES = {
    "dataset": "Select what was pushed longer ago than this, such as 30d.",
    "model": "Select what was pushed longer ago than this, such as 30d.",
    "job": "Select what ended longer ago than this, such as 30d.",
    "checkpoint": "Select what was written longer ago than this, such as 30d.",
}


def _id_of(client: Client, kind: str, key: str) -> str:
    """The id of what a name means now: another could have the name when it is deleted."""
    if kind in ("dataset", "model"):
        return str(getattr(getattr(client, f"{kind}s").get(key), f"{kind}_id"))
    # No name of a job has an @.
    job, at, step = key.partition("@") if kind == "checkpoint" else (key, "", "")
    if at and not step.isdecimal():
        raise click.UsageError(f"{key!r}: name the checkpoint to delete by its step: JOB@STEP")
    return f"{find_job(client, job).job_id}{at}{step}"


def _confirmed(client: Client, kind: str, ids: Sequence[str], filters: dict[str, Any]) -> list[str]:
    """Show what would go and ask; return the keys, none where there is nothing or the answer is no."""
    found = list(client.housekeeping.delete(kind, ids, dry_run=True, **filters))
    for deletion in found:
        click.echo(_line(kind, deletion, dry_run=True), err=True)
    chosen = [deletion for deletion in found if not deletion.refusal]
    if not found:
        click.echo(f"no {kind} is selected", err=True)
    if not chosen:
        # One that was named is refused with an exit code by the call itself.
        return [deletion.key for deletion in found] if ids else []
    if not _can_ask():
        raise click.UsageError("add --yes to delete this, or --dry-run to only see it")
    question = f"delete {_number(kind, len(chosen))}, {bytes_text(sum(one.size_bytes for one in chosen))}?"
    click.confirm(question, abort=True, err=True)
    return [deletion.key for deletion in chosen]


def _can_ask() -> bool:
    return sys.stdin.isatty()


def _delete(
    client: Client, kind: str, ids: Sequence[str], filters: dict[str, Any], *, dry_run: bool, named: bool, output: str
) -> int:
    results: list[Deletion] = []
    parts = [ids[start : start + _KEYS_AT_ONCE] for start in range(0, len(ids), _KEYS_AT_ONCE)] or [ids]
    try:
        for part in parts:
            for deletion in client.housekeeping.delete(kind, part, dry_run=dry_run, **filters):
                results.append(deletion)
                # As each is done: the files of many jobs take minutes to remove.
                click.echo(_line(kind, deletion, dry_run=dry_run), err=bool(deletion.refusal) or output != "table")
    except KeyboardInterrupt:
        done = _number(kind, sum(not one.refusal for one in results))
        raise Interrupted(f"interrupted; {done} deleted so far, and the one under way is finished") from None
    gone = [deletion for deletion in results if not deletion.refusal]
    if output != "table":
        print_result(results, output, names=[one.key for one in gone], page=str)
    elif len(results) != 1 or dry_run:
        verb = "would be deleted" if dry_run else "deleted"
        freed = bytes_text(sum(one.size_bytes for one in gone))
        click.echo(f"{_number(kind, len(gone))} {verb}, {freed} in all; {len(results) - len(gone)} refused", err=True)
    refused = {deletion.reason for deletion in results if deletion.refusal}
    if not (named and refused):
        return 0
    return 3 if refused == {"NOT_ALLOWED"} else 2


def _line(kind: str, deletion: Deletion, *, dry_run: bool) -> str:
    name = clean(deletion.name or deletion.key)
    if deletion.refusal:
        return f"Error: {clean(deletion.refusal)}" if not dry_run else f"refused: {clean(deletion.refusal)}"
    if kind in ("job", "checkpoint"):
        name = f"{name} ({deletion.key})" if kind == "job" else f"{deletion.key} of {name}"
    return f"would delete {kind} {name}, {bytes_text(deletion.size_bytes)}" if dry_run else f"deleted {kind} {name}"


def _number(kind: str, number: int) -> str:
    return f"{number:,} {kind}{'' if number == 1 else 's'}"
