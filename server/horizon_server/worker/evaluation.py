"""What an attempt measures between its steps: the figures of every eval set, and the answers that the model gives to
prompts of one.

Everything that is known of a set comes from `Evaluation.figures_of`. An evaluation changes nothing that training reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.engine.data import DocumentPrompt, PreparedDataset, StepPlan
from horizon_server.engine.device.protocol import Device
from horizon_server.engine.generation.generator import TokenGenerator, generation_template
from horizon_server.engine.generation.sequences import GenerationOptions
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import InvalidSpec
from horizon_server.events import EvalAnswer, EvalDone
from horizon_server.expressions import final_answer
from horizon_server.figures import EvalFigures, EvalSetFigures, total_evaluation
from horizon_server.planning.asked import page_elements_of
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.planning.sampling import cache_limit_bytes
from horizon_server.records.job import StopRequest
from horizon_server.spec import JobSpec
from horizon_server.spec.evaluation import EXACT_MATCH, LOSS, GenerateSpec
from horizon_server.store.host_store import HostStore
from horizon_server.worker.answering import stop_tokens
from horizon_server.worker.device_turn import DeviceTurn
from horizon_server.worker.objective import MethodData
from horizon_server.worker_link.orders import Orders

MAX_SHOWN_ANSWERS = 8
MAX_SHOWN_CHARACTERS = 2000

_OF_FIRST_SET = ("eval_loss", "num_targets", "num_correct", "method_figures")

MakePlan = Callable[[PreparedDataset, bool], StepPlan]
"""The plan of one pass over a set in the file's order; packed or not."""

OnStep = Callable[[str, int, int], None]
"""Is told of each step over a set: its name, the steps done and all of them."""


class _Interrupted(Exception):
    """An order or the deadline came before the evaluation was complete."""


