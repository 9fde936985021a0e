"""A model's chat template: messages to text, and which characters of it an assistant wrote.

Owns rendering, in the dialect of Jinja that chat templates are written in, and the spans to train. Must not know tokens or
files. Templates come with models from anywhere, so they run sandboxed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from horizon_server.errors import InvalidData, InvalidModel

Message = Mapping[str, Any]
Span = tuple[int, int]

# Noncharacters: Unicode reserves them for internal use, so no text may hold them.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"


class ChatTemplate:
    """A compiled template.

    Raises: InvalidModel when the source is no template; its methods raise InvalidData when the template refuses a chat.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, end_markers: Sequence[str] = ()) -> None:
        self._environment = _sandbox()
        self._special_tokens = dict(special_tokens)
        self._marker_pattern = _any_of(end_markers)
        try:
            self._template = self._environment.from_string(source)
        except TemplateError as error:
            raise InvalidModel(f"the model's chat template cannot be read: {error}") from error
        self.has_generation_markers = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the text of a chat, ending in the assistant's cue where `add_generation_prompt` asks for it."""
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        try:
            return self._template.render(
                messages=plain,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            ArithmeticError,
            AttributeError,
            LookupError,
            RecursionError,
        ) as error:
            raise InvalidData(f"the model's chat template refuses this chat: {error}") from error

    def assistant_spans(self, messages: Sequence[Message]) -> tuple[str, list[Span | None]]:
        """Return the text of a chat and, per message, the characters an assistant generates (None for other roles).

        A span reaches from after the assistant's cue to the end-of-turn token, inclusive. Generation markers of the template decide
        where it has them; else the chat is rendered message by message, which works if each beginning of the chat renders to a
        beginning of the text.
        """
        text = self.render(messages)
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans: list[Span | None] = [None] * len(messages)
        marked = self._marked_spans(messages, text) if self.has_generation_markers else []
        for order, index in enumerate(replies):
            # Blocks that do not match the replies one by one leave open which reply they belong to.
            spans[index] = (
                marked[order] if len(marked) == len(replies) else self._span_by_prefixes(messages, index, text)
            )
        return text, spans

    def _marked_spans(self, messages: Sequence[Message], text: str) -> list[Span]:
        if _OPEN in text or _CLOSE in text:
            raise InvalidData("the chat holds U+FDD0 or U+FDD1, which Unicode reserves; remove them")
        tag = self._environment.extensions[_GenerationTag.identifier]
        assert isinstance(tag, _GenerationTag)
        tag.marks = (_OPEN, _CLOSE)
        try:
            marked = self.render(messages)
        finally:
            tag.marks = ("", "")
        if marked.replace(_OPEN, "").replace(_CLOSE, "") != text:
            raise InvalidData("the model's chat template changes the text inside its generation markers")
        spans = []
        removed = 0
        for match in re.finditer(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}", marked):
            start = match.start() - removed
            spans.append((start, start + len(match.group(1))))
            removed += 2
        return spans

    def _span_by_prefixes(self, messages: Sequence[Message], index: int, text: str) -> Span:
        cue = self.render(messages[:index], add_generation_prompt=True)
        if not text.startswith(cue):
            raise InvalidData(
                f"the model's chat template renders messages[0] to messages[{index - 1}] with the assistant's cue to text that the "
                "whole chat does not begin with, so the trained part cannot be found; add {% generation %} markers to the template"
            )
        closed = self.render(messages[: index + 1])
        if text.startswith(closed) and len(closed) > len(cue):
            return len(cue), self._trim_after_end_of_turn(text, len(cue), len(closed))
        return len(cue), self._end_after_content(messages[index]["content"], index, text, len(cue))

    def _trim_after_end_of_turn(self, text: str, start: int, end: int) -> int:
        # Generation stops at the end-of-turn token; a line break that the template adds behind it is never generated.
        ends = [match.end() for match in self._marker_pattern.finditer(text, start, end)]
        return ends[-1] if ends and not text[ends[-1] : end].strip() else end

    def _end_after_content(self, content: str, index: int, text: str, start: int) -> int:
        # Some templates write a reply differently once others follow it (they drop its reasoning). The text is right; its end is
        # where the content ends, plus the end-of-turn token.
        stripped = content.strip()
        at = start + len(text[start:]) - len(text[start:].lstrip())
        if not text.startswith(stripped, at):
            raise InvalidData(
                f"the model's chat template rewrites messages[{index}].content when other messages follow, so the trained part "
                "cannot be found; add {% generation %} markers to the template"
            )
        end = at + len(stripped)
        behind = re.compile(r"\s*").match(text, end)
        marker = self._marker_pattern.match(text, behind.end() if behind else end)
        return marker.end() if marker else end


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: renders its body, between marks while spans are sought."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so
    marks = ("", "")

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_between_marks"), [], [], body).set_lineno(line)

    def _between_marks(self, caller: Callable[[], str]) -> str:
        return f"{self.marks[0]}{caller()}{self.marks[1]}"


class _SafeNamespace(Namespace):
    """Jinja's namespace object, without the underscored attributes through which a template could reach Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _refuse_reserved(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_reserved(name)
        super().__setitem__(name, value)


def _refuse_reserved(name: object) -> None:
    if str(name).startswith("_"):
        raise TemplateError(f"a namespace may not hold {name!r}: names with a leading underscore are reserved")


def _sandbox() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _SafeNamespace
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _any_of(literals: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted((re.escape(literal) for literal in literals if literal), key=len, reverse=True)
    return re.compile("|".join(longest_first) or r"(?!)")
