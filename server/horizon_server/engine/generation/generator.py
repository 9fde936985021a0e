"""Generates answers to a batch of prompts through streamed layers: all prompts advance layer by layer, so that the
weights cross the link once per token for the whole batch.

The prompts are computed first, then one token of each at a time with a cache of keys and values. A layer runs on one
sequence after the other, without padding: an answer has the same bits whatever else is in the batch.

Shapes: T = tokens of a sequence in one pass, N = those of all sequences, R = rows of the embedding in use, D = hidden
size. Source: FlexGen (arXiv 2303.06865), many sequences per visit of a layer's weights.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from horizon_server.engine.device.protocol import Device, Event
from horizon_server.engine.generation.cache import LayerCacheSize, SequenceCache
from horizon_server.engine.generation.choosing import choose, draw_for
from horizon_server.engine.generation.trial import try_cache
from horizon_server.engine.layer_stream import LayerStream, UnitRequest
from horizon_server.engine.layer_stubs import LayerCall
from horizon_server.engine.optimizer import Optimizer
from horizon_server.engine.template import Template, VisitNorms
from horizon_server.errors import DoesNotFit, InvalidData
from horizon_server.records.execution import NUM_SLOTS
from horizon_server.store.host_store import HostStore

Ended = Literal["stop", "length"]

# That the driver queues before compute has reached them, as in training.
_UNITS_AHEAD = 2


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How to answer. `temperature` 0 takes the likeliest token; `top_p` and `seed` matter only above it.

    An answer ends with the first of `stop_tokens`, or after `max_tokens`.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise _refused("max_tokens", f"is {self.max_tokens}; it must be at least 1")
        if not (0 <= self.temperature < math.inf):
            raise _refused("temperature", f"is {self.temperature}; it must be 0 or more")
        if not 0 < self.top_p <= 1:
            raise _refused("top_p", f"is {self.top_p}; it must be above 0 and at most 1")


@dataclass(frozen=True, kw_only=True)
class NewToken:
    """A token of the answer to a prompt. `ended` says why it is the last one, or None where it is not."""

    prompt: int
    token: int
    ended: Ended | None


@dataclass(frozen=True, kw_only=True)
class GeneratedAnswer:
    """The tokens after a prompt, the stop token included."""

    tokens: tuple[int, ...]
    ended: Ended


@dataclass(eq=False, kw_only=True)
class _Sequence:
    """A prompt and its answer. `new_ids` are the tokens that the next pass computes. `hidden_1TD` and `calls` are
    compute's."""

    prompt: int
    cache: SequenceCache
    new_ids: Tensor
    num_computed: int = 0
    num_generated: int = 0
    hidden_1TD: Tensor | None = None
    calls: list[LayerCall] = field(default_factory=list)


