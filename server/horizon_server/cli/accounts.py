"""`horizond user` and `horizond token`: straight into the database, with or without a running daemon."""

from __future__ import annotations

import datetime
import os
import pwd
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import click

from horizon_server.cli.allowances import allowance_row, allowance_text, change_allowance, with_allowance_options
from horizon_server.cli.options import Commands, in_database, print_rows, with_output_option, with_settings_options
from horizon_server.db.database import Database
from horizon_server.errors import BadSetting, NotFound
from horizon_server.records.account import ROLES, SCOPES, Owned, ProjectMember, Token, User
from horizon_server.records.sharing import Allowance
from horizon_server.services.accounts import Accounts
from horizon_server.services.quotas import Allowances

_UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0, "y": 365 * 86400.0}


@click.group(cls=Commands, name="user")
def user_group() -> None:
    """Create, change, list and remove users."""


@user_group.command("add")
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="user", show_default=True, help="What the user may do.")
@click.option("--project", help="Project that the user's jobs are charged to. [default: a project of the user's own]")
@with_settings_options
def user_add(name: str, role: str, project: str | None, config: Path | None, state_dir: Path | None) -> None:
    """Create a user. Example: horizond user add ada --role admin."""

    async def add(database: Database) -> tuple[User, bool]:
        accounts = Accounts(database)
        is_known = (project or name) in await accounts.projects()
        return await accounts.add_user(name, role=role, project=project), is_known

    user, is_known = in_database(config, state_dir, add)
    where = "".join(f" {name} {path}" for name, path in (("--config", config), ("--state-dir", state_dir)) if path)
    new = "" if is_known else "new "
    click.echo(
        f"user {user.name} ({user.role}, {new}project {user.project}); next: horizond token create {user.name}{where}",
        err=True,
    )
    click.echo(user.name)


@user_group.command("list")
@with_output_option
@with_settings_options
def user_list(output: str, config: Path | None, state_dir: Path | None) -> None:
    """List users with their weights and quotas."""

    async def read(database: Database) -> tuple[list[User], list[ProjectMember], list[Allowance]]:
        accounts = Accounts(database)
        return await accounts.users(), await accounts.members(), await Allowances(database).allowances()

    users, members, allowances = in_database(config, state_dir, read)
    rows = [
        {
            "name": u.name,
            "role": u.role,
            "project": u.project,
            "member_of": ", ".join(f"{m.project} ({m.role})" for m in members if m.user == u.name),
            "created": _day(u.created_s),
            "disabled": _day(u.disabled_s) if u.disabled_s else "",
        }
        | allowance_row(allowances, "user", u.name)
        for u in users
    ]
    print_rows(rows, output, name_key="name")


@user_group.command("set")
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), help="What the user may do.")
@click.option(
    "--disable/--enable", "disable", default=None, help="Accept no token of the user any more, or accept them again."
)
@with_allowance_options
@click.option(
    "--max-retained-bytes",
    "retained_bytes",
    metavar="SIZE",
    help="Checkpoints of ended jobs, such as 500GiB; the oldest beyond it are deleted after a warning.",
)
@with_settings_options
def user_set(
    name: str, role: str | None, disable: bool | None, config: Path | None, state_dir: Path | None, **changes: Any
) -> None:
    """Set a user's role, weight and quotas, or disable the account; what is not named stays.

    A device's time is divided among the users of a project in proportion to their weights. 'none' removes a quota. A
    running daemon follows within seconds: calls and open streams of a disabled user are refused. Their jobs continue:
    cancel them first if they should not.

    Example: horizond user set ada --weight 2 --max-resident-jobs 2 --max-host-memory 200GiB
    """

    async def change(database: Database) -> list[str]:
        accounts, done = Accounts(database), []
        if name not in [user.name for user in await accounts.users()]:
            raise NotFound(f"user {name} does not exist; see: horizond user list")
        has_others = role is not None or disable is not None
        # First, as it may refuse what was given, and then nothing must be changed.
        if not has_others or any(value is not None for value in changes.values()):
            done.append(allowance_text(await change_allowance(database, "user", name, changes)))
        if role is not None:
            await accounts.set_role(name, role)
            done.append(f"user {name} has the role {role}")
        if disable is not None:
            await accounts.disable(name, is_disabled=disable)
            done.append(f"user {name} is disabled" if disable else f"user {name} is enabled")
        return done

    for line in in_database(config, state_dir, change):
        click.echo(line, err=True)


