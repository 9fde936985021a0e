"""What both faces, gRPC and HTTP, are given by main."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from horizon_server.services.accounts import Accounts
from horizon_server.services.jobs import JobService
from horizon_server.services.node import NodeFacts
from horizon_server.services.previews import Previews
from horizon_server.services.pushed import DatasetService, ModelService
from horizon_server.services.uploads import Uploads

_log = logging.getLogger(__name__)
_REFUSALS_EVERY_S = 60.0


class RefusedTokens:
    """Logs refused tokens: the first at once, then at most one line a minute, so that guessing cannot fill the log."""

    def __init__(self) -> None:
        self._logged_s = float("-inf")
        self._num_unlogged = 0

    def add(self, peer: str) -> None:
        """Count one refused token; `peer` is the address that sent it."""
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
