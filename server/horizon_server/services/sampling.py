"""Answers to prompts from a job's checkpoint, computed in a child process: the daemon never loads torch, nor runs a
model's template."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from horizon_server.children.entry import Answer
from horizon_server.codec import to_plain
from horizon_server.errors import NotFound, WorkerFailed
from horizon_server.events import SampledPrompt, SampledText, WorkerLine
from horizon_server.jobs.folders import CheckpointFolder
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.pages import pages_of_answers
from horizon_server.planning.sampling import (
    CACHE_BYTES,
    SampleMemory,
    sample_layout,
    sample_memory,
    trained_layout,
)
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord
from horizon_server.records.sample import (
    SampleAdapter,
    SampleCall,
    SampleFigures,
    SampleModel,
    SampleOptions,
    SamplePrompt,
    check_sample,
)
from horizon_server.services.access import require_create, require_sample
from horizon_server.services.jobs import JobService
from horizon_server.services.sampling_child import SamplingChild, WantedModel
from horizon_server.services.sampling_turns import SamplingTurns
from horizon_server.store.adapter_files import read_adapter_folder
from horizon_server.store.checkpoint_parts import adapter_part, model_part
from horizon_server.store.generation_config import GENERATION_CONFIG_FILE

Sampled = SampledText | SampledPrompt | SampleFigures


class Samples:
    """Answers prompts: the calls for one model at a time on the node, together. Thread: belongs to one event loop."""

    def __init__(self, jobs: JobService, child: SamplingChild, *, num_threads: int) -> None:
        """The calls are answered by `child`, with that many threads."""
        self._jobs, self._child, self._num_threads = jobs, child, num_threads
        self._turns = SamplingTurns()

    async def sample(
        self,
        principal: Principal,
        key: str,
        step: int,
        prompts: Sequence[SamplePrompt],
        options: SampleOptions,
    ) -> AsyncGenerator[Sampled, None]:
        """Yield texts of the answers to `prompts` as they come, then what it took. Closing it drops the call.

        Raises:
            NotFound: when the caller has no such job, or it has no such checkpoint.
            NotAllowed: when the caller may see the job and use nothing of the node.
            InvalidSpec: for prompts or options out of range, InvalidData for a prompt that cannot be rendered; they
                name the field.
            InvalidModel: when the architecture's cache cannot be used; it is named.
            DoesNotFit: when running jobs leave too little memory.
            Stalled: when it takes longer than the limit.
        """
        job = await self._jobs.get(principal, key)
        require_sample(principal, job.owner, f"job {job.job_id}", project=job.project)
        check_sample(prompts, options)
        if self._jobs.boxes.has_arrived(job):
            more = {"step": step, "prompts": to_plain(list(prompts)), "options": to_plain(options)}
            kinds = (SampledText, SampledPrompt, SampleFigures)
            async with contextlib.aclosing(self._jobs.boxes.records(principal, job, "sample", kinds, **more)) as texts:
                async for text in texts:
                    yield text
            return
        checkpoints = self._jobs.folders.checkpoints(job.job_id)
        async with self._turns.of_user(principal.name):
            with await self._jobs.leases.take(checkpoints, step):
                folder, adapter, weights = await self._answering(job, checkpoints, step)
                answers = _answers_folder(checkpoints.of_step(step), folder)
                call = SampleCall(prompts=tuple(prompts), options=options)
                texts = self._call(principal.name, call, self._model(folder, adapter, answers), weights)
                async with contextlib.aclosing(texts):
                    async for text in texts:
                        yield text

    async def sample_base(
        self, principal: Principal, name: str, prompts: Sequence[SamplePrompt], options: SampleOptions
    ) -> AsyncGenerator[Sampled, None]:
        """The same from a model that is no checkpoint: a pushed one, one of the hub, or an allowed folder of the node.

        Raises NotFound when the caller has no such model, NotAllowed for viewers and tokens that allow no changes; else
        as `sample`.
        """
        # Nothing is changed, but memory and processors of the node are used.
        require_create(principal)
        check_sample(prompts, options)
        model_id, folder = await self._jobs.resources.model(principal, name)
        async with self._turns.of_user(principal.name):
            with self._jobs.resources.reading_model(model_id):
                call = SampleCall(prompts=tuple(prompts), options=options)
                texts = self._call(principal.name, call, self._model(folder, None, folder), f"the model {name}")
                async with contextlib.aclosing(texts):
                    async for text in texts:
                        yield text

    def _model(self, folder: Path, adapter: SampleAdapter | None, answers: Path) -> SampleModel:
        return SampleModel(
            folder=folder,
            num_threads=self._num_threads,
            cache_bytes=CACHE_BYTES,
            adapter=adapter,
            answers=answers,
        )

    async def _call(
        self, user: str, call: SampleCall, model: SampleModel, weights: str
    ) -> AsyncGenerator[Sampled, None]:
        """Ask the child, when it is the model's turn."""
        memory = await asyncio.to_thread(_memory, model.folder, model.adapter)
        wanted = await asyncio.to_thread(WantedModel.of, model)
        async with self._turns.of_model(wanted):
            try:
                texts = self._answered(self._child.answer(wanted, call, memory, user=user))
                async with contextlib.aclosing(texts):
                    async for text in texts:
                        yield replace(text, weights=weights) if isinstance(text, SampleFigures) else text
            finally:
                # A job may wait for this memory.
                self._jobs.scheduler.wake()

    async def _answering(
        self, job: JobRecord, checkpoints: CheckpointFolder, step: int
    ) -> tuple[Path, SampleAdapter | None, str]:
        """Return the model folder that answers, with an adapter to put on it, and both in words.

        Where a job has kept its base in fewer bits, that base answers: a merged model is rounded once more, or is on
        other values. Otherwise it is the checkpoint's own model where it has one.
        """
        manifest, folder = await asyncio.to_thread(checkpoints.manifest, step), checkpoints.of_step(step)
        model, part = model_part(manifest.files), adapter_part(manifest.files)
        if part is None or manifest.base is None:
            return folder / (model or ""), None, "the weights of the checkpoint"
        kept_as = job.spec.train.lora.base
        if model is not None and kept_as == "source":
            return folder / model, None, "the merged model of the checkpoint"
        try:
            base = await self._jobs.base_of(job)
        except NotFound:
            if model is None:
                raise
            return (
                folder / model,
                None,
                f"the merged model of the checkpoint, because {job.spec.model} is not on the node any more",
            )
        adapter = SampleAdapter(
            folder=folder / part,
            base_sha256=manifest.base.sha256,
            digests=self._jobs.folders.digests,
            spec=None if kept_as == "source" else job.spec,
        )
        if kept_as == "source":
            return base, adapter, f"{job.spec.model} with the adapter merged into it"
        return base, adapter, f"{job.spec.model} in {kept_as}, as the adapter was trained on it, with the adapter"

    async def _answered(self, lines: AsyncGenerator[WorkerLine | Answer, None]) -> AsyncGenerator[Sampled, None]:
        start_s = time.monotonic()
        async with contextlib.aclosing(lines):
            async for line in lines:
                if isinstance(line, SampledText | SampledPrompt):
                    yield line
                elif isinstance(line, Answer):
                    answer, was_loaded = line.value
                    figures = _figures(answer)
                    # With the start of the child, which takes longer than a small model's weights.
                    load_s = max(figures.load_s, time.monotonic() - start_s - figures.duration_s)
                    yield replace(figures, load_s=0.0 if was_loaded else load_s)

    async def close(self) -> None:
        """Free the memory of a model that no call uses; none stays in memory from now on."""
        await self._child.close()


def _answers_folder(checkpoint: Path, model: Path) -> Path:
    # A checkpoint of adapters has one where it has ends to list that the model does not.
    return checkpoint if (checkpoint / GENERATION_CONFIG_FILE).is_file() else model


def _memory(folder: Path, adapter: SampleAdapter | None) -> SampleMemory:
    model = open_model_folder(folder)
    if adapter is not None and adapter.spec is not None:
        layout = trained_layout(folder, adapter.spec.train)
    else:
        layout = sample_layout(model, None if adapter is None else read_adapter_folder(adapter.folder))
    return sample_memory(layout, expert_page_elements=pages_of_answers(replace(model, layout=layout)))


def _figures(answer: Any) -> SampleFigures:
    try:
        return SampleFigures(**answer)
    except TypeError as error:
        # The child runs a template that came with a model, so its answer is not trusted.
        raise WorkerFailed("the child that answers prompts sent something that is not figures") from error
