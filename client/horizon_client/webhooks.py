"""`client.webhooks`: addresses that the daemon tells of changes of jobs' states."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from horizon_client.connection import Connection
from horizon_client.conversion import from_message
from horizon_client.resources import Webhook, WebhookDelivery
from horizon_proto.v1 import webhook_pb2


@dataclass(frozen=True, kw_only=True)
class CreatedWebhook:
    """A new webhook with the secret that its requests are signed with, which cannot be shown again."""

    webhook: Webhook
    secret: str = field(repr=False)


class AsyncWebhooks:
    """`client.webhooks`: your webhooks, and those of your projects."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def add(
        self,
        url: str,
        *,
        project: str = "",
        events: Iterable[str] = (),
        format: str = "json",  # noqa: A002
        secret: str = "",
    ) -> CreatedWebhook:
        """Have the daemon send a request to `url` when a job of yours changes its state or, with `project`, any job of
        that.

        `events` are states in lower case, as in `succeeded`; none means succeeded, failed and cancelled. `format` is
        `json` or `slack`. Requests are signed with `secret` (`whsec_` and base64); without one the daemon makes one.

        Raises:
            InvalidRequest: when the address is one that the daemon does not send to.
            NotAllowed: when you are not an admin of the project.
        """
        request = webhook_pb2.CreateWebhookRequest(
            url=url, project=project, events=list(events), format=format, secret=secret
        )
        # Once: a repeated call would make a second webhook, whose secret nobody has seen
        answer = await self._connection.unary(self._connection.calls.webhooks.CreateWebhook, request, repeatable=False)
        return CreatedWebhook(webhook=from_message(Webhook, answer.webhook), secret=answer.secret)

    async def remove(self, webhook_id: str) -> None:
        """Remove a webhook of yours, or of a project that you are an admin of."""
        request = webhook_pb2.DeleteWebhookRequest(webhook_id=webhook_id)
        await self._connection.unary(self._connection.calls.webhooks.DeleteWebhook, request, repeatable=False)

    async def test(self, webhook_id: str) -> WebhookDelivery:
        """Send one request now, and return how it was answered. An answer enables a disabled webhook again."""
        request = webhook_pb2.TestWebhookRequest(webhook_id=webhook_id)
        answer = await self._connection.unary(self._connection.calls.webhooks.TestWebhook, request, repeatable=False)
        return from_message(WebhookDelivery, answer.delivery)

    async def deliveries(self, webhook_id: str) -> list[WebhookDelivery]:
        """Return the newest deliveries of a webhook, newest first."""
        request = webhook_pb2.ListWebhookDeliveriesRequest(webhook_id=webhook_id)
        answer = await self._connection.unary(self._connection.calls.webhooks.ListWebhookDeliveries, request)
        return [from_message(WebhookDelivery, delivery) for delivery in answer.deliveries]

    async def list(self) -> list[Webhook]:
        """Return your webhooks and those of your projects, oldest first."""
        request = webhook_pb2.ListWebhooksRequest()
        answer = await self._connection.unary(self._connection.calls.webhooks.ListWebhooks, request)
        return [from_message(Webhook, webhook) for webhook in answer.webhooks]
