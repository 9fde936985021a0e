"""`AsyncClient`, and `client.node`. The blocking `Client` is generated from the async classes."""

from __future__ import annotations

import os

from horizon_client.checkpoints import AsyncCheckpoints
from horizon_client.connection import STREAM_RETRY, UNARY_RETRY, Connection, RetryPolicy
from horizon_client.conversion import from_message
from horizon_client.jobs import AsyncJobs
from horizon_client.profiles import resolve_endpoint
from horizon_client.pushed import AsyncDatasets, AsyncModels
from horizon_client.resources import Node
from horizon_proto.v1 import node_pb2


class AsyncNodeInfo:
    """`client.node`: the machine that the daemon runs on."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def status(self) -> Node:
        """Return the node's hardware, free memory, jobs, and the caller's user and role."""
        answer = await self._connection.unary(self._connection.calls.node.GetNode, node_pb2.GetNodeRequest())
        return from_message(Node, answer.node)


class AsyncClient:
    """A connection to one daemon, opened by the first call and closed by `close` or by leaving the `with` block.

    What is not given comes from the environment (HORIZON_SERVER, HORIZON_TOKEN, HORIZON_CA, HORIZON_PROFILE), then from the profile that
    `horizon login` wrote.

    Raises:
        BadConfig: when no server is known, or when the connection would be plain text to another machine.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        token: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        profile: str | None = None,
        unary_retry: RetryPolicy = UNARY_RETRY,
        stream_retry: RetryPolicy = STREAM_RETRY,
    ) -> None:
        endpoint = resolve_endpoint(
            server, token=token, ca_file=None if ca_file is None else os.fspath(ca_file), profile=profile
        )
        self._connection = Connection(endpoint, unary_retry=unary_retry, stream_retry=stream_retry)
        self.server = endpoint.server
        self.datasets = AsyncDatasets(self._connection)
        self.models = AsyncModels(self._connection)
        self.jobs = AsyncJobs(self._connection, self.datasets, self.models)
        self.checkpoints = AsyncCheckpoints(self._connection)
        self.node = AsyncNodeInfo(self._connection)

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *leaving: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self.server!r})"
