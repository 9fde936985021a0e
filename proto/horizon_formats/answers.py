"""How rows of answers (`preference`, `openai-preference`, `kto`, `samples`) are read: where the prompt of two
conversations ends, and whose numbers a list holds.

The checks and the preparation both ask here, so that what passes the one is what the other reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from horizon_formats.formats import text_of

Message = Mapping[str, Any]
# A text, or the messages of a chat.
Turns = str | Sequence[Message]


class Comparison(NamedTuple):
    """A prompt and the two answers to it that are compared."""

    prompt: Turns
    chosen: Turns
    rejected: Turns


def is_whole(answer: Turns) -> bool:
    """Whether this is a conversation with its prompt: messages that do not begin with the assistant's."""
    return not isinstance(answer, str) and answer[0].get("role") != "assistant"


def compared(prompt: Turns | None, chosen: Turns, rejected: Turns) -> Comparison | str:
    """Return what is compared, or what is wrong in words, beginning with `chosen and rejected` or `prompt`.

    Two whole conversations share their prompt: the messages that both begin with. At least one message of each is left
    to compare, as TRL's `extract_prompt` does. A text prompt next to them is one that some files repeat; it must be one
    of the shared messages.
    """
    if is_whole(chosen) is not is_whole(rejected):
        return "chosen and rejected must both be replies, or both be whole conversations that begin with the prompt"
    if not is_whole(chosen) or isinstance(chosen, str) or isinstance(rejected, str):
        if prompt is None:
            return (
                "prompt is missing; give it, or write chosen and rejected as whole conversations: lists of messages "
                "that begin with the same system or user message"
            )
        return Comparison(prompt, chosen, rejected)
    first, second = [_written(message) for message in chosen], [_written(message) for message in rejected]
    most = min(len(first), len(second)) - 1
    num_shared = next((index for index in range(most) if first[index] != second[index]), most)
    if first[num_shared]["role"] != "assistant" or second[num_shared]["role"] != "assistant":
        return (
            f"chosen and rejected differ first in message {num_shared}, which is not the assistant's in both; "
            "conversations are compared "
            "from an assistant's message on, and all before it must be the same"
        )
    shared = first[:num_shared]
    if isinstance(prompt, str) and prompt in [text_of(message.get("content")) for message in shared]:
        prompt = None
    if prompt is not None:
        return "prompt is given, and chosen and rejected are conversations that have theirs; leave one of the two out"
    return Comparison(shared, first[num_shared:], second[num_shared:])


def as_preference(columns: Mapping[str, Any], field_map: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a row of `openai-preference` as one of `preference`, and its field map: columns are called by their place
    in the row."""
    asked, chosen, rejected = (
        field_map.get(name, name) for name in ("input", "preferred_output", "non_preferred_output")
    )
    given = columns.get(asked)
    inside = given if isinstance(given, Mapping) else {}
    names = {"prompt": f"{asked}.messages", "tools": f"{asked}.tools", "chosen": chosen, "rejected": rejected}
    row = {names["prompt"]: inside.get("messages"), names["tools"]: inside.get("tools")}
    return row | {name: columns[name] for name in (chosen, rejected) if name in columns}, names


def of_targets(values: Sequence[Any], mask: Sequence[int]) -> Sequence[Any] | None:
    """Return the numbers of the supervised tokens; `values` has one for each of them, or one for each token. None for
    other lengths."""
    if len(values) == len(mask):
        return [value for value, supervised in zip(values, mask, strict=True) if supervised]
    return values if len(values) == sum(mask) else None


def _written(message: Message) -> dict[str, Any]:
    # Tables write null where another row has a value.
    return {key: value for key, value in message.items() if value is not None}