class Evaluation:
    """The evaluations of one attempt. Thread: the worker's main thread, as the trainer's."""

    def __init__(
        self,
        spec: JobSpec,
        prepared: Mapping[str, Path],
        folder: ModelFolder,
        *,
        store: HostStore,
        device: Device,
        orders: Orders,
        turn: DeviceTurn,
        make_plan: MakePlan,
        answer_ends: Collection[int] = (),
        on_step: OnStep = lambda *_: None,
    ) -> None:
        """`prepared` has the folder of each eval set, by its name. `folder` is the job's model, laid out for it;
        `answer_ends` are the tokens that end trained answers.

        Raises:
            InvalidSpec: no row of the set to answer has a prompt that fits.
        """
        self._spec, self._orders, self._turn = spec, orders, turn
        self._make_plan, self._on_step = make_plan, on_step
        self.sets = {name: MethodData(prepared[name], spec, is_evaluated=True) for name in spec.eval_sets}
        generate = self._spec.eval.generate
        self.answers: Sequence[EvalAnswer] = ()
        """All answers of the newest evaluation, whole."""
        self._answers = None
        if generate is not None:
            dataset = self.sets[generate.set].dataset
            self._answers = _Answers(self._spec, folder, generate, dataset, answer_ends, store=store, device=device)

    def run(self, trainer: Trainer, step: int) -> EvalDone | None:
        """Evaluate the weights of a step on every set. None: an order or the deadline came before it was complete.

        A stop lets the figures of the sets be completed that need not wait for the device, because they belong to the
        checkpoint that follows; answers, which take longer, are given up.
        """
        parts: list[EvalFigures] = []
        figures: dict[str, EvalSetFigures] = {}
        answers: Sequence[EvalAnswer] = ()
        self.answers = ()
        try:
            for name in self.sets:
                measured = self.figures_of(name, trainer)
                parts.append(measured)
                figures[name] = EvalSetFigures.of(name, measured)
            if self._answers is not None:
                name = self._answers.generate.set
                answers = self._answered(self._answers, trainer)
                figures[name] = self._answers.counted(figures[name], answers)
        except _Interrupted:
            return None
        self.answers = answers
        total = total_evaluation(parts)
        of_first = {field: getattr(parts[0], field) for field in _OF_FIRST_SET}
        return EvalDone(
            **{**vars(total), **of_first},
            step=step,
            sets=tuple(figures.values()),
            answers=tuple(_shown(answer) for answer in answers[:MAX_SHOWN_ANSWERS]),
            judged=self._judged(figures),
        )

    @property
    def is_possible(self) -> bool:
        """Whether there is a set."""
        return bool(self.sets)

    def figures_of(self, name: str, trainer: Trainer) -> EvalFigures:
        """Measure one set with the weights of the last step: the only place where the figures of a set come from.

        Raises:
            _Interrupted: a cancel came, or the device could not be had.
        """
        data, parts = self.sets[name], []
        plan = self._plan_of(data, trainer)
        data.forget()
        for i in range(plan.num_steps):
            if self._orders.current is StopRequest.CANCEL or not self._turn.take():
                raise _Interrupted
            parts.append(data.evaluate(trainer, plan, i))
            self._turn.boundary()
            self._on_step(name, i + 1, plan.num_steps)
        return data.total(parts)

    def plans(self, trainer: Trainer) -> list[tuple[MethodData, StepPlan]]:
        """Return every set with the plan by which it is evaluated."""
        return [(data, self._plan_of(data, trainer)) for data in self.sets.values()]

    def _plan_of(self, data: MethodData, trainer: Trainer) -> StepPlan:
        packing = self._spec.train.packing != "false" and trainer.supports_packing
        # In the data's order: every evaluation of a job sees the same rows.
        return self._make_plan(data.dataset, packing)

    def release_device(self) -> None:
        """Free the device's memory until the next token."""
        if self._answers is not None:
            self._answers.release_device()

    def close(self) -> None:
        """Free everything."""
        self.release_device()

    def _answered(self, answers: _Answers, trainer: Trainer) -> list[EvalAnswer]:
        if not self._turn.take():
            raise _Interrupted
        # The weights of the step, all of them; and room on the device, where nothing of training is under way.
        trainer.flush()
        trainer.release_device()
        try:
            return answers.all(before_token=self._go_on)
        finally:
            answers.release_device()

    def _go_on(self) -> None:
        """Between two tokens: have the device, or give up."""
        self._turn.boundary()
        if self._orders.current is not StopRequest.NOTHING or not self._turn.take():
            raise _Interrupted

    def _judged(self, figures: dict[str, EvalSetFigures]) -> float | None:
        name, figure = self._spec.eval.judged
        of_set = figures[name or next(iter(figures))]
        return of_set.loss if figure == LOSS else of_set.exact_match if figure == EXACT_MATCH else of_set.accuracy


