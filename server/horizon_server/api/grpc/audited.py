"""Which calls are changes, and what the audit log says about one."""

from __future__ import annotations

import json
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

# How the calls begin that change nothing. Those of any other name are audited.
READING = ("Get", "List", "Watch", "Query", "Find", "Read", "Plan", "Simulate", "Preview", "WhoAmI")
# Contents of uploads: without the Create or Finalize that names them they are nothing, and they may be thousands.
NOT_AUDITED = ("WriteBlob",)
# What a resource is called in requests and answers, the first that is there.
_RESOURCE_FIELDS = ("job_id", "dataset_id", "model_id", "token_id", "key", "name", "project", "user", "resource")
_MAX_VALUE_CHARS = 80
_MAX_REPEATED = 20
_HIDDEN = frozenset({"request_id", "secret", "token", "files", "blobs"})
_MESSAGE = FieldDescriptor.CPPTYPE_MESSAGE


def is_change(method: str) -> bool:
    """Whether a call of that path (/package.Service/Method) changes something."""
    return not method.rpartition("/")[2].startswith((*READING, *NOT_AUDITED))


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