class TokenGenerator:
    """Answers prompts with the model of `template`, made without own attention, and the weights in `store`, which must
    not change.

    The cache is on the device where it fits beside the weights in flight, else in host memory: then each layer's part
    is copied to the device for its call and back, which changes the speed only. Weights of `resident_layers` stay on
    the device. Thread: one driving thread.
    """

    def __init__(
        self,
        template: Template,
        store: HostStore,
        device: Device,
        *,
        num_weight_slots: int = NUM_SLOTS,
        resident_layers: int = 0,
    ) -> None:
        """Try the model's cache on the real weights.

        Raises:
            InvalidModel: the layers do not compute with a cache what they compute without.
            DoesNotFit: the device has no room for the weights in flight.
        """
        assert template.needs_masks, "a cache needs a template made with own_attention=False"
        self._template, self._store, self._device = template, store, device
        if device.compute_dtype is not torch.float32:
            template.check_dtype(device.compute_dtype)
        device.adopt(store)
        template.place_buffers(device.place)
        template.train(False)
        # It never updates anything; the stream asks it when a unit may be read.
        updates = Optimizer(store, device, num_threads=1, table=None)
        self._stream = LayerStream(
            template, store, device, updates, num_slots=num_weight_slots, resident_layers=resident_layers
        )
        self._layers = [UnitRequest(unit_index=layer + 1) for layer in range(template.num_layers)]
        self._head = UnitRequest(unit_index=template.layout.units[-1].index)
        self._place = device.place(torch.empty(0)).device
        self._cache_sizes = try_cache(template, device, self._stream)
        self.cache_on_device = True
        """Where the cache of the last batch was."""
        self._running: list[_Sequence] = []
        # What the batch in progress has on the device's account.
        self._charged_bytes = 0
        self._is_released = False

    def cache_bytes(self, num_tokens: int) -> int:
        """What the cache of one sequence of `num_tokens` takes at most, in all layers."""
        return sum(self._layer_cache_bytes(size, num_tokens) for size in self._cache_sizes)

    def generate(self, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> list[GeneratedAnswer]:
        """The answer to each prompt. Raises as `stream` does."""
        tokens: list[list[int]] = [[] for _ in prompts]
        ended: list[Ended] = ["length"] * len(prompts)
        for new in self.stream(prompts, options):
            tokens[new.prompt].append(new.token)
            ended[new.prompt] = new.ended or "length"
        return [GeneratedAnswer(tokens=tuple(ids), ended=why) for ids, why in zip(tokens, ended, strict=True)]

    def stream(self, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> Generator[NewToken, None, None]:
        """Every token as it is known: one of each prompt that has not ended, then the next one of each.

        Raises:
            InvalidData: a prompt is empty, holds a token outside the vocabulary, or is too long with its answer.
            DoesNotFit: not even one layer's part of the cache fits on the device.
        """
        self._check(prompts, options)
        self._take_device()
        longest = [len(prompt) + options.max_tokens for prompt in prompts]
        with self._room(longest, num_prompt_tokens=sum(map(len, prompts))):
            self._running = [
                _Sequence(
                    prompt=index,
                    cache=SequenceCache(self._template.config, num_layers=self._template.num_layers),
                    new_ids=torch.tensor(prompt, dtype=torch.int64),
                )
                for index, prompt in enumerate(prompts)
            ]
            while self._running:
                # The caller may have released it after the last token.
                self._take_device()
                chosen = self._pass(self._running, options)
                still, news = [], []
                for sequence, token in zip(self._running, chosen, strict=True):
                    sequence.num_computed += sequence.new_ids.numel()
                    sequence.num_generated += 1
                    sequence.new_ids = torch.tensor([token])
                    ended: Ended | None = None
                    if token in options.stop_tokens:
                        ended = "stop"
                    elif sequence.num_generated == options.max_tokens:
                        ended = "length"
                    if ended is None:
                        still.append(sequence)
                    news.append(NewToken(prompt=sequence.prompt, token=token, ended=ended))
                # Those that ended give their cache's memory back here.
                self._running = still
                yield from news

    def release_device(self) -> None:
        """Free the device's memory for other work, until the next token takes it again; not while the token of a batch
        is computed.

        The weights may change until the next batch begins: it copies them again. No answer depends on it.
        """
        if self._is_released:
            return
        self.close()
        self._move_caches(torch.device("cpu"))
        self._device.charge("activations", -self._charged_bytes)
        self._device.release_memory()
        self._is_released = True

    def _take_device(self) -> None:
        if not self._is_released:
            return
        self._device.adopt(self._store)
        self._stream.open()
        self._device.charge("activations", self._charged_bytes)
        self._move_caches(self._place)
        self._is_released = False

    def _move_caches(self, place: torch.device) -> None:
        # Elsewhere each part is in host memory between two calls of its layer.
        if self.cache_on_device:
            for sequence in self._running:
                for layer in range(self._template.num_layers):
                    sequence.cache.to(layer, place)

    def close(self) -> None:
        """Free the device's memory. The caller closes the device."""
        for queue in (self._device.h2d, self._device.compute, self._device.d2h):
            queue.record().wait()
        self._stream.close()

    def _check(self, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> None:
        template = self._template
        limits = [limit for limit in (template.max_document_tokens, template.packing_limit) if limit is not None]
        limit = min(limits, default=None)
        for index, prompt in enumerate(prompts):
            name = f"prompts[{index}]"
            if not prompt:
                raise _refused(name, "has no token; a prompt needs at least one")
            wrong = next((token for token in prompt if not 0 <= token < template.vocab_size), None)
            if wrong is not None:
                raise _refused(
                    name, f"holds token {wrong}; the model's vocabulary has {template.vocab_size} tokens, from 0"
                )
            if limit is not None and len(prompt) + options.max_tokens > limit:
                # At the second limit the architecture counts positions differently, for the tokens in the cache too.
                raise _refused(
                    name,
                    f"has {len(prompt)} tokens, and max_tokens is {options.max_tokens}; together they may be at most "
                    f"{limit} "
                    "for this model; shorten the prompt or lower max_tokens",
                )

    def _layer_cache_bytes(self, size: LayerCacheSize, num_tokens: int) -> int:
        return size.num_bytes(num_tokens, item_bytes=self._device.compute_dtype.itemsize)

    @contextmanager
    def _room(self, longest: Sequence[int], *, num_prompt_tokens: int) -> Iterator[None]:
        """Account for the hidden states and the cache of a batch, and decide where the cache is."""
        device, template = self._device, self._template
        # A layer's input and its output.
        hidden_bytes = 2 * num_prompt_tokens * template.hidden_size * device.compute_dtype.itemsize
        all_bytes = sum(map(self.cache_bytes, longest))
        # On the host, the device has one layer's part of one sequence.
        most_tokens = max(longest, default=0)
        one_part = max((self._layer_cache_bytes(size, most_tokens) for size in self._cache_sizes), default=0)
        charged = hidden_bytes + all_bytes
        self.cache_on_device = True
        try:
            device.charge("activations", charged)
        except DoesNotFit:
            self.cache_on_device, charged = False, hidden_bytes + one_part
            device.charge("activations", charged)
        self._charged_bytes = charged
        try:
            yield
        finally:
            # Also where the caller stops reading: nothing of the batch is in flight between two tokens.
            self._running, self._charged_bytes = [], 0
            if not self._is_released:
                device.charge("activations", -charged)

    def _pass(self, sequences: Sequence[_Sequence], options: GenerationOptions) -> list[int]:
        """Compute the new tokens of all sequences, and return the token that follows in each."""
        template, device = self._template, self._device
        ids_N = torch.cat([sequence.new_ids for sequence in sequences])
        rows_R = None
        row_ids_N = ids_N
        if template.embeds_by_rows:
            rows_R, row_ids_N = torch.unique(ids_N, return_inverse=True)
        chosen_S = device.place(torch.zeros(len(sequences), dtype=torch.int64))
        requests = [UnitRequest(unit_index=0, rows_R=rows_R), *self._layers, self._head]
        done: deque[Event] = deque()
        for request, flat in self._stream.walk(requests):
            if request is requests[0]:
                self._enqueue_embed(sequences, flat, rows_R, row_ids_N)
            elif request is self._head:
                self._enqueue_head(sequences, flat, chosen_S, options)
            else:
                self._enqueue_layer(sequences, request.unit_index - 1, flat)
            done.append(device.compute.record())
            if len(done) > _UNITS_AHEAD:
                done.popleft().wait()
        tokens_S = torch.zeros(len(sequences), dtype=torch.int64)
        device.d2h.wait(device.compute.record())
        device.read_back(chosen_S, tokens_S)
        device.d2h.record().wait()
        device.raise_failure()
        return [int(token) for token in tokens_S]

    def _enqueue_embed(
        self, sequences: Sequence[_Sequence], flat: Tensor, rows_R: Tensor | None, row_ids_N: Tensor
    ) -> None:
        template = self._template

        def embed(sequence: _Sequence, row_ids_T: Tensor, position_ids_T: Tensor) -> None:
            parameters = {place.name: place.piece.read(flat) for place in template.places_besides_table}
            if rows_R is None:
                table = template.table_place.piece.read(flat)
            else:
                table = flat[: rows_R.numel() * template.hidden_size].view(-1, template.hidden_size)
            parameters[template.table_place.name] = table
            with torch.no_grad():
                hidden_1TD, sequence.calls = template.embed(
                    parameters, row_ids_T, position_ids_T, cache=sequence.cache.cache
                )
            # Not a view into the slot, which has other weights soon.
            sequence.hidden_1TD = hidden_1TD.clone()

        start = 0
        for sequence in sequences:
            end = start + sequence.new_ids.numel()
            positions_T = torch.arange(sequence.num_computed, sequence.num_computed + end - start)
            row_ids_T = self._device.place(row_ids_N[start:end].contiguous())
            work = partial(embed, sequence, row_ids_T, self._device.place(positions_T))
            self._device.compute.submit(work, label="generate 0")
            start = end

    def _enqueue_layer(self, sequences: Sequence[_Sequence], layer: int, flat: Tensor) -> None:
        template, norms = self._template, VisitNorms(self._template, layer)

        def forward(sequence: _Sequence) -> None:
            assert sequence.hidden_1TD is not None
            parameters = norms.beside({place.name: place.piece.read(flat) for place in template.places[layer + 1]})
            cache = sequence.cache
            if not self.cache_on_device:
                cache.to(layer, self._place)
            with torch.no_grad():
                call = cache.call(layer, sequence.calls[layer])
                sequence.hidden_1TD = template.layer(layer, parameters, sequence.hidden_1TD, call)
            cache.compact(layer)
            if not self.cache_on_device:
                cache.to(layer, torch.device("cpu"))

        for sequence in sequences:
            self._device.compute.submit(partial(forward, sequence), label=f"generate {layer + 1}")

    def _enqueue_head(
        self, sequences: Sequence[_Sequence], flat: Tensor, chosen_S: Tensor, options: GenerationOptions
    ) -> None:
        template = self._template

        def head(index: int, sequence: _Sequence) -> None:
            assert sequence.hidden_1TD is not None
            parameters = {place.name: place.piece.read(flat) for place in template.places[self._head.unit_index]}
            draw = draw_for(options.seed, sequence.prompt, sequence.num_generated)
            with torch.no_grad():
                logits_1V = template.head(parameters, sequence.hidden_1TD[:, -1:])
                chosen_S[index] = choose(logits_1V[0], temperature=options.temperature, top_p=options.top_p, draw=draw)
            sequence.hidden_1TD, sequence.calls = None, []

        for index, sequence in enumerate(sequences):
            self._device.compute.submit(partial(head, index, sequence), label="generate head")


def _refused(name: str, description: str) -> InvalidData:
    return InvalidData.of(name, f"{name} {description}")
