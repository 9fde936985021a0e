"""Answers as text: prompts in tokens, what the engine is asked for, and the pieces of text that its tokens become."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from horizon_formats.formats import DatasetFormat
from horizon_formats.row_checks import check_prompt_row
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.rendering import Chat, normalise
from horizon_server.engine.generation.generator import TokenGenerator
from horizon_server.engine.generation.sequences import GenerationOptions, New, NewToken, ScoredPrompt
from horizon_server.errors import FieldViolation, InvalidData
from horizon_server.events import SampledPrompt, SampledText
from horizon_server.records.sample import MAX_MESSAGES, MAX_PROMPT_TOKENS, SampleOptions, SamplePrompt
from horizon_server.store.generation_config import listed_ends

# How often text of one answer is sent.
_TEXT_EVERY_S = 0.2
# What a tokenizer writes for bytes that are not a character yet.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def encoded(codec: TextCodec, index: int, prompt: SamplePrompt) -> list[int]:
    """The tokens of a prompt: of a chat as the model's template renders it, with the assistant's cue.

    Raises:
        InvalidData: the model has no chat template, the template refuses the chat, or there are too many tokens.
    """
    name = f"prompts[{index}]"
    if prompt.ids:
        ids = list(prompt.ids)
    elif prompt.text:
        ids = [*codec.leading_ids, *codec.encode_ids(prompt.text)]
    elif codec.chat_template is None:
        raise _refused(name, "has messages, and the model has no chat template; send a text instead")
    else:
        chat = _chat(name, prompt)
        # The template writes the tokens before a text by itself.
        ids = codec.encode_ids(codec.chat_template.render(chat.messages, tools=chat.tools, add_generation_prompt=True))
    if not 1 <= len(ids) <= MAX_PROMPT_TOKENS:
        raise _refused(name, f"has {len(ids)} tokens; it must have 1 to {MAX_PROMPT_TOKENS}")
    codec.check_ids(ids)
    return ids


def _chat(name: str, prompt: SamplePrompt) -> Chat:
    """The chat of a prompt as templates read it: one with tools as the same row of a dataset."""
    if not prompt.chat_json:
        return Chat(messages=[dataclasses.asdict(message) for message in prompt.messages])
    try:
        row = json.loads(prompt.chat_json)
    except (ValueError, RecursionError) as error:
        raise _refused(name, f"has a chat_json that is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise _refused(name, "has a chat_json that is not an object with messages")
    if problems := check_prompt_row(row):
        raise _refused(name, f"cannot be used: {problems[0][0]} {problems[0][1]}")
    if len(row["messages"]) > MAX_MESSAGES:
        raise _refused(name, f"has {len(row['messages'])} messages; at most {MAX_MESSAGES} are allowed")
    chat = normalise(row, DatasetFormat.MESSAGES, {})
    assert isinstance(chat, Chat), "a row of messages is a chat"
    return chat


def stop_tokens(folder: Path, codec: TextCodec) -> frozenset[int]:
    """What ends an answer: by generation_config.json, else by config.json, and the tokenizer's own end-of-text
    token."""
    return frozenset(listed_ends(folder)) | ({codec.eos_id} if codec.eos_id is not None else set())


def generation_options(options: SampleOptions, stops: frozenset[int]) -> GenerationOptions:
    """Return what the engine is asked for; `stops` are the tokens that end the model's answers."""
    return GenerationOptions(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        seed=options.seed,
        num_samples=options.num_samples,
        stop_tokens=stops | frozenset(options.stop_ids),
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
    )


Piece = SampledText | SampledPrompt