class _Answers:
    """Has the model answer the first prompts of a set, in batches whose cache fits into what the plan has for it."""

    def __init__(
        self,
        spec: JobSpec,
        folder: ModelFolder,
        generate: GenerateSpec,
        dataset: PreparedDataset,
        answer_ends: Collection[int],
        *,
        store: HostStore,
        device: Device,
    ) -> None:
        self.generate = generate
        self._store, self._device = store, device
        # A model of its own: with a cache, the layers run with their own attention instead of the engine's.
        recipe, sequence_length = spec.train.recipe, spec.train.sequence_length
        self._template = generation_template(
            lambda own: Template.from_folder(folder.path, layout=folder.layout, recipe=recipe, own_attention=own)
        )
        self._cache_bytes, self._chunk_tokens = cache_limit_bytes(spec, folder), spec.train.chunk_tokens or 0
        self._page_elements = page_elements_of(spec)
        codec = TextCodec.from_folder(folder.path)
        self._decode = codec.tokenizer.decode
        stops = stop_tokens(folder.path, codec) | frozenset(answer_ends)
        self._options = GenerationOptions(max_tokens=generate.max_new_tokens, stop_tokens=stops)
        self._prompts = self._chosen(dataset, sequence_length)
        self._generator: TokenGenerator | None = None

    def _chosen(self, dataset: PreparedDataset, sequence_length: int) -> list[DocumentPrompt]:
        limits = [
            limit for limit in (self._template.max_document_tokens, self._template.packing_limit) if limit is not None
        ]
        longest = min(limits, default=None)
        chosen: list[DocumentPrompt] = []
        for prompt in dataset.prompts(shorter_than=sequence_length):
            if longest is None or len(prompt.ids) + self.generate.max_new_tokens <= longest:
                chosen.append(prompt)
                if len(chosen) == self.generate.prompts:
                    return chosen
        if not chosen:
            raise InvalidSpec.of(
                "eval.generate",
                f"eval.generate: no row of the set {self.generate.set} has a prompt and an answer below "
                f"train.sequence_length ({sequence_length} tokens) that leave room for max_new_tokens "
                f"({self.generate.max_new_tokens}); lower it, or use longer "
                "rows",
            )
        return chosen

    def all(self, *, before_token: Callable[[], None]) -> list[EvalAnswer]:
        """The answer to every prompt, greedy. `before_token` is called between two tokens of the batch, and may
        raise."""
        if self._generator is None:
            self._generator = TokenGenerator(
                self._template,
                self._store,
                self._device,
                chunk_tokens=self._chunk_tokens,
                expert_page_elements=self._page_elements,
            )
        tokens: list[list[int]] = [[] for _ in self._prompts]
        ended = [""] * len(self._prompts)
        for batch in self._batches(self._generator):
            last = -1
            # Closed at once where an order ends it, so that what it has on the device is off its account.
            with contextlib.closing(
                self._generator.stream([self._prompts[i].ids for i in batch], self._options)
            ) as stream:
                for new in stream:
                    # Once a pass, of all prompts together.
                    if new.prompt <= last:
                        before_token()
                    last = new.prompt
                    index = batch[new.prompt]
                    ended[index] = new.ended or ""
                    # The token that ends an answer is no text.
                    if new.ended != "stop":
                        tokens[index].append(new.token)
        return [self._answer(*each) for each in zip(self._prompts, tokens, ended, strict=True)]

    def counted(self, figures: EvalSetFigures, answers: Sequence[EvalAnswer]) -> EvalSetFigures:
        """The figures of the set with those of its answers."""
        compared = self.generate.answer is not None
        num_matches = sum(answer.matches for answer in answers)
        return dataclasses.replace(
            figures,
            num_answers=len(answers),
            num_matches=num_matches,
            exact_match=num_matches / len(answers) if compared else None,
        )

    def release_device(self) -> None:
        """Free what the generator has on the device, until its next token."""
        if self._generator is not None:
            self._generator.release_device()

    def _batches(self, generator: TokenGenerator) -> list[list[int]]:
        """The prompts in order, as many at a time as the cache has room for, and at least one."""
        batches: list[list[int]] = [[]]
        held_bytes = 0
        for index, prompt in enumerate(self._prompts):
            needed_bytes = generator.cache_bytes(len(prompt.ids) + self.generate.max_new_tokens)
            if batches[-1] and held_bytes + needed_bytes > self._cache_bytes:
                batches.append([])
                held_bytes = 0
            batches[-1].append(index)
            held_bytes += needed_bytes
        return batches

    def _answer(self, prompt: DocumentPrompt, tokens: list[int], ended: str) -> EvalAnswer:
        answer = self._decode(tokens, skip_special_tokens=True)
        reference = self._decode(prompt.answer_ids, skip_special_tokens=True)
        found = expected = None
        if self.generate.answer is not None:
            found, expected = final_answer(self.generate.answer, answer), final_answer(self.generate.answer, reference)
        return EvalAnswer(
            document=prompt.document,
            prompt=self._decode(prompt.ids, skip_special_tokens=True),
            answer=answer,
            reference=reference,
            found=found,
            expected=expected,
            matches=found is not None and found == expected,
            ended=ended,
        )


def _shown(answer: EvalAnswer) -> EvalAnswer:
    """The answer with texts that are short enough to show: of a prompt its end, of all else its beginning."""

    def cut(text: str) -> str:
        return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 3] + "..."

    prompt = answer.prompt
    if len(prompt) > MAX_SHOWN_CHARACTERS:
        prompt = "..." + prompt[3 - MAX_SHOWN_CHARACTERS :]
    return dataclasses.replace(
        answer,
        prompt=prompt,
        answer=cut(answer.answer),
        reference=cut(answer.reference),
        found=None if answer.found is None else cut(answer.found),
        expected=None if answer.expected is None else cut(answer.expected),
    )
