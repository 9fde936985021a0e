"""Prompts from a file, and answers as they are complete: `horizon checkpoint sample`."""

from __future__ import annotations

import json
import time
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horizon_client.errors import BadFile
from horizon_client.prompts import is_plain_chat
from horizon_client.resources import SampledText, SampleFigures
from horizon_formats.formats import text_of
from horizon_formats.problems import listed
from horizon_formats.row_checks import check_prompt_row

if TYPE_CHECKING:
    from horizon_client.reporter import Reporter
    from horizon_client.resources import SampledPrompt

Prompt = str | list[dict[str, Any]] | dict[str, Any]

# Of a call, besides loading and answering.
_SHOWN_WAIT_S = 0.5
_FIELDS = ("prompt", "messages", "tools")


def read_prompts(path: Path, field_map: Mapping[str, str] | None = None) -> list[Prompt]:
    """Return the prompts of a file of JSON lines; `field_map` has the columns of a file that uses other names.

    Raises BadFile, which names the line.
    """
    columns = {field: (field_map or {}).get(field, field) for field in _FIELDS}
    if unknown := (field_map or {}).keys() - set(_FIELDS):
        raise BadFile(f"--map {min(unknown)}=...: a prompt has the fields {', '.join(_FIELDS)}")
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadFile(f"cannot read {path}: {error}") from error
    return [_prompt(path, number, line, columns) for number, line in enumerate(lines, start=1) if line.strip()]


def with_system(prompt: Prompt, system: str) -> Prompt:
    """Return the prompt as a chat that begins with this system message: a text as the user's. Raises BadFile where it
    has one already."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    messages = prompt["messages"] if isinstance(prompt, dict) else prompt
    if messages[0].get("role") == "system":
        raise BadFile(
            "a chat of the prompts has a system message already; leave --system out, or take it out of the chat"
        )
    messages = [{"role": "system", "content": system}, *messages]
    return {**prompt, "messages": messages} if isinstance(prompt, dict) else messages


def _prompt(path: Path, number: int, line: str, columns: Mapping[str, str]) -> Prompt:
    wanted = (
        f'write {{"{columns["prompt"]}": "..."}} or {{"{columns["messages"]}": [{{"role": "user", "content": "..."}}]}}'
    )
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path}:{number} is not JSON ({error}); {wanted}") from error
    given = {field: row.get(column) for field, column in columns.items()} if isinstance(row, dict) else {}
    prompt, messages, tools = (given.get(field) for field in _FIELDS)
    if isinstance(prompt, str) and messages is None and not tools:
        return prompt
    if prompt is None and messages is not None:
        if isinstance(messages, list) and all(map(_is_message, messages)) and is_plain_chat({**given}):
            # Training data may have a weight, which is not for a prompt.
            return [{"role": message["role"], "content": message["content"]} for message in messages]
        chat = {"messages": messages} | ({"tools": tools} if tools else {})
        problems = check_prompt_row(chat)
        if not problems:
            return chat
        raise BadFile(f"{path}:{number} is not a prompt: {problems[0][0]} {problems[0][1]}; {wanted}")
    held = (
        f" (it has {listed(row, none='no columns')}; --map prompt=COLUMN names another)"
        if isinstance(row, dict)
        else ""
    )
    raise BadFile(f"{path}:{number} is not a prompt{held}; {wanted}")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def answers(
    pieces: Iterable[SampledText | SampledPrompt | SampleFigures],
    prompts: Sequence[Prompt],
    reporter: Reporter,
    clock: Callable[[], float] = time.monotonic,
    *,
    num_samples: int = 1,
    has_logprobs: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield each answer with its prompt once it is complete, with its number where there are several, and with its
    tokens where their log-probabilities were asked for; the figures go to `reporter`."""
    texts: defaultdict[tuple[int, int], str] = defaultdict(str)
    tokens: defaultdict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    start_s = clock()
    for piece in pieces:
        if isinstance(piece, SampleFigures):
            # Other users' calls come first, and the connection has to be made.
            waited_s = clock() - start_s - piece.duration_s - piece.load_s
            before = [f"{piece.load_s:.1f} s to load"] if piece.load_s else []
            before += [f"{waited_s:.1f} s of waiting"] if waited_s >= _SHOWN_WAIT_S else []
            reporter.notice(
                f"{piece.num_tokens} tokens in {piece.duration_s:.1f} s ({piece.tokens_per_second:.1f} tokens/s)"
                f"{', after ' if before else ''}{' and '.join(before)}"
            )
            reporter.notice(f"answered with {piece.weights}")
            continue
        if not isinstance(piece, SampledText):
            continue
        which = piece.prompt, piece.sample
        texts[which] += piece.text
        if has_logprobs:
            tokens[which] += _tokens(piece)
        if piece.ended:
            yield {
                "index": piece.prompt,
                **({"sample": piece.sample} if num_samples > 1 else {}),
                **_row(prompts[piece.prompt]),
                "answer": texts.pop(which),
                "num_tokens": piece.num_tokens,
                "ended": piece.ended,
                **({"tokens": tokens.pop(which, [])} if has_logprobs else {}),
            }


def _tokens(piece: SampledText) -> list[dict[str, Any]]:
    """The tokens of a piece, each with the likeliest in its place where they were asked for."""
    rows: list[dict[str, Any]] = [
        {"token": token, "text": text, "logprob": logprob}
        for token, text, logprob in zip(piece.tokens, piece.texts, piece.logprobs, strict=True)
    ]
    for row, likely in zip(rows, piece.top, strict=False):
        row["top"] = [{"token": one.token, "text": one.text, "logprob": one.logprob} for one in likely.tokens]
    return rows


def _row(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return prompt if isinstance(prompt, dict) else {"messages": prompt}


def answer_text(answer: dict[str, Any]) -> str:
    """Return an answer for people, with the last of what it answers."""
    asked = answer["prompt"] if "prompt" in answer else text_of(answer["messages"][-1].get("content"))
    which = f"{answer['index']}.{answer['sample']}" if "sample" in answer else answer["index"]
    scores = "".join(f"    {token['logprob']:9.4f} {token['text']!r}\n" for token in answer.get("tokens", ()))
    return printable(f"[{which}] {asked}\n--> {answer['answer']}\n{scores}")


def printable(text: str) -> str:
    """Return text without control characters but line feeds and tabs, so that a model cannot control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cf"))
