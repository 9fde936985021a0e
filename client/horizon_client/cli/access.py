"""`horizon whoami`, `horizon token`, `horizon project`, and `share` and `unshare` of datasets and models."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from horizon_client.cli.completion import Completer
from horizon_client.cli.output import (
    View,
    age_text,
    clean,
    output_option,
    print_list,
    print_one,
    print_result,
    time_text,
)
from horizon_client.cli.root import Commands
from horizon_client.cli.session import connected
from horizon_client.cli.times import duration

if TYPE_CHECKING:
    from horizon_client.resources import Account, Project, ProjectMember, Token
    from horizon_client.sync_client import Client

_SCOPES = ["full", "read", "metrics"]
_ROLES = ["viewer", "member", "admin"]
_EVERYONE = "*"

_ACCOUNT_VIEW: View[Account] = View(
    columns=[],
    details=lambda a: [
        ("user", a.name),
        ("role", a.role),
        ("project", a.project),
        ("member of", ", ".join(f"{name} ({role})" for name, role in sorted(a.memberships.items()))),
        ("token", a.token_id),
        ("scope", a.scope),
    ],
    name=lambda a: a.name,
)
_TOKEN_VIEW: View[Token] = View(
    columns=[
        ("TOKEN ID", lambda t: t.token_id),
        ("LABEL", lambda t: t.label or "-"),
        ("SCOPE", lambda t: t.scope),
        ("AGE", lambda t: age_text(t.create_time)),
        ("LAST USED", lambda t: f"{age_text(t.last_use_time)} ago" if t.last_use_time else "never"),
        ("EXPIRES", lambda t: time_text(t.expire_time) if t.expire_time else "never"),
        ("REVOKED", lambda t: time_text(t.revoke_time) if t.revoke_time else ""),
    ],
    details=lambda t: [
        ("id", t.token_id),
        ("user", t.user),
        ("label", t.label),
        ("scope", t.scope),
        ("created", time_text(t.create_time)),
        ("created by", t.created_by),
        ("last used", time_text(t.last_use_time) if t.last_use_time else "never"),
        ("expires", time_text(t.expire_time) if t.expire_time else "never"),
        ("revoked", time_text(t.revoke_time)),
    ],
    name=lambda t: t.token_id,
)
_PROJECT_VIEW: View[Project] = View(
    columns=[
        ("PROJECT", lambda p: p.name),
        ("YOUR ROLE", lambda p: p.role or "-"),
        ("MEMBERS", lambda p: ", ".join(f"{m.user} ({m.role})" for m in p.members)),
    ],
    details=lambda p: [("name", p.name)],
    name=lambda p: p.name,
)
_MEMBER_VIEW: View[ProjectMember] = View(
    columns=[
        ("USER", lambda m: m.user),
        ("ROLE", lambda m: m.role),
        ("PROJECT", lambda m: m.project),
        ("ADDED", lambda m: age_text(m.add_time)),
    ],
    details=lambda m: [("project", m.project), ("user", m.user), ("role", m.role)],
    name=lambda m: m.user,
)


@click.command(epilog="\b\nExample:\n  horizon whoami\n  horizon whoami -o json")
@output_option
@connected
def whoami(client: Client, output: str) -> None:
    """Show who you are, and what your token allows."""
    print_one(client.account.whoami(), _ACCOUNT_VIEW, output)


@click.group(cls=Commands)
def token() -> None:
    """Create, list and revoke your tokens."""


@token.command(
    epilog="""\b
Example:
  horizon token create --label laptop > laptop.token
  horizon token create --scope read --label dashboard --expires 30d > dashboard.token

