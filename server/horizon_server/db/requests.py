"""Create calls that were carried out, so that a retried one gives the same resource and never a second."""

from __future__ import annotations

import hashlib
import json
import time
import uuid

from sqlalchemy.ext.asyncio import AsyncSession

from horizon_server.db.tables import RequestRow
from horizon_server.errors import InvalidSpec, RequestIdReused


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, default=str).encode()).hexdigest()


class Requests:
    """The memory of create calls. Both methods run inside the transaction that creates the resource."""

    async def once(self, session: AsyncSession, *, user: str, request_id: str, method: str, body: object) -> str | None:
        """Return the resource id of the same earlier call, or None when this is the first.

        Raises:
            RequestIdReused: when the id was used for another method or body.
            InvalidSpec: when the id is not a UUID.
        """
        try:
            uuid.UUID(request_id)
        except ValueError as error:
            rule = "request_id must be a UUID, chosen by the caller once per intended resource and repeated on retries"
            raise InvalidSpec.of("request_id", rule) from error
        row = await session.get(RequestRow, (user, request_id))
        if row is None:
            return None
        if row.method != method or row.body_sha256 != _digest(body):
            raise RequestIdReused(f"request_id {request_id} was used before with another body; choose a new one")
        return row.resource_id

    async def record(
        self, session: AsyncSession, *, user: str, request_id: str, method: str, body: object, resource_id: str
    ) -> None:
        """Remember that the call made `resource_id`."""
        session.add(
            RequestRow(
                user=user,
                request_id=request_id,
                method=method,
                body_sha256=_digest(body),
                resource_id=resource_id,
                created_s=time.time(),
            )
        )
        await session.flush()
