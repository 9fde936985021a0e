"""Prompts, as users write them, and as they are sent."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from horizon_client.errors import InvalidRequest
from horizon_formats.row_checks import check_prompt_row
from horizon_proto.v1 import checkpoint_pb2

Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = str | Mapping[str, Any] | Sequence[Message]
"""A text to continue, a chat of messages, or a row with one of them: {"prompt": ...} or {"messages": [...]}."""


def wire_prompts(prompts: Prompt | Sequence[Prompt | Sequence[int]]) -> list[checkpoint_pb2.SamplePrompt]:
    """Return prompts as they are sent; one that is a list of tokens too."""
    return [
        checkpoint_pb2.SamplePrompt(ids=prompt) if _is_tokens(prompt) else _prompt(place, prompt)
        for place, prompt in _single_or_several(prompts)
    ]


def _is_tokens(prompt: Any) -> bool:
    is_list = isinstance(prompt, Sequence) and not isinstance(prompt, str)
    return is_list and bool(prompt) and all(isinstance(token, int) for token in prompt)


def _single_or_several(prompts: Prompt | Sequence[Prompt | Sequence[int]]) -> list[tuple[str, Any]]:
    """Return the prompts, each with its place for messages. A str is a sequence too, and a chat is a list as several
    prompts are."""
    if isinstance(prompts, str | Mapping):
        return [("prompts", prompts)]
    listed: list[Any] = [*prompts]
    if listed and all(isinstance(item, Mapping) and "role" in item for item in listed):
        return [("prompts", listed)]
    return [(f"prompts[{number}]", prompt) for number, prompt in enumerate(listed)]


def _prompt(place: str, prompt: Any) -> checkpoint_pb2.SamplePrompt:
    tools = None
    if isinstance(prompt, Mapping):
        given = [name for name in ("prompt", "messages") if prompt.get(name) is not None]
        prompt, tools = prompt[given[0]] if len(given) == 1 else None, prompt.get("tools")
    if isinstance(prompt, str) and not tools:
        return checkpoint_pb2.SamplePrompt(text=prompt)
    if isinstance(prompt, Sequence) and prompt and all(isinstance(message, Mapping) for message in prompt):
        chat: dict[str, Any] = {"messages": [dict(message) for message in prompt], "tools": tools}
        if is_plain_chat(chat):
            messages = [checkpoint_pb2.SampleMessage(role=m["role"], content=m["content"]) for m in chat["messages"]]
            return checkpoint_pb2.SamplePrompt(messages=messages)
        if not check_prompt_row(chat):
            return checkpoint_pb2.SamplePrompt(chat_json=json.dumps(chat))
    raise InvalidRequest.of(
        place,
        f"{place} is not a prompt; write a text, a list of messages with role and content, "
        '{"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}',
    )


def is_plain_chat(chat: Mapping[str, Any]) -> bool:
    """Whether a chat is messages of a role and a text alone, without tools; a `weight` is for training."""
    return not chat.get("tools") and all(
        all(isinstance(message.get(key), str) for key in ("role", "content"))
        and not any(value is not None for key, value in message.items() if key not in ("role", "content", "weight"))
        for message in chat["messages"]
    )
