"""The frozen weights under adapters that resident jobs share: a memory file for each base, which is there for as
long as a job is on it.

The daemon makes the file and lends it to the workers of all these jobs, one of which loads it (`store.base_plane`). A
later daemon gets it back from the workers that it takes over, and waits for these before it makes another one.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field

import structlog

from horizon_server.errors import DriveFailed
from horizon_server.records.job import JobRecord
from horizon_server.records.plan import Plan, SharedBase
from horizon_server.store.base_plane import PLANE
from horizon_server.store.drive_files import lent_files
from horizon_server.store.planes import create_memory_file, lent_memory

log = structlog.get_logger(__name__)

_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(kw_only=True, eq=False)
class _Held:
    """A memory file, and the jobs that are on it."""

    fd: int
    num_bytes: int
    job_ids: set[str]


@dataclass(kw_only=True, eq=False)
class Bases:
    """Thread: belongs to one event loop."""

    _held: dict[str, _Held] = field(init=False, default_factory=dict)
    _expected: dict[str, str] = field(init=False, default_factory=dict)
    """Jobs of an earlier daemon that have not brought their base yet, and its key."""
    _on_drives: set[str] = field(init=False, default_factory=set)
    """Jobs that have files on drives."""
    _news: asyncio.Event = field(init=False, default_factory=asyncio.Event)

    @property
    def num_bytes(self) -> int:
        """Of all bases in memory."""
        return sum(held.num_bytes for held in self._held.values())

    @property
    def num_jobs(self) -> int:
        """Jobs that are on them."""
        return sum(len(held.job_ids) for held in self._held.values())

    def jobs_on(self, key: str) -> int:
        """How many jobs are on a base. Any thread may ask."""
        held = self._held.get(key)
        return 0 if held is None else len(held.job_ids)

    def expect(self, job: JobRecord) -> None:
        """A job of an earlier daemon may have a worker, which has its base."""
        if job.plan is not None and job.plan.base is not None:
            self._expected[job.job_id] = job.plan.base.key

    @asynccontextmanager
    async def lent_planes(self, plan: Plan, job_id: str) -> AsyncIterator[dict[str, int]]:
        """Lend a job its planes within the block, by descriptors, with its files on drives; and its base, until
        `leave`. Raises DriveFailed: a drive cannot have its file.
        """
        drives = plan.execution.drives
        with ExitStack() as lent:
            planes = lent.enter_context(lent_memory(plan.plane_bytes))
            # On a thread: file systems take a while to allocate the space.
            making = lent_files(drives.folders, plan.drive_file_bytes)
            files = await asyncio.to_thread(lent.enter_context, making)
            if files:
                self._on_drives.add(job_id)
            base = {} if plan.base is None else {PLANE: await self._lent(plan.base, job_id)}
            yield planes | files | base

    def may_have_room_later(self, job_id: str, error: DriveFailed) -> bool:
        """Whether a drive had no room for a job's file while other jobs have files there."""
        is_full = isinstance(error.__cause__, OSError) and error.__cause__.errno in _FULL
        return is_full and bool(self._on_drives - {job_id})

    def take_over(self, job: JobRecord, planes: Mapping[str, int]) -> None:
        """Keep the base among the planes that a worker of an earlier daemon has brought."""
        base = None if job.plan is None else job.plan.base
        if job.plan is not None and job.plan.execution.drives.units:
            self._on_drives.add(job.job_id)
        if base is not None and PLANE in planes:
            held = self._held.get(base.key)
            if held is None:
                self._held[base.key] = _Held(fd=os.dup(planes[PLANE]), num_bytes=base.num_bytes, job_ids={job.job_id})
            elif os.path.sameopenfile(held.fd, planes[PLANE]):
                held.job_ids.add(job.job_id)
        self._arrived(job.job_id)

    def leave(self, job_id: str) -> None:
        """A job has left memory. A base without jobs is freed."""
        self._on_drives.discard(job_id)
        for key, held in list(self._held.items()):
            held.job_ids.discard(job_id)
            if not held.job_ids:
                os.close(held.fd)
                del self._held[key]
                log.info("a base is freed", num_bytes=held.num_bytes)
        self._arrived(job_id)

    async def _lent(self, base: SharedBase, job_id: str) -> int:
        while base.key not in self._held and base.key in self._expected.values():
            await self._news.wait()
        if (held := self._held.get(base.key)) is None:
            fd = create_memory_file(PLANE, base.num_bytes)
            held = self._held[base.key] = _Held(fd=fd, num_bytes=base.num_bytes, job_ids=set())
        held.job_ids.add(job_id)
        log.info("lends a base", num_bytes=base.num_bytes, num_jobs=len(held.job_ids))
        return held.fd

    def _arrived(self, job_id: str) -> None:
        if self._expected.pop(job_id, None) is not None:
            self._news.set()
            self._news = asyncio.Event()
