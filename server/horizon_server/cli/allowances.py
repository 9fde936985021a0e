"""`horizond project`, and the weights and quotas that it and `horizond user set` take."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import click

from horizon_server.cli.options import Commands, in_database, print_rows, with_output_option, with_settings_options
from horizon_server.db.database import Database
from horizon_server.errors import AlreadyExists, BadSetting, NotFound
from horizon_server.records.account import PROJECT_ROLES, ProjectMember
from horizon_server.records.sharing import Allowance, Holder
from horizon_server.services.accounts import Accounts
from horizon_server.services.quotas import Allowances

_BINARY = {"": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_UNITS = _BINARY | {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_UNIT_OF = {unit.lower(): num_bytes for unit, num_bytes in _UNITS.items()}
_LARGEST = 2**63 - 1
"""The database stores 64-bit numbers."""

# The name of each limit of a quota: its option.
_OPTIONS = {
    "max_queued_jobs": "--max-queued-jobs",
    "max_resident_jobs": "--max-resident-jobs",
    "max_host_bytes": "--max-host-memory",
    "max_stored_bytes": "--max-stored",
    "device_hours_per_week": "--device-hours-per-week",
    "retained_bytes": "--max-retained-bytes",
}


def with_allowance_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --weight and one option for each limit of a quota."""
    for option in reversed(
        (
            click.option(
                "--weight", metavar="W", help="Part of a device's time relative to others; 1 until it is set."
            ),
            click.option("--max-queued-jobs", metavar="N", help="Jobs that may wait in the queue."),
            click.option("--max-resident-jobs", metavar="N", help="Jobs that may be in memory and share the devices."),
            click.option(
                "--max-host-memory",
                "max_host_bytes",
                metavar="SIZE",
                help="Planned host memory of resident jobs together, such as 200GiB.",
            ),
            click.option(
                "--max-stored",
                "max_stored_bytes",
                metavar="SIZE",
                help="Datasets, models and checkpoints together, such as 1TiB.",
            ),
            click.option(
                "--device-hours-per-week", metavar="H", help="Hours of a device's time within any 7 days, such as 40."
            ),
        )
    ):
        command = option(command)
    return command


@click.group(cls=Commands, name="project")
def project_group() -> None:
    """Add and list projects, set their weights and quotas, and manage their members."""


@project_group.command("add")
@click.argument("name")
@click.option("--admin", "admins", multiple=True, metavar="USER", help="A member with the role admin (repeatable).")
@with_settings_options
def project_add(name: str, admins: tuple[str, ...], config: Path | None, state_dir: Path | None) -> None:
    """Create a project, which users can then be members of.

    A user who was created without --project has one of their own name already. Example: horizond project add lab
    --admin ada
    """

    async def add(database: Database) -> None:
        known = [user.name for user in await Accounts(database).users()]
        for user in admins:
            if user not in known:
                raise NotFound(f"user {user} does not exist; see: horizond user list")
        if name in await Accounts(database).projects():
            raise AlreadyExists(f"project {name} exists already; see: horizond project list")
        await Allowances(database).add_project(name)
        for user in admins:
            await Accounts(database).add_member(name, user, "admin")

    in_database(config, state_dir, add)
    told = f" with {', '.join(admins)} as admin" if admins else f"; next: horizond project member add {name} USER"
    click.echo(f"new project {name}{told}", err=True)


@project_group.command("set")
@click.argument("name")
@with_allowance_options
@with_settings_options
def project_set(name: str, config: Path | None, state_dir: Path | None, **changes: Any) -> None:
    """Set a project's weight and quotas; those that are not named stay.

    A device's time is divided among projects in proportion to their weights. The quotas of a project hold for all its
    users together. 'none' removes a quota. A running daemon follows within seconds.

    Example: horizond project set lab --weight 3 --max-queued-jobs 50 --max-stored 2TiB
    """

    async def change(database: Database) -> Allowance:
        await Accounts(database).require_project(name)
        return await change_allowance(database, "project", name, changes)

    click.echo(allowance_text(in_database(config, state_dir, change)), err=True)


@project_group.command("list")
@with_output_option
@with_settings_options
def project_list(output: str, config: Path | None, state_dir: Path | None) -> None:
    """List projects with their users, members, weights and quotas.

    Projects are those that 'horizond project add' has made, that a user is charged to, or that a job was. Users are
    charged there; members see the project's jobs.
    """

    async def read(database: Database) -> tuple[dict[str, list[str]], list[ProjectMember], list[Allowance]]:
        sharing = Allowances(database)
        return await sharing.projects(), await Accounts(database).members(), await sharing.allowances()

    projects, members, allowances = in_database(config, state_dir, read)
    names = sorted(projects.keys() | {member.project for member in members})
    rows = [
        {
            "name": name,
            "users": ", ".join(projects.get(name, ())),
            "members": ", ".join(f"{m.user} ({m.role})" for m in members if m.project == name),
        }
        | allowance_row(allowances, "project", name)
        for name in names
    ]
    print_rows(rows, output, name_key="name")


