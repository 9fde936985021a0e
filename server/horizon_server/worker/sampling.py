"""The child that answers prompts from a checkpoint or model folder: `python -m horizon_server.worker.sampling`.

It loads the weights alone into a store of its own and computes on the host in fp32, at a lower priority than training:
the node's jobs have the GPUs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from horizon_formats.formats import DatasetFormat
from horizon_formats.row_checks import check_prompt_row
from horizon_server.children.entry import EventWriter, serve
from horizon_server.codec import from_plain, to_plain
from horizon_server.datasets.tokens.chat_template import processor_time_limit
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.rendering import Chat, normalise
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.generation.generator import TokenGenerator, generation_template
from horizon_server.engine.generation.sequences import GenerationOptions, NewToken, ScoredPrompt
from horizon_server.engine.template import Template
from horizon_server.errors import DoesNotFit, FieldViolation, InvalidData, InvalidModel, naming
from horizon_server.events import SampledPrompt, SampledText
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.sampling import sample_layout, trained_layout
from horizon_server.records.sample import (
    MAX_MESSAGES,
    MAX_PROMPT_TOKENS,
    SampleAdapter,
    SampleFigures,
    SampleOptions,
    SamplePrompt,
    SampleRequest,
)
from horizon_server.store.adapter_files import AdapterFolder, read_adapter_folder
from horizon_server.store.adapter_load import merge_into
from horizon_server.store.base_digest import DigestBook, check_base
from horizon_server.store.generation_config import listed_ends
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model
from horizon_server.texts import size_text
from horizon_server.worker import let_launchers_run

# Training on the same node has the processors first.
_NICENESS = 10
# How often text of one answer is sent.
_TEXT_EVERY_S = 0.2
# Processor time for the prompts of a call, which take milliseconds.
RENDER_S = 30.0
# What a tokenizer writes for bytes that are not a character yet.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Answerer:
    """Answers requests one after the other. The first one says which model answers; it stays in memory for the
    others."""

    def __init__(self) -> None:
        self._codec: TextCodec | None = None
        self._generator: TokenGenerator | None = None

    def work(self, plain: Any, events: EventWriter) -> Any:
        """Send the text of every answer as it comes, and return what it took."""
        let_launchers_run()
        request = from_plain(SampleRequest, plain)
        names = {request.folder: "the checkpoint" if request.adapter is None else "the base model"}
        if request.adapter is not None:
            names[request.adapter.folder] = "the checkpoint"
        with naming(names):
            return to_plain(self.answer(request, events))

    def answer(self, request: SampleRequest, events: EventWriter) -> SampleFigures:
        """Answer the prompts of a request.

        Raises:
            InvalidModel: the folder cannot be loaded, or its model cannot generate; it names the architecture.
            InvalidData: a prompt cannot be rendered, or is too long; it names the prompt.
            DoesNotFit: the prompts with their answers are too many and too long.
        """
        start_s = time.perf_counter()
        folder, options = request.folder, request.options
        codec = self._codec = self._codec or TextCodec.from_folder(folder)
        # Before the weights are read, which takes far longer. A template that never ends must not keep other callers
        # waiting.
        endless = InvalidModel(
            f"the model's chat template takes more than {RENDER_S:g} s for these prompts; send fewer, or correct the "
            "template"
        )
        with processor_time_limit(RENDER_S, endless):
            prompts = [encoded(codec, index, prompt) for index, prompt in enumerate(request.prompts)]
        generator = self._generator = self._generator or _generator(request)
        of_prompts = (generator.cache_bytes(len(prompt) + options.max_tokens) for prompt in prompts)
        needed_bytes = options.num_samples * sum(of_prompts)
        if needed_bytes > request.cache_bytes:
            raise DoesNotFit(
                f"keys and values of {len(prompts)} prompts with answers of up to {options.max_tokens} tokens take "
                f"{size_text(needed_bytes)}, and {size_text(request.cache_bytes)} are allowed; send fewer prompts at a "
                "time, or lower "
                "max_tokens"
            )
        how = generation_options(options, stop_tokens(request.answers or folder, codec))
        loaded_s = time.perf_counter()
        answering = Answering(generator, prompts, how, codec, stop=options.stop, send=events.send)
        while answering.step():
            pass
        duration_s = time.perf_counter() - loaded_s
        num_tokens = answering.num_tokens
        return SampleFigures(
            num_prompt_tokens=sum(map(len, prompts)),
            num_tokens=num_tokens,
            load_s=loaded_s - start_s,
            duration_s=duration_s,
            tokens_per_second=num_tokens / duration_s,
        )


def _generator(request: SampleRequest) -> TokenGenerator:
    template, store = _loaded(request)
    return TokenGenerator(template, store, HostDevice(num_threads=request.num_threads))


def _loaded(request: SampleRequest) -> tuple[Template, HostStore]:
    """The weights that answer, and the model that computes with them."""
    folder, asked = request.folder, request.adapter
    adapter = None if asked is None else _adapter(folder, asked)
    spec = None if asked is None else asked.spec
    # Next to its base as the evaluations of its job, so that no bit differs from them.
    layout = sample_layout(open_model_folder(folder), adapter) if spec is None else trained_layout(folder, spec.train)
    recipe = None if spec is None else spec.train.recipe
    template = generation_template(
        lambda own: Template.from_folder(folder, layout=layout, recipe=recipe, own_attention=own)
    )
    store = HostStore.allocate(layout, grad_dtype=None, num_threads=request.num_threads)
    if spec is not None:
        assert adapter is not None
        names = {place.name for _, place in layout.tensors() if place.adapts}
        load_model(store, folder, adapters=adapter.tensors(names))
    else:
        load_model(store, folder)
        if adapter is not None:
            merge_into(store, adapter)
    return template, store


def _adapter(base: Path, asked: SampleAdapter) -> AdapterFolder:
    check_base("the checkpoint's adapter", asked.base_sha256, DigestBook(asked.digests).digest(base))
    return read_adapter_folder(asked.folder)


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
    """The answers to some prompts while their tokens come, as text. Closed by `drop` where it is given up."""

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
        self._ticket = generator.add(prompts, options)
        self._writers = {
            (prompt, sample): _AnswerWriter(prompt, sample, codec, stop, send)
            for prompt in range(len(prompts))
            for sample in range(options.num_samples)
        }

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers so far."""
        return sum(writer.num_tokens for writer in self._writers.values())

    def step(self) -> bool:
        """Have the next token of every answer. Returns whether more come."""
        for _, new in self._generator.step():
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
                self._generator.end(self._ticket, new.prompt, new.sample)
        return self._generator.is_busy(self._ticket)


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


if __name__ == "__main__":
    sys.exit(serve(Answerer().work, who="the child that answers prompts", niceness=_NICENESS, stays=True))
