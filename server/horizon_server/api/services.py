"""What gRPC and REST share: the services they call, the limits of their callers, and the streams they hold open."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from horizon_server.api.limits import CallLimits
from horizon_server.api.logins import Logins
from horizon_server.errors import Draining, HorizonError, NotAllowed, Unauthenticated
from horizon_server.records.account import Principal
from horizon_server.services.access import has_lost_rights
from horizon_server.services.accounts import Accounts
from horizon_server.services.audit import Audit
from horizon_server.services.evaluating import Evaluations
from horizon_server.services.fleet.guest import Guest
from horizon_server.services.housekeeping.deletion import Deletions
from horizon_server.services.housekeeping.retention import Retention
from horizon_server.services.identity import IdentityService
from horizon_server.services.jobs import JobService
from horizon_server.services.merging import Merges
from horizon_server.services.node import NodeFacts
from horizon_server.services.previews import Previews
from horizon_server.services.pushed import DatasetService, ModelService
from horizon_server.services.sampling import Samples
from horizon_server.services.sessions import Sessions
from horizon_server.services.sharing import SharingService
from horizon_server.services.task_results import TaskResults
from horizon_server.services.tinker.drawing import Drawing
from horizon_server.services.tinker.models import TinkerModels
from horizon_server.services.tinker.samples import WaitingSamples
from horizon_server.services.uploads import Uploads
from horizon_server.services.webhooks.hooks import Webhooks

CHECK_TOKENS_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Services:
    """The services that gRPC and REST call."""

    accounts: Accounts
    jobs: JobService
    datasets: DatasetService
    previews: Previews
    samples: Samples
    sessions: Sessions
    tinker_models: TinkerModels
    tinker_drawing: Drawing
    tinker_samples: WaitingSamples
    evaluations: Evaluations
    task_results: TaskResults
    merges: Merges
    models: ModelService
    blobs: Uploads
    node: NodeFacts
    sharing: SharingService
    audit: Audit
    logins: Logins
    limits: CallLimits
    deletions: Deletions
    retention: Retention
    identity: IdentityService
    webhooks: Webhooks
    guest: Guest


class OpenStreams:
    """The streams that are open now: they end in order when the caller leaves, and at once when the daemon shuts down.

    They also end, within seconds, when their caller's token is not accepted any more or allows less than when they
    began.

    Thread: one event loop.
    """

    def __init__(self, accounts: Accounts, *, check_every_s: float = CHECK_TOKENS_EVERY_S) -> None:
        self._accounts = accounts
        self._check_every_s = check_every_s
        self._scopes: dict[asyncio.Timeout, Principal] = {}
        self._refused: dict[asyncio.Timeout, HorizonError] = {}
        self._checking: asyncio.Task[None] | None = None
        self._ended = False

    @asynccontextmanager
    async def one(self, principal: Principal) -> AsyncIterator[None]:
        """Count the block as an open stream of that caller.

        Raises:
            Draining: when the daemon shuts down meanwhile.
            Unauthenticated, NotAllowed: when the token is not accepted any more, or allows less.
        """
        # A timeout without a time: set to now, it raises in the stream's own task, wherever that waits.
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes[scope] = principal
                if self._ended:
                    scope.reschedule(asyncio.get_running_loop().time())
                elif self._checking is None or self._checking.done():
                    self._checking = asyncio.create_task(self._check(), name="tokens-of-streams")
                try:
                    yield
                finally:
                    self._scopes.pop(scope, None)
                    refused = self._refused.pop(scope, None)
        except TimeoutError as error:
            if not scope.expired():
                raise  # one of the stream's own
            if refused is not None:
                raise refused from error
            raise Draining("the daemon is shutting down; connect again in a moment", retry_after_s=2.0) from error

    def end(self) -> None:
        """End all streams, and those that still come."""
        self._ended = True
        if self._checking is not None:
            self._checking.cancel()
        for scope in self._scopes:
            scope.reschedule(asyncio.get_running_loop().time())

    async def _check(self) -> None:
        """Look at the tokens of the open streams, for as long as there are any."""
        # They may be revoked by `horizond token revoke`, in another process: only the database tells.
        while self._scopes:
            await asyncio.sleep(self._check_every_s)
            opened = dict(self._scopes)
            try:
                accepted = await self._accounts.still_accepted({principal.token_id for principal in opened.values()})
            except HorizonError:
                continue  # a database that is busy for long; looked at again
            for scope, principal in opened.items():
                now = accepted.get(principal.token_id)
                if now is not None and not has_lost_rights(principal, now):
                    continue
                if scope in self._scopes and not scope.expired():
                    self._refused[scope] = _not_accepted(principal) if now is None else _less_allowed(principal)
                    scope.reschedule(asyncio.get_running_loop().time())


def _not_accepted(principal: Principal) -> HorizonError:
    return Unauthenticated(
        f"token {principal.token_id} was revoked or has expired, or {principal.name} is disabled; ask an admin for a "
        "new token"
    )


def _less_allowed(principal: Principal) -> HorizonError:
    return NotAllowed(f"the role or a membership of {principal.name} was changed while the stream was open; call again")
