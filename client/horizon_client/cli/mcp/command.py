"""`horizon mcp`."""

from __future__ import annotations

import asyncio

import click

from horizon_client.cli.root import connection_options
from horizon_client.cli.session import Notices, client_arguments
from horizon_client.errors import InvalidRequest


@click.command(
    epilog="""\b
Example:
  horizon mcp
  horizon mcp --write

\b
An assistant's program starts this command and speaks with it over stdin and
stdout; docs/assistants.md has the lines for its configuration.
It needs the package mcp: pip install 'horizon-train[mcp]'"""
)
@click.option("--write", is_flag=True, help="Also submit, pause, resume and cancel jobs, and sample checkpoints.")
@connection_options
@click.pass_context
def mcp(ctx: click.Context, /, write: bool, **options: str | None) -> None:
    """Let an AI assistant look at your jobs, over the Model Context Protocol.

    The assistant has your rights on the node. Without --write it plans jobs and sees jobs, their figures, events and
    logs, checkpoints, datasets, models, the queue and the node, and can change nothing.
    """
    try:
        import mcp.server  # noqa: F401 - whether it is installed is asked here, once
    except ImportError:
        raise InvalidRequest(
            "horizon mcp needs the package mcp, which is not installed: pip install 'horizon-train[mcp]'"
        ) from None
    # Only here, because both load what no other command needs
    from horizon_client.async_client import AsyncClient
    from horizon_client.cli.mcp.server import assistant_server

    async def serve() -> None:
        async with AsyncClient(**client_arguments(ctx), reporter=Notices()) as client:
            await assistant_server(client, may_write=write).run_stdio_async()

    asyncio.run(serve())
