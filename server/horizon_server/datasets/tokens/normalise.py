"""Rows of six formats as one of four things: a chat, a prompt with its completion, a text, or tokens.

Takes rows that `horizon_formats.row_checks` has found fine. Which rows are held out for evaluation follows from what a row means, and
from nothing else: a row stays on its side wherever it is in the file, and copies of one row are never on both sides.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horizon_formats.formats import DatasetFormat
from horizon_formats.messages import FUNCTION_CALL, OPENAI, parse_calls, sharegpt_spelling, text_of

_HASH_BYTES = 8
_END = float(1 << (8 * _HASH_BYTES))


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation, as chat templates read it.

    Every message has `role` (system, user, assistant or tool), `content` (a string) and `weight` (0: not trained, or 1); and where the
    row has them `name`, `tool_call_id`, `reasoning_content` and `tool_calls`, the arguments of each call as an object.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A prompt and its completion: two turns for a model with a chat template, else one text after the other."""

    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text, trained from end to end."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids with a label each: the token itself, or -100 where it is not trained. Not shifted."""

    input_ids: Sequence[int]
    labels: Sequence[int]


NormalRow = Chat | Pair | Text | Tokens


def normalise(columns: Mapping[str, Any], dataset_format: DatasetFormat, field_map: Mapping[str, str]) -> NormalRow:
    """Return what the columns of a checked row mean; `dataset_format` is never auto."""

    def value(field: str) -> Any:
        return columns.get(field_map.get(field, field))

    if dataset_format is DatasetFormat.MESSAGES:
        return Chat(messages=[_message(message) for message in value("messages")], tools=_tools(value("tools")))
    if dataset_format is DatasetFormat.PROMPT_COMPLETION:
        return Pair(prompt=value("prompt"), completion=value("completion"))
    if dataset_format is DatasetFormat.TEXT:
        return Text(text=value("text"))
    if dataset_format is DatasetFormat.TOKENS:
        return Tokens(input_ids=value("input_ids"), labels=value("labels") or value("input_ids"))
    if dataset_format is DatasetFormat.SHAREGPT:
        turns = [_sharegpt_message(message) for message in value("conversations")]
        return Chat(messages=_system(value("system")) + turns, tools=_tools(value("tools")))
    assert dataset_format is DatasetFormat.ALPACA
    asked = "\n".join(part for part in (value("instruction"), value("input")) if part)
    turns = [turn for pair in (*(value("history") or ()), (asked, value("output"))) for turn in _exchange(*pair)]
    return Chat(messages=_system(value("system")) + turns)


def row_content(row: NormalRow) -> bytes:
    """Return the bytes that identify a row: equal for rows that mean the same, whatever else their lines hold."""
    content = {"kind": type(row).__name__} | {
        field.name: getattr(row, field.name)
        for field in dataclasses.fields(row)
        if getattr(row, field.name) is not None
    }
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")


def is_held_out(content: bytes, fraction: float) -> bool:
    """Whether content is on the evaluation side of this fraction. What is held out at some fraction is so at every larger one."""
    number = int.from_bytes(hashlib.blake2b(content, digest_size=_HASH_BYTES).digest(), "big")
    return number < fraction * _END


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in message.items() if value is not None}
    weight = int(given.get("weight", 1))
    normal = given | {"content": text_of(given.get("content")), "weight": weight}
    if "tool_calls" in given:
        normal["tool_calls"] = [_call(call) for call in given["tool_calls"]]
    return normal


def _sharegpt_message(message: Mapping[str, Any]) -> dict[str, Any]:
    spelling = sharegpt_spelling(message)
    speaker, text = message[spelling.speaker], message.get(spelling.text)
    calls = parse_calls(text) if speaker == FUNCTION_CALL and isinstance(text, str) else None
    rest = {key: value for key, value in message.items() if key not in (spelling.speaker, spelling.text)}
    turn = {OPENAI.speaker: spelling.roles[speaker], OPENAI.text: text} | rest
    if calls is not None:
        turn |= {"content": "", "tool_calls": [{"function": call} for call in calls]}
    return _message(turn)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object: OpenAI writes them as JSON text, templates print objects."""
    function = dict(call["function"])
    arguments = function.get("arguments")
    function["arguments"] = json.loads(arguments) if isinstance(arguments, str) else arguments or {}
    rest = {key: value for key, value in call.items() if value is not None}
    return {"type": "function"} | rest | {"function": function}


def _tools(tools: str | list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    described = json.loads(tools) if isinstance(tools, str) else tools
    return described or None


def _system(text: str | None) -> list[dict[str, Any]]:
    return [{"role": "system", "content": text, "weight": 1}] if text else []


def _exchange(asked: str, answer: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return (
        {"role": "user", "content": asked, "weight": 1},
        {"role": "assistant", "content": answer, "weight": 1},
    )
