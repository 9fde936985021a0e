"""Sends what is in the outbox: a few requests at a time, and each again until it is answered, is given up, or may not
be sent any more.

Nothing here holds up a job: changes of state are stored whether or not anybody can be told of them.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import structlog

from horizon_server.db.webhooks import WebhookStore
from horizon_server.errors import HorizonError
from horizon_server.records.webhook import DELIVERED, DROPPED, FAILED, PENDING, Delivery, DueDelivery
from horizon_server.services.access import may_listen
from horizon_server.services.webhooks.payload import body_of, headers_of
from horizon_server.services.webhooks.receiver import Receivers, Refused
from horizon_server.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

MAX_AT_ONCE = 8
"""Requests that are under way."""
MAX_AT_ONCE_OF_OWNER = 2
"""Of them, to the webhooks of one user; to one webhook, one."""
MAX_ATTEMPTS = 12
MAX_GIVEN_UP = 5
"""Deliveries in a row that are given up before a webhook is disabled."""
FIRST_WAIT_S = 5.0
LONGEST_WAIT_S = 6 * 3600.0
KEPT_DAYS = 30.0
_GROWTH = 3.0
_LOOK_EVERY_S = 1.0
_GONE = 410


def wait_s(num_attempts: int) -> float:
    """Return how long the next attempt waits after that many: 5 s, 15 s, 45 s, ... 6 h; the last is a day after the
    first."""
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * _GROWTH ** (num_attempts - 1))


class Deliveries:
    """The outbox's sender. Thread: belongs to one event loop.

    Args:
        clock: Unix seconds; a port for tests.
    """

    def __init__(
        self,
        store: WebhookStore,
        receivers: Receivers,
        metrics: Metrics,
        *,
        public_url: str | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._receivers = receivers
        self._metrics = metrics
        self._public_url = public_url
        self.clock = clock
        self._sending: dict[str, tuple[str, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Send what is due, until cancelled."""
        try:
            while True:
                try:
                    await self.send_due()
                except HorizonError as error:
                    log.error("webhooks wait for the database", why=error.message)
                await asyncio.sleep(_LOOK_EVERY_S)
        finally:
            under_way = [task for _, task in self._sending.values()]
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def send_due(self) -> list[asyncio.Task[None]]:
        """Begin to send what is due now, as much as may be under way; return what was begun."""
        now_s, begun = self.clock(), []
        next_s = await self._store.next_attempt_s()
        if next_s is None or next_s > now_s or len(self._sending) >= MAX_AT_ONCE:
            return []
        for due in await self._store.due(now_s, but=self._sending):
            owners = Counter(owner for owner, _ in self._sending.values())
            webhook = due.webhook
            if len(self._sending) < MAX_AT_ONCE and owners[webhook.owner] < MAX_AT_ONCE_OF_OWNER:
                task = asyncio.create_task(self._send(due), name=f"webhook-{webhook.webhook_id}")
                self._sending[webhook.webhook_id] = webhook.owner, task
                begun.append(task)
        return begun

    async def _send(self, due: DueDelivery) -> None:
        try:
            await self.attempt(due)
        except HorizonError as error:
            # Still pending, so it is sent again: at least once, with the same id.
            log.error("the result of a webhook's delivery could not be stored", why=error.message)
        finally:
            del self._sending[due.webhook.webhook_id]

    async def attempt(self, due: DueDelivery, *, is_last: bool = False) -> Delivery:
        """Send a delivery once, store how that ended, and return it. With `is_last` it is not sent again."""
        webhook, now_s = due.webhook, self.clock()
        if due.listener is None or not may_listen(due.listener, webhook.project):
            is_known = due.listener is not None
            reason = f"{webhook.owner} is no admin of project {webhook.project} any more"
            reason = reason if is_known else f"the account of {webhook.owner} is disabled"
            ended = replace(due.delivery, outcome=DROPPED, error=reason, next_attempt_s=None)
            return await self._stored(due, ended, disable_reason=reason)
        attempted = replace(
            due.delivery, num_attempts=due.delivery.num_attempts + 1, last_attempt_s=now_s, status_code=0, error=""
        )
        wants_s, error, is_gone = 0.0, "", False
        body = body_of(
            webhook.format,
            due.facts,
            event=due.delivery.event,
            created_s=due.delivery.created_s,
            public_url=self._public_url,
        )
        try:
            answer = await self._receivers.post(
                webhook.url, body, headers_of(due.delivery.delivery_id, body, due.secret, now_s)
            )
        except (Refused, OSError) as problem:
            error = str(problem)
        else:
            attempted = replace(attempted, status_code=answer.status_code)
            wants_s, error = answer.retry_after_s, _problem(answer.status_code)
            is_gone = answer.status_code == _GONE
        if not error:
            return await self._stored(due, replace(attempted, outcome=DELIVERED, next_attempt_s=None))
        attempted = replace(attempted, error=error)
        if is_gone or is_last or attempted.num_attempts >= MAX_ATTEMPTS:
            ended = replace(attempted, outcome=FAILED, next_attempt_s=None)
            return await self._stored(due, ended, disable_reason=error if is_gone else "")
        # Not all at the same moment, where a receiver was away that many daemons or webhooks send to.
        pause_s = wait_s(attempted.num_attempts) * random.uniform(0.8, 1.2)
        next_s = now_s + max(pause_s, min(wants_s, LONGEST_WAIT_S))
        return await self._stored(due, replace(attempted, outcome=PENDING, next_attempt_s=next_s))

    async def _stored(self, due: DueDelivery, attempted: Delivery, *, disable_reason: str = "") -> Delivery:
        webhook = due.webhook
        result = attempted.error or DELIVERED
        disabled = await self._store.store_attempt(
            due, attempted, result=result, max_given_up=MAX_GIVEN_UP, disable_reason=disable_reason
        )
        self._metrics.on_webhook(attempted.outcome if attempted.outcome != PENDING else "retried")
        if disabled:
            log.warning("a webhook is disabled", webhook=webhook.webhook_id, owner=webhook.owner, why=disabled)
        return attempted


def _problem(status_code: int) -> str:
    """Return what is wrong with an answer; empty where nothing is."""
    if 200 <= status_code < 300:
        return ""
    if 300 <= status_code < 400:
        return f"the receiver redirects (HTTP {status_code}), which is not followed; give the address that it names"
    if status_code == _GONE:
        return "the receiver says that it wants no more (HTTP 410)"
    return f"the receiver answered HTTP {status_code}"
