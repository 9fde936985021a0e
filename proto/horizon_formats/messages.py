"""What the messages of a chat must hold, in the spelling of OpenAI (role, content) and of ShareGPT (from, value).

Roles, keys and tool calls, and the message for each way in which they can be wrong.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horizon_formats.problems import Problem, check_string, shown, unwritable

ROLES = ("system", "user", "assistant", "tool")

FUNCTION_CALL = "function_call"
"""ShareGPT's speaker of a tool call: an assistant whose value is the call, as JSON."""

_SPEAKERS = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    FUNCTION_CALL: "assistant",
}
_EXTRA_TEXTS = ("name", "tool_call_id", "reasoning_content")


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """What a chat calls the speaker and the text of a message, and which role each speaker has."""

    speaker: str
    text: str
    roles: Mapping[str, str]

    @property
    def keys(self) -> frozenset[str]:
        """Every key that a message of this spelling may hold."""
        return frozenset((self.speaker, self.text, "weight", "tool_calls", *_EXTRA_TEXTS))


OPENAI = Spelling(speaker="role", text="content", roles={role: role for role in ROLES})
_FROM_VALUE = Spelling(speaker="from", text="value", roles=_SPEAKERS)
_ROLE_CONTENT = Spelling(speaker="role", text="content", roles=_SPEAKERS)
_KEYS = {id(spelling): spelling.keys for spelling in (OPENAI, _FROM_VALUE, _ROLE_CONTENT)}


def sharegpt_spelling(message: object) -> Spelling:
    """Return the spelling of one message of a ShareGPT conversation: some files write role and content."""
    return _ROLE_CONTENT if isinstance(message, dict) and "role" in message else _FROM_VALUE


def check_messages(path: str, messages: object, *, sharegpt: bool) -> list[Problem]:
    """Return everything that is wrong with the messages at `path`; empty when there is something to learn in them."""
    if not isinstance(messages, list) or not messages:
        return [(path, f"is {shown(messages)}; it must be a non-empty list of messages")]
    problems: list[Problem] = []
    learnable = False
    for index, message in enumerate(messages):
        spelling = sharegpt_spelling(message) if sharegpt else OPENAI
        found = _check_message(message, spelling)
        if found:
            problems += [(f"{path}[{index}]{key}", problem) for key, problem in found]
        elif not learnable:
            learnable = _has_something_to_learn(message, spelling)
    if not problems and not learnable:
        problems.append((path, "has nothing to learn: no assistant message with text and a weight other than 0"))
    return problems


def opens_with_system(conversation: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a checked ShareGPT conversation begins with its own system message."""
    return bool(conversation[0][sharegpt_spelling(conversation[0]).speaker] == "system")


def check_tools(path: str, tools: object) -> list[Problem]:
    """Return what is wrong with the tools a chat may call: a list of JSON objects, or that list as JSON text."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            return [(path, f"is a string that is not JSON ({error}); it must be a list of tool descriptions")]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return [(path, f"is {shown(tools)}; it must be a list of tool descriptions, each a JSON object")]
    problem = unwritable(tools)
    return [(path, problem)] if problem else []


def parse_calls(text: str) -> list[dict[str, Any]] | None:
    """Return the function calls that a ShareGPT `function_call` spells out, or None when its text is not a call."""
    try:
        spoken = json.loads(text)
    except (ValueError, RecursionError):
        return None
    calls = spoken if isinstance(spoken, list) else [spoken]
    if not calls or not all(_is_call(call) for call in calls) or unwritable(calls):
        return None
    return [{"name": call["name"], "arguments": call.get("arguments")} for call in calls]


def text_of(content: object) -> str | None:
    """Return the text of a message's content: a string, null, or a list of text parts; None for anything else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    return "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]


def _check_message(message: object, spelling: Spelling) -> list[Problem]:
    if not isinstance(message, dict):
        return [("", f"is {shown(message)}; it must be an object with {spelling.speaker} and {spelling.text}")]
    speaker, content = message.get(spelling.speaker), message.get(spelling.text)
    problems: list[Problem] = []
    if not isinstance(speaker, str) or speaker not in spelling.roles:
        allowed = ", ".join(spelling.roles)
        problems.append((f".{spelling.speaker}", f"is {shown(speaker)}; it must be one of {allowed}"))
    if type(content) is str:
        problems += check_string(f".{spelling.text}", content)
    else:
        problems += _check_other_content(f".{spelling.text}", content, message)
    if len(message) > 2 or content is None:
        problems += _check_extras(message, spelling)
    if speaker == FUNCTION_CALL and isinstance(content, str) and parse_calls(content) is None:
        problems.append(
            (f".{spelling.text}", 'is not a tool call; it must be JSON such as {"name": ..., "arguments": ...}')
        )
    return problems


def _check_other_content(path: str, content: object, message: Mapping[str, Any]) -> list[Problem]:
    if content is None and message.get("tool_calls"):
        return []
    text = text_of(content)
    if content is None or text is None:
        return [(path, f"is {shown(content)}; it must be a string or a list of text parts")]
    return check_string(path, text)


def _check_extras(message: Mapping[str, Any], spelling: Spelling) -> Iterator[Problem]:
    """Yield what is wrong apart from speaker and text. Null is absent: tables write it where other rows have a value."""
    keys = _KEYS[id(spelling)]
    for key, value in message.items():
        if value is None or key == spelling.speaker or key == spelling.text:
            continue
        if key not in keys:
            held = ", ".join(sorted(keys))
            yield f".{key:.40}", f"is not understood by this version; a message holds {held}"
        elif key == "weight":
            if isinstance(value, bool) or value not in (0, 1):
                yield ".weight", f"is {shown(value)}; it must be 0 or 1"
        elif key == "tool_calls":
            yield from _check_calls(value, message.get(spelling.speaker))
        else:
            yield from check_string(f".{key}", value)


def _check_calls(calls: object, speaker: object) -> Iterator[Problem]:
    if not isinstance(calls, list):
        yield ".tool_calls", f"is {shown(calls)}; it must be a list of calls"
        return
    if calls and _SPEAKERS.get(str(speaker)) != "assistant":
        yield ".tool_calls", "is given, but only an assistant calls tools"
    for index, call in enumerate(calls):
        path = f".tool_calls[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            yield path, 'must be an object such as {"function": {"name": ..., "arguments": ...}}'
        elif problem := unwritable(call):
            yield path, problem
        elif not _is_call(function):
            yield f"{path}.function.arguments", "must be a JSON object, or a string that holds one"


def _is_call(function: object) -> bool:
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return False
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return False
    return arguments is None or isinstance(arguments, dict)


def _has_something_to_learn(message: Mapping[str, Any], spelling: Spelling) -> bool:
    if spelling.roles[message[spelling.speaker]] != "assistant" or message.get("weight") == 0:
        return False
    return bool(message.get("tool_calls")) or bool((text_of(message.get(spelling.text)) or "").strip())
