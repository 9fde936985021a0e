"""`horizon login`, `horizon logout` and `horizon profile`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from horizon_client.cli.output import View, clean, output_option, print_list, print_one
from horizon_client.cli.root import Commands
from horizon_client.cli.session import token_of
from horizon_client.errors import BadConfig
from horizon_client.profiles import (
    SYSTEM_CA,
    Profile,
    ProfileFile,
    ProfileSummary,
    resolve_endpoint,
)

_FIRST_CONTACT_S = 5.0
_VIEW: View[ProfileSummary] = View(
    columns=[
        ("NAME", lambda p: p.name),
        ("SERVER", lambda p: p.server),
        ("CA", lambda p: p.ca_file or "-"),
        ("IN USE", lambda p: "yes" if p.in_use else ""),
    ],
    details=lambda p: [
        ("name", p.name),
        ("server", p.server),
        ("ca", p.ca_file or "-"),
        ("in use", str(p.in_use).lower()),
    ],
    name=lambda p: p.name,
)


@click.command(
    epilog="""\b
Example:
  horizon login gpubox:7171 --token-file token.txt --ca ca.pem
  horizon login 127.0.0.1:7171 --token-file - < token.txt"""
)
@click.argument("server", metavar="HOST:PORT")
@click.option(
    "--token-file",
    type=click.Path(allow_dash=True),
    metavar="FILE",
    help="File that contains your token, or '-' for stdin. Without it you are asked for the token.",
)
@click.option(
    "--ca",
    type=click.Path(),
    metavar="FILE",
    help="The daemon's CA file, or 'system' for a public certificate. Not needed where an earlier login has saved it, "
    "nor without TLS.",
)
@click.option(
    "--client-cert",
    type=click.Path(),
    metavar="FILE",
    help="Your certificate (PEM), where the daemon asks clients for one. The profile keeps its place.",
)
@click.option("--client-key", type=click.Path(), metavar="FILE", help="The key of your certificate (PEM).")
@click.option("--profile", "profile_name", metavar="NAME", default="default", show_default=True, help="Profile name.")
def login(
    server: str,
    token_file: str | None,
    ca: str | None,
    client_cert: str | None,
    client_key: str | None,
    profile_name: str,
) -> None:
    """Log in to a daemon: check the token, then save it as the profile in use."""
    token = _read_token(token_file)
    ca_file, cert, key = (
        path if path in (None, SYSTEM_CA) else str(Path(path).expanduser().absolute())
        for path in (ca, client_cert, client_key)
    )
    earlier = ProfileFile().of_server(server, profile_name)
    endpoint = resolve_endpoint(
        server,
        token=token,
        ca_file=ca_file,
        client_cert=cert,
        client_key=key,
        profile=None if earlier is None else earlier.name,
    )
    if earlier is not None and endpoint.ca_file is not None and endpoint.ca_file == earlier.ca_file:
        click.echo(f"using the CA of profile {earlier.name}", err=True)
    from horizon_client.connection import RetryPolicy
    from horizon_client.sync_client import Client

    # Saved only when the daemon knows the token
    with Client(
        endpoint.server,
        token=token,
        ca_file=endpoint.ca_file,
        client_cert=endpoint.client_cert,
        client_key=endpoint.client_key,
        # At the first contact a mistyped address is more likely than a restart of the daemon
        unary_retry=RetryPolicy(max_elapsed_s=_FIRST_CONTACT_S),
    ) as client:
        node = client.node.status()
    ProfileFile().save(
        Profile(
            name=profile_name,
            server=endpoint.server,
            token=token,
            ca_file=endpoint.ca_file,
            client_cert=endpoint.client_cert,
            client_key=endpoint.client_key,
        )
    )
    click.echo(
        f"logged in to {clean(node.hostname)} ({endpoint.server}) as {clean(node.user)}, role {clean(node.role)}; "
        f"profile {profile_name}"
    )


@click.command(
    epilog="""\b
Example:
  horizon logout
  horizon logout --profile gpubox"""
)
@click.option("--profile", "profile_name", metavar="NAME", help="Profile to log out of. Default: the one in use.")
@output_option
def logout(profile_name: str | None, output: str) -> None:
    """Forget a daemon: remove its profile with the token from this machine."""
    name = profile_name or ProfileFile().current_name()
    if name is None:
        raise BadConfig("you are not logged in; nothing to do")
    _remove(name, output, "logged out of {server}; the profile {name} and its token are removed from this machine")
    # On stderr, because `-o json` and `-o name` are read by programs
    click.echo(
        "the token stays valid until it is revoked, with: horizon token revoke, or by an admin with: horizond token "
        "revoke",
        err=True,
    )


@click.group(cls=Commands)
def profile() -> None:
    """List, choose and remove the daemons you logged in to."""


@profile.command(name="list", epilog="\b\nExample:\n  horizon profile list")
@output_option
def list_profiles(output: str) -> None:
    """List your profiles."""
    print_list(ProfileFile().summaries(), _VIEW, output)


@profile.command(epilog="\b\nExample:\n  horizon profile use gpubox")
@click.argument("name")
@output_option
def use(name: str, output: str) -> None:
    """Make NAME the profile that commands use."""
    file = ProfileFile()
    file.use(name)
    print_one(next(p for p in file.summaries() if p.name == name), _VIEW, output)


@profile.command(epilog="\b\nExample:\n  horizon profile remove gpubox")
@click.argument("name")
@output_option
def remove(name: str, output: str) -> None:
    """Remove a profile and its token from this machine."""
    _remove(name, output, "removed the profile {name} of {server} and its token")


def _remove(name: str, output: str, message: str) -> None:
    file = ProfileFile()
    file.get(name)  # with its own error for an unknown name
    gone = next(profile for profile in file.summaries() if profile.name == name)
    file.remove(name)
    print_one(gone, _VIEW, output, message=message.format(name=gone.name, server=gone.server))


def _read_token(token_file: str | None) -> str:
    if token_file == "-":  # noqa: S105 - the usual name of stdin
        return sys.stdin.read().strip()
    if token_file is not None:
        return token_of(Path(token_file).expanduser())
    if not sys.stdin.isatty():  # a prompt would block a script
        raise BadConfig("pass the file that contains your token with --token-file FILE")
    return str(click.prompt("token", hide_input=True)).strip()
