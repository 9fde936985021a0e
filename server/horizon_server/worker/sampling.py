"""The child that answers prompts from a checkpoint or model folder: `python -m horizon_server.worker.sampling`.

It loads the weights alone into a store of its own and computes on the host in fp32, at a lower priority than training:
the node's jobs have the GPUs. All calls that it has are answered together: a call joins between two tokens of the
others, once there is room for it.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from horizon_server.children.calls import Ask, Begun, CallPipe, Continue, Hold, Leave, Order
from horizon_server.children.entry import Answer, EventWriter, Failure, end_of, serve
from horizon_server.codec import from_plain, to_plain
from horizon_server.datasets.tokens.chat_template import processor_time_limit
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.errors import DoesNotFit, InvalidModel, OutOfMemory, naming
from horizon_server.imports import seldom_collecting
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.sampling import sample_layout, trained_layout
from horizon_server.records.execution import NOTHING_STAYS, Residency
from horizon_server.records.sample import SampleAdapter, SampleCall, SampleFigures, SampleModel
from horizon_server.store.adapter_files import AdapterFolder, read_adapter_folder
from horizon_server.store.adapter_load import merge_into
from horizon_server.store.base_digest import DigestBook, check_base
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_load import load_model
from horizon_server.texts import size_text
from horizon_server.worker import let_launchers_run

# The modules that load torch and transformers.
with seldom_collecting():
    from horizon_server.engine.device.host import HostDevice
    from horizon_server.engine.generation.generator import TokenGenerator, generation_template
    from horizon_server.engine.template import Template
    from horizon_server.worker.answering import Answering, encoded, generation_options, stop_tokens

_WHO = "the child that answers prompts"
# Training on the same node has the processors first.
_NICENESS = 10
# Processor time for the prompts of a call, which take milliseconds.
RENDER_S = 30.0
# Tokens of prompts that a pass computes, where a call is alone, and where others wait for their next token.
_ALONE_TOKENS, _PIECE_TOKENS = 1024, 256
# How long prompts are read between two tokens of the others.
_READ_S = 0.02


@dataclass(eq=False, kw_only=True)
class _Call:
    """A call that has come: read prompt by prompt, then waiting for room, then answered."""

    number: int
    user: str
    asked: SampleCall
    arrived_s: float
    render_s: float
    prompts: list[list[int]] = field(default_factory=list)
    is_held: bool = False
    answering: Answering | None = None
    begun_s: float = 0.0
    num_passes: int = 0
    num_shared_passes: int = 0

    @property
    def num_sequences(self) -> int:
        """Its answers."""
        return len(self.asked.prompts) * self.asked.options.num_samples

    @property
    def longest(self) -> list[int]:
        """The most tokens of each answer with its prompt, once all prompts are read."""
        options = self.asked.options
        return [len(prompt) + options.max_tokens for prompt in self.prompts for _ in range(options.num_samples)]


class Answerer:
    """Answers calls with one model, until no more come. What is wrong with a call ends that call alone; what is wrong
    with the model, or with a pass over it, ends the child.

    Who waits for room: of the user that has the fewest answers running the oldest call, and no other before it. Calls
    share passes, and nothing else: prompts that begin alike are computed once within a call only, so that the time
    that one takes tells nothing of the prompts of others.
    """

    def __init__(self, model: SampleModel, pipe: CallPipe) -> None:
        self._model, self._pipe = model, pipe
        self._names = {model.folder: "the checkpoint" if model.adapter is None else "the base model"}
        if model.adapter is not None:
            self._names[model.adapter.folder] = "the checkpoint"
        self._unread: deque[_Call] = deque()
        self._waiting: list[_Call] = []
        self._running: list[_Call] = []
        self._generator: TokenGenerator | None = None

    def run(self) -> None:
        """Answer what comes.

        Raises:
            InvalidModel: the folder cannot be loaded, or its model cannot generate; it names the architecture.
        """
        with naming(self._names):
            self._codec = TextCodec.from_folder(self._model.folder)
            self._stops = stop_tokens(self._model.answers or self._model.folder, self._codec)
            while (orders := self._pipe.orders(wait=not self._has_work)) is not None:
                for order in orders:
                    self._obey(order)
                self._read_prompts()
                self._let_in()
                self._step()

    @property
    def _has_work(self) -> bool:
        return bool(self._unread or self._following()) or any(not call.is_held for call in self._running)

    def _obey(self, order: Order) -> None:
        match order:
            case Ask():
                asked = from_plain(SampleCall, order.request)
                now_s = time.perf_counter()
                self._unread.append(
                    _Call(number=order.call, user=order.user, asked=asked, arrived_s=now_s, render_s=RENDER_S)
                )
            case Leave():
                for call in [call for call in self._calls if call.number == order.call]:
                    self._remove(call)
            case Hold() | Continue():
                for call in self._calls:
                    if call.number == order.call:
                        call.is_held = isinstance(order, Hold)

    @property
    def _calls(self) -> list[_Call]:
        return [*self._unread, *self._waiting, *self._running]

    def _remove(self, call: _Call) -> None:
        for calls in (self._unread, self._waiting, self._running):
            with contextlib.suppress(ValueError):
                calls.remove(call)
        if call.answering is not None:
            call.answering.drop()

    def _tried(self, call: _Call, work: Callable[[], object]) -> bool:
        """Do a part of a call. Where it cannot be done, the call ends; returns whether it could."""

        def named() -> None:
            with naming(self._names):
                work()

        end = end_of(named, _WHO)
        if isinstance(end, Answer):
            return True
        # Made here, where the memory that the work took is free again.
        self._remove(call)
        self._pipe.send(call.number, end or Failure(OutOfMemory(f"{_WHO} ran out of memory")))
        return False

    def _read_prompts(self) -> None:
        """Read prompts of the calls that have come, one of each in turn, for a short while where others wait for their
        next token."""
        end_s = time.perf_counter() + _READ_S
        while self._unread and not (self._running and time.perf_counter() > end_s):
            call = self._unread.popleft()
            if not self._tried(call, partial(self._read_prompt, call)):
                continue
            if len(call.prompts) < len(call.asked.prompts):
                self._unread.append(call)
                continue
            # Only now: reading the weights takes far longer. What fails here fails for all.
            generator = self._generator = self._generator or _generator(self._model)
            if self._tried(call, partial(self._require_room, call, generator)):
                self._waiting.append(call)

    def _read_prompt(self, call: _Call) -> None:
        """Raises InvalidModel for a template that does not end: it must not keep others waiting."""
        endless = InvalidModel(
            f"the model's chat template takes more than {RENDER_S:g} s for these prompts; send fewer, or correct the "
            "template"
        )
        index, before_s = len(call.prompts), time.process_time()
        # Not 0, which would be no limit.
        with processor_time_limit(max(call.render_s, 1e-3), endless):
            call.prompts.append(encoded(self._codec, index, call.asked.prompts[index]))
        call.render_s -= time.process_time() - before_s

    def _require_room(self, call: _Call, generator: TokenGenerator) -> None:
        """Raises DoesNotFit: the prompts with their answers are too many and too long, even alone."""
        needed_bytes, allowed_bytes = sum(map(generator.cache_bytes, call.longest)), self._model.cache_bytes
        if needed_bytes > allowed_bytes:
            raise DoesNotFit(
                f"keys and values of {len(call.prompts)} prompts with answers of up to {call.asked.options.max_tokens} "
                f"tokens take {size_text(needed_bytes)}, and {size_text(allowed_bytes)} are allowed; send fewer "
                "prompts at a time, or lower max_tokens"
            )

    def _let_in(self) -> None:
        """Have calls join while there is room for the next one."""
        while call := self._following():
            self._waiting.remove(call)
            if self._tried(call, partial(self._begin, call)):
                self._running.append(call)

    def _following(self) -> _Call | None:
        """The next one of those that wait, where there is room for it."""
        sequences: Counter[str] = Counter()
        for call in self._running:
            sequences[call.user] += call.num_sequences
        following = min(self._waiting, key=lambda call: (sequences[call.user], call.number), default=None)
        return following if following is not None and (not self._running or self._fits(following)) else None

    def _fits(self, call: _Call) -> bool:
        generator = self._generator
        assert generator is not None, "its prompts are read"
        return (
            generator.num_sequences + call.num_sequences <= self._model.num_sequences
            and generator.kept_bytes(call.longest) <= self._model.cache_bytes
        )

    def _begin(self, call: _Call) -> None:
        assert self._generator is not None, "its prompts are read"
        call.begun_s = time.perf_counter()
        self._pipe.send(call.number, Begun())
        options = call.asked.options
        call.answering = Answering(
            self._generator,
            call.prompts,
            generation_options(options, self._stops),
            self._codec,
            stop=options.stop,
            send=partial(self._pipe.send, call.number),
        )

    def _step(self) -> None:
        """Have the next token of every answer, and end the calls that have their last one."""
        running = {call.answering.ticket: call for call in self._running if call.answering and not call.is_held}
        if self._generator is None or not running:
            return
        held = [call.answering.ticket for call in self._running if call.answering and call.is_held]
        most = _ALONE_TOKENS if len(running) == 1 else _PIECE_TOKENS
        for ticket, new in self._generator.step(held=held, most_prompt_tokens=most):
            answering = running[ticket].answering
            assert answering is not None, "it has a ticket"
            answering.take(new)
        for call in running.values():
            call.num_passes += 1
            call.num_shared_passes += len(running) > 1
            if call.answering is not None and not call.answering.is_busy:
                self._running.remove(call)
                self._pipe.send(call.number, Answer(to_plain(_figures(call, call.answering.num_tokens))))


def _figures(call: _Call, num_tokens: int) -> SampleFigures:
    duration_s = time.perf_counter() - call.begun_s
    return SampleFigures(
        num_prompt_tokens=sum(map(len, call.prompts)),
        num_tokens=num_tokens,
        load_s=call.begun_s - call.arrived_s,
        duration_s=duration_s,
        tokens_per_second=num_tokens / duration_s,
        num_passes=call.num_passes,
        num_shared_passes=call.num_shared_passes,
    )


def answer_calls(plain: Any, events: EventWriter) -> None:
    """Answer the calls that come by the standard input, with the model that the request says."""
    let_launchers_run()
    Answerer(from_plain(SampleModel, plain), CallPipe(sys.stdin.buffer, events)).run()


def _generator(model: SampleModel) -> TokenGenerator:
    template, store = _loaded(model)
    everything = Residency(resident_layers=template.num_layers, resident_head=True)
    residency = everything if model.keeps_weights else NOTHING_STAYS
    return TokenGenerator(
        template,
        store,
        HostDevice(num_threads=model.num_threads),
        residency=residency,
        expert_page_elements=model.expert_page_elements,
    )


def _loaded(model: SampleModel) -> tuple[Template, HostStore]:
    """The weights that answer, and the model that computes with them."""
    folder, asked = model.folder, model.adapter
    adapter = None if asked is None else _adapter(folder, asked)
    spec = None if asked is None else asked.spec
    # Next to its base as the evaluations of its job, so that no bit differs from them, unless experts come in pages
    # here and did not there.
    layout = sample_layout(open_model_folder(folder), adapter) if spec is None else trained_layout(folder, spec.train)
    recipe = None if spec is None else spec.train.recipe
    template = generation_template(
        lambda own: Template.from_folder(folder, layout=layout, recipe=recipe, own_attention=own)
    )
    store = HostStore.allocate(layout, grad_dtype=None, num_threads=model.num_threads)
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


if __name__ == "__main__":
    sys.exit(serve(answer_calls, who=_WHO, niceness=_NICENESS))
