"""`horizon login` and `horizon profile`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from horizon_client.cli.output import View, output_option, print_list, print_one
from horizon_client.cli.text import clean
from horizon_client.endpoint import SYSTEM_CA, Endpoint, read_token_file
from horizon_client.errors import BadConfig
from horizon_client.profiles import Profile, ProfileFile, ProfileSummary

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
    "--token-file", metavar="FILE", help="File that holds your token; '-' reads stdin. Asked for when left out."
)
@click.option(
    "--ca", metavar="FILE", help="CA file of the daemon, or the word 'system'. Not needed on this machine itself."
)
@click.option(
    "--profile", "profile_name", metavar="NAME", default="default", show_default=True, help="Name to remember it by."
)
def login(server: str, token_file: str | None, ca: str | None, profile_name: str) -> None:
    """Log in to a daemon: check the token, then remember it as the profile in use."""
    token = _read_token(token_file)
    ca_file = None if ca is None else Path(ca) if ca == SYSTEM_CA else Path(ca).expanduser().absolute()
    endpoint = Endpoint(server=server, token=token, ca_file=ca_file)
    from horizon_client.sync_client import Client

    with Client(endpoint.server, token=token, ca_file=None if ca_file is None else str(ca_file)) as client:
        node = client.node.status()
    ProfileFile().save(Profile(name=profile_name, server=endpoint.server, token=token, ca_file=ca_file))
    click.echo(
        f"logged in to {clean(node.hostname)} ({endpoint.server}) as {clean(node.user)}, role {clean(node.role)}; profile {profile_name}"
    )


@click.group()
def profile() -> None:
    """List the daemons you logged in to, and choose one."""


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


def _read_token(token_file: str | None) -> str:
    if token_file == "-":  # noqa: S105 - the usual name of stdin
        return sys.stdin.read().strip()
    if token_file is not None:
        return read_token_file(Path(token_file).expanduser())
    if not sys.stdin.isatty():
        raise BadConfig("pass the file that holds your token with --token-file FILE")
    return str(click.prompt("token", hide_input=True)).strip()
