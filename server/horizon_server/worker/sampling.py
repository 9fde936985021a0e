"""The child that answers prompts from a checkpoint or model folder: `python -m horizon_server.worker.sampling`.

It loads the weights alone into a store of its own and computes on the host in fp32, at a lower priority than training:
the node's jobs have the GPUs.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
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
from horizon_server.engine.generation.generator import TokenGenerator
from horizon_server.engine.generation.sequences import GenerationOptions
from horizon_server.engine.template import Template
from horizon_server.errors import DoesNotFit, FieldViolation, InvalidData, InvalidModel, naming
from horizon_server.events import SampledText
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.sampling import sample_layout, trained_layout
from horizon_server.records.sample import (
    MAX_MESSAGES,
    MAX_PROMPT_TOKENS,
    SampleAdapter,
    SampleFigures,
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
        needed_bytes = sum(generator.cache_bytes(len(prompt) + options.max_tokens) for prompt in prompts)
        if needed_bytes > request.cache_bytes:
            raise DoesNotFit(
                f"keys and values of {len(prompts)} prompts with answers of up to {options.max_tokens} tokens take "
                f"{size_text(needed_bytes)}, and {size_text(request.cache_bytes)} are allowed; send fewer prompts at a "
                "time, or lower "
                "max_tokens"
            )
        how = GenerationOptions(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            stop_tokens=stop_tokens(request.answers or folder, codec),
        )
        loaded_s = time.perf_counter()
        writers = [_AnswerWriter(index, codec, events) for index in range(len(prompts))]
        for new in generator.stream(prompts, how):
            # The reader gets the reason of the end; the token that ended the answer is no text.
            writers[new.prompt].add(None if new.ended == "stop" else new.token, ended=new.ended or "")
        duration_s = time.perf_counter() - loaded_s
        num_tokens = sum(writer.num_tokens for writer in writers)
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
    template = Template.from_folder(folder, layout=layout, recipe=recipe, own_attention=False)
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


class _AnswerWriter:
    """Sends the text of one answer, a piece at a time."""

    def __init__(self, prompt: int, codec: TextCodec, events: EventWriter) -> None:
        self._prompt, self._codec, self._events = prompt, codec, events
        self._tokens: list[int] = []
        self._num_sent = 0
        self._sent_s = float("-inf")
        self.num_tokens = 0

    def add(self, token: int | None, *, ended: str) -> None:
        """Add a token, or None for one that is no text; `ended` is empty while more come."""
        self.num_tokens += 1
        if token is not None:
            self._tokens.append(token)
        now_s = time.monotonic()
        if not ended and now_s - self._sent_s < _TEXT_EVERY_S:
            return
        # The whole again: what a token adds depends on those before it.
        text: str = self._codec.tokenizer.decode(self._tokens, skip_special_tokens=True)
        if not ended:
            text = text.rstrip(_INCOMPLETE)
        piece = text[self._num_sent :]
        if piece or ended:
            self._events.send(SampledText(prompt=self._prompt, text=piece, num_tokens=self.num_tokens, ended=ended))
            self._num_sent, self._sent_s = len(text), now_s


def _refused(name: str, what: str) -> InvalidData:
    return InvalidData(f"{name} {what}", violations=[FieldViolation(field=name, description=f"{name} {what}")])


if __name__ == "__main__":
    sys.exit(serve(Answerer().work, who="the child that answers prompts", niceness=_NICENESS, stays=True))
