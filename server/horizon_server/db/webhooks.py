"""Webhooks and their deliveries in the database: the outbox.

A delivery is stored in the transaction that changes the job's state, so neither exists without the other, and it stays
pending until an attempt is stored that ended it. A daemon that is killed in between sends it again, with the same id.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, and_, delete, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from horizon_server.db.database import Database
from horizon_server.db.tables import JobRow, MemberRow, UserRow, WebhookDeliveryRow, WebhookRow
from horizon_server.errors import NotFound, QuotaExceeded
from horizon_server.records.account import Principal
from horizon_server.records.webhook import DELIVERED, DROPPED, FAILED, PENDING, TEST, Delivery, DueDelivery, Webhook

MAX_WEBHOOKS = 20
"""Of a user."""
MAX_PENDING = 1000
"""Deliveries that wait for one webhook; the oldest make room for new ones."""
MAX_SHOWN = 100
"""Deliveries of one webhook in a list."""
# Webhooks with something to send that one look at the outbox sees.
_MAX_LOOKED_AT = 200
# What is said of a job beside its id, for a receiver that has no token.
_FACTS = ("job_id", "name", "owner", "project", "reason", "message", "step", "num_steps")
_MAX_MESSAGE_CHARS = 2000


class WebhookStore:
    """The tables of webhooks and deliveries. Each call is one transaction."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, webhook: Webhook, secret: str) -> None:
        """Store a webhook. Raises QuotaExceeded when its owner has too many."""
        async with self._database.session() as session:
            mine = select(func.count()).select_from(WebhookRow).where(WebhookRow.owner == webhook.owner)
            if (await session.scalar(mine) or 0) >= MAX_WEBHOOKS:
                raise QuotaExceeded(
                    f"{webhook.owner} has {MAX_WEBHOOKS} webhooks, the maximum; remove one first: "
                    "horizon webhook remove WEBHOOK_ID"
                )
            values = dataclasses.asdict(webhook) | {"events": list(webhook.events)}
            session.add(WebhookRow(**values, secret=secret, num_given_up=0))

    async def all(self) -> list[Webhook]:
        """Return every webhook, oldest first."""
        query = select(WebhookRow).order_by(WebhookRow.created_s, WebhookRow.webhook_id)
        async with self._database.reading() as session:
            return [_webhook(row) for row in await session.scalars(query)]

    async def get(self, webhook_id: str) -> Webhook | None:
        """Return one webhook."""
        async with self._database.reading() as session:
            row = await session.get(WebhookRow, webhook_id)
            return None if row is None else _webhook(row)

    async def delete(self, webhook_id: str) -> None:
        """Remove a webhook and its deliveries."""
        async with self._database.session() as session:
            await delete_webhooks(session, WebhookRow.webhook_id == webhook_id)

    async def deliveries(self, webhook_id: str) -> list[Delivery]:
        """Return the newest deliveries of a webhook, newest first."""
        query = select(WebhookDeliveryRow).where(WebhookDeliveryRow.webhook_id == webhook_id)
        query = query.order_by(WebhookDeliveryRow.number.desc()).limit(MAX_SHOWN)
        async with self._database.reading() as session:
            return [_delivery(row) for row in await session.scalars(query)]

    async def next_attempt_s(self) -> float | None:
        """Return when the first pending delivery is due; None where there is none."""
        query = select(func.min(WebhookDeliveryRow.next_attempt_s)).where(WebhookDeliveryRow.outcome == PENDING)

        def read(connection: Connection) -> float | None:
            return connection.scalar(query)

        return await self._database.look_up("next webhook", read)

    async def due(self, now_s: float, *, but: Collection[str]) -> list[DueDelivery]:
        """Return the oldest delivery that is due of each webhook that is not among `but`, those due first first."""
        first = (
            select(func.min(WebhookDeliveryRow.number))
            .where(WebhookDeliveryRow.outcome == PENDING, WebhookDeliveryRow.next_attempt_s <= now_s)
            .where(WebhookDeliveryRow.webhook_id.not_in(list(but)))
            .group_by(WebhookDeliveryRow.webhook_id)
        )
        which = WebhookDeliveryRow.number.in_(first)
        async with self._database.reading() as session:
            rows = await session.execute(_dues(which).order_by(WebhookDeliveryRow.next_attempt_s).limit(_MAX_LOOKED_AT))
            return [_due(*row) for row in rows]

    async def add_test(self, webhook_id: str, facts: dict[str, Any], now_s: float) -> DueDelivery:
        """Store a delivery that only tries the address, and return it; it has had its one attempt. Raises NotFound."""
        async with self._database.session() as session:
            row = _new_row(webhook_id, TEST, facts, now_s)
            # Never pending: the caller sends it, once.
            row.outcome, row.next_attempt_s, row.error = FAILED, None, "it was not answered before the daemon ended"
            session.add(row)
            await session.flush()
            found = (await session.execute(_dues(WebhookDeliveryRow.number == row.number))).first()
            if found is None:
                raise NotFound(f"webhook {webhook_id} does not exist")
            return _due(*found)

    async def store_attempt(
        self, due: DueDelivery, attempted: Delivery, *, result: str, max_given_up: int, disable_reason: str = ""
    ) -> str:
        """Store how an attempt ended. Return why its webhook is disabled now, or an empty text.

        Args:
            attempted: the delivery as it is after the attempt.
            result: what the webhook shows of it.
            max_given_up: that many deliveries in a row that were given up disable the webhook.
            disable_reason: disables it now; its pending deliveries are dropped.
        """
        webhook_id, now_s = due.webhook.webhook_id, attempted.last_attempt_s
        changes = dataclasses.asdict(attempted)
        for name in ("delivery_id", "event", "job_id", "created_s"):
            del changes[name]
        async with self._database.session() as session:
            this = WebhookDeliveryRow.delivery_id == attempted.delivery_id
            await session.execute(update(WebhookDeliveryRow).where(this).values(**changes))
            row = await session.get(WebhookRow, webhook_id)
            if row is None:  # it was removed meanwhile
                return ""
            if attempted.num_attempts > due.delivery.num_attempts:
                row.last_attempt_s, row.last_result = now_s, result
            if attempted.outcome == DELIVERED:
                row.num_given_up, row.disabled_s, row.disable_reason = 0, None, ""
            elif attempted.outcome == FAILED and attempted.job_id:  # a test that fails is none that was given up
                row.num_given_up += 1
            if not disable_reason and row.num_given_up >= max_given_up and row.disabled_s is None:
                disable_reason = f"{row.num_given_up} deliveries in a row were given up, the last one because: {result}"
            if disable_reason:
                row.disabled_s, row.disable_reason = now_s, disable_reason
                await _drop(session, webhook_id, "the webhook was disabled")
            return disable_reason

    async def trim(self, *, before_s: float) -> int:
        """Delete deliveries that ended and are older than that. Return how many."""
        old = and_(WebhookDeliveryRow.created_s < before_s, WebhookDeliveryRow.outcome != PENDING)
        async with self._database.session() as session:
            gone = await session.execute(delete(WebhookDeliveryRow).where(old))
            return int(gone.rowcount)  # type: ignore[attr-defined]  # of a deletion it is there


