"""What callers can do with webhooks: create, list, try and remove them, and see what was delivered."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from horizon_server.db.webhooks import WebhookStore
from horizon_server.errors import BadSetting, InvalidSpec, NotFound
from horizon_server.records.account import Principal
from horizon_server.records.job import JobState
from horizon_server.records.webhook import Delivery, Webhook
from horizon_server.services.access import may_see, require_change, require_visible, require_webhook
from horizon_server.services.accounts import Accounts, UserLocks
from horizon_server.services.webhooks.deliveries import KEPT_DAYS, Deliveries
from horizon_server.services.webhooks.payload import FORMATS, check_secret, new_secret
from horizon_server.services.webhooks.receiver import Receivers, shown_url

DEFAULT_EVENTS = ("succeeded", "failed", "cancelled")
_EVENTS = tuple(state.value.lower() for state in JobState)


@dataclass(kw_only=True, eq=False)
class Webhooks:
    """The use cases around webhooks. Thread: belongs to one event loop."""

    store: WebhookStore
    deliveries: Deliveries
    receivers: Receivers
    accounts: Accounts
    # Each call below that holds one of these waits for a receiver, or for a name server.
    _turns: UserLocks = field(init=False, default_factory=UserLocks)

    async def create(
        self,
        principal: Principal,
        *,
        url: str,
        project: str,
        events: Sequence[str],
        format: str,  # noqa: A002  # the contract's word
        secret: str,
    ) -> tuple[Webhook, str]:
        """Create a webhook of the caller's own jobs, or of all jobs of a project; return it with its secret.

        Raises:
            InvalidSpec: naming the field that is wrong, such as an address that this daemon does not send to.
            NotFound, NotAllowed: when the caller may have no webhook of that project.
            QuotaExceeded: when they have too many.
        """
        require_webhook(principal, project)
        if project:
            try:
                await self.accounts.require_project(project)
            except BadSetting as error:
                raise InvalidSpec.of("project", error.message) from error
        unknown = [event for event in events if event not in _EVENTS]
        if unknown:
            problem = f"events has {unknown[0]!r:.80}; each must be one of {', '.join(_EVENTS)}"
            raise InvalidSpec.of("events", problem)
        if (format or FORMATS[0]) not in FORMATS:
            raise InvalidSpec.of("format", f"format is {format!r:.80}; it must be one of {', '.join(FORMATS)}")
        if secret:
            check_secret(secret)
        async with self._turns.of(principal.name):
            await self.receivers.check(url)
        webhook = Webhook(
            webhook_id="wh_" + secrets.token_hex(5),
            owner=principal.name,
            project=project,
            url=url,
            # In the order of a job's life, each once.
            events=tuple(event for event in _EVENTS if event in (events or DEFAULT_EVENTS)),
            format=format or FORMATS[0],
            created_s=time.time(),
        )
        signed_with = secret or new_secret()
        await self.store.create(webhook, signed_with)
        return webhook, signed_with

    async def delete(self, principal: Principal, webhook_id: str) -> None:
        """Remove a webhook: its owner, an admin of its project, or an admin. Raises NotFound, NotAllowed."""
        webhook = await self._visible(principal, webhook_id)
        require_change(principal, webhook.owner, f"webhook {webhook_id}", project=webhook.project)
        await self.store.delete(webhook_id)

    async def test(self, principal: Principal, webhook_id: str) -> Delivery:
        """Send one request now, and return how it was answered. An answer enables a disabled webhook again.

        Raises NotFound, NotAllowed.
        """
        webhook = await self._visible(principal, webhook_id)
        require_change(principal, webhook.owner, f"webhook {webhook_id}", project=webhook.project)
        facts = {"webhook_id": webhook_id, "message": f"this is a test of webhook {webhook_id} by {principal.name}"}
        async with self._turns.of(principal.name):
            due = await self.store.add_test(webhook_id, facts, time.time())
            return await self.deliveries.attempt(due, is_last=True)

    async def list_deliveries(self, principal: Principal, webhook_id: str) -> list[Delivery]:
        """Return the newest deliveries of a webhook, newest first. Raises NotFound."""
        await self._visible(principal, webhook_id)
        return await self.store.deliveries(webhook_id)

    async def sweep(self) -> None:
        """Forget deliveries that ended long ago."""
        await self.store.trim(before_s=time.time() - KEPT_DAYS * 86400.0)

    async def _visible(self, principal: Principal, webhook_id: str) -> Webhook:
        webhook = await self.store.get(webhook_id)
        if webhook is None:
            raise NotFound(f"webhook {webhook_id!r:.80} does not exist, or is not yours")
        require_visible(principal, webhook.owner, f"webhook {webhook_id!r:.80}", project=webhook.project)
        return webhook

    async def list(self, principal: Principal) -> list[Webhook]:
        """Return the webhooks that the caller may see, oldest first: their own, and those of their projects."""
        seen = [w for w in await self.store.all() if may_see(principal, w.owner, project=w.project)]
        return [webhook if webhook.owner == principal.name else _masked(webhook) for webhook in seen]


def _masked(webhook: Webhook) -> Webhook:
    return replace(webhook, url=shown_url(webhook.url))
