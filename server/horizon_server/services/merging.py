"""Merged models of checkpoints of adapters: made by a child process next to the adapter, as the folder merged/ of the
checkpoint."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any, get_args

from horizon_server.blobs.concurrency import in_thread
from horizon_server.children.child import ChildTask, Limits
from horizon_server.children.entry import Answer
from horizon_server.codec import to_plain
from horizon_server.durable import remove_unfinished
from horizon_server.errors import InvalidModel, InvalidSpec, naming
from horizon_server.events import MergeProgress
from horizon_server.jobs.folders import CheckpointFolder, JobFolders
from horizon_server.records.account import Principal
from horizon_server.records.job import CheckpointRecord, JobRecord
from horizon_server.services.access import require_change
from horizon_server.services.jobs import JobService
from horizon_server.services.merge_request import MergeRequest
from horizon_server.services.quotas import Quotas
from horizon_server.store.checkpoint_parts import (
    MERGED_FOLDER,
    NEW_MERGED_FOLDER,
    MergeBase,
    adapter_part,
    model_part,
)
from horizon_server.store.exported import ExportDtype
from horizon_server.store.manifest import FileRecord, Manifest, read_manifest
from horizon_server.store.merging import has_dtype, merged_bytes, merged_dtype, read_origin
from horizon_server.store.safetensors_files import read_safetensors_headers

# Headers, and pieces of a few tensors; whatever the model's size.
_LIMITS = Limits(memory_bytes=4 * 2**30, oom_score_adj=1000)


class Merges:
    """Merges adapters: one checkpoint at a time on the node, and callers take turns. Thread: belongs to one event
    loop."""

    def __init__(self, jobs: JobService, *, quotas: Quotas, environment: Mapping[str, str]) -> None:
        self._jobs, self._quotas = jobs, quotas
        self._task = ChildTask(
            module="horizon_server.services.merge_child",
            who="the child that merges an adapter",
            # The child has threads of its own, and products so small that BLAS's would only wait for each other.
            environment={**environment, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
            limits=_LIMITS,
        )
        self._turn = asyncio.Lock()

    async def merge(
        self, principal: Principal, key: str, step: int, *, dtype: str = "", base: str = "", remove: bool = False
    ) -> AsyncGenerator[MergeProgress | CheckpointRecord, None]:
        """Add the merged model to a checkpoint of adapters, or with `remove` take it away: yield the progress, then the
        checkpoint.

        Where `dtype` and `base` are empty, a merged model that is there already decides, else the job's own
        `checkpoint.dtype` and `checkpoint.merge_base`. A merged model that was made with what is asked for stays as it
        is; another one is replaced, once the new one is complete. Closing the generator ends the child, and leaves what
        was there; so does a refusal.

        Raises:
            NotFound: when the caller has no such job, it has no such checkpoint, or its base model is gone.
            NotAllowed: when the caller may not change the job.
            InvalidSpec: when the checkpoint is not one of adapters, there is nothing to remove, or the checkpoint was
                written merged with another `dtype` or `base`.
            InvalidModel: when the base is not the one that the adapter was trained on.
            QuotaExceeded: when the job's owner, or their project, would store more than an admin allows.
            DiskFull: when the node has no space for the merged model.
            InUse: when what is to be removed or replaced is being downloaded.
        """
        if dtype and dtype not in get_args(ExportDtype):
            raise InvalidSpec.of("dtype", f"dtype is {dtype:.20}; it must be one of {', '.join(get_args(ExportDtype))}")
        if base and base not in get_args(MergeBase):
            raise InvalidSpec.of("base", f"base is {base:.20}; it must be one of {', '.join(get_args(MergeBase))}")
        job = await self._jobs.get(principal, key)
        require_change(principal, job.owner, f"job {job.job_id}", project=job.project)
        if self._jobs.boxes.has_arrived(job):
            more = {"step": step, "dtype": dtype, "base": base, "remove": remove}
            kinds = (MergeProgress, CheckpointRecord)
            there = self._jobs.boxes.records(principal, job, "merge", kinds, **more)
            async with contextlib.aclosing(there):
                async for progress in there:
                    yield progress
            return
        checkpoints = self._jobs.folders.checkpoints(job.job_id)
        async with self._turn:
            manifest = await asyncio.to_thread(checkpoints.manifest, step)
            if adapter_part(manifest.files) is None:
                raise InvalidSpec.of(
                    "job_id",
                    f"the checkpoint of step {step} of job {job.job_id} holds a whole model, not an adapter; pull it "
                    "as it is",
                )
            merged = model_part(manifest.files)
            if remove:
                await self._remove(job, checkpoints, step, merged)
            elif merged is None or await self._is_other(job, checkpoints.of_step(step) / merged, step, dtype, base):
                lines = self._merged(job, checkpoints, step, manifest, dtype, base)
                async with contextlib.aclosing(lines):
                    async for line in lines:
                        yield line
            records = await asyncio.to_thread(checkpoints.all)
        yield next(record for record in records if record.step == step)

    async def _remove(self, job: JobRecord, checkpoints: CheckpointFolder, step: int, merged: str | None) -> None:
        if merged == "":
            raise InvalidSpec.of(
                "remove",
                f"the checkpoint of step {step} of job {job.job_id} was written merged (checkpoint.export); only what "
                "horizon "
                "checkpoint merge or export: both has added can be removed",
            )
        self._jobs.leases.require_unread(checkpoints, [step])
        self._jobs.leases.drop_idle(checkpoints, step)
        await asyncio.to_thread(checkpoints.remove_merged, step)

    async def _is_other(self, job: JobRecord, merged: Path, step: int, dtype: Any, base: str) -> bool:
        """Whether the merged model in this folder was made with other options than those that are given. Raises
        InvalidSpec."""
        model = await self._jobs.base_of(job) if dtype == "source" else None
        differs = await asyncio.to_thread(
            _difference, merged, dtype, base, kept_as=job.spec.train.lora.base, model=model
        )
        if differs and merged.name != MERGED_FOLDER:
            name, has = differs
            raise InvalidSpec.of(
                name,
                f"{name} is {dtype if name == 'dtype' else base}, and the checkpoint of step {step} of job "
                f"{job.job_id} was written merged (checkpoint.export) with {name} {has}; leave {name} out to have that "
                "model",
            )
        return differs is not None

    async def _merged(
        self, job: JobRecord, checkpoints: CheckpointFolder, step: int, manifest: Manifest, dtype: Any, merge_base: Any
    ) -> AsyncGenerator[MergeProgress, None]:
        """Make the merged model. One that is there stays until the new one is complete, and gives it what is not asked
        for."""
        assert manifest.base is not None, "a checkpoint of adapters names its base"
        base = await self._jobs.base_of(job)
        folder, part = checkpoints.of_step(step), adapter_part(manifest.files)
        old = [record for name, record in manifest.files.items() if name.startswith(f"{MERGED_FOLDER}/")]
        if old:
            self._jobs.leases.require_unread(checkpoints, [step])
            made_dtype, made_base = await asyncio.to_thread(_made_with, folder / MERGED_FOLDER)
            dtype, merge_base = dtype or made_dtype, merge_base or made_base
        dtype, merge_base = dtype or job.spec.checkpoint.dtype, merge_base or job.spec.checkpoint.merge_base
        old_bytes = sum(record.size_bytes for record in old)
        base_bytes, needed_bytes = await asyncio.to_thread(_expected_bytes, base, dtype)
        await self._quotas.require_stored(job.owner, max(0, needed_bytes - old_bytes))
        # Of a merge that was cut together with the daemon.
        await asyncio.to_thread(_remove_unlisted, folder)
        request = MergeRequest(
            base=base,
            base_model=manifest.base,
            digests=self._jobs.folders.digests,
            adapter=folder / (part or ""),
            target=folder / (NEW_MERGED_FOLDER if old else MERGED_FOLDER),
            dtype=dtype,
            merge_base=merge_base,
            kept_as=job.spec.train.lora.base,
            min_free_bytes=self._jobs.folders.min_free_bytes,
        )
        files: dict[str, FileRecord] = {}
        try:
            with await self._jobs.leases.take(checkpoints, step):
                # Before anything is read, it says that a model is about to be made: a caller may have nowhere to put
                # it.
                yield MergeProgress(done_bytes=0, total_bytes=base_bytes)
                async with contextlib.aclosing(self._task.stream(to_plain(request))) as lines:
                    async for line in lines:
                        if isinstance(line, MergeProgress):
                            yield line
                        elif isinstance(line, Answer):
                            files = {name: FileRecord(**record) for name, record in line.value.items()}
                # Again, of what was really written: others have stored things meanwhile.
                new_bytes = sum(record.size_bytes for record in files.values())
                await self._quotas.require_stored(job.owner, max(0, new_bytes - old_bytes))
            if old:
                self._jobs.leases.require_unread(checkpoints, [step])
                self._jobs.leases.drop_idle(checkpoints, step)
                await in_thread(lambda: checkpoints.replace_merged(step, files))
            else:
                await in_thread(lambda: checkpoints.add_merged(step, files))
        except BaseException:
            # A child that was killed had no time to clean up.
            await in_thread(lambda: _remove_unlisted(folder))
            raise


def _expected_bytes(base: Path, dtype: ExportDtype) -> tuple[int, int]:
    """The bytes of the base's tensors, which are read, and the most that a merged model takes."""
    with naming({base: "the base model"}):
        headers = read_safetensors_headers(base)
        return sum(header.end - header.start for header in headers.values()), merged_bytes(base, dtype)


