"""A model's chat template: messages to text, and which characters of it an assistant generates.

Templates come with models from anywhere, so they run in a sandbox and their processor time is limited.
"""

from __future__ import annotations

import json
import re
import secrets
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cached_property
from types import FrameType
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from horizon_server.errors import InvalidData, InvalidModel

Message = Mapping[str, Any]
Tools = Sequence[Mapping[str, Any]]
Span = tuple[int, int]

# Longest text of one chat: more than a row of the largest size, and what can be tokenised in the memory of one process.
MAX_RENDERED_CHARACTERS = 16 * 2**20

# Variables that are printed before and after each generation block: nothing, unless they are given.
_OPEN_MARK, _CLOSE_MARK = "_generation_begins", "_generation_ends"
# Random in each process, so that no chat can hold them.
_MARKS = {mark: f"<{mark} {secrets.token_hex(16)}>" for mark in (_OPEN_MARK, _CLOSE_MARK)}
_PROBE = "probe"
_ADD_MARKERS = "add {% generation %} markers to the template"
# How Python prints a function, a generator or another object that has no text form.
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}", re.IGNORECASE)
# What Jinja and the Python that it makes of a template raise for a chat that the template was not written for.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, ArithmeticError, AttributeError, LookupError, RecursionError)


class ChatTemplate:
    """A compiled template. Its methods raise InvalidData when the template refuses a chat."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, end_markers: Sequence[str] = ()) -> None:
        """Raises: InvalidModel when the source is not a template."""
        environment = _chat_environment()
        self._source = source
        self._special_tokens = dict(special_tokens)
        # The longest first, as one may begin with another; where there are none, a pattern that never matches.
        longest_first = sorted((re.escape(marker) for marker in end_markers if marker), key=len, reverse=True)
        self._end_marker = re.compile("|".join(longest_first) or r"(?!)")
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise InvalidModel(f"the model's chat template cannot be read: {error}") from error
        except (RecursionError, SyntaxError, MemoryError) as error:
            # Jinja translates a template to Python: what nests too deeply for one of the two ends so.
            raise InvalidModel(f"the model's chat template is nested too deeply ({error}); simplify it") from error
        self._has_generation_blocks = _holds_blocks(tree)
        # Where a template filters, stores or passes on what a block prints, the marks may end up around another text.
        takers = tree.find_all((nodes.AssignBlock, nodes.FilterBlock, nodes.Macro, nodes.CallBlock))
        self._blocks_reach_the_text = not any(map(_holds_blocks, takers))

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
        marks: Mapping[str, str] | None = None,
    ) -> str:
        """Return the text of a chat, ending in the assistant's cue where `add_generation_prompt` asks for it."""
        plain = [{key: value for key, value in message.items() if key != "weight"} for message in messages]
        given = {"tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt, **(marks or {})}
        try:
            text = self._template.render(messages=plain, **self._special_tokens, **given)
            text.encode("utf-8")  # neither a tokenizer nor the wire can carry half a surrogate pair
        except InvalidModel:
            raise  # the limit on processor time, which ends the template from outside
        except _TEMPLATE_ERRORS as error:
            raise InvalidData(f"the model's chat template refuses this chat: {error}") from error
        if len(text) > MAX_RENDERED_CHARACTERS:
            raise InvalidData(
                f"the model's chat template makes {len(text)} characters of this chat; at most "
                f"{MAX_RENDERED_CHARACTERS} are allowed"
            )
        # A Python object that the template prints has another address in every process, so its tokens would differ from
        # run to run. A dataset about programming may contain such text itself.
        found = _ADDRESS.search(text) if " at 0x" in text else None
        if found and not _ADDRESS.search(f"{plain} {tools} {self._source}"):
            raise InvalidData(
                f"the model's chat template prints a Python object (... {found.group()}>) instead of a text; correct "
                "the template"
            )
        return text

    def assistant_spans(self, messages: Sequence[Message], tools: Tools | None = None) -> tuple[str, list[Span | None]]:
        """Return the text of a chat and, per message, the characters an assistant generates (None for other roles).

        A span reaches from after the assistant's cue to the end-of-turn token, inclusive. Generation markers of the
        template decide where it has them; else the chat is rendered message by message, which works if each beginning
        of the chat renders to a beginning of the text.
        """
        replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        spans: list[Span | None] = [None] * len(messages)
        text, marked = self._render_marked(messages, tools)
        for order, index in enumerate(replies):
            # Blocks that do not match the replies one by one leave open which reply they belong to.
            is_clear = len(marked) == len(replies)
            spans[index] = marked[order] if is_clear else self._span_by_prefixes(messages, tools, index, text)
        return text, spans

    def turn_span(self, messages: Sequence[Message], index: int, text: str, tools: Tools | None = None) -> Span:
        """Return the characters of one whole turn of any role, its header included."""
        start = self._beginning(text, self.render(messages[:index], tools=tools)) if index else 0
        end = self._beginning(text, self.render(messages[: index + 1], tools=tools))
        if start is None or end is None or start > end:
            raise InvalidData(
                f"the model's chat template does not render the chat turn by turn, so messages[{index}] cannot be left "
                "out of "
                "training; leave out the row or its weights"
            )
        return start, end

    def answers(
        self, prompt: Sequence[Message], answers: Sequence[Sequence[Message]], tools: Tools | None = None
    ) -> tuple[str, list[str]]:
        """Return the text of a prompt with the assistant's cue, and that of the prompt with each of the answers to it.

        A whole text begins with that of the prompt, not always with the cue: templates may write it differently once
        the answer follows.
        """
        cue = self.render(prompt, tools=tools, add_generation_prompt=True)
        wholes = [self.render([*prompt, *answer], tools=tools) for answer in answers]
        # Nearly always the cue is where the answer begins, and nothing else need be asked.
        if not all(whole.startswith(cue) for whole in wholes):
            alone = self.render(prompt, tools=tools)
            if any(self._beginning(whole, alone) is None for whole in wholes):
                raise InvalidData(
                    "the model's chat template renders the prompt differently once an answer follows it, so where the "
                    "answer begins cannot be found; leave out the turns that it rewrites, or correct the template"
                )
        return cue, wholes

    def _beginning(self, text: str, rendered: str) -> int | None:
        """Return how much of the text the beginning of its chat renders to, or None where it does not begin so."""
        if text.startswith(rendered):
            return len(rendered)
        # Some templates close whatever they are given with an end-of-text token.
        last = [marker for marker in self._end_marker.finditer(rendered) if marker.end() == len(rendered)]
        return last[0].start() if last and text.startswith(rendered[: last[0].start()]) else None

    def _render_marked(self, messages: Sequence[Message], tools: Tools | None) -> tuple[str, list[Span]]:
        if not self._has_generation_blocks:
            return self.render(messages, tools=tools), []
        before, *blocks = self.render(messages, tools=tools, marks=_MARKS).split(_MARKS[_OPEN_MARK])
        pieces, spans, at = [before], [], len(before)
        for block in blocks:
            generated, closed, after = block.partition(_MARKS[_CLOSE_MARK])
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
                f"the model's chat template renders what precedes messages[{index}] with the assistant's cue to text "
                f"that the whole chat does not begin with, so the trained part cannot be found; {_ADD_MARKERS}"
            )
        closed = self.render(messages[: index + 1], tools=tools) if index + 1 < len(messages) else text
        end = self._end_of_turn(closed, len(cue))
        if end > len(cue) and text.startswith(closed[:end]):
            return len(cue), end
        return len(cue), self._end_by_token(messages[index], index, text, len(cue))

    def _end_of_turn(self, closed: str, start: int) -> int:
        """Return where the turn that a text closes with ends."""
        # Generation stops at the token that closes the turn; a line break or an end of text after it is never
        # generated.
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
        _, found, rest = text.partition(_PROBE)
        marker = self._end_marker.match(rest.lstrip()) if found else None
        return marker.group() if marker else ""

    def _end_by_token(self, message: Message, index: int, text: str, start: int) -> int:
        # Some templates write a reply differently once others follow it (they drop its reasoning). What the model reads
        # there is what it would have generated, up to the token that ends every turn.
        end = text.find(self._usual_end, start) if self._usual_end else -1
        if end < 0 or self._usual_end in str(message):
            raise InvalidData(
                f"the model's chat template rewrites messages[{index}] when other messages follow, and no special "
                f"token marks where it ends, so the trained part cannot be found; {_ADD_MARKERS}"
            )
        return end + len(self._usual_end)


