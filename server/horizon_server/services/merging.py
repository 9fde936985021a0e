"""Merged models of checkpoints of adapters: made by a child process next to the adapter, as the folder merged/ of the checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, get_args

from horizon_server.blobs.concurrency import in_thread
from horizon_server.children.child import Child, Limits
from horizon_server.durable import remove_unfinished
from horizon_server.errors import InvalidModel, InvalidSpec, in_words
from horizon_server.events import MergeProgress, WorkerLine
from horizon_server.jobs.folders import CheckpointFolder
from horizon_server.records.account import Principal
from horizon_server.records.job import CheckpointRecord, JobRecord
from horizon_server.services.access import require_change
from horizon_server.services.jobs import JobService
from horizon_server.services.quotas import Quotas
from horizon_server.store.checkpoint_parts import MERGED_FOLDER, MergeBase, adapter_part, model_part
from horizon_server.store.manifest import FileRecord, Manifest, read_manifest
from horizon_server.store.merging import ExportDtype, merged_bytes, read_origin

_CHILD_MODULE = "horizon_server.services.merge_child"
_WHO = "the child that merges an adapter"
# Headers, and pieces of a few tensors; whatever the model's size.
_LIMITS = Limits(memory_bytes=4 * 2**30, oom_score_adj=1000)


class Merges:
    """Merges adapters: one checkpoint at a time on the node, and callers take turns. Thread: belongs to one event loop."""

    def __init__(self, jobs: JobService, *, quotas: Quotas, environment: Mapping[str, str]) -> None:
        # The child has threads of its own, and products so small that BLAS's would only wait for each other.
        self._jobs, self._environment = jobs, {**environment, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self._quotas = quotas
        self._turn = asyncio.Lock()

    async def merge(
        self, principal: Principal, key: str, step: int, *, dtype: str = "", base: str = "", remove: bool = False
    ) -> AsyncGenerator[MergeProgress | CheckpointRecord, None]:
        """Add the merged model to a checkpoint of adapters, or with `remove` take it away: yield the progress, then the checkpoint.

        `dtype` and `base` are the job's own `checkpoint.dtype` and `checkpoint.merge_base` where they are empty. A merged model that is
        there already stays as it is. Closing the generator ends the child, and leaves nothing; so does a refusal.

        Raises:
            NotFound: when the caller has no such job, it has no such checkpoint, or its base model is gone.
            NotAllowed: when the caller may not change the job.
            InvalidSpec: when the checkpoint is not one of adapters, there is nothing to remove, or there is a merged model of another
                `base`.
            InvalidModel: when the base is not the one that the adapter was trained on.
            QuotaExceeded: when the job's owner, or their project, would store more than an admin allows.
            DiskFull: when the node has no space for the merged model.
            InUse: when what is to be removed is being downloaded.
        """
        if dtype and dtype not in get_args(ExportDtype):
            raise InvalidSpec.of("dtype", f"dtype is {dtype:.20}; it must be one of {', '.join(get_args(ExportDtype))}")
        if base and base not in get_args(MergeBase):
            raise InvalidSpec.of("base", f"base is {base:.20}; it must be one of {', '.join(get_args(MergeBase))}")
        job = await self._jobs.get(principal, key)
        require_change(principal, job.owner, f"job {job.job_id}", project=job.project)
        checkpoints = self._jobs.folders.checkpoints(job.job_id)
        async with self._turn:
            manifest = await asyncio.to_thread(checkpoints.manifest, step)
            if adapter_part(manifest.files) is None:
                raise InvalidSpec.of(
                    "job_id",
                    f"the checkpoint of step {step} of job {job.job_id} holds a whole model, not an adapter; pull it as it is",
                )
            merged = model_part(manifest.files)
            if remove:
                await self._remove(job, checkpoints, step, merged)
            elif merged is not None:
                if base:
                    await asyncio.to_thread(_require_same, job, checkpoints.of_step(step) / merged, step, base)
            else:
                with await self._jobs.leases.take(checkpoints, step):
                    lines = self._merged(
                        job,
                        checkpoints,
                        step,
                        manifest,
                        dtype or job.spec.checkpoint.dtype,
                        base or job.spec.checkpoint.merge_base,
                    )
                    async with contextlib.aclosing(lines):
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
        self,
        job: JobRecord,
        checkpoints: CheckpointFolder,
        step: int,
        manifest: Manifest,
        dtype: Any,
        merge_base: str,
    ) -> AsyncGenerator[MergeProgress, None]:
        assert manifest.base is not None, "a checkpoint of adapters names its base"
        base = await self._jobs.base_of(job)
        folder, part = checkpoints.of_step(step), adapter_part(manifest.files)
        await self._quotas.require_stored(job.owner, await asyncio.to_thread(_expected_bytes, base, dtype))
        # Of a merge that was cut together with the daemon.
        await asyncio.to_thread(_remove_unlisted, folder)
        request = {
            "base": str(base),
            "base_name": manifest.base.model,
            "base_sha256": manifest.base.sha256,
            "digests": str(self._jobs.folders.digests),
            "adapter": str(folder / (part or "")),
            "target": str(folder / MERGED_FOLDER),
            "dtype": dtype,
            "merge_base": merge_base,
            "kept_as": job.spec.train.lora.base,
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
            # Again, of what was really written: others have stored things meanwhile.
            await self._quotas.require_stored(job.owner, sum(record.size_bytes for record in files.values()))
            await in_thread(lambda: checkpoints.add_merged(step, files))
        except BaseException:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            # A child that was killed had no time to clean up.
            await in_thread(lambda: _remove_unlisted(folder))
            raise


def _expected_bytes(base: Path, dtype: ExportDtype) -> int:
    try:
        return merged_bytes(base, dtype)
    except InvalidModel as error:
        raise InvalidModel(in_words(error.message, {base: "the base model"}), violations=error.violations) from error


def _remove_unlisted(folder: Path) -> None:
    """Remove what a merge has left in a checkpoint that does not list it."""
    if model_part(read_manifest(folder).files) is None:
        shutil.rmtree(folder / MERGED_FOLDER, ignore_errors=True)
    remove_unfinished(folder)


def _require_same(job: JobRecord, merged: Path, step: int, asked: str) -> None:
    """Refuse a merged model that is there already and was made from other values than those that are asked for."""
    origin, kept_as = read_origin(merged), job.spec.train.lora.base
    # Earlier versions merged into the model folder's own weights, and wrote no origin.
    has, wanted = "source" if origin is None else origin.base_format, kept_as if asked == "trained" else "source"
    if has != wanted:
        other = "source" if asked == "trained" else "trained"
        raise InvalidSpec.of(
            "base",
            f"base is {asked}, and the checkpoint of step {step} of job {job.job_id} has a merged model of base {other} already; take it "
            "off the node first (horizon checkpoint merge --remove), or leave base out to have that one",
        )