@user_group.command("remove")
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@with_settings_options
def user_remove(name: str, yes: bool, config: Path | None, state_dir: Path | None) -> None:
    """Remove a user with all their tokens, memberships, weight and quotas.

    Their jobs with checkpoints, datasets, models and projects stay. Running jobs continue: cancel them first if they
    should not. An admin deletes what stays with: horizon job delete --owner NAME --older-than 0s; the same for dataset
    and model.
    """
    owned = in_database(config, state_dir, lambda db: Accounts(db).owned(name), only_look=True)
    click.echo(f"user {name} owns {_owned_text(owned)}", err=True)
    if not yes:
        if not sys.stdin.isatty():
            raise BadSetting(f"nobody can be asked here whether to remove user {name}; add --yes")
        click.confirm(f"Remove user {name}?", abort=True, err=True)
    num_tokens = in_database(config, state_dir, lambda db: Accounts(db).remove_user(name))
    click.echo(f"user {name} is removed with {_number(num_tokens, 'token')}", err=True)


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _owned_text(owned: Owned) -> str:
    if not (owned.num_jobs or owned.num_datasets or owned.num_models):
        return "no jobs, datasets or models"
    running = f" ({owned.num_jobs_not_ended} not ended)" if owned.num_jobs_not_ended else ""
    jobs, datasets = _number(owned.num_jobs, "job"), _number(owned.num_datasets, "dataset")
    what = f"{jobs}{running}, {datasets} and {_number(owned.num_models, 'model')}"
    return f"{what}, which stay; horizond user remove --help says how to delete them"


@click.group(cls=Commands, name="token")
def token_group() -> None:
    """Create, list and revoke bearer tokens."""


@token_group.command("create")
@click.argument("user")
@click.option("--expires", default="90d", show_default=True, help="Lifetime such as 12h, 90d, 1y, or never.")
@click.option(
    "--scope",
    type=click.Choice(SCOPES),
    default="full",
    show_default=True,
    help="What it allows: read allows no changes, metrics only GET /metrics with the series of all users.",
)
@click.option("--label", default="", help="What it is for; at most 63 letters.")
@click.option(
    "--to",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write it into this new file, which only you can read, instead of printing it.",
)
@with_settings_options
def token_create(
    user: str, expires: str, scope: str, label: str, to: Path | None, config: Path | None, state_dir: Path | None
) -> None:
    """Create a token for USER and print it; it cannot be shown again. Example: horizond token create ada --to
    ada.token."""
    lifetime_s = parse_lifetime(expires)

    async def create(database: Database) -> tuple[Token, str]:
        return await Accounts(database).create_token(
            user, lifetime_s=lifetime_s, scope=scope, label=label, created_by=_system_account()
        )

    if to is None:
        token, secret = in_database(config, state_dir, create)
    else:
        # Before the token is made: one that could not be written would be lost.
        with _new_private_file(to) as file:
            token, secret = in_database(config, state_dir, create)
            file.write(f"{secret}\n")
    end = "never expires" if token.expires_s is None else f"expires {_day(token.expires_s)}"
    made = f"token {token.token_id} of {user}, scope {scope}, {end}"
    if to is not None:
        click.echo(f"{made}; it is in {to}, and cannot be shown again", err=True)
        return
    click.echo(f"{made}; it cannot be shown again:", err=True)
    # Alone on stdout, so that it can be redirected into a file.
    click.echo(secret)


@contextmanager
def _new_private_file(path: Path) -> Iterator[TextIO]:
    """Make a file that only its owner can read, for the block; it is removed where the block fails. Raises
    BadSetting."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise BadSetting(f"--to {path} exists already; choose another file, or remove it first") from error
    except OSError as error:
        raise BadSetting(f"--to {path} cannot be written: {error.strerror}; choose another file") from error
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            yield file
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@token_group.command("list")
@with_output_option
@with_settings_options
def token_list(output: str, config: Path | None, state_dir: Path | None) -> None:
    """List tokens, never their secrets."""
    tokens = in_database(config, state_dir, lambda db: Accounts(db).tokens())
    rows = [
        {
            "token_id": t.token_id,
            "user": t.user,
            "scope": t.scope,
            "label": t.label,
            "created": _day(t.created_s),
            "created_by": t.created_by,
            "expires": _day(t.expires_s) if t.expires_s else "never",
            "last_used": _day(t.last_used_s) if t.last_used_s else "never",
            "revoked": _day(t.revoked_s) if t.revoked_s else "",
        }
        for t in tokens
    ]
    print_rows(rows, output, name_key="token_id")


@token_group.command("revoke")
@click.argument("token_id")
@with_settings_options
def token_revoke(token_id: str, config: Path | None, state_dir: Path | None) -> None:
    """Revoke a token: new calls with it are refused at once, open streams end within seconds. 'horizond token list'
    shows the ids."""
    in_database(config, state_dir, lambda db: Accounts(db).revoke_token(token_id))
    click.echo(f"token {token_id} is revoked", err=True)


def parse_lifetime(text: str) -> float | None:
    """Return seconds, or None for never.

    Raises:
        BadSetting: when it is not a number with h, d, w or y.
    """
    if text == "never":
        return None
    match = re.fullmatch(r"(\d{1,6})([hdwy])", text)
    if match is None or int(match.group(1)) == 0:
        raise BadSetting(
            f"--expires {text!r} is not a lifetime: write a number with h, d, w or y such as 90d, or never"
        )
    return int(match.group(1)) * _UNITS_S[match.group(2)]


def _system_account() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # in a container, whose users need no names
        return f"uid {os.getuid()}"


def _day(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
