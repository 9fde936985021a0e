"""What the audit log shows of the messages of a call."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from horizon_server.api.audited import Asked

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
# The address of a webhook is often a secret too.
_HIDDEN = frozenset({"request_id", "url", "secret", "token", "files", "blobs"})
_MESSAGE = FieldDescriptor.CPPTYPE_MESSAGE


def asked_by(request: Any) -> Asked:
    """Return what a request asks for."""
    values = {
        field.name: list(value) if field.is_repeated else value
        for field, value in request.ListFields()
        if field.name not in _HIDDEN and field.cpp_type != _MESSAGE
    }
    return Asked(resource=resource_of(request), values=values)


def resource_of(message: Any) -> str:
    """Return which resource a message names, by itself or in a message directly inside it; empty where it names
    none."""
    for one in _messages(message):
        for name in _RESOURCE_FIELDS:
            if isinstance(value := getattr(one, name, None), str) and value:
                return value
    return ""


def outcome_of(response: Any) -> tuple[str, str]:
    """Return how one item of a change of many ended, and why: a refused one says so in its answer."""
    for message in _messages(response):
        if refusal := getattr(message, "refusal", ""):
            return message.reason, refusal
    return "OK", ""


def _messages(root: Any) -> list[Any]:
    """Return a message and those directly inside it."""
    return [root, *(value for f, value in root.ListFields() if f.cpp_type == _MESSAGE and not f.is_repeated)]
