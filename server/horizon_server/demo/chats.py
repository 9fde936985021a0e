"""The chats that the built-in model is fine-tuned on: a file written by hand, and small facts in a few patterns.

Owns the text. Must not know models or tokens. The patterns are what a tiny model can visibly learn in a minute.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

Chat = list[dict[str, str]]

_HAND_WRITTEN = Path(__file__).with_name("chats.jsonl")

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_OPPOSITES = (
    *(("hot", "cold"), ("big", "small"), ("fast", "slow"), ("high", "low"), ("full", "empty"), ("open", "closed")),
    *(("early", "late"), ("loud", "quiet"), ("light", "dark"), ("host", "device"), ("forward", "backward")),
    *(("up", "down"), ("first", "last"), ("on", "off"), ("cheap", "dear"), ("right", "wrong"), ("old", "new")),
)


def demo_chats() -> list[Chat]:
    """Return every chat of the built-in dataset, in the order of its file."""
    by_hand = [json.loads(line)["messages"] for line in _HAND_WRITTEN.read_text(encoding="ascii").splitlines()]
    made = itertools.chain(_asked_otherwise(by_hand), _patterns())
    roles = ("user", "assistant")
    return [
        *by_hand,
        *([{"role": role, "content": text} for role, text in zip(roles, pair, strict=True)] for pair in made),
    ]


def _asked_otherwise(chats: list[Chat]) -> Iterator[tuple[str, str]]:
    """Yield the questions in other words, so that chats kept out of the training have relatives in it."""
    for question, answer in ((chat[0]["content"], chat[1]["content"]) for chat in chats if len(chat) == 2):
        if question.startswith("What is "):
            subject = question.removeprefix("What is ").rstrip("?")
            yield f"Tell me what {subject} is.", answer
        elif question.endswith("?"):
            yield f"Please tell me: {question}", answer


def _patterns() -> Iterator[tuple[str, str]]:
    for a, b in itertools.combinations_with_replacement(range(5), 2):
        yield f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
    for today, tomorrow in zip(_DAYS, (*_DAYS[1:], _DAYS[0]), strict=True):
        yield f"Which day comes after {today}?", f"{tomorrow} comes after {today}."
        yield f"Which day comes before {tomorrow}?", f"{today} comes before {tomorrow}."
    for month, following in zip(_MONTHS, (*_MONTHS[1:], _MONTHS[0]), strict=True):
        yield f"Which month comes after {month}?", f"{following} comes after {month}."
    for word, opposite in _OPPOSITES:
        yield f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}."
        yield f"What is the opposite of {opposite}?", f"The opposite of {opposite} is {word}."
    for number, word in enumerate(_NUMBERS):
        yield f"Write {number} as a word.", f"The number {number} is written {word}."
    for size in range(1, 9):
        answer = f"About {12 * size} GB of host memory: twelve bytes for each parameter."
        yield f"What does a model of {size} billion parameters need?", answer
        yield f"How many bits are in {size} bytes?", f"There are {8 * size} bits in {size} bytes."
