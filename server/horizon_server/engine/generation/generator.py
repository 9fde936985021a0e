"""Generates answers to batches of prompts through streamed layers: all sequences advance layer by layer, so that the
weights cross the link once per token for all of them.

Prompts are computed first, then one token of each at a time, with what is kept of the sequences. Where the model has
our attention, the new tokens of all sequences are one row, and every product is one for all of them; each sequence
attends to its own tokens. Other models run one sequence after the other, with the cache of transformers and without
padding. Prompts may be added, and dropped, between two tokens of the others.

The bits of an answer depend on what else is in the batch where sequences are one row, because products of other sizes
add up in another order; the same batch gives the same bits.

Shapes: N = new tokens of all sequences in a pass, T = those of one, R = rows of the embedding in use, D = hidden size,
C = tokens that are chosen in a pass, P = tokens of prompts that are scored in it, V = vocabulary.
Source: FlexGen (arXiv 2303.06865), many sequences per visit of a layer's weights; Orca (OSDI 2022), a batch that
changes between two tokens.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable, Collection, Generator
from collections.abc import Sequence as SequenceOf
from functools import partial

import torch
from torch import Tensor

from horizon_server.engine.attention.kept import KeptKeys, places_of
from horizon_server.engine.cross_entropy import log_probabilities
from horizon_server.engine.device.protocol import Device, Event
from horizon_server.engine.generation.cache import LayerCacheSize, SequenceCache
from horizon_server.engine.generation.choosing import Choice, choose
from horizon_server.engine.generation.found import Found, add_scores, new_token, scored_prompt, tensors, write_top
from horizon_server.engine.generation.kept_trial import try_kept
from horizon_server.engine.generation.paged import PagedAnswers
from horizon_server.engine.generation.passes import Pass, RowPass, SequencePass
from horizon_server.engine.generation.sequences import (
    Ended,
    GeneratedAnswer,
    GenerationOptions,
    New,
    NewToken,
    ScoredPrompt,
    Sequence,
    in_pieces,
    refused,
)
from horizon_server.engine.generation.trial import try_cache
from horizon_server.engine.layer_stream import LayerStream, UnitRequest
from horizon_server.engine.optimizer import Optimizer
from horizon_server.engine.paged_experts import Paging
from horizon_server.engine.template import Template
from horizon_server.errors import DoesNotFit
from horizon_server.planning.working_memory import logits_chunk_tokens
from horizon_server.records.execution import NOTHING_STAYS, NUM_SLOTS, Residency
from horizon_server.store.host_store import HostStore

# That the driver queues before compute has reached them, as in training.
_UNITS_AHEAD = 2
_LEAST_SHARED = 16
"""Tokens that prompts have in common at their beginning, from which on these are computed once."""


def generation_template(make: Callable[[bool], Template]) -> Template:
    """Return a model that can be computed token by token. `make` makes it, with own attention or without."""
    template = make(True)
    own = template.own_attention
    return template if own is None or own.is_everywhere else make(False)


class TokenGenerator:
    """Answers prompts with the model of `template` (see `generation_template`) and the weights in `store`, which must
    not change while prompts are being answered.

    What is kept of sequences is on the device where it fits beside the weights in flight, else in host memory: then
    each layer's part is copied to the device for its call and back, which changes the speed only. `residency` says
    which weights stay on the device. A pass computes at most `chunk_tokens` of prompts, where they are one row; 0 is
    no limit. With `expert_page_elements`, experts come in pages of that size, as in training; of few tokens, only those
    that some token of the pass visits. Thread: one driving thread.
    """

    def __init__(
        self,
        template: Template,
        store: HostStore,
        device: Device,
        *,
        num_weight_slots: int = NUM_SLOTS,
        residency: Residency = NOTHING_STAYS,
        chunk_tokens: int = 0,
        expert_page_elements: int = 0,
    ) -> None:
        """Try on the real weights whether the model can be computed token by token.

        Raises:
            InvalidModel: the layers compute something else token by token, or their experts cannot be in pages.
            DoesNotFit: the device has no room for the weights in flight.
        """
        self._template, self._store, self._device, self._chunk_tokens = template, store, device, chunk_tokens
        own = template.own_attention
        assert own is None or own.is_everywhere, "made by generation_template"
        self._packs = own is not None
        """Whether the new tokens of all sequences are one row."""
        if device.compute_dtype is not torch.float32:
            template.check_dtype(device.compute_dtype)
        self._page_elements = expert_page_elements
        device.adopt(store, page_elements=expert_page_elements)
        template.place_buffers(device.place)
        template.train(False)
        # It never updates anything; the stream asks it when a unit may be read.
        updates = Optimizer(store, device, num_threads=1, table=None)
        paging = Paging.of(template, expert_page_elements)
        self._stream = LayerStream(
            template, store, device, updates, num_slots=num_weight_slots, residency=residency, paging=paging
        )
        self._paged = PagedAnswers(template, device, self._stream)
        self._layers = [UnitRequest(unit_index=layer + 1) for layer in range(template.num_layers)]
        self._head = UnitRequest(unit_index=template.layout.units[-1].index)
        self._place = device.place(torch.empty(0)).device
        self._head_chunk = logits_chunk_tokens(template.vocab_size, device.name)
        try_model = try_kept if self._packs else try_cache
        self._cache_sizes = try_model(template, device, self._stream)
        self.cache_on_device = True
        """Where the cache of the last batch was."""
        self._kept = KeptKeys(template.num_layers)
        self._running: list[Sequence] = []
        self._tickets = itertools.count()
        # What prompts that are being answered have on the device's account, by ticket.
        self._charged: dict[int, int] = {}
        self._is_released = False

    def cache_bytes(self, num_tokens: int) -> int:
        """What the cache of one sequence of `num_tokens` takes at most, in all layers."""
        if self._packs:
            num_tokens = places_of(num_tokens)
        return sum(self._layer_cache_bytes(size, num_tokens) for size in self._cache_sizes)

    def generate(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        options: GenerationOptions,
        *,
        on_score: Callable[[ScoredPrompt], None] = lambda _: None,
    ) -> list[GeneratedAnswer]:
        """The answers, `num_samples` to each prompt, one prompt after the other. `on_score` gets each prompt's scores,
        where they were asked for. Raises as `stream` does."""
        number = range(len(prompts) * options.num_samples)
        tokens: list[list[int]] = [[] for _ in number]
        logprobs: list[list[float]] = [[] for _ in number]
        ended: list[Ended] = ["length" for _ in number]
        for new in self.stream(prompts, options, on_score=on_score):
            place = new.prompt * options.num_samples + new.sample
            tokens[place].append(new.token)
            if new.logprob is not None:
                logprobs[place].append(new.logprob)
            ended[place] = new.ended or "length"
        return [
            GeneratedAnswer(tokens=tuple(ids), logprobs=tuple(numbers), ended=why)
            for ids, numbers, why in zip(tokens, logprobs, ended, strict=True)
        ]

    def stream(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        options: GenerationOptions,
        *,
        on_score: Callable[[ScoredPrompt], None] = lambda _: None,
    ) -> Generator[NewToken, None, None]:
        """Every token as it is known: one of each answer that has not ended, then the next one of each.

        Raises:
            InvalidData: a prompt is empty, holds a token outside the vocabulary, or is too long with its answer.
            DoesNotFit: not even one layer's part of the cache fits on the device.
        """
        ticket = self.add(prompts, options)
        try:
            while self.is_busy(ticket):
                for owner, new in self.step():
                    assert owner == ticket, "a stream is alone"
                    if isinstance(new, ScoredPrompt):
                        on_score(new)
                    else:
                        yield new
        finally:
            # Also where the caller stops reading: nothing of the batch is in flight between two tokens.
            self.drop(ticket)

    def add(self, prompts: SequenceOf[SequenceOf[int]], options: GenerationOptions) -> int:
        """Have prompts answered together with those that are being answered. Returns a ticket, by which `step` says
        whose a token is.

        Raises:
            InvalidData: as `stream`.
            DoesNotFit: not even one layer's part of the cache fits on the device, or there is no room beside the other
                prompts.
        """
        self._check(prompts, options)
        self._take_device()
        self._template.train(False)
        longest = [len(prompt) + options.max_tokens for prompt in prompts for _ in range(options.num_samples)]
        ticket = next(self._tickets)
        self._charge(ticket, longest, num_prompt_tokens=sum(map(len, prompts)))
        try:
            self._running += self._begun(ticket, prompts, options)
        except BaseException:
            self.drop(ticket)
            raise
        return ticket

    def drop(self, ticket: int) -> None:
        """Answer the prompts of a ticket no more, and free what they hold."""
        self._give_back([one.place for one in self._running if one.ticket == ticket and not one.followers])
        self._running = [sequence for sequence in self._running if sequence.ticket != ticket]
        charged = self._charged.pop(ticket, 0)
        if not self._is_released:
            self._device.charge("activations", -charged)

    def is_busy(self, ticket: int) -> bool:
        """Whether answers of a ticket have tokens to come."""
        return ticket in self._charged

    def end(self, ticket: int, prompt: int, sample: int) -> None:
        """End one answer before its last token; the others of its ticket continue."""
        for sequence in self._running:
            if (sequence.ticket, sequence.prompt, sequence.samples) == (ticket, prompt, [sample]):
                self._give_back([sequence.place])
                self._running.remove(sequence)
                break
        if all(sequence.ticket != ticket for sequence in self._running):
            self.drop(ticket)

    @property
    def num_sequences(self) -> int:
        """Answers that are not at their end."""
        return sum(len(sequence.samples) for sequence in self._running)

    def kept_bytes(self, more: SequenceOf[int] = ()) -> int:
        """What is kept of the prompts that are being answered, with further sequences of at most so many tokens."""
        if not self._packs:
            running = (len(sequence.samples) * self.cache_bytes(sequence.capacity) for sequence in self._running)
            return sum(running) + sum(map(self.cache_bytes, more))
        num_places = max(self._kept.num_places, self.num_sequences + len(more))
        # All places have the room of the largest.
        return num_places * self.cache_bytes(max(self._kept.capacity, *map(places_of, more), 0))

    def step(self, *, held: Collection[int] = (), most_prompt_tokens: int | None = None) -> list[tuple[int, New]]:
        """The next token of every answer, with the ticket of each; none of the tickets that are `held`. A ticket ends
        with its last token.

        With `most_prompt_tokens`, no more tokens of prompts are computed in this pass, and the others in later ones: so
        a long prompt does not keep the answers to others waiting. Where sequences run one after the other, a prompt is
        always computed at once.
        """
        # The caller may have released it after the last token.
        self._take_device()
        running = [one for one in self._running if one.ticket not in held and not one.waits]
        most = [number for number in (most_prompt_tokens, self._chunk_tokens) if number]
        if most and self._packs:
            running = in_pieces(running, min(most))
        if not running:
            return []
        found = self._pass(running)
        news: list[tuple[int, New]] = []
        computed = set(map(id, running))
        still = [sequence for sequence in self._running if id(sequence) not in computed]
        first_scored = place = 0
        for sequence in running:
            if sequence.scores_prompt:
                scored = slice(first_scored, first_scored + sequence.num_scored)
                first_scored = scored.stop
                add_scores(sequence, found, scored)
                if not sequence.later_ids.numel():
                    news.append((sequence.ticket, scored_prompt(sequence)))
            if sequence.later_ids.numel():
                sequence.num_computed += sequence.num_new
                sequence.new_ids, sequence.later_ids = sequence.later_ids, sequence.later_ids[:0]
                still.append(sequence)
                continue
            if sequence.followers:
                self._begin_followers(sequence)
                continue
            places = range(place, place + sequence.num_chosen)
            place = places.stop
            sequence.num_computed += sequence.num_new
            sequence.num_generated += 1
            answers = self._apart(sequence) if places else []
            ended_places = [] if places else [sequence.place]
            for at, one in zip(places, answers, strict=True):
                token = int(found.tokens_C[at])
                ended: Ended | None = None
                if token in sequence.options.stop_tokens:
                    ended = "stop"
                elif sequence.num_generated == sequence.options.max_tokens:
                    ended = "length"
                if ended is None:
                    one.new_ids = torch.tensor([token])
                    still.append(one)
                else:
                    ended_places.append(one.place)
                news.append((sequence.ticket, new_token(one, token, ended, found, at)))
            self._give_back(ended_places)
        # Those that ended give their cache's memory back here.
        self._running = still
        for ticket in self._charged.keys() - {sequence.ticket for sequence in still}:
            self.drop(ticket)
        return news

    def _give_back(self, places: SequenceOf[int]) -> None:
        if self._packs and places:
            self._kept.give_back(places)

    def release_device(self) -> None:
        """Free the device's memory for other work, until the next token takes it again; not while the token of a batch
        is computed.

        The weights may change until the next batch begins: it copies them again. No answer depends on it.
        """
        if self._is_released:
            return
        self.close()
        self._move_caches(torch.device("cpu"))
        self._device.charge("activations", -sum(self._charged.values()))
        self._device.release_memory()
        self._is_released = True

    def _take_device(self) -> None:
        if not self._is_released:
            return
        self._device.adopt(self._store, page_elements=self._page_elements)
        self._stream.open()
        self._device.charge("activations", sum(self._charged.values()))
        self._move_caches(self._place)
        self._is_released = False

    def _move_caches(self, place: torch.device) -> None:
        # Elsewhere each part is in host memory between two calls of its layer.
        if self.cache_on_device:
            for layer in range(self._template.num_layers):
                self._kept.to(layer, place)
                for sequence in self._running:
                    if sequence.cache is not None:
                        sequence.cache.to(layer, place)

    def close(self) -> None:
        """Free the device's memory. The caller closes the device."""
        for queue in (self._device.h2d, self._device.compute, self._device.d2h):
            queue.record().wait()
        self._stream.close()

    def _check(self, prompts: SequenceOf[SequenceOf[int]], options: GenerationOptions) -> None:
        template = self._template
        limits = [limit for limit in (template.max_document_tokens, template.packing_limit) if limit is not None]
        limit = min(limits, default=None)
        for index, prompt in enumerate(prompts):
            name = f"prompts[{index}]"
            if not prompt:
                raise refused(name, "has no token; a prompt needs at least one")
            wrong = next((token for token in prompt if not 0 <= token < template.vocab_size), None)
            if wrong is not None:
                raise refused(
                    name, f"holds token {wrong}; the model's vocabulary has {template.vocab_size} tokens, from 0"
                )
            if limit is not None and len(prompt) + options.max_tokens > limit:
                # At the second limit the architecture counts positions differently, for the tokens in the cache too.
                raise refused(
                    name,
                    f"has {len(prompt)} tokens, and max_tokens is {options.max_tokens}; together they may be at most "
                    f"{limit} "
                    "for this model; shorten the prompt or lower max_tokens",
                )

    def _layer_cache_bytes(self, size: LayerCacheSize, num_tokens: int) -> int:
        return size.num_bytes(num_tokens, item_bytes=self._device.compute_dtype.itemsize)

    def _charge(self, ticket: int, longest: SequenceOf[int], *, num_prompt_tokens: int) -> None:
        """Account for the hidden states and the cache of prompts, and where they are alone, decide where it is."""
        device, template = self._device, self._template
        # A layer's input and its output.
        hidden_bytes = 2 * num_prompt_tokens * template.hidden_size * device.compute_dtype.itemsize
        most_tokens = max(longest, default=0)
        if self._packs:
            # All places have the same room, and a layer's are on the device together.
            most_tokens = max(places_of(most_tokens), self._kept.capacity)
            of_layers = [len(longest) * self._layer_cache_bytes(size, most_tokens) for size in self._cache_sizes]
            all_bytes, one_part = sum(of_layers), max(of_layers, default=0)
        else:
            all_bytes = sum(map(self.cache_bytes, longest))
            # On the host, the device has one layer's part of one sequence.
            one_part = max((self._layer_cache_bytes(size, most_tokens) for size in self._cache_sizes), default=0)
        is_alone = not self._charged
        if is_alone:
            self.cache_on_device = True
        charged = hidden_bytes + (all_bytes if self.cache_on_device else one_part)
        try:
            device.charge("activations", charged)
        except DoesNotFit:
            if not is_alone or not self.cache_on_device:
                raise
            self.cache_on_device, charged = False, hidden_bytes + one_part
            device.charge("activations", charged)
        self._charged[ticket] = charged

    def _begun(self, ticket: int, prompts: SequenceOf[SequenceOf[int]], options: GenerationOptions) -> list[Sequence]:
        """The sequences of prompts. What all of them have in common at their beginning is computed once, before the
        rest."""
        ids = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
        longest = [len(prompt) + options.max_tokens for prompt in prompts]
        samples = list(range(options.num_samples))
        if not self._packs:
            return [
                self._sequence(ticket, index, [sample], options, prompt, capacity)
                for index, (prompt, capacity) in enumerate(zip(ids, longest, strict=True))
                for sample in samples
            ]
        num_shared = 0 if options.prompt_logprobs is not None else _num_shared(prompts)
        begun = [
            self._sequence(ticket, index, samples, options, prompt[num_shared:], capacity)
            for index, (prompt, capacity) in enumerate(zip(ids, longest, strict=True))
        ]
        if num_shared:
            # In the place of the first one, which has room for all of it.
            shared = copy.copy(begun[0])
            shared.samples, shared.new_ids, shared.followers = [], ids[0][:num_shared], begun
            for sequence in begun:
                sequence.num_computed, sequence.waits = num_shared, True
            return [shared, *begun]
        return begun

    def _begin_followers(self, shared: Sequence) -> None:
        """Have what begins with the tokens of a sequence continue from them."""
        others = [sequence for sequence in shared.followers if sequence.place != shared.place]
        self._copy(shared, others)
        for sequence in shared.followers:
            sequence.waits = False

    def _sequence(
        self,
        ticket: int,
        prompt: int,
        samples: SequenceOf[int],
        options: GenerationOptions,
        ids: Tensor,
        capacity: int,
    ) -> Sequence:
        template = self._template
        return Sequence(
            ticket=ticket,
            prompt=prompt,
            samples=list(samples),
            options=options,
            cache=None if self._packs else SequenceCache(template.config, num_layers=template.num_layers),
            place=self._kept.take(1, capacity=capacity)[0] if self._packs else -1,
            new_ids=ids,
            capacity=capacity,
        )

    def _apart(self, sequence: Sequence) -> list[Sequence]:
        """A sequence for each of its answers, which differ from now on."""
        found = [sequence]
        if len(sequence.samples) > 1:
            places = self._kept.take(len(sequence.samples) - 1, capacity=sequence.capacity)
            for sample, place in zip(sequence.samples[1:], places, strict=True):
                one = copy.copy(sequence)
                one.samples, one.place = [sample], place
                found.append(one)
            self._copy(sequence, found[1:])
            sequence.samples = sequence.samples[:1]
        return found

    def _copy(self, source: Sequence, targets: SequenceOf[Sequence]) -> None:
        """Have sequences continue from what is kept of another one."""
        work = partial(self._kept.copy, source.place, [one.place for one in targets])
        self._device.compute.submit(work, label="copy of what is kept")
        # Their places may be given back from now on, and what is kept get smaller.
        self._device.compute.record().wait()

    def _pass(self, sequences: SequenceOf[Sequence]) -> Found:
        """Compute the new tokens of all sequences, and what follows them. Returns it on the host."""
        template, device = self._template, self._device
        ids_N = torch.cat([sequence.new_ids for sequence in sequences])
        rows_R = None
        row_ids_N = ids_N
        if template.embeds_by_rows:
            rows_R, row_ids_N = torch.unique(ids_N, return_inverse=True)
        found = self._empty(sequences, device.place)
        requests = [UnitRequest(unit_index=0, rows_R=rows_R), *self._layers, self._head]
        place = None if self.cache_on_device else self._place
        rows: Pass = SequencePass(template, device, sequences, self._paged, place=place)
        if self._packs:
            rows = RowPass(template, device, sequences, self._kept, self._paged, place=place)
        done: deque[Event] = deque()
        for request, flat in self._stream.walk(requests):
            if request is requests[0]:
                rows.enqueue_embed(flat, rows_R, row_ids_N)
            elif request is self._head:
                self._enqueue_head(sequences, rows, flat, found)
            else:
                rows.enqueue_layer(request.unit_index - 1, flat)
            done.append(device.compute.record())
            if len(done) > _UNITS_AHEAD:
                done.popleft().wait()
        on_host = self._empty(sequences, lambda tensor: tensor)
        device.d2h.wait(device.compute.record())
        for source, target in zip(tensors(found), tensors(on_host), strict=True):
            if target.numel():
                device.read_back(source, target)
        device.d2h.record().wait()
        device.raise_failure()
        return on_host

    def _empty(self, sequences: SequenceOf[Sequence], place: Callable[[Tensor], Tensor]) -> Found:
        num_chosen = sum(sequence.num_chosen for sequence in sequences)
        num_scored = sum(sequence.num_scored for sequence in sequences)

        def top(num: int, most: int) -> tuple[Tensor, Tensor] | None:
            if not most:
                return None
            return place(torch.zeros(num, most, dtype=torch.int64)), place(torch.zeros(num, most))

        return Found(
            tokens_C=place(torch.zeros(num_chosen, dtype=torch.int64)),
            logprobs_C=place(torch.zeros(num_chosen)),
            logprobs_P=place(torch.zeros(num_scored)),
            top_C=top(num_chosen, max(sequence.options.logprobs or 0 for sequence in sequences)),
            top_P=top(num_scored, max(sequence.options.prompt_logprobs or 0 for sequence in sequences)),
        )

    def _enqueue_head(self, sequences: SequenceOf[Sequence], rows: Pass, flat: Tensor, found: Found) -> None:
        """Choose the next tokens, and score the prompts that are to be."""
        place = scored = 0
        at: list[tuple[int, list[Choice]]] = []
        for index, sequence in enumerate(sequences):
            if sequence.scores_prompt:
                targets = self._device.place(sequence.scored_ids)
                for start in range(0, targets.numel(), self._head_chunk):
                    part = slice(start, min(start + self._head_chunk, targets.numel()))
                    into = slice(scored + part.start, scored + part.stop)
                    work = partial(self._score, rows, index, part, targets[part], flat, found, into)
                    self._device.compute.submit(work, label="score head")
                scored += targets.numel()
            if sequence.num_chosen:
                at.append((index, sequence.choices))
        for start in range(0, len(at), self._head_chunk):
            chosen = at[start : start + self._head_chunk]
            number = sum(len(choices) for _, choices in chosen)
            work = partial(self._choose, rows, chosen, flat, found, slice(place, place + number))
            self._device.compute.submit(work, label="generate head")
            place += number

    def _choose(
        self,
        rows: Pass,
        chosen: SequenceOf[tuple[int, list[Choice]]],
        flat: Tensor,
        found: Found,
        into: slice,
    ) -> None:
        logits_SV = self._logits(rows.last_hidden([index for index, _ in chosen]), flat)
        numbers = [len(choices) for _, choices in chosen]
        if max(numbers) > 1:
            logits_SV = logits_SV.repeat_interleave(torch.tensor(numbers, device=logits_SV.device), 0)
        tokens_C = choose(logits_SV, [choice for _, choices in chosen for choice in choices])
        found.tokens_C[into] = tokens_C
        found.logprobs_C[into] = log_probabilities(logits_SV, tokens_C)
        write_top(logits_SV, found.top_C, into)

    def _score(
        self,
        rows: Pass,
        index: int,
        part: slice,
        targets: Tensor,
        flat: Tensor,
        found: Found,
        into: slice,
    ) -> None:
        logits_PV = self._logits(rows.hidden(index)[:, part], flat)
        found.logprobs_P[into] = log_probabilities(logits_PV, targets)
        write_top(logits_PV, found.top_P, into)

    def _logits(self, hidden_1CD: Tensor, flat: Tensor) -> Tensor:
        parameters = {place.name: place.piece.read(flat) for place in self._template.places[self._head.unit_index]}
        with torch.no_grad():
            return self._template.head(parameters, hidden_1CD)


def _num_shared(prompts: SequenceOf[SequenceOf[int]]) -> int:
    """How many tokens all prompts have in common at their beginning, where computing them once is worth it; each has
    one more at least."""
    if len(prompts) < 2:
        return 0
    most = min(map(len, prompts)) - 1
    first = prompts[0][:most]
    num = next((i for i in range(most) if any(prompt[i] != first[i] for prompt in prompts)), most)
    return num if num >= _LEAST_SHARED else 0
