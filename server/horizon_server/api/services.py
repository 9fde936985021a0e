"""What gRPC and REST share: the services they call, the streams they hold open, and the tokens they refused."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from horizon_server.errors import Draining
from horizon_server.services.accounts import Accounts
from horizon_server.services.jobs import JobService
from horizon_server.services.node import NodeFacts
from horizon_server.services.previews import Previews
from horizon_server.services.pushed import DatasetService, ModelService
from horizon_server.services.uploads import Uploads

_log = logging.getLogger(__name__)
_REFUSALS_EVERY_S = 60.0


class RefusedTokens:
    """Logs refused tokens: the first at once, then at most one line a minute."""

    def __init__(self) -> None:
        self._logged_s = float("-inf")
        self._num_unlogged = 0

    def add(self, peer: str) -> None:
        """Count one refused token; `peer` is the address that sent it."""
        # A line for each would let a caller without a token fill the disk.
        self._num_unlogged += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= _REFUSALS_EVERY_S:
            _log.warning("refused %d wrong, expired or revoked tokens, the last from %s", self._num_unlogged, peer)
            self._logged_s, self._num_unlogged = now_s, 0


@dataclass(frozen=True, kw_only=True)
class Services:
    """The services that gRPC and REST call."""

    accounts: Accounts
    jobs: JobService
    datasets: DatasetService
    previews: Previews
    models: ModelService
    blobs: Uploads
    node: NodeFacts
    refused_tokens: RefusedTokens = field(default_factory=RefusedTokens)


class OpenStreams:
    """The streams that are open now: they end in order when the caller leaves, and at once when the daemon shuts down.

    Thread: one event loop.
    """

    def __init__(self) -> None:
        self._scopes: set[asyncio.Timeout] = set()
        self._ended = False

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Count the block as an open stream.

        Raises:
            Draining: when the daemon shuts down meanwhile.
        """
        # A timeout without a time: `end` sets it to now, which raises in the stream's own task, wherever it waits.
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes.add(scope)
                if self._ended:
                    scope.reschedule(asyncio.get_running_loop().time())
                try:
                    yield
                finally:
                    self._scopes.discard(scope)
        except TimeoutError as error:
            if not scope.expired():
                raise  # one of the stream's own
            raise Draining("the daemon is shutting down; connect again in a moment", retry_after_s=2.0) from error

    def end(self) -> None:
        """End all streams, and those that still come."""
        self._ended = True
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())
