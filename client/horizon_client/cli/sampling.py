"""Prompts from a file, and answers as they are complete: `horizon checkpoint sample`."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horizon_client.errors import BadFile
from horizon_client.resources import SampledText

if TYPE_CHECKING:
    from horizon_client.reporter import Reporter
    from horizon_client.resources import SampleFigures

Prompt = str | list[dict[str, str]]


def read_prompts(path: Path) -> list[Prompt]:
    """Return the prompts of a file of JSON lines. Raises BadFile, which names the line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"cannot read {path}: {error}") from error
    return [_prompt(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _prompt(path: Path, number: int, line: str) -> Prompt:
    wanted = 'write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadFile(f"{path}:{number} is not JSON ({error}); {wanted}") from error
    prompt = row.get("prompt") if isinstance(row, dict) else None
    messages = row.get("messages") if isinstance(row, dict) else None
    if isinstance(prompt, str) and messages is None:
        return prompt
    if prompt is None and isinstance(messages, list) and all(map(_is_message, messages)):
        # Training data may have more keys (weight), which are not for a prompt.
        return [{"role": message["role"], "content": message["content"]} for message in messages]
    raise BadFile(f"{path}:{number} is not a prompt; {wanted}")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def answers(
    pieces: Iterable[SampledText | SampleFigures], prompts: Sequence[Prompt], reporter: Reporter
) -> Iterator[dict[str, Any]]:
    """Yield each answer with its prompt once it is complete; the figures go to `reporter`."""
    texts: dict[int, str] = {}
    for piece in pieces:
        if not isinstance(piece, SampledText):
            reporter.notice(
                f"{piece.num_tokens} tokens in {piece.duration_s:.1f} s ({piece.tokens_per_second:.1f} tokens/s), after "
                f"{piece.load_s:.1f} s to load"
            )
            # A daemon of an earlier version does not say.
            if piece.weights:
                reporter.notice(f"answered with {piece.weights}")
            continue
        texts[piece.prompt] = texts.get(piece.prompt, "") + piece.text
        if piece.ended:
            prompt = prompts[piece.prompt]
            given = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
            yield {
                "index": piece.prompt,
                **given,
                "answer": texts.pop(piece.prompt),
                "num_tokens": piece.num_tokens,
                "ended": piece.ended,
            }


def answer_text(answer: dict[str, Any]) -> str:
    """Return an answer for people, with the last of what it answers."""
    asked = answer["prompt"] if "prompt" in answer else answer["messages"][-1]["content"]
    return printable(f"[{answer['index']}] {asked}\n--> {answer['answer']}\n")


def printable(text: str) -> str:
    """Return text without control characters but line feeds and tabs, so that a model cannot control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf"))