@contextmanager
def processor_time_limit(limit_s: float, error: Exception) -> Iterator[None]:
    """Raise `error` inside the block once the process has used this much processor time in it. Thread: main, which gets
    signals."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise error

    before = signal.signal(signal.SIGPROF, stop)
    # Processor time, as a template must not be blamed for a busy machine.
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: renders its body, in a scope of its own, between the two marks."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Read the block; part of jinja2's interface."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        opened, closed = (nodes.Output([nodes.Name(mark, "load")]) for mark in (_OPEN_MARK, _CLOSE_MARK))
        # A scope, as transformers' tag has one: what is set in the block stays in it.
        return [node.set_lineno(line) for node in (opened, nodes.Scope(body), closed)]


def _holds_blocks(node: nodes.Node) -> bool:
    return any(name.name == _OPEN_MARK for name in node.find_all(nodes.Name))


class _SafeNamespace(Namespace):
    """Jinja's namespace object, without the underscored attributes through which a template could reach Python."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _refuse_reserved(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_reserved(name)
        super().__setitem__(name, value)


# Not a method: every attribute of a namespace is the template's.
def _refuse_reserved(name: object) -> None:
    if str(name).startswith("_"):
        raise TemplateError(f"a namespace may not hold {name!r}: names with a leading underscore are reserved")


def _chat_environment() -> ImmutableSandboxedEnvironment:
    """Return an environment with all that transformers gives to chat templates."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    # jinja2's own filter escapes for HTML.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _SafeNamespace
    # The class itself would lead to its methods, such as `mro`.
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
