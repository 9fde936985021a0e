"""`horizon completion`, and the words it offers: names of jobs, datasets and models, and the fields of a job spec."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, TypeAlias

import click
from click.shell_completion import CompletionItem, get_completion_class

from horizon_client.cli.job_file import spec_fields
from horizon_client.errors import HorizonClientError

if TYPE_CHECKING:
    from horizon_client.async_client import AsyncClient

Completer: TypeAlias = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

_SHELLS = ["bash", "zsh", "fish"]
_PATIENCE_S = 3.0  # a shell shows nothing while it waits for a completion
_MOST_NAMES = 200


def _completer(list_names: Callable[[AsyncClient], Awaitable[Iterable[str]]]) -> Completer:
    """Return the shell completion of an argument: names that the server lists; none when it cannot be reached."""

    def complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        import asyncio  # only here: every command imports this module

        from horizon_client.async_client import AsyncClient
        from horizon_client.cli.session import client_arguments
        from horizon_client.connection import RetryPolicy

        async def ask() -> Iterable[str]:
            # One attempt per call, because a user waits at the TAB key
            once = RetryPolicy(max_attempts=1, max_elapsed_s=0.0)
            async with AsyncClient(**client_arguments(ctx), unary_retry=once) as client:
                return await list_names(client)

        try:
            names = asyncio.run(asyncio.wait_for(ask(), _PATIENCE_S))
        except (HorizonClientError, asyncio.TimeoutError):
            return []  # a message here would be written into the command line
        # Several jobs may have one name
        return [CompletionItem(name) for name in dict.fromkeys(names) if name.startswith(incomplete)]

    return complete


async def _jobs(client: AsyncClient) -> Iterable[str]:
    jobs = await client.jobs.list(limit=_MOST_NAMES)
    return [*(job.name for job in jobs), *(job.job_id for job in jobs)]


job_names = _completer(_jobs)
dataset_names = _completer(lambda client: client.datasets.names())
model_names = _completer(lambda client: client.models.names())


def spec_keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the fields that `--set` can change."""
    return [CompletionItem(f"{path}=") for path, _ in spec_fields() if path.startswith(incomplete)]


@click.command(
    epilog="""\b
Example:
  horizon completion bash > ~/.horizon-completion.bash
  echo '. ~/.horizon-completion.bash' >> ~/.bashrc
  horizon completion fish > ~/.config/fish/completions/horizon.fish"""
)
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(shell: str) -> None:
    """Print the completion script for your shell."""
    from horizon_client.cli.root import horizon

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - click knows all of _SHELLS
    script = kind(horizon, {}, "horizon", "_HORIZON_COMPLETE").source()
    # bash would put a space after `--set name=`, where the value belongs
    script = script.replace(
        "    return 0\n",
        "    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace\n    return 0\n",
    )
    click.echo(script)
