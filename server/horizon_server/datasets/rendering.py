"""A row as the text a model reads, and which characters of it are trained.

Owns what `train_on`, `method` and the weights of messages mean. Must not know files or tokens, but for the ids that a tokenizer puts
around a text by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, assert_never

from horizon_server.datasets.chat_template import ChatTemplate, Span
from horizon_server.datasets.normalise import Chat, Pair, Text
from horizon_server.datasets.preparation import PrepareOptions


class RenderedText(NamedTuple):
    """A text that is encoded by itself, and the characters of it that are trained."""

    text: str
    spans: tuple[Span, ...]

    @property
    def trained_throughout(self) -> bool:
        """Whether every character is trained."""
        return self.spans == ((0, len(self.text)),)


class RenderedRow(NamedTuple):
    """Texts laid end to end. `bare` asks for the tokens that the tokenizer puts around a text that no template has rendered."""

    texts: tuple[RenderedText, ...]
    bare: bool


class RowRenderer:
    """Renders rows for one model and one choice of what is trained. `template` is None for a model without one."""

    def __init__(self, template: ChatTemplate | None, options: PrepareOptions) -> None:
        self._template = template
        self._train_all = options.method == "pretrain" or options.train_on == "all"
        self._last_only = options.train_on == "last-assistant"

    def render(self, row: Chat | Pair | Text) -> RenderedRow:
        """Return the texts of a row.

        Raises: InvalidData where the template refuses the chat, or its trained part cannot be found exactly.
        """
        if isinstance(row, Chat):
            return self._chat(row)
        if isinstance(row, Text):
            return RenderedRow(texts=(_trained(row.text),), bare=True)
        if isinstance(row, Pair):
            return self._pair(row)
        assert_never(row)

    def _pair(self, row: Pair) -> RenderedRow:
        if self._template is not None:
            turns = ({"role": "user", "content": row.prompt}, {"role": "assistant", "content": row.completion})
            return self._chat(Chat(messages=[turn | {"weight": 1} for turn in turns]))
        # Encoded apart: at generation time the prompt ends where the model starts.
        prompt = _trained(row.prompt) if self._train_all else RenderedText(text=row.prompt, spans=())
        return RenderedRow(texts=(prompt, _trained(row.completion)), bare=True)

    def _chat(self, row: Chat) -> RenderedRow:
        assert self._template is not None, "chats need a chat template"
        text, spans = self._everything(self._template, row) if self._train_all else self._replies(self._template, row)
        return RenderedRow(texts=(RenderedText(text=text, spans=tuple(spans)),), bare=False)

    def _everything(self, template: ChatTemplate, row: Chat) -> tuple[str, list[Span]]:
        text = template.render(row.messages, tools=row.tools)
        muted = [index for index, message in enumerate(row.messages) if not message["weight"]]
        left_out = [template.turn_span(row.messages, index, text, row.tools) for index in muted]
        return text, _complement(left_out, len(text))

    def _replies(self, template: ChatTemplate, row: Chat) -> tuple[str, list[Span]]:
        text, found = template.assistant_spans(row.messages, row.tools)
        replies = [(message, span) for message, span in zip(row.messages, found, strict=True) if span is not None]
        if self._last_only:
            replies = replies[-1:]
        return text, [span for message, span in replies if message["weight"] and _says_something(message)]


def _says_something(message: dict[str, object]) -> bool:
    return bool(str(message["content"]).strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _trained(text: str) -> RenderedText:
    return RenderedText(text=text, spans=((0, len(text)),))


def _complement(spans: Sequence[Span], length: int) -> list[Span]:
    borders = [0, *(border for span in spans for border in span), length]
    return [span for span in zip(borders[::2], borders[1::2], strict=True) if span[0] < span[1]]
