"""The child that answers prompts: one on the node. It stays for a while when it has answered, so that the next call for
the same model need not load it again; its memory goes to whoever needs it first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from horizon_server.children.child import Child, ChildTask, Limits, OnEvent
from horizon_server.codec import to_plain
from horizon_server.errors import DoesNotFit, InvalidModel, OutOfMemory, Stalled, WorkerCrashed
from horizon_server.planning.sampling import SampleMemory
from horizon_server.records.sample import SampleOptions, SampleRequest
from horizon_server.texts import size_text

# Of one call, its turn not counted.
LIMIT_S = 900.0
# Between two looks at the files that the idle child's model was loaded from.
LOOK_EVERY_S = 5.0
# The kernel takes a while to free the memory of a large model.
_END_S = 30.0
_LOG_BYTES = 64 * 2**20

# Each file of a model: its path, and what changes with its content.
_Files = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class _Model:
    """All that the answers of a child depend on besides prompts and options."""

    request: SampleRequest
    files: _Files

    @classmethod
    def of(cls, request: SampleRequest) -> _Model:
        """The model that a request asks for, as its files are now. Blocking."""
        return cls(request=replace(request, prompts=(), options=SampleOptions()), files=_files(request))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Idle:
    child: Child
    model: _Model
    memory: SampleMemory
    watch: asyncio.Task[None]


class SamplingChild:
    """Starts the child, asks it, and ends it. `busy_bytes` is the host memory of a call that runs and of what others
    hold, which the queue must leave to them.

    Thread: belongs to one event loop. One call at a time; the others may come whenever they like.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        free_bytes: Callable[[str], int],
        keep_s: float,
        limit_s: float = LIMIT_S,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        """`free_bytes` is what jobs leave of the host's memory, all but the one of that id; `keep_s` how long an idle
        child stays."""
        self._limit_s, self.busy_bytes = limit_s, 0
        self._environment, self._free_bytes = environment, free_bytes
        self._keep_s, self._look_every_s = keep_s, look_every_s
        self._idle: _Idle | None = None
        self._ending: asyncio.Task[None] | None = None
        # Held by whoever decides about the idle child's memory.
        self._lock = asyncio.Lock()

    @property
    def held_bytes(self) -> int:
        """Host memory of the child, with a call or idle."""
        return self.busy_bytes + (self._idle.memory.total if self._idle is not None else 0)

    async def answer(self, request: SampleRequest, memory: SampleMemory, on_event: OnEvent) -> tuple[Any, bool]:
        """Return the answer, and whether the model was in memory already. Whoever cancels it ends the child.

        Raises as `Child.answer`, and DoesNotFit when running jobs leave too little memory.
        """
        model = await asyncio.to_thread(_Model.of, request)
        child = await self._take(model, memory)
        was_loaded = child is not None
        try:
            if child is not None:
                answer = await child.ask(to_plain(request), on_event)
            else:
                child = await self._start(request, memory)
                answer = await child.answer(on_event, stays=True)
            if self._keep_s > 0:
                # Nothing is waited for until the memory is that of an idle child.
                watch = asyncio.create_task(self._watch(child, model), name="idle model")
                self._idle = _Idle(child=child, model=model, memory=memory, watch=watch)
            else:
                await child.end()
        finally:
            self.busy_bytes -= memory.total
        return answer, was_loaded

    @contextlib.asynccontextmanager
    async def held(self, num_bytes: int, refusal: Callable[[int, int], DoesNotFit]) -> AsyncIterator[None]:
        """Hold memory for another child until the end of the block; the idle child makes room. Raises what `refusal`
        makes of the bytes that are needed and those that are free, when running jobs leave too little."""
        async with self._lock:
            await self._end()
            if num_bytes > (free := self._unpromised()):
                raise refusal(num_bytes, free)
            self.busy_bytes += num_bytes
        try:
            yield
        finally:
            self.busy_bytes -= num_bytes

    async def make_room(self, job_id: str, num_bytes: int) -> None:
        """End the idle child where a job that takes its memory now does not fit beside it; then the child's is free."""
        async with self._lock:
            if self._idle is None or num_bytes > self._free_bytes(job_id) - self._idle.memory.total:
                await self._end()

    async def close(self) -> None:
        """End the idle child; from now on none stays."""
        self._keep_s = 0.0
        async with self._lock:
            await self._end()

    async def _take(self, model: _Model, memory: SampleMemory) -> Child | None:
        """Hold the memory for a call, and return the child that has the model already, if there is one."""
        async with self._lock:
            idle = self._idle
            if idle is not None and idle.model == model and idle.child.is_running:
                self._idle = None
                idle.watch.cancel()
                self.busy_bytes += memory.total
                return idle.child
            await self._end()
            if memory.total > (free := self._unpromised()):
                raise DoesNotFit(
                    f"answering with this checkpoint takes {size_text(memory.total)} of host memory (weights "
                    f"{size_text(memory.planes)}), and the node's jobs leave {size_text(free)}; sample again when they "
                    "have ended, or pull the checkpoint"
                )
            self.busy_bytes += memory.total
            return None

    def _unpromised(self) -> int:
        """Host memory that neither jobs nor calls have."""
        return max(0, self._free_bytes("") - self.busy_bytes)

    async def _start(self, request: SampleRequest, memory: SampleMemory) -> Child:
        task = ChildTask(
            module="horizon_server.worker.sampling",
            who="the child that answers prompts",
            environment=self._environment,
            limits=Limits(
                memory_bytes=memory.private,
                # The planes are files, in memory.
                file_bytes=max(memory.planes, _LOG_BYTES),
                wall_s=self._limit_s,
                oom_score_adj=1000,
            ),
            meanings={
                Stalled: Stalled(
                    f"the prompts were not answered within {self._limit_s:g} s; send fewer at a time, or lower "
                    "max_tokens"
                ),
                OutOfMemory: DoesNotFit(
                    "answering these prompts takes more memory than planned; send fewer or shorter ones"
                ),
                WorkerCrashed: InvalidModel("answering with this checkpoint crashes; is its chat template right?"),
            },
        )
        return await task.start(to_plain(request))

    async def _watch(self, child: Child, model: _Model) -> None:
        """End a child that is idle for its time, or whose model is not that of its files any more."""
        end_s = time.monotonic() + self._keep_s
        while child.is_running and (left_s := end_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, self._look_every_s))
            if await asyncio.to_thread(_files, model.request) != model.files:
                break
        async with self._lock:
            if self._idle is not None and self._idle.child is child:
                await self._end()

    async def _end(self) -> None:
        """End the idle child, if there is one, and wait until its memory is free; the lock is held."""
        if self._idle is not None:
            idle, self._idle = self._idle, None
            if idle.watch is not asyncio.current_task():
                idle.watch.cancel()
            # A task, so that a caller who leaves meanwhile does not leave the end undone.
            self._ending = asyncio.create_task(idle.child.end(), name="end of the idle model")
        if self._ending is not None:
            await asyncio.wait({self._ending}, timeout=_END_S)


def _files(request: SampleRequest) -> _Files:
    """Every file that the child may read of the model. Blocking."""
    adapter = None if request.adapter is None else request.adapter.folder
    folders = {folder for folder in (request.folder, adapter, request.answers) if folder is not None}
    paths = {Path(parent, name) for folder in folders for parent, _, names in os.walk(folder) for name in names}
    found = []
    for path in sorted(paths):
        # Gone meanwhile, or a link to nothing.
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append((str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)
