"""Answers to prompts from a job's checkpoint, computed in a child process: the daemon never loads torch, nor runs a model's template."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from horizon_server.children.child import Child, Limits
from horizon_server.errors import DoesNotFit, InvalidModel, NotFound, OutOfMemory, Stalled, WorkerCrashed, WorkerFailed
from horizon_server.events import SampledText, WorkerLine
from horizon_server.jobs.folders import CheckpointFolder
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.planning.sampling import (
    CACHE_BYTES,
    SampleHold,
    SampleMemory,
    sample_layout,
    sample_memory,
    trained_layout,
)
from horizon_server.records.account import Principal
from horizon_server.records.job import JobRecord
from horizon_server.records.plan import size_text
from horizon_server.records.sample import (
    SampleAdapter,
    SampleFigures,
    SampleOptions,
    SamplePrompt,
    SampleRequest,
    check_sample,
)
from horizon_server.services.access import require_sample
from horizon_server.services.jobs import JobService
from horizon_server.store.adapter_files import read_adapter_folder
from horizon_server.store.checkpoint_parts import adapter_part, model_part
from horizon_server.store.generation_config import GENERATION_CONFIG_FILE

CHILD_MODULE = "horizon_server.worker.sampling"
# Of one call, its turn not counted.
LIMIT_S = 900.0
# Texts that wait for a caller who reads slowly; then the child waits too.
_WAITING_TEXTS = 256

Sampled = SampledText | SampleFigures


class Samples:
    """Answers prompts: one call at a time on the node, and callers take turns. Thread: belongs to one event loop."""

    def __init__(
        self,
        jobs: JobService,
        *,
        hold: SampleHold,
        free_bytes: Callable[[], int],
        environment: Mapping[str, str],
        num_threads: int,
        limit_s: float = LIMIT_S,
    ) -> None:
        """`free_bytes` is what running jobs leave of the host's memory; `hold` is what the queue must leave to a call that runs."""
        self._jobs, self._hold, self._free_bytes = jobs, hold, free_bytes
        self._environment, self._num_threads, self._limit_s = environment, num_threads, limit_s
        self._turn = asyncio.Lock()
        self._of_user: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def sample(
        self,
        principal: Principal,
        key: str,
        step: int,
        prompts: Sequence[SamplePrompt],
        options: SampleOptions,
    ) -> AsyncGenerator[Sampled, None]:
        """Yield texts of the answers to `prompts` as they come, then what it took. Closing it ends the child.

        Raises:
            NotFound: when the caller has no such job, or it has no such checkpoint.
            NotAllowed: when the caller may see the job and use nothing of the node.
            InvalidSpec: for prompts or options out of range, InvalidData for a prompt that cannot be rendered; they name the field.
            InvalidModel: when the architecture's cache cannot be used; it is named.
            DoesNotFit: when running jobs leave too little memory.
            Stalled: when it takes longer than the limit.
        """
        job = await self._jobs.get(principal, key)
        require_sample(principal, job.owner, f"job {job.job_id}", project=job.project)
        check_sample(prompts, options)
        checkpoints = self._jobs.folders.checkpoints(job.job_id)
        # First the user's own turn: what waits for it must not keep others waiting.
        async with self._of_user[principal.name], self._turn:
            with await self._jobs.leases.take(checkpoints, step):
                folder, adapter, weights = await self._answering(job, checkpoints, step)
                memory = await asyncio.to_thread(_memory, folder, adapter)
                self._require_room(memory)
                request = SampleRequest(
                    folder=folder,
                    prompts=tuple(prompts),
                    options=options,
                    num_threads=self._num_threads,
                    cache_bytes=CACHE_BYTES,
                    adapter=adapter,
                    answers=_answers_folder(checkpoints.of_step(step), folder),
                )
                self._hold.num_bytes = memory.total
                try:
                    async with contextlib.aclosing(self._answered(request, memory)) as texts:
                        async for text in texts:
                            yield replace(text, weights=weights) if isinstance(text, SampleFigures) else text
                finally:
                    self._hold.num_bytes = 0
                    # A job may wait for this memory.
                    self._jobs.scheduler.wake()

    async def _answering(
        self, job: JobRecord, checkpoints: CheckpointFolder, step: int
    ) -> tuple[Path, SampleAdapter | None, str]:
        """Return the model folder that answers, with an adapter to put on it, and both in words.

        Where a job has kept its base in fewer bits, that base answers: a merged model is rounded once more, or is on other values.
        Otherwise it is the checkpoint's own model where it has one.
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

    def _require_room(self, memory: SampleMemory) -> None:
        free = max(0, self._free_bytes())
        if memory.total > free:
            raise DoesNotFit(
                f"answering with this checkpoint takes {size_text(memory.total)} of host memory (weights {size_text(memory.planes)}), and "
                f"the node's jobs leave {size_text(free)}; sample again when they have ended, or pull the checkpoint"
            )

    async def _answered(self, request: SampleRequest, memory: SampleMemory) -> AsyncGenerator[Sampled, None]:
        news: asyncio.Queue[Sampled | None] = asyncio.Queue(_WAITING_TEXTS)

        async def on_event(line: WorkerLine) -> None:
            if isinstance(line, SampledText):
                await news.put(line)

        async def run() -> Any:
            try:
                child = await Child.start(
                    CHILD_MODULE,
                    request.to_mapping(),
                    who="the child that answers prompts",
                    environment=self._environment,
                    limits=Limits(
                        memory_bytes=memory.private, file_bytes=64 * 2**20, wall_s=self._limit_s, oom_score_adj=1000
                    ),
                )
                return await child.answer(on_event)
            finally:
                # Where the queue is full, the reader looks at this task when it is empty.
                with contextlib.suppress(asyncio.QueueFull):
                    news.put_nowait(None)

        start_s = time.monotonic()
        running = asyncio.create_task(run(), name="sample")
        try:
            while not (running.done() and news.empty()):
                text = await news.get()
                if text is None:
                    break
                yield text
            figures = _figures(await self._explained(running, request.folder))
            # With the start of the child, which takes longer than a small model's weights.
            yield replace(figures, load_s=max(figures.load_s, time.monotonic() - start_s - figures.duration_s))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _explained(self, running: asyncio.Task[Any], folder: Path) -> Any:
        try:
            return await running
        except Stalled as error:
            raise Stalled(
                f"the prompts were not answered within {self._limit_s:g} s; send fewer at a time, or lower max_tokens"
            ) from error
        except OutOfMemory as error:
            raise DoesNotFit(
                "answering these prompts takes more memory than planned; send fewer or shorter ones"
            ) from error
        except WorkerCrashed as error:
            raise InvalidModel("answering with this checkpoint crashes; is its chat template right?") from error


def _answers_folder(checkpoint: Path, model: Path) -> Path:
    # Checkpoints of earlier versions may have none.
    return checkpoint if (checkpoint / GENERATION_CONFIG_FILE).is_file() else model


def _memory(folder: Path, adapter: SampleAdapter | None) -> SampleMemory:
    if adapter is not None and adapter.spec is not None:
        return sample_memory(trained_layout(folder, adapter.spec.train))
    found = None if adapter is None else read_adapter_folder(adapter.folder)
    return sample_memory(sample_layout(open_model_folder(folder), found))


def _figures(answer: Any) -> SampleFigures:
    try:
        return SampleFigures(**answer)
    except TypeError as error:
        # The child runs a template that came with a model, so its answer is not trusted.
        raise WorkerFailed("the child that answers prompts sent something that is not figures") from error
