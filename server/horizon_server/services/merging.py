"""Merged models of checkpoints of adapters: made by a child process next to the adapter, as the folder merged/ of the checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator, Mapping
from typing import Any, get_args

from horizon_server.children.child import Child, Limits
from horizon_server.errors import InvalidSpec
from horizon_server.events import MergeProgress, WorkerLine
from horizon_server.jobs.folders import CheckpointFolder
from horizon_server.records.account import Principal
from horizon_server.records.job import CheckpointRecord, JobRecord
from horizon_server.services.access import require_change
from horizon_server.services.jobs import JobService
from horizon_server.store.checkpoint_parts import MERGED_FOLDER, adapter_part, model_part
from horizon_server.store.manifest import FileRecord
from horizon_server.store.merging import ExportDtype

_CHILD_MODULE = "horizon_server.services.merge_child"
_WHO = "the child that merges an adapter"
# Headers, and pieces of a few tensors; whatever the model's size.
_LIMITS = Limits(memory_bytes=4 * 2**30, oom_score_adj=1000)


class Merges:
    """Merges adapters: one checkpoint at a time on the node, and callers take turns. Thread: belongs to one event loop."""

    def __init__(self, jobs: JobService, *, environment: Mapping[str, str]) -> None:
        # The child has threads of its own, and products so small that BLAS's would only wait for each other.
        self._jobs, self._environment = jobs, {**environment, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._turn = asyncio.Lock()

    async def merge(
        self, principal: Principal, key: str, step: int, *, dtype: str = "", remove: bool = False
    ) -> AsyncGenerator[MergeProgress | CheckpointRecord, None]:
        """Add the merged model to a checkpoint of adapters, or with `remove` take it away: yield the progress, then the checkpoint.

        `dtype` is the job's own `checkpoint.dtype` where it is empty. A merged model that is there already stays as it is. Closing the
        generator ends the child, and leaves nothing.

        Raises:
            NotFound: when the caller has no such job, it has no such checkpoint, or its base model is gone.
            NotAllowed: when the caller may not change the job.
            InvalidSpec: when the checkpoint is not one of adapters, or there is nothing to remove.
            InvalidModel: when the base is not the one that the adapter was trained on.
            DiskFull: when the node has no space for the merged model.
            InUse: when what is to be removed is being downloaded.
        """
        if dtype and dtype not in get_args(ExportDtype):
            raise InvalidSpec.of("dtype", f"dtype is {dtype:.20}; it must be one of {', '.join(get_args(ExportDtype))}")
        job = await self._jobs.get(principal, key)
        require_change(principal, job.owner, f"job {job.job_id}", project=job.project)
        checkpoints = self._jobs.folders.checkpoints(job.job_id)
        async with self._turn:
            files = (await asyncio.to_thread(checkpoints.manifest, step)).files
            if adapter_part(files) is None:
                raise InvalidSpec.of(
                    "job_id",
                    f"the checkpoint of step {step} of job {job.job_id} holds a whole model, not an adapter; pull it as it is",
                )
            merged = model_part(files)
            if remove:
                await self._remove(job, checkpoints, step, merged)
            elif merged is None:
                with await self._jobs.leases.take(checkpoints, step):
                    async with contextlib.aclosing(self._merged(job, checkpoints, step, dtype)) as lines:
                        async for line in lines:
                            yield line
            records = await asyncio.to_thread(checkpoints.all)
        yield next(record for record in records if record.step == step)

    async def _remove(self, job: JobRecord, checkpoints: CheckpointFolder, step: int, merged: str | None) -> None:
        if merged == "":
            raise InvalidSpec.of(
                "remove",
                f"the checkpoint of step {step} of job {job.job_id} was written merged (checkpoint.export); only what horizon "
                "checkpoint merge or export: both has added can be removed",
            )
        self._jobs.leases.require_unread(checkpoints, [step])
        self._jobs.leases.drop_idle(checkpoints, step)
        await asyncio.to_thread(checkpoints.remove_merged, step)

    async def _merged(
        self, job: JobRecord, checkpoints: CheckpointFolder, step: int, dtype: str
    ) -> AsyncGenerator[MergeProgress, None]:
        manifest = await asyncio.to_thread(checkpoints.manifest, step)
        assert manifest.base is not None, "a checkpoint of adapters names its base"
        base = await self._jobs.base_of(job)
        folder, part = checkpoints.of_step(step), adapter_part(manifest.files)
        # Of a merge that was cut between its last two steps.
        await asyncio.to_thread(shutil.rmtree, folder / MERGED_FOLDER, ignore_errors=True)
        request = {
            "base": str(base),
            "base_name": manifest.base.model,
            "base_sha256": manifest.base.sha256,
            "kept": str(self._jobs.folders.base_digest(job.job_id)),
            "adapter": str(folder / (part or "")),
            "target": str(folder / MERGED_FOLDER),
            "dtype": dtype or job.spec.checkpoint.dtype,
            "min_free_bytes": self._jobs.folders.min_free_bytes,
        }
        news: asyncio.Queue[MergeProgress | None] = asyncio.Queue()

        async def on_event(line: WorkerLine) -> None:
            if isinstance(line, MergeProgress):
                news.put_nowait(line)

        async def run() -> Any:
            try:
                child = await Child.start(
                    _CHILD_MODULE, request, who=_WHO, environment=self._environment, limits=_LIMITS
                )
                return await child.answer(on_event)
            finally:
                news.put_nowait(None)

        running = asyncio.create_task(run(), name="merge")
        try:
            while (line := await news.get()) is not None:
                yield line
            files = {name: FileRecord(**record) for name, record in (await running).items()}
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await asyncio.to_thread(checkpoints.add_merged, step, files)
