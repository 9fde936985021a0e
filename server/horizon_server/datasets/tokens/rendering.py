"""What a row means, whatever its format, and the text that a model reads of it: which characters of that are trained,
and which tokens.

Takes rows that `horizon_formats.checks` has found fine.
"""

from __future__ import annotations

import array
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from horizon_formats.answers import as_preference, compared, of_targets
from horizon_formats.formats import FUNCTION_CALL, OPENAI, DatasetFormat, parse_calls, sharegpt_spelling, text_of
from horizon_server.datasets.recipe import PrepareOptions
from horizon_server.datasets.tokens.chat_template import ChatTemplate, Span
from horizon_server.errors import InvalidData

_HASH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A conversation, as chat templates read it.

    Every message has `role`, `content` (a string) and `weight` (0: not trained, 1, or how much its tokens count), and
    what else the row has: the arguments of a tool call always as an object.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A prompt and its completion: two turns for a model with a chat template, else one text after the other.

    `weight` says how much the completion counts, where that is not 1.
    """

    prompt: str
    completion: str
    weight: float | None = None


@dataclass(frozen=True, kw_only=True)
class Text:
    """A text, trained from end to end."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Token ids with a label each: the token itself, or -100 where it is not trained. Not shifted."""

    input_ids: Sequence[int]
    labels: Sequence[int]


