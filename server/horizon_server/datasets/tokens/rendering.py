"""A row as the text a model reads, which characters of it are trained, and which tokens that makes.

What `train_on`, `method` and the weights of messages mean is decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, assert_never

from horizon_server.datasets.recipe import PrepareOptions
from horizon_server.datasets.tokens.chat_template import ChatTemplate, Span
from horizon_server.datasets.tokens.normalise import Chat, Pair, Text
from horizon_server.errors import InvalidData


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


def token_mask(text: str, encoding: Any, spans: Iterable[Span]) -> bytearray:
    """Return a byte for each token of a `tokenizers.Encoding` of `text`: 1 where it is in a span of characters.

    A token across the border of a span belongs to the side that holds its letters; on the other side there is white space only, such
    as the line break that `<|end|>` of some vocabularies swallows. White space on both sides belongs to what comes first.

    Raises: InvalidData where a token holds letters of both sides: then no mask is exact.
    """
    mask = bytearray(len(encoding))
    for start, end in spans:
        if start < end:
            first, last = _first_token(text, encoding, start), _first_token(text, encoding, end)
            mask[first:last] = b"\1" * max(0, last - first)
    return mask


def _first_token(text: str, encoding: Any, border: int) -> int:
    """Return the first token that belongs to what follows the border."""
    token = _token_at(text, encoding, border)
    if token is None:
        return len(encoding)
    begin, end = encoding.token_to_chars(token)
    if begin == border:
        return token
    if not text[border:end].strip():
        return token + 1
    if not text[begin:border].strip():
        return token
    raise InvalidData(
        f"token {text[begin:end]!r} holds text that is trained and text that is not, so no mask is exact; put white space or a "
        "special token between the template's words and the reply's"
    )


def _token_at(text: str, encoding: Any, character: int) -> int | None:
    # A tokenizer may leave characters out, as white space at the ends.
    for index in range(character, len(text)):
        token = encoding.char_to_token(index)
        if token is not None:
            return int(token)
    return None


def _says_something(message: dict[str, object]) -> bool:
    return bool(str(message["content"]).strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _trained(text: str) -> RenderedText:
    return RenderedText(text=text, spans=((0, len(text)),))


def _complement(spans: Sequence[Span], length: int) -> list[Span]:
    borders = [0, *(border for span in spans for border in span), length]
    return [span for span in zip(borders[::2], borders[1::2], strict=True) if span[0] < span[1]]
