"""`AsyncClient`: the implementation. `sync_client.Client` is a blocking face of the same methods."""

from __future__ import annotations

import os
from types import TracebackType

from horizon_client.checkpoints import AsyncCheckpoints
from horizon_client.connection import STREAM_RETRY, UNARY_RETRY, Connection, RetryPolicy
from horizon_client.datasets import AsyncDatasets
from horizon_client.jobs import AsyncJobs
from horizon_client.models import AsyncModels
from horizon_client.node import AsyncNode
from horizon_client.profiles import resolve_endpoint


class AsyncClient:
    """Speaks to one daemon over one channel, which is opened by the first call and closed by `close` or `async with`.

    What is not given comes from the environment (HORIZON_SERVER, HORIZON_TOKEN, HORIZON_CA, HORIZON_PROFILE), then from the profile that
    `horizon login` wrote.

    Thread: belongs to the event loop of its first call.

    Raises:
        BadConfig: when no server is known, or when the connection would be plain text beyond this machine.
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
        self.node = AsyncNode(self._connection)

    async def close(self) -> None:
        """Close the channel."""
        await self._connection.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