Turns = str | list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Answers:
    """A prompt with two answers, chosen and rejected, or with one that has a label: 1 desirable, 0 undesirable.

    Messages are as in `Chat`. Texts are turns for a model with a chat template, as in `Pair`.
    """

    prompt: Turns
    answers: list[Turns]
    label: int | None = None
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Recorded token ids, of which those with mask 1 were sampled; one log-probability and one advantage for each of
    them."""

    input_ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float]
    advantages: Sequence[float]


NormalRow = Chat | Pair | Text | Tokens | Answers | Sample


def normalise(columns: Mapping[str, Any], dataset_format: DatasetFormat, field_map: Mapping[str, str]) -> NormalRow:
    """Return what the columns of a checked row mean; `dataset_format` is never auto."""

    def value(field: str) -> Any:
        return columns.get(field_map.get(field, field))

    match dataset_format:
        case DatasetFormat.MESSAGES:
            system, turns, tools = None, [_message(message) for message in value("messages")], value("tools")
        case DatasetFormat.PROMPT_COMPLETION:
            weight = _weight(value("weight"))
            # A row without a weight is known by its texts alone.
            return Pair(prompt=value("prompt"), completion=value("completion"), weight=None if weight == 1 else weight)
        case DatasetFormat.TEXT:
            return Text(text=value("text"))
        case DatasetFormat.TOKENS:
            return Tokens(input_ids=value("input_ids"), labels=value("labels") or value("input_ids"))
        case DatasetFormat.PREFERENCE:
            comparison = compared(value("prompt"), value("chosen"), value("rejected"))
            assert not isinstance(comparison, str), "the check has found nothing wrong with the row"
            prompt, *answers = map(_turns, comparison)
            return Answers(prompt=prompt, answers=answers, tools=_tools(value("tools")))
        case DatasetFormat.OPENAI_PREFERENCE:
            row, names = as_preference(columns, field_map)
            return normalise(row, DatasetFormat.PREFERENCE, names)
        case DatasetFormat.KTO:
            answers = [_turns(value("completion"))]
            label = int(value("label"))
            return Answers(prompt=_turns(value("prompt")), answers=answers, label=label, tools=_tools(value("tools")))
        case DatasetFormat.SAMPLES:
            return _sample(value("tokens"), value)
        case DatasetFormat.SHAREGPT:
            turns = [_sharegpt_message(message) for message in value("conversations")]
            system, tools = value("system"), value("tools")
        case _:
            asked = "\n".join(part for part in (value("instruction"), value("input")) if part)
            pairs = [*(value("history") or ()), (asked, value("output"))]
            turns = [turn for question, answer in pairs for turn in _exchange(question, answer)]
            turns[-1]["weight"] = _weight(value("weight"))
            system, tools = value("system"), None
    head = [{"role": "system", "content": system, "weight": 1}] if system else []
    return Chat(messages=head + turns, tools=_tools(tools))


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    return (json.loads(tools) if isinstance(tools, str) else tools) or None


def _turns(turns: Any) -> Turns:
    return turns if isinstance(turns, str) else [_message(message) for message in turns]


def _sample(tokens: Sequence[int], value: Callable[[str], Any]) -> Sample:
    prompt_length, mask, advantage = value("prompt_length"), value("mask"), value("advantage")
    if mask is None:
        mask = [0] * prompt_length + [1] * (len(tokens) - prompt_length)
    mask = list(map(int, mask))
    numbers = [value("logprobs"), [advantage] * sum(mask) if advantage is not None else value("advantages")]
    logprobs, advantages = ([float(number) for number in of_targets(values, mask) or ()] for values in numbers)
    return Sample(input_ids=tokens, mask=mask, logprobs=logprobs, advantages=advantages)


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: value for key, value in message.items() if value is not None}
    normal = given | {"content": text_of(given.get("content")), "weight": _weight(given.get("weight"))}
    if "tool_calls" in given:
        normal["tool_calls"] = []
        for call in given["tool_calls"]:
            # OpenAI writes the arguments of a call as JSON text, but templates print objects.
            arguments = call["function"].get("arguments")
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments or {}
            rest = {key: value for key, value in call.items() if value is not None}
            function = {**call["function"], "arguments": arguments}
            normal["tool_calls"].append({"type": "function"} | rest | {"function": function})
    return normal


def _weight(given: float | None) -> float:
    # 1 and 1.0 mean the same, and so do 2 and 2.0: a row is known by what it means.
    return 1 if given is None else int(given) if given in (0, 1) else float(given)


def _sharegpt_message(message: Mapping[str, Any]) -> dict[str, Any]:
    spelling = sharegpt_spelling(message)
    speaker, text = message[spelling.speaker], message.get(spelling.text)
    calls = parse_calls(text) if speaker == FUNCTION_CALL and isinstance(text, str) else None
    rest = {key: value for key, value in message.items() if key not in (spelling.speaker, spelling.text)}
    turn = {OPENAI.speaker: spelling.roles[speaker], OPENAI.text: text} | rest
    if calls is not None:
        turn |= {"content": "", "tool_calls": [{"function": call} for call in calls]}
    return _message(turn)


def _exchange(asked: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": asked, "weight": 1}, {"role": "assistant", "content": answer, "weight": 1}]


def row_content(row: NormalRow) -> bytes:
    """Return the bytes that identify a row: equal for rows that mean the same, whatever else their lines hold."""
    content = {name: value for name, value in vars(row).items() if value is not None} | {"kind": type(row).__name__}
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode("ascii")


def is_held_out(content: bytes, fraction: float) -> bool:
    """Whether content is on the evaluation side of this fraction. What is held out at some fraction is so at every
    larger one."""
    # By content alone: a row stays on its side wherever it is in the file, and copies of a row are never on both sides.
    # A random draw would leak copies, and would change with every row that is added (ADR 0005).
    number = int.from_bytes(hashlib.blake2b(content, digest_size=_HASH_BYTES).digest(), "big")
    return number < fraction * float(1 << (8 * _HASH_BYTES))


class RenderedText(NamedTuple):
    """A text that is encoded by itself, and the characters of it that are trained; `weights` has one for each span, or
    none: all are 1."""

    text: str
    spans: tuple[Span, ...]
    weights: tuple[float, ...] = ()

    @property
    def trained_throughout(self) -> bool:
        """Whether every character is trained, and all count alike."""
        return self.spans == ((0, len(self.text)),) and not self.weights


class RenderedRow(NamedTuple):
    """Texts laid end to end. `bare` asks for the tokens that the tokenizer puts around a text that no template has
    rendered."""

    texts: tuple[RenderedText, ...]
    bare: bool


class RenderedAnswers(NamedTuple):
    """The text of a prompt, with the assistant's cue where a template has one, and the whole text with each answer;
    `bare` as above."""

    prompt: str
    wholes: tuple[str, ...]
    bare: bool


class RowRenderer:
    """Renders rows for one model and one choice of what is trained. `template` is None for a model without one."""

    def __init__(self, template: ChatTemplate | None, options: PrepareOptions) -> None:
        self._template = template
        self._train_all = options.trains_everything
        self._last_only = options.train_on == "last-assistant"

    def render(self, row: Chat | Pair | Text) -> RenderedRow:
        """Return the texts of a row.

        Raises: InvalidData where the template refuses the chat, or its trained part cannot be found exactly.
        """
        if isinstance(row, Text):
            return RenderedRow(texts=(_trained(row.text),), bare=True)
        if isinstance(row, Pair):
            if self._template is None:
                # Encoded apart: at generation time the prompt ends where the model starts.
                prompt = _trained(row.prompt) if self._train_all else RenderedText(text=row.prompt, spans=())
                return RenderedRow(texts=(prompt, _trained(row.completion, row.weight)), bare=True)
            asked, reply = _exchange(row.prompt, row.completion)
            row = Chat(messages=[asked, reply | {"weight": _weight(row.weight)}])
        assert self._template is not None, "chats need a chat template"
        text, found = self._everything(self._template, row) if self._train_all else self._replies(self._template, row)
        spans, weights = tuple(span for span, _ in found), tuple(weight for _, weight in found)
        weights = weights if any(weight != 1 for weight in weights) else ()
        return RenderedRow(texts=(RenderedText(text=text, spans=spans, weights=weights),), bare=False)

    def render_answers(self, row: Answers) -> RenderedAnswers:
        """Return the texts of a row, each whole. Raises: InvalidData where the template refuses them, or there is none
        for messages."""
        turns = [row.prompt, *row.answers]
        if self._template is None:
            if not all(isinstance(turn, str) for turn in turns):
                raise InvalidData(
                    "the row holds messages, but the model has no chat template; add chat_template.jinja to the model "
                    "or write the prompt and the answers as texts"
                )
            prompt, *answers = map(str, turns)
            return RenderedAnswers(prompt=prompt, wholes=tuple(prompt + answer for answer in answers), bare=True)
        asked, *replies = (
            [{"role": "assistant" if index else "user", "content": turn, "weight": 1}]
            if isinstance(turn, str)
            else turn
            for index, turn in enumerate(turns)
        )
        cue, wholes = self._template.answers(asked, replies, row.tools)
        return RenderedAnswers(prompt=cue, wholes=tuple(wholes), bare=False)

    def _everything(self, template: ChatTemplate, row: Chat) -> tuple[str, list[tuple[Span, float]]]:
        text = template.render(row.messages, tools=row.tools)
        found: list[tuple[Span, float]] = []
        end = 0
        for index, message in enumerate(row.messages):
            if message["weight"] != 1:
                span = template.turn_span(row.messages, index, text, row.tools)
                found += [((end, span[0]), 1), (span, message["weight"])]
                end = span[1]
        found.append(((end, len(text)), 1))
        # Turns that are neighbours have nothing between them.
        return text, [(span, weight) for span, weight in found if weight and span[0] < span[1]]

    def _replies(self, template: ChatTemplate, row: Chat) -> tuple[str, list[tuple[Span, float]]]:
        text, found = template.assistant_spans(row.messages, row.tools)
        replies = [(message, span) for message, span in zip(row.messages, found, strict=True) if span is not None]
        if self._last_only:
            replies = replies[-1:]
        # An empty reply would train the end-of-turn token alone: to say nothing.
        return text, [
            (span, message["weight"])
            for message, span in replies
            if message["weight"]
            and (str(message["content"]).strip() or message.get("tool_calls") or message.get("reasoning_content"))
        ]


def _trained(text: str, weight: float | None = None) -> RenderedText:
    return RenderedText(text=text, spans=((0, len(text)),), weights=() if weight is None else (weight,))


def token_mask(text: str, encoding: Any, spans: Iterable[Span]) -> bytearray:
    """Return a byte for each token of a `tokenizers.Encoding` of `text`: 1 where it is in a span of characters.

    A token across the border of a span belongs to the side that holds its letters; on the other side there is white
    space only, such as the line break that `<|end|>` of some vocabularies swallows. White space on both sides belongs
    to what comes first.

    Raises: InvalidData where a token holds letters of both sides: then no mask is exact.
    """
    mask = bytearray(len(encoding))
    for first, last in _token_ranges(text, encoding, spans):
        mask[first:last] = b"\1" * (last - first)
    return mask


def token_weights(rendered: RenderedText, encoding: Any) -> array.array[float] | None:
    """Return the weight of each token of an encoded text, by the rule of `token_mask`; 1 where it is not trained. None:
    all are 1."""
    if not rendered.weights:
        return None
    weights = array.array("f", [1.0]) * len(encoding)
    ranges = _token_ranges(rendered.text, encoding, rendered.spans)
    for (first, last), weight in zip(ranges, rendered.weights, strict=True):
        weights[first:last] = array.array("f", [weight]) * (last - first)
    return weights


def _token_ranges(text: str, encoding: Any, spans: Iterable[Span]) -> Iterator[tuple[int, int]]:
    for start, end in spans:
        first, last = (_first_token(text, encoding, border) for border in (start, end)) if start < end else (0, 0)
        yield first, max(first, last)


def _first_token(text: str, encoding: Any, border: int) -> int:
    """Return the first token that belongs to what follows the border."""
    # A tokenizer may leave characters out, as white space at the ends.
    candidates = (encoding.char_to_token(index) for index in range(border, len(text)))
    token = next((token for token in candidates if token is not None), None)
    if token is None:
        return len(encoding)
    begin, end = encoding.token_to_chars(token)
    if begin == border:
        return int(token)
    if not text[border:end].strip():
        return int(token) + 1
    if not text[begin:border].strip():
        return int(token)
    # Guessing would train on half a cue, or leave out half a word.
    raise InvalidData(
        f"token {text[begin:end]!r} holds text that is trained and text that is not, so no mask is exact; put white "
        "space or a "
        "special token between the template's words and the reply's"
    )
