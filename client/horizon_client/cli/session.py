"""Opens the client that a command speaks through, from its flags, the flags before the command, the environment and the profile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from horizon_client.endpoint import SYSTEM_CA, read_token_file

if TYPE_CHECKING:
    from horizon_client.sync_client import Client


def connected(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the connection flags, and an open client as its first argument."""

    @click.option("--server", metavar="HOST:PORT", help="The daemon to speak to.")
    @click.option("--token-file", metavar="FILE", help="File that holds your token.")
    @click.option("--ca", metavar="FILE", help="CA file of the daemon, or the word 'system'.")
    @click.option("--profile", "profile_name", metavar="NAME", help="Profile to use.")
    @functools.wraps(command)
    def run(server: str | None, token_file: str | None, ca: str | None, profile_name: str | None, **rest: Any) -> Any:
        flags = {"server": server, "token_file": token_file, "ca": ca, "profile_name": profile_name}
        before: dict[str, str | None] = click.get_current_context().find_root().obj or {}
        chosen = {name: value or before.get(name) for name, value in flags.items()}
        with open_client(**chosen) as client:
            return command(client, **rest)

    return run


def open_client(*, server: str | None, token_file: str | None, ca: str | None, profile_name: str | None) -> Client:
    """Return a client for these flags.

    Raises:
        BadConfig: when they, the environment and the profiles do not lead to a daemon.
    """
    token = read_token_file(Path(token_file).expanduser()) if token_file else None
    ca_file = ca if ca in (None, SYSTEM_CA) else str(Path(str(ca)).expanduser())
    from horizon_client.sync_client import Client

    return Client(server, token=token, ca_file=ca_file, profile=profile_name)