@project_group.group(cls=Commands, name="member")
def member_group() -> None:
    """Add, remove and list the members of projects: they see its jobs."""


@member_group.command("add")
@click.argument("project")
@click.argument("user")
@click.option(
    "--role",
    type=click.Choice(PROJECT_ROLES),
    default="member",
    show_default=True,
    help="viewer sees the project's jobs, member submits too, admin changes jobs and members too.",
)
@with_settings_options
def member_add(project: str, user: str, role: str, config: Path | None, state_dir: Path | None) -> None:
    """Add USER to PROJECT, or give them another role there. Example: horizond project member add lab ada."""
    in_database(config, state_dir, lambda db: Accounts(db).add_member(project, user, role))
    click.echo(f"user {user} is {role} of project {project}", err=True)


@member_group.command("remove")
@click.argument("project")
@click.argument("user")
@with_settings_options
def member_remove(project: str, user: str, config: Path | None, state_dir: Path | None) -> None:
    """Remove USER from PROJECT; what they own there stays theirs."""
    in_database(config, state_dir, lambda db: Accounts(db).remove_member(project, user))
    click.echo(f"user {user} is removed from project {project}", err=True)


@member_group.command("list")
@click.argument("project", required=False)
@with_output_option
@with_settings_options
def member_list(project: str | None, output: str, config: Path | None, state_dir: Path | None) -> None:
    """List the members of PROJECT, or of all projects."""
    members = in_database(config, state_dir, lambda db: Accounts(db).members(None if project is None else [project]))
    rows = [{"project": m.project, "user": m.user, "role": m.role} for m in members]
    print_rows(rows, output, name_key="user")


async def change_allowance(
    database: Database, holder: Holder, name: str, options: Mapping[str, str | None]
) -> Allowance:
    """Set what the options of `with_allowance_options` name. Raises BadSetting when there is none, or one is
    malformed."""
    given = {key: text for key, text in options.items() if text is not None}
    if not given:
        known = [option for key, option in _OPTIONS.items() if key in options]
        raise BadSetting(f"nothing to set; give at least one of --weight, {', '.join(known)}")
    weight = given.pop("weight", None)
    changes: dict[str, int | float | None] = {}
    for key, text in given.items():
        if text == "none":
            changes[key] = None
        elif key.endswith("_bytes"):
            changes[key] = parse_size(text, what=_OPTIONS[key])
        elif key.endswith("_jobs"):
            changes[key] = _count(text, what=_OPTIONS[key])
        else:
            changes[key] = _number(text, what=_OPTIONS[key])
    return await Allowances(database).change(
        holder, name, changes, weight=None if weight is None else _number(weight, what="--weight")
    )


def allowance_row(allowances: Iterable[Allowance], holder: Holder, name: str) -> dict[str, Any]:
    """Return the weight and the quotas of a holder, for a table."""
    found = [one for one in allowances if (one.holder, one.name) == (holder, name)]
    allowance = found[0] if found else Allowance(holder=holder, name=name)
    return {"weight": f"{allowance.weight:g}", "quotas": _quotas_text(allowance)}


def allowance_text(allowance: Allowance) -> str:
    """Return what a user or project may take, in one line."""
    return f"{allowance.holder} {allowance.name}: weight {allowance.weight:g}, quotas {_quotas_text(allowance)}"


def _quotas_text(allowance: Allowance) -> str:
    """The options that set these quotas, so that they can be given to another holder."""
    limits = allowance.quota.limits.items()
    return " ".join(f"{_OPTIONS[key]} {_limit_text(key, limit)}" for key, limit in limits) or "none"


def _limit_text(key: str, limit: float) -> str:
    if not key.endswith("_bytes"):
        return f"{limit:.15g}"
    unit = max(
        (u for u, size in _BINARY.items() if limit % size == 0 and limit >= size), key=_BINARY.__getitem__, default=""
    )
    return f"{int(limit) // _BINARY[unit]}{unit}"


def parse_size(text: str, *, what: str) -> int:
    """Return the bytes of a size such as 200GiB, 1.5TB or 4096.

    Raises BadSetting when it is not a number with a unit, or without one for bytes.
    """
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)", text)
    if match is None or match.group(2).lower() not in _UNIT_OF:
        raise BadSetting(
            f"{what} {text!r} is not a size: write a number with KiB, MiB, GiB, TiB, KB, MB, GB or TB such as 200GiB, "
            "or none"
        )
    num_bytes = int(Decimal(match.group(1)) * _UNIT_OF[match.group(2).lower()])
    if num_bytes > _LARGEST:
        raise BadSetting(f"{what} {text!r} is too large; write none for no limit")
    return num_bytes


def _count(text: str, *, what: str) -> int:
    if re.fullmatch(r"[0-9]{1,9}", text) is None:
        raise BadSetting(f"{what} {text!r} is not a number of jobs: write a whole number from 0, or none")
    return int(text)


def _number(text: str, *, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        none = "" if what == "--weight" else ", or none"
        raise BadSetting(f"{what} {text!r} is not a number: write one such as 2 or 0.5{none}") from None