\b
Scopes:
  full     all that you may do
  read     look, but change nothing
  metrics  only GET /metrics, with the series of all users; for admins and viewers"""
)
@click.option("--label", default="", help="What the token is for; at most 63 letters.")
@click.option("--scope", type=click.Choice(_SCOPES), default="full", show_default=True, help="What the token allows.")
@click.option(
    "--expires", type=duration, metavar="DURATION", help="How long it is accepted, such as 12h or 30d. Default: 90d."
)
@output_option
@connected
def create(client: Client, label: str, scope: str, expires: timedelta | None, output: str) -> None:
    """Create a token of your own and print it; it cannot be shown again."""
    lifetime_s = None if expires is None else expires.total_seconds()
    made = client.account.create_token(label=label, scope=scope, lifetime_s=lifetime_s)
    end = f"expires {time_text(made.token.expire_time)}" if made.token.expire_time else "never expires"
    click.echo(f"token {made.token.token_id}, scope {scope}, {end}; it cannot be shown again:", err=True)
    # Alone on stdout, so that it can be redirected into a file
    print_result(
        {"token": made.token, "secret": made.secret},
        output,
        names=[made.secret],
        page=lambda: clean(made.secret),
    )


@token.command(name="list", epilog="\b\nExample:\n  horizon token list\n  horizon token list --user ada")
@click.option("--user", default="", help="List the tokens of another user; for admins.")
@output_option
@connected
def list_tokens(client: Client, user: str, output: str) -> None:
    """List your tokens, newest first, never their secrets."""
    print_list(client.account.tokens(user), _TOKEN_VIEW, output)


@token.command(epilog="\b\nExample:\n  horizon token revoke tok_0123456789")
@click.argument("token_id")
@output_option
@connected
def revoke(client: Client, token_id: str, output: str) -> None:
    """Revoke a token: calls with it are refused at once, and its open streams end within seconds."""
    gone = client.account.revoke_token(token_id)
    print_one(gone, _TOKEN_VIEW, output, message=f"token {gone.token_id} is revoked")


@click.group(cls=Commands)
def project() -> None:
    """List your projects, and manage their members."""


@project.command(name="list", epilog="\b\nExample:\n  horizon project list")
@output_option
@connected
def list_projects(client: Client, output: str) -> None:
    """List your projects with their members."""
    print_list(client.account.projects(), _PROJECT_VIEW, output)


@project.command(epilog="\b\nExample:\n  horizon project members lab")
@click.argument("name", metavar="PROJECT")
@output_option
@connected
def members(client: Client, name: str, output: str) -> None:
    """List the members of a project that you are in."""
    from horizon_client.errors import NotFound, did_you_mean

    projects = {found.name: found for found in client.account.projects()}
    if name not in projects:
        raise NotFound(
            f"project {name!r} does not exist, or you are not a member of it; {did_you_mean(name, projects)}"
        )
    print_list(projects[name].members, _MEMBER_VIEW, output)


@project.command(epilog="\b\nExample:\n  horizon project add lab ada --role viewer")
@click.argument("name", metavar="PROJECT")
@click.argument("user")
@click.option(
    "--role",
    type=click.Choice(_ROLES),
    default="member",
    show_default=True,
    help="viewer sees the project's jobs, member submits too, admin changes jobs and members too.",
)
@output_option
@connected
def add(client: Client, name: str, user: str, role: str, output: str) -> None:
    """Add a user to a project that you are an admin of, or give them another role there."""
    member = client.account.set_member(name, user, role)
    text = f"user {member.user} is {member.role} of project {member.project}"
    print_one(member, _MEMBER_VIEW, output, message=text)


@project.command(epilog="\b\nExample:\n  horizon project remove lab ada")
@click.argument("name", metavar="PROJECT")
@click.argument("user")
@output_option
@connected
def remove(client: Client, name: str, user: str, output: str) -> None:
    """Remove a user from a project that you are an admin of, or yourself from any."""
    client.account.remove_member(name, user)
    gone = {"project": name, "user": user}
    print_result(gone, output, names=[user], page=lambda: f"user {clean(user)} is removed from project {clean(name)}")


def add_share_commands(group: click.Group, complete: Completer) -> None:
    """Add `share` and `unshare`, which are the same for datasets and models."""
    kind = str(group.name)

    def command(verb: str, summary: str) -> Any:
        def run(client: Client, name: str, project_name: str | None, everyone: bool, output: str) -> None:
            if (project_name is None) == (not everyone):
                raise click.UsageError("give either --project PROJECT or --everyone")
            shared = getattr(client.account, verb)(kind, name, _EVERYONE if everyone else project_name)
            shown = ", ".join("everyone" if one == _EVERYONE else f"project {one}" for one in shared)
            print_result(
                {"name": name, "shared_with": shared},
                output,
                names=shared,
                page=lambda: clean(
                    f"{kind} {name} is shared with {shown}" if shown else f"{kind} {name} is not shared"
                ),
            )

        run = output_option(connected(run))
        run = click.option("--everyone", is_flag=True, help="All users of the node.")(run)
        run = click.option("--project", "project_name", metavar="PROJECT", help="All members of this project.")(run)
        run = click.argument("name", shell_complete=complete)(run)
        example = f"\b\nExample:\n  horizon {kind} {verb} NAME --project lab\n  horizon {kind} {verb} NAME --everyone"
        return group.command(name=verb, help=summary, epilog=example)(run)

    command("share", f"Let others use your {kind}: see it, preview it, submit jobs with it.")
    command("unshare", f"Stop sharing a {kind}. Jobs that were submitted with it keep it.")
