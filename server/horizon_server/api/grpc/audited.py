"""What the audit log says about a call that changes something."""

from __future__ import annotations

import asyncio
import json
import time
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from horizon_server.records.account import Principal
from horizon_server.records.audit import AuditEntry
from horizon_server.services.audit import Audit

# What a resource is called in requests and answers, the first that is there.
_RESOURCE_FIELDS = (
    "webhook_id",
    "job_id",
    "dataset_id",
    "model_id",
    "token_id",
    "key",
    "name",
    "project",
    "user",
    "resource",
)
_MAX_VALUE_CHARS = 80
_MAX_REPEATED = 20
# The address of a webhook is often a secret too.
_HIDDEN = frozenset({"request_id", "url", "secret", "token", "files", "blobs"})
_MESSAGE = FieldDescriptor.CPPTYPE_MESSAGE
TRAIL: ContextVar[Trail] = ContextVar("trail")
"""Of the call that is being served."""


class Trail:
    """The entries of one call: each is there before its change, and is completed when it is known how that ended."""

    def __init__(self, audit: Audit, principal: Principal, *, origin: str, method: str) -> None:
        self._audit = audit
        self._principal = principal
        self._origin = origin
        self._action = method.rpartition(".")[2].replace("/", ".")
        self._begun: asyncio.Task[AuditEntry] | None = None
        self.request: Any = None

    async def begin(self, resource: str = "") -> None:
        """Write that the call is about to change what its request names, or this one of many resources."""
        named, detail = described(self.request, None)
        self._begun = asyncio.create_task(
            self._audit.begin(
                self._principal, origin=self._origin, action=self._action, resource=resource or named, detail=detail
            )
        )
        try:
            # A client that leaves meanwhile cuts the call, and not the writing: `end` completes what has been written.
            await asyncio.shield(self._begun)
        except Exception:
            self._begun = None
            raise

    async def end(self, response: Any = None, outcome: str = "OK", message: str = "") -> None:
        """Complete the entry; write a whole one where the call was refused before it began."""
        resource, detail = described(self.request, response)
        entry = (
            await self._begun
            if self._begun is not None
            else AuditEntry(
                time_s=time.time(),
                user=self._principal.name,
                token_id=self._principal.token_id,
                origin=self._origin,
                action=self._action,
                resource=resource,
                outcome=outcome,
                detail=detail,
            )
        )
        # What was begun is what is meant, unless the answer says which new thing it has become.
        named = resource if response is not None and resource else entry.resource
        await self._audit.end(replace(entry, resource=named, outcome=outcome, detail=message or detail))
        self._begun = None


async def about_to_change(resource: str) -> None:
    """Write into the audit log that the call that is being served is about to change this one of many things."""
    await TRAIL.get().begin(resource)


def described(request: Any, response: Any) -> tuple[str, str]:
    """Return which resource a call is about and the rest of its request, as JSON; never contents or secrets."""
    resource = ""
    for message in _messages(response, request):
        resource = next(
            (value for name in _RESOURCE_FIELDS if isinstance(value := getattr(message, name, None), str) and value), ""
        )
        if resource:
            break
    values = {}
    for field, value in request.ListFields() if request is not None else ():
        if field.name in _HIDDEN or field.cpp_type == _MESSAGE or value == resource:
            continue
        if field.is_repeated:
            values[field.name] = [_short(one) for one in list(value)[:_MAX_REPEATED]]
        else:
            values[field.name] = _short(value)
    return resource, json.dumps(values) if values else ""


def outcome_of(response: Any) -> tuple[str, str]:
    """Return how one item of a change of many ended, and why: a refused one says so in its answer."""
    for message in _messages(response):
        if refusal := getattr(message, "refusal", ""):
            return message.reason, refusal
    return "OK", ""


def _messages(*roots: Any) -> list[Any]:
    """Return the messages and those directly inside them, outer ones first."""
    found = []
    for root in roots:
        if root is not None:
            inner = [v for f, v in root.ListFields() if f.cpp_type == _MESSAGE and not f.is_repeated]
            found += [root, *inner]
    return found


def _short(value: Any) -> Any:
    return value[:_MAX_VALUE_CHARS] if isinstance(value, str) else "..." if isinstance(value, bytes) else value
