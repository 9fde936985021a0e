"""Opens the client of a command, from its options, the options before the command, the environment and the profile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from horizon_client.cli.reporter import Notices
from horizon_client.cli.root import connection_options
from horizon_client.endpoint import SYSTEM_CA, read_token_file

if TYPE_CHECKING:
    from horizon_client.resources import Job
    from horizon_client.sync_client import Client

_SEARCHED_JOBS = 200
_OPTIONS = ("server", "token_file", "ca", "profile_name")


def connected(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the connection options to a command, and pass it an open client as its first argument."""

    @connection_options
    @functools.wraps(command)
    def run(**values: Any) -> Any:
        with open_client(click.get_current_context()) as client:
            return command(client, **{name: value for name, value in values.items() if name not in _OPTIONS})

    return run


def find_job(client: Client, text: str) -> Job:
    """Return the job that `text` means, and say so where it is the newest of several with that name."""
    job = client.jobs.get(text)
    if job.name == text and job.job_id != text:
        jobs = client.jobs.list(limit=_SEARCHED_JOBS)
        number = sum(other.name == text and other.owner == job.owner for other in jobs)
        if number > 1:
            Notices().notice(f"{number} jobs are named {text}; this is the newest, {job.job_id}")
    return job


def open_client(ctx: click.Context) -> Client:
    """Return the client for the options of `ctx`.

    Raises:
        BadConfig: when no daemon is configured, or the configuration is unusable.
    """
    from horizon_client.sync_client import Client

    return Client(**client_arguments(ctx))


def client_arguments(ctx: click.Context) -> dict[str, Any]:
    """Return the arguments of `Client` for the options of a command, or those before the command."""
    chosen = {name: ctx.params.get(name) or ctx.find_root().params.get(name) for name in _OPTIONS}
    token_file, ca = chosen["token_file"], chosen["ca"]
    return {
        "server": chosen["server"],
        "token": read_token_file(Path(token_file).expanduser()) if token_file else None,
        "ca_file": ca if ca in (None, SYSTEM_CA) else str(Path(ca).expanduser()),
        "profile": chosen["profile_name"],
    }