class Answering:
    """The answers to some prompts while their tokens come, as text. `ticket` is the generator's."""

    def __init__(
        self,
        generator: TokenGenerator,
        prompts: Sequence[Sequence[int]],
        options: GenerationOptions,
        codec: TextCodec,
        *,
        stop: Sequence[str],
        send: Callable[[Piece], None],
    ) -> None:
        self._generator, self._prompts, self._codec, self._send = generator, prompts, codec, send
        self.ticket = generator.add(prompts, options)
        self._writers = {
            (prompt, sample): _AnswerWriter(prompt, sample, codec, stop, send)
            for prompt in range(len(prompts))
            for sample in range(options.num_samples)
        }

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(writer.num_tokens for writer in self._writers.values())

    @property
    def is_busy(self) -> bool:
        """Whether more tokens come."""
        return self._generator.is_busy(self.ticket)

    def answer(self) -> None:
        """Have all tokens, where no other prompts are being answered."""
        while self.is_busy:
            for _, new in self._generator.step():
                self.take(new)

    def take(self, new: New) -> None:
        """Send what a token or a score that the generator has found adds."""
        if isinstance(new, ScoredPrompt):
            ids = tuple(self._prompts[new.prompt])
            self._send(
                SampledPrompt(
                    prompt=new.prompt,
                    tokens=ids,
                    texts=_texts(self._codec, ids),
                    logprobs=new.logprobs,
                    top=new.top,
                    top_texts=tuple(_texts(self._codec, [token for token, _ in top]) for top in new.top),
                )
            )
        elif self._writers[new.prompt, new.sample].add(new):
            self._generator.end(self.ticket, new.prompt, new.sample)

    def drop(self) -> None:
        """Give them up."""
        self._generator.drop(self.ticket)


class _AnswerWriter:
    """Sends the text of one answer, a piece at a time."""

    def __init__(
        self, prompt: int, sample: int, codec: TextCodec, stop: Sequence[str], send: Callable[[Piece], None]
    ) -> None:
        self._prompt, self._sample, self._codec, self._stop, self._send = prompt, sample, codec, stop, send
        # What may be the beginning of a text that ends the answer is not sent.
        self._held_back = max((len(text) - 1 for text in stop), default=0)
        self._tokens: list[int] = []
        self._news: list[NewToken] = []
        self._num_sent = 0
        self._sent_s = float("-inf")
        self.num_tokens = 0

    def add(self, new: NewToken) -> bool:
        """Add a token. Returns whether a text has ended the answer before its last token."""
        self.num_tokens += 1
        self._news.append(new)
        # The reader gets the reason of the end; the token that ended the answer is no text.
        if new.ended != "stop":
            self._tokens.append(new.token)
        now_s = time.monotonic()
        if not self._stop and not new.ended and now_s - self._sent_s < _TEXT_EVERY_S:
            return False
        # The whole again: what a token adds depends on those before it.
        text: str = self._codec.tokenizer.decode(self._tokens, skip_special_tokens=True)
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        ended, is_stopped = new.ended or "", bool(found)
        if is_stopped:
            text, ended = text[: min(found)], "stop"
        elif not ended:
            text = text.rstrip(_INCOMPLETE)
            text = text[: max(self._num_sent, len(text) - self._held_back)]
        if not ended and now_s - self._sent_s < _TEXT_EVERY_S:
            return False
        piece = text[self._num_sent :]
        if piece or ended:
            self._send_piece(piece, ended)
            self._num_sent, self._sent_s = max(self._num_sent, len(text)), now_s
        return is_stopped and new.ended is None

    def _send_piece(self, text: str, ended: str) -> None:
        news, self._news = self._news, []
        has_logprobs, has_top = any(new.logprob is not None for new in news), any(new.top for new in news)
        self._send(
            SampledText(
                prompt=self._prompt,
                sample=self._sample,
                text=text,
                num_tokens=self.num_tokens,
                ended=ended,
                tokens=tuple(new.token for new in news),
                texts=_texts(self._codec, [new.token for new in news]),
                logprobs=tuple(new.logprob or 0.0 for new in news) if has_logprobs else (),
                top=tuple(new.top for new in news) if has_top else (),
                top_texts=tuple(_texts(self._codec, [token for token, _ in new.top]) for new in news)
                if has_top
                else (),
            )
        )


def _texts(codec: TextCodec, tokens: Iterable[int]) -> tuple[str, ...]:
    """The text of each token by itself, also of those that are no text of an answer."""
    return tuple(codec.tokenizer.decode([token], skip_special_tokens=False) for token in tokens)


def _refused(name: str, what: str) -> InvalidData:
    return InvalidData(f"{name} {what}", violations=[FieldViolation(field=name, description=f"{name} {what}")])
