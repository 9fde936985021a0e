"""A model's chat template: messages to text, and which characters of it an assistant generates."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from horizon_server.datasets.tokens.sandbox import (
    CLOSE_MARK,
    OPEN_MARK,
    blocks_reach_the_text,
    chat_environment,
    has_generation_blocks,
)
from horizon_server.errors import InvalidData, InvalidModel

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Span = tuple[int, int]

MAX_RENDERED_CHARACTERS = 16 * 2**20
"""Longest text of one chat: more than a row of the largest size, and what can be tokenised in the memory of one process."""

# Random in each process, so that no chat can hold them.
_MARKS = {mark: f"<{mark} {secrets.token_hex(16)}>" for mark in (OPEN_MARK, CLOSE_MARK)}
_PROBE = "probe"
_SPACE = re.compile(r"\s*")
_ADD_MARKERS = "add {% generation %} markers to the template"
# How Python prints a function, a generator or another object that has no text form.
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}", re.IGNORECASE)
_TEMPLATE_ERRORS = (
    *(TemplateError, TypeError, ValueError, ArithmeticError),
    *(AttributeError, LookupError, RecursionError),
)


class ChatTemplate:
    """A compiled template. Its methods raise InvalidData when the template refuses a chat."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, end_markers: Sequence[str] = ()) -> None:
        """Raises: InvalidModel when the source is not a template."""
        environment = chat_environment()
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._end_marker = _any_of(end_markers)
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidModel(f"the model's chat template cannot be read: {error}") from error
        except (RecursionError, SyntaxError, MemoryError) as error:
            # Jinja translates a template to Python: what nests too deeply for one of the two ends so.
            raise InvalidModel(f"the model's chat template is nested too deeply ({error}); simplify it") from error
        self.has_generation_markers = has_generation_blocks(tree)
        self._blocks_reach_the_text = blocks_reach_the_text(tree)

    def render(
        self, messages: Sequence[Message], *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> str:
        """Return the text of a chat, ending in the assistant's cue where `add_generation_prompt` asks for it."""
        return self._rendered(messages, tools, add_generation_prompt=add_generation_prompt)

    def assistant_spans(self, messages: Sequence[Message], tools: Tools | None = None) -> tuple[str, list[Span | None]]:
        """Return the text of a chat and, per message, the characters an assistant generates (None for other roles).

        A span reaches from after the assistant's cue to the end-of-turn token, inclusive. Generation markers of the template decide
        where it has them; else the chat is rendered message by message, which works if each beginning of the chat renders to a
        beginning of the text.
        """
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans: list[Span | None] = [None] * len(messages)
        text, marked = self._render_marked(messages, tools)
        for order, index in enumerate(replies):
            # Blocks that do not match the replies one by one leave open which reply they belong to.
            spans[index] = (
                marked[order] if len(marked) == len(replies) else self._span_by_prefixes(messages, tools, index, text)
            )
        return text, spans

    def turn_span(self, messages: Sequence[Message], index: int, text: str, tools: Tools | None = None) -> Span:
        """Return the characters of one whole turn of any role, its header included."""
        start = self._beginning(text, self.render(messages[:index], tools=tools)) if index else 0
        end = self._beginning(text, self.render(messages[: index + 1], tools=tools))
        if start is None or end is None or start > end:
            raise InvalidData(
                f"the model's chat template does not render the chat turn by turn, so messages[{index}] cannot be left out of "
                "training; leave out the row or its weights"
            )
        return start, end

    def _beginning(self, text: str, rendered: str) -> int | None:
        """Return how much of the text the beginning of its chat renders to, or None where it does not begin so."""
        if text.startswith(rendered):
            return len(rendered)
        # Some templates close whatever they are given with an end-of-text token.
        last = [marker for marker in self._end_marker.finditer(rendered) if marker.end() == len(rendered)]
        return last[0].start() if last and text.startswith(rendered[: last[0].start()]) else None

    def _rendered(self, messages: Sequence[Message], tools: Tools | None, **given: object) -> str:
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        try:
            text = self._template.render(messages=plain, tools=tools, documents=None, **self._special_tokens, **given)
            text.encode("utf-8")  # neither a tokenizer nor the wire can carry half a surrogate pair
        except InvalidModel:
            raise  # the limit on processor time, which ends the template from outside
        except _TEMPLATE_ERRORS as error:
            raise InvalidData(f"the model's chat template refuses this chat: {error}") from error
        if len(text) > MAX_RENDERED_CHARACTERS:
            raise InvalidData(
                f"the model's chat template makes {len(text)} characters of this chat; at most {MAX_RENDERED_CHARACTERS} are allowed"
            )
        self._refuse_addresses(text, plain, tools)
        return text

    def _refuse_addresses(self, text: str, messages: object, tools: object) -> None:
        """Refuse a text in which the template has printed a Python object: its address would be another in every process."""
        # A dataset about programming may contain such text itself.
        if " at 0x" in text and not _ADDRESS.search(f"{messages} {tools} {self._source}"):
            found = _ADDRESS.search(text)
            if found:
                raise InvalidData(
                    f"the model's chat template prints a Python object (... {found.group()}>) instead of a text; correct the template"
                )

    def _render_marked(self, messages: Sequence[Message], tools: Tools | None) -> tuple[str, list[Span]]:
        if not self.has_generation_markers:
            return self.render(messages, tools=tools), []
        before, *blocks = self._rendered(messages, tools, add_generation_prompt=False, **_MARKS).split(
            _MARKS[OPEN_MARK]
        )
        pieces, spans, at = [before], [], len(before)
        for block in blocks:
            generated, closed, after = block.partition(_MARKS[CLOSE_MARK])
            if not closed:
                raise InvalidData("the model's chat template leaves a generation block before its end")
            pieces += (generated, after)
            spans.append((at, at + len(generated)))
            at += len(generated) + len(after)
        text = "".join(pieces)
        if not self._blocks_reach_the_text and self.render(messages, tools=tools) != text:
            raise InvalidData("the model's chat template changes the text inside its generation markers")
        return text, spans

    def _span_by_prefixes(self, messages: Sequence[Message], tools: Tools | None, index: int, text: str) -> Span:
        cue = self.render(messages[:index], tools=tools, add_generation_prompt=True)
        if not text.startswith(cue):
            raise InvalidData(
                f"the model's chat template renders what precedes messages[{index}] with the assistant's cue to text that the "
                f"whole chat does not begin with, so the trained part cannot be found; {_ADD_MARKERS}"
            )
        closed = self.render(messages[: index + 1], tools=tools) if index + 1 < len(messages) else text
        end = self._end_of_turn(closed, len(cue))
        if end > len(cue) and text.startswith(closed[:end]):
            return len(cue), end
        return len(cue), self._end_by_token(messages[index], index, text, len(cue))

    def _end_of_turn(self, closed: str, start: int) -> int:
        # Generation stops at the token that closes the turn; a line break or an end of text after it is never generated.
        end = len(closed)
        closing: list[re.Match[str]] = []
        for marker in reversed([*self._end_marker.finditer(closed, start)]):
            if closed[marker.end() : end].strip():
                break
            end = marker.start()
            closing.insert(0, marker)
        usual = [marker for marker in closing if marker.group() == self._usual_end]
        return (usual or closing)[0].end() if closing else len(closed)

    @cached_property
    def _usual_end(self) -> str:
        """The token after a reply of plain text, or nothing where there is none."""
        try:
            text = self.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}])
        except InvalidData:
            return ""
        at = text.find(_PROBE)
        marker = self._end_marker.match(text, _after_space(text, at + len(_PROBE))) if at >= 0 else None
        return marker.group() if marker else ""

    def _end_by_token(self, message: Message, index: int, text: str, start: int) -> int:
        # Some templates write a reply differently once others follow it (they drop its reasoning). What the model reads there is what
        # it would have generated, up to the token that ends every turn.
        end = text.find(self._usual_end, start) if self._usual_end else -1
        if end < 0 or self._usual_end in str(message):
            raise InvalidData(
                f"the model's chat template rewrites messages[{index}] when other messages follow, and no special token marks where it "
                f"ends, so the trained part cannot be found; {_ADD_MARKERS}"
            )
        return end + len(self._usual_end)


def _after_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start


def _any_of(literals: Sequence[str]) -> re.Pattern[str]:
    longest_first = sorted((re.escape(literal) for literal in literals if literal), key=len, reverse=True)
    return re.compile("|".join(longest_first) or r"(?!)")
