"""What the audit log says about a call that changes something, by gRPC or REST."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from horizon_server.records.account import Principal
from horizon_server.records.audit import AuditEntry
from horizon_server.services.audit import Audit

_MAX_VALUE_CHARS = 80
_MAX_REPEATED = 20
TRAIL: ContextVar[Trail] = ContextVar("trail")
"""Of the call that is being served."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a call asks for, as the log shows it: the resource that it names, and other values by the names of its
    fields; never contents or secrets."""

    resource: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def detail(self, resource: str) -> str:
        """Return the values as JSON, without what says again which resource it is; empty where there are none."""
        values = {name: _shown(value) for name, value in self.values.items() if value != resource}
        return json.dumps(values) if values else ""


class Trail:
    """The entries of one call: each is there before its change, and is completed when it is known how that ended."""

    def __init__(self, audit: Audit, principal: Principal, *, origin: str, call: str) -> None:
        """`call` is its name in `api.effects`."""
        self._audit = audit
        self._principal = principal
        self._origin = origin
        self._action = call.replace("/", ".")
        self._begun: asyncio.Task[AuditEntry] | None = None
        self.asked: Asked | None = None
        """None until the request has arrived."""

    async def begin(self, resource: str = "") -> None:
        """Write that the call is about to change what its request names, or this one of many resources."""
        asked = self.asked or Asked()
        self._begun = asyncio.create_task(
            self._audit.begin(
                self._principal,
                origin=self._origin,
                action=self._action,
                resource=resource or asked.resource,
                detail=asked.detail(asked.resource),
            )
        )
        try:
            # A client that leaves meanwhile cuts the call, and not the writing: `end` completes what has been written.
            await asyncio.shield(self._begun)
        except Exception:
            self._begun = None
            raise

    async def end(self, *, changed: str = "", outcome: str = "OK", message: str = "") -> None:
        """Complete the entry; write a whole one where the call was refused before it began.

        Args:
            changed: the resource that the answer names: which new thing it has become, or of which id it is.
        """
        asked = self.asked or Asked()
        detail = message or asked.detail(changed or asked.resource)
        entry = (
            await self._begun
            if self._begun is not None
            else AuditEntry(
                time_s=time.time(),
                user=self._principal.name,
                token_id=self._principal.token_id,
                origin=self._origin,
                action=self._action,
                resource=asked.resource,
                outcome=outcome,
                detail=detail,
            )
        )
        await self._audit.end(replace(entry, resource=changed or entry.resource, outcome=outcome, detail=detail))
        self._begun = None


async def about_to_change(resource: str) -> None:
    """Write into the audit log that the call that is being served is about to change this one of many things."""
    await TRAIL.get().begin(resource)


def _shown(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_shown(one) for one in value[:_MAX_REPEATED]]
    return value[:_MAX_VALUE_CHARS] if isinstance(value, str) else "..." if isinstance(value, bytes) else value
