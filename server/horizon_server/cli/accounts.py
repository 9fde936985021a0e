"""`horizond user` and `horizond token`: straight into the database, with or without a running daemon."""

from __future__ import annotations

import asyncio
import datetime
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import click

from horizon_server.cli.options import print_rows, with_output_option, with_settings_options
from horizon_server.db.database import Database
from horizon_server.errors import BadSetting
from horizon_server.records.account import ROLES
from horizon_server.services.accounts import Accounts
from horizon_server.settings import load_settings
from horizon_server.state_dir import private_state_dir

_UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0, "y": 365 * 86400.0}

Result = TypeVar("Result")


@click.group(name="user")
def user_group() -> None:
    """Create, list and remove users."""


@user_group.command("add")
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default="user", show_default=True, help="What the user may do.")
@click.option("--project", help="Project that the user's jobs are charged to. [default: a project of the user's own]")
@with_settings_options
def user_add(name: str, role: str, project: str | None, config: Path | None, state_dir: Path | None) -> None:
    """Create a user. Example: horizond user add ada --role admin."""
    user = _with_accounts(config, state_dir, lambda a: a.add_user(name, role=role, project=project))
    where = "".join(f" {name} {path}" for name, path in (("--config", config), ("--state-dir", state_dir)) if path)
    click.echo(
        f"user {user.name} ({user.role}, project {user.project}); next: horizond token create {user.name}{where}",
        err=True,
    )
    click.echo(user.name)


@user_group.command("list")
@with_output_option
@with_settings_options
def user_list(output: str, config: Path | None, state_dir: Path | None) -> None:
    """List users."""
    users = _with_accounts(config, state_dir, lambda a: a.users())
    rows = [{"name": u.name, "role": u.role, "project": u.project, "created": _day(u.created_s)} for u in users]
    print_rows(rows, output, name_key="name")


@user_group.command("remove")
@click.argument("name")
@with_settings_options
def user_remove(name: str, config: Path | None, state_dir: Path | None) -> None:
    """Remove a user with all their tokens.

    Their jobs, datasets and models stay. Running jobs continue: cancel them first if they should not.
    """
    num_tokens = _with_accounts(config, state_dir, lambda a: a.remove_user(name))
    click.echo(f"user {name} is removed with {num_tokens} tokens", err=True)


@click.group(name="token")
def token_group() -> None:
    """Create, list and revoke bearer tokens."""


@token_group.command("create")
@click.argument("user")
@click.option("--expires", default="90d", show_default=True, help="Lifetime such as 12h, 90d, 1y, or never.")
@with_settings_options
def token_create(user: str, expires: str, config: Path | None, state_dir: Path | None) -> None:
    """Create a token for USER and print it; it cannot be shown again. Example: horizond token create ada > ada.token."""
    lifetime_s = parse_lifetime(expires)
    token, secret = _with_accounts(config, state_dir, lambda a: a.create_token(user, lifetime_s=lifetime_s))
    end = "never expires" if token.expires_s is None else f"expires {_day(token.expires_s)}"
    click.echo(f"token {token.token_id} of {user}, {end}; it cannot be shown again:", err=True)
    # Alone on stdout, so that it can be redirected into a file.
    click.echo(secret)


@token_group.command("list")
@with_output_option
@with_settings_options
def token_list(output: str, config: Path | None, state_dir: Path | None) -> None:
    """List tokens, never their secrets."""
    tokens = _with_accounts(config, state_dir, lambda a: a.tokens())
    rows = [
        {
            "token_id": t.token_id,
            "user": t.user,
            "created": _day(t.created_s),
            "expires": _day(t.expires_s) if t.expires_s else "never",
            "revoked": _day(t.revoked_s) if t.revoked_s else "",
        }
        for t in tokens
    ]
    print_rows(rows, output, name_key="token_id")


@token_group.command("revoke")
@click.argument("token_id")
@with_settings_options
def token_revoke(token_id: str, config: Path | None, state_dir: Path | None) -> None:
    """Revoke a token; new calls with it are refused at once. 'horizond token list' shows the ids."""
    _with_accounts(config, state_dir, lambda a: a.revoke_token(token_id))
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


def _with_accounts(
    config: Path | None, state_dir: Path | None, call: Callable[[Accounts], Awaitable[Result]]
) -> Result:
    settings = load_settings(config, state_dir=state_dir)
    # The first command on a machine may be this one, before the daemon has made its folder.
    private_state_dir(settings.state_dir)

    async def run() -> Result:
        async with Database.opened(settings.database_path) as database:
            return await call(Accounts(database))

    return asyncio.run(run())


def _day(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