def remove_cut_merges(folders: JobFolders) -> None:
    """Remove what merges have left that were cut together with the daemon: no quota counts it. Blocking."""
    for folder in folders.with_merges():
        with contextlib.suppress(
            InvalidModel, OSError
        ):  # not complete, which is for those that look at all checkpoints
            _remove_unlisted(folder)


def _remove_unlisted(folder: Path) -> None:
    """Remove what a merge has left in a checkpoint that does not list it."""
    if model_part(read_manifest(folder).files) is None:
        shutil.rmtree(folder / MERGED_FOLDER, ignore_errors=True)
    shutil.rmtree(folder / NEW_MERGED_FOLDER, ignore_errors=True)
    remove_unfinished(folder)


def _made_with(merged: Path) -> tuple[ExportDtype, str]:
    """The `dtype` and `base` that a merged model was made with."""
    return merged_dtype(merged), read_origin(merged).base


def _difference(merged: Path, dtype: Any, base: str, *, kept_as: str, model: Path | None) -> tuple[str, str] | None:
    """The first given option that a merged model was not made with, and what it was made with; None where all agree.

    What counts is the result: dtype by the formats of the tensors, base by the format of the values that were used.
    """
    made_dtype, made_base = _made_with(merged)
    if base and read_origin(merged).base_format != (kept_as if base == "trained" else "source"):
        return "base", made_base
    if dtype and not has_dtype(merged, dtype, model):
        return "dtype", made_dtype
    return None
