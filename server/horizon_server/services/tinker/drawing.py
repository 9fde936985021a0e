"""Answers for sampling clients: from a session's own weights while they are the ones that are meant, else from a
checkpoint or a base."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from horizon_server.errors import (
    FieldViolation,
    HorizonError,
    InvalidData,
    InvalidModel,
    InvalidSpec,
    NotFound,
    WrongJobState,
)
from horizon_server.events import SampledPrompt, SampledText
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord, JobState
from horizon_server.records.sample import SampleFigures, SampleOptions, SamplePrompt
from horizon_server.records.session import CallFailed, Sample, Sampled
from horizon_server.services.access import require_create, require_sample
from horizon_server.services.jobs import JobService
from horizon_server.services.sampling import Samples
from horizon_server.services.sessions import MAX_WAIT_S, Sessions
from horizon_server.services.tinker.models import TinkerModels
from horizon_server.services.tinker.names import CheckpointName, Target

_ERRORS: tuple[type[HorizonError], ...] = (InvalidData, InvalidModel, InvalidSpec, NotFound)
"""What a session refuses calls with."""
Top = tuple[tuple[int, float], ...]
"""The likeliest tokens in a place, with their log-probabilities."""


@dataclass(kw_only=True)
class DrawnAnswer:
    """One answer to a prompt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Top] = field(default_factory=list)
    ended: str = ""


@dataclass(kw_only=True)
class Drawn:
    """All answers to one prompt; its own log-probabilities have none for the first token."""

    answers: list[DrawnAnswer]
    prompt_logprobs: list[float | None] = field(default_factory=list)
    prompt_top: list[Top] = field(default_factory=list)


class Drawing:
    """Thread: belongs to one event loop."""

    def __init__(self, jobs: JobService, sessions: Sessions, samples: Samples, models: TinkerModels) -> None:
        self._jobs, self._sessions, self._samples, self._models = jobs, sessions, samples, models

    async def target(self, principal: Principal, *, base: str = "", path: str = "", model: str = "") -> Target:
        """Return what is to answer: a base, a checkpoint by its path, or a model as it is. Raises NotFound, NotAllowed
        for who may use nothing of the node."""
        if base:
            require_create(principal)
            await self._jobs.resources.model(principal, base)
            return Target(base=base)
        if not path:
            return Target(model=model)
        name = CheckpointName.parse(path)
        job, step = await self._models.checkpoint(principal, name)
        require_sample(principal, job.owner, f"checkpoint {path}", project=job.project)
        return Target(model=name.model.text, step=step)

    async def base_of(self, principal: Principal, target: Target) -> str:
        """Return the name of the base of what answers. Raises NotFound."""
        return target.base or (await self._models.find(principal, target.model)).spec.model

    async def longest(self, principal: Principal, target: Target) -> int:
        """Return how many tokens a prompt and its answer may have together. Raises NotFound."""
        if target.base:
            return await self._models.longest(principal, target.base)
        return (await self._models.find(principal, target.model)).spec.train.sequence_length

    async def check(self, principal: Principal, target: Target, options: SampleOptions) -> None:
        """Let what can be asked pass. Raises NotFound, NotAllowed, InvalidSpec."""
        if target.base:
            require_create(principal)
            await self._jobs.resources.model(principal, target.base)
            return
        job = await self._models.find(principal, target.model)
        require_sample(principal, job.owner, f"model {target.model}", project=job.project)
        if target.step is None and _wants_top(options):
            raise InvalidSpec.of(
                "topk_prompt_logprobs",
                "topk_prompt_logprobs and topk_sample_logprobs are not for a client of kind inflight; save a snapshot",
            )

    async def draw(
        self, principal: Principal, target: Target, prompts: Sequence[SamplePrompt], options: SampleOptions
    ) -> list[Drawn]:
        """Return the answers to each prompt. Raises as `Samples.sample` and `Sessions.call`."""
        if target.base:
            return await _gathered(
                self._samples.sample_base(principal, target.base, prompts, options), len(prompts), options.num_samples
            )
        job, step = await self._models.find(principal, target.model), target.step
        if step is not None:
            self._models.asked(job, step)
        if step is None or (not _wants_top(options) and await self._is_at(job, step)):
            try:
                return await self._from_session(
                    principal, job, Sample(prompts=tuple(prompts), options=options, at_step=step)
                )
            except (NotFound, WrongJobState):
                # There was a change meanwhile, or its end.
                if step is None:
                    raise
        return await _gathered(
            self._samples.sample(principal, job.job_id, step, prompts, options), len(prompts), options.num_samples
        )

    async def _is_at(self, job: JobRecord, step: int) -> bool:
        """Whether a session has the weights of a step in memory, and will have them for a while."""
        is_now = job.job_state is JobState.RUNNING and job.step == step
        return is_now and not await self._sessions.will_change(job)

    async def _from_session(self, principal: Principal, job: JobRecord, call: Sample) -> list[Drawn]:
        """Have the session answer with the very weights that it trains. Raises NotFound where they are others now."""
        number = await self._sessions.call(principal, job.job_id, call)
        result = None
        while result is None:
            result = await self._sessions.result(principal, job.job_id, number, wait_s=MAX_WAIT_S)
        if isinstance(result, CallFailed):
            raise error_of(result)
        assert isinstance(result, Sampled), "a call that samples"
        scores = result.prompt_logprobs or ((),) * len(result.answers)
        return [
            Drawn(
                answers=[
                    DrawnAnswer(tokens=list(one.tokens), logprobs=list(one.logprobs), ended=one.ended)
                    for one in answers
                ],
                prompt_logprobs=list(of_prompt),
            )
            for answers, of_prompt in zip(result.answers, scores, strict=True)
        ]


def error_of(failed: CallFailed) -> HorizonError:
    """Return the error that a call of a session was refused with."""
    kind = next((kind for kind in _ERRORS if kind.reason == failed.reason), HorizonError)
    violations = [FieldViolation(field=one.field, description=one.description) for one in failed.violations]
    return kind(failed.message, violations=violations)


def _wants_top(options: SampleOptions) -> bool:
    return bool(options.logprobs or options.prompt_logprobs)


async def _gathered(
    texts: AsyncGenerator[SampledText | SampledPrompt | SampleFigures, None], num_prompts: int, num_samples: int
) -> list[Drawn]:
    found = [Drawn(answers=[DrawnAnswer() for _ in range(num_samples)]) for _ in range(num_prompts)]
    async with aclosing(texts):
        async for piece in texts:
            if isinstance(piece, SampledText):
                answer = found[piece.prompt].answers[piece.sample]
                answer.tokens += piece.tokens
                answer.logprobs += piece.logprobs
                answer.top += piece.top
                answer.ended = piece.ended or answer.ended
            elif isinstance(piece, SampledPrompt):
                drawn = found[piece.prompt]
                drawn.prompt_logprobs = [None, *piece.logprobs] if piece.logprobs or len(piece.tokens) == 1 else []
                drawn.prompt_top = [(), *piece.top] if piece.top else []
    return found