async def queue_deliveries(session: AsyncSession, job: JobRow, now_s: float) -> None:
    """Queue what webhooks are told of the state that this transaction has given a job."""
    listens = or_(
        and_(WebhookRow.project == "", WebhookRow.owner == job.owner), and_(WebhookRow.project == job.project)
    )
    query = select(WebhookRow.webhook_id, WebhookRow.events).where(WebhookRow.disabled_s.is_(None), listens)
    event = job.job_state.lower()
    for webhook_id, events in (await session.execute(query)).all():
        if event not in events:
            continue
        pending = select(WebhookDeliveryRow.number).where(
            WebhookDeliveryRow.webhook_id == webhook_id, WebhookDeliveryRow.outcome == PENDING
        )
        too_old = pending.order_by(WebhookDeliveryRow.number.desc()).offset(MAX_PENDING - 1)
        why = f"more than {MAX_PENDING:,} deliveries waited"
        await _end(session, WebhookDeliveryRow.number.in_(too_old), DROPPED, why)
        facts = {name: getattr(job, name) for name in _FACTS}
        facts["message"] = facts["message"][:_MAX_MESSAGE_CHARS]
        session.add(_new_row(webhook_id, event, facts, now_s))


async def delete_webhooks(session: AsyncSession, which: Any) -> None:
    """Remove webhooks and their deliveries within a transaction."""
    ids = select(WebhookRow.webhook_id).where(which)
    await session.execute(delete(WebhookDeliveryRow).where(WebhookDeliveryRow.webhook_id.in_(ids)))
    await session.execute(delete(WebhookRow).where(which))


def _new_row(webhook_id: str, event: str, facts: dict[str, Any], now_s: float) -> WebhookDeliveryRow:
    return WebhookDeliveryRow(
        delivery_id="msg_" + secrets.token_hex(12),
        webhook_id=webhook_id,
        event=f"webhook.{event}" if event == TEST else f"job.{event}",
        job_id=facts.get("job_id", ""),
        facts=json.dumps(facts),
        outcome=PENDING,
        created_s=now_s,
        num_attempts=0,
        status_code=0,
        error="",
        next_attempt_s=now_s,
    )


async def _drop(session: AsyncSession, webhook_id: str, why: str) -> None:
    waits = and_(WebhookDeliveryRow.webhook_id == webhook_id, WebhookDeliveryRow.outcome == PENDING)
    await _end(session, waits, DROPPED, why)


async def _end(session: AsyncSession, which: Any, outcome: str, why: str) -> None:
    ended = update(WebhookDeliveryRow).where(which)
    await session.execute(ended.values(outcome=outcome, error=why, next_attempt_s=None))


def _dues(which: Any) -> Any:
    membership = and_(MemberRow.user == WebhookRow.owner, MemberRow.project == WebhookRow.project)
    return (
        select(WebhookDeliveryRow, WebhookRow, UserRow, MemberRow)
        .join(WebhookRow, WebhookRow.webhook_id == WebhookDeliveryRow.webhook_id)
        .outerjoin(UserRow, UserRow.name == WebhookRow.owner)
        .outerjoin(MemberRow, membership)
        .where(which)
    )


def _due(row: WebhookDeliveryRow, webhook: WebhookRow, user: UserRow | None, member: MemberRow | None) -> DueDelivery:
    listener = None
    if user is not None and user.disabled_s is None:
        memberships = {} if member is None else {member.project: member.role}
        listener = Principal(name=user.name, role=user.role, project=user.project, memberships=memberships)
    return DueDelivery(
        delivery=_delivery(row),
        webhook=_webhook(webhook),
        secret=webhook.secret,
        facts=json.loads(row.facts),
        listener=listener,
    )


def _webhook(row: WebhookRow) -> Webhook:
    values = {field.name: getattr(row, field.name) for field in dataclasses.fields(Webhook)}
    return Webhook(**values | {"events": tuple(row.events)})


def _delivery(row: WebhookDeliveryRow) -> Delivery:
    return Delivery(**{field.name: getattr(row, field.name) for field in dataclasses.fields(Delivery)})
