"""The child that answers prompts: one on the node, and one model in it. Calls for this model share it. It stays for a
while after the last answer, so that the next call need not load the model again; its memory goes to whoever needs it
first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from horizon_server.children.child import ChildTask, Limits
from horizon_server.children.entry import Answer
from horizon_server.children.shared import SharedChild
from horizon_server.codec import to_plain
from horizon_server.errors import DoesNotFit, InvalidModel, OutOfMemory, Stalled, WorkerCrashed
from horizon_server.events import WorkerLine
from horizon_server.planning.sampling import SampleMemory
from horizon_server.records.sample import SampleCall, SampleModel
from horizon_server.texts import size_text

# Of one call, from when the child has room for it.
LIMIT_S = 900.0
# Between two looks at the files that the idle child's model was loaded from.
LOOK_EVERY_S = 5.0
# The kernel takes a while to free the memory of a large model.
_END_S = 30.0
_LOG_BYTES = 64 * 2**20

# Each file of a model: its path, and what changes with its content.
_Files = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, kw_only=True)
class WantedModel:
    """All that the answers of a child depend on besides prompts and options."""

    model: SampleModel
    files: _Files

    @classmethod
    def of(cls, model: SampleModel) -> WantedModel:
        """A model as its files are now. Blocking."""
        return cls(model=model, files=_files(model))


@dataclass(kw_only=True, eq=False)
class _Loaded:
    """A child. While calls use it, `num_calls` says how many; else `watch` looks when it is to be ended."""

    child: SharedChild
    wanted: WantedModel
    memory: SampleMemory
    num_calls: int = 0
    watch: asyncio.Task[None] | None = None


class SamplingChild:
    """Starts the child, asks it, and ends it. Thread: belongs to one event loop. Calls for one model at a time, as
    `SamplingTurns` has them; `held` and `make_room` may come whenever they like.
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
        self._limit_s, self._others_bytes = limit_s, 0
        self._environment, self._free_bytes = environment, free_bytes
        self._keep_s, self._look_every_s = keep_s, look_every_s
        self._loaded: _Loaded | None = None
        self._ending: asyncio.Task[None] | None = None
        # Held by whoever decides about the child's memory.
        self._lock = asyncio.Lock()

    @property
    def busy_bytes(self) -> int:
        """Host memory of calls that run and of what others hold, which the queue must leave to them."""
        loaded = self._loaded
        return self._others_bytes + (loaded.memory.total if loaded is not None and loaded.num_calls else 0)

    @property
    def held_bytes(self) -> int:
        """Host memory of the child, with calls or idle, and of what others hold."""
        return self._others_bytes + (self._loaded.memory.total if self._loaded is not None else 0)

    async def answer(
        self, wanted: WantedModel, call: SampleCall, memory: SampleMemory, *, user: str
    ) -> AsyncGenerator[WorkerLine | Answer, None]:
        """Yield the events of a call as they come, then its answer, with whether the model was in memory already.
        Closing it drops the call, and no other.

        Raises as `SharedChild.lines`, and DoesNotFit when running jobs leave too little memory.
        """
        loaded = await self._join(wanted, memory)
        was_loaded = loaded.child.has_begun
        try:
            async with contextlib.aclosing(loaded.child.lines(user, to_plain(call))) as lines:
                async for line in lines:
                    yield Answer((line.value, was_loaded)) if isinstance(line, Answer) else line
        finally:
            loaded.num_calls -= 1
            if not loaded.num_calls and self._loaded is loaded:
                # A task, so that a caller who leaves meanwhile does not leave the end undone.
                loaded.watch = asyncio.create_task(self._watch(loaded), name="idle model")
                if not self._keep_s or not loaded.child.is_running:
                    await asyncio.wait({loaded.watch})

    @contextlib.asynccontextmanager
    async def held(self, num_bytes: int, refusal: Callable[[int, int], DoesNotFit]) -> AsyncIterator[None]:
        """Hold memory for another child until the end of the block; the idle child makes room. Raises what `refusal`
        makes of the bytes that are needed and those that are free, when running jobs leave too little."""
        async with self._lock:
            await self._end()
            if num_bytes > (free := self._unpromised()):
                raise refusal(num_bytes, free)
            self._others_bytes += num_bytes
        try:
            yield
        finally:
            self._others_bytes -= num_bytes

    async def make_room(self, job_id: str, num_bytes: int) -> None:
        """End the idle child where a job that takes its memory now does not fit beside it; then the child's is free."""
        async with self._lock:
            if self._loaded is None or num_bytes > self._free_bytes(job_id) - self._loaded.memory.total:
                await self._end()

    async def close(self) -> None:
        """End the idle child; from now on none stays."""
        self._keep_s = 0.0
        async with self._lock:
            await self._end()

    async def _join(self, wanted: WantedModel, memory: SampleMemory) -> _Loaded:
        """Hold the memory for a call, and return the child that has the model, or is about to."""
        async with self._lock:
            loaded = self._loaded
            if loaded is not None and loaded.wanted == wanted and loaded.child.is_running:
                if loaded.watch is not None:
                    loaded.watch.cancel()
                loaded.num_calls += 1
                return loaded
            await self._end()
            if memory.total > (free := self._unpromised()):
                raise DoesNotFit(
                    f"answering with this checkpoint takes {size_text(memory.total)} of host memory (weights "
                    f"{size_text(memory.planes)}), and the node's jobs leave {size_text(free)}; sample again when they "
                    "have ended, or pull the checkpoint"
                )
            memory = memory.for_room(free)
            self._others_bytes += memory.total
            try:
                child = await self._start(wanted.model, memory)
            finally:
                self._others_bytes -= memory.total
            self._loaded = _Loaded(child=child, wanted=wanted, memory=memory, num_calls=1)
            return self._loaded

    def _unpromised(self) -> int:
        """Host memory that neither jobs nor calls have."""
        return max(0, self._free_bytes("") - self.busy_bytes)

    async def _start(self, model: SampleModel, memory: SampleMemory) -> SharedChild:
        task = ChildTask(
            module="horizon_server.worker.sampling",
            who="the child that answers prompts",
            environment=self._environment,
            limits=Limits(
                memory_bytes=memory.private,
                # The planes are files, in memory.
                file_bytes=max(memory.planes, _LOG_BYTES),
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
        model = replace(model, keeps_weights=memory.keeps_weights, expert_page_elements=memory.expert_page_elements)
        return SharedChild(await task.start(to_plain(model)), limit_s=self._limit_s)

    async def _watch(self, loaded: _Loaded) -> None:
        """End a child that is idle for its time, or whose model is not that of its files any more."""
        end_s = time.monotonic() + self._keep_s
        while loaded.child.is_running and (left_s := end_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, self._look_every_s))
            if await asyncio.to_thread(_files, loaded.wanted.model) != loaded.wanted.files:
                break
        async with self._lock:
            if self._loaded is loaded:
                await self._end()

    async def _end(self) -> None:
        """End the child if it is idle or gone, and wait until its memory is free; the lock is held."""
        loaded = self._loaded
        if loaded is not None and (not loaded.num_calls or not loaded.child.is_running):
            self._loaded = None
            if loaded.watch is not None and loaded.watch is not asyncio.current_task():
                loaded.watch.cancel()
            # A task, so that a caller who leaves meanwhile does not leave the end undone.
            self._ending = asyncio.create_task(loaded.child.end(), name="end of the idle model")
        if self._ending is not None:
            await asyncio.wait({self._ending}, timeout=_END_S)


def _files(model: SampleModel) -> _Files:
    """Every file that the child may read of the model. Blocking."""
    adapter = None if model.adapter is None else model.adapter.folder
    folders = {folder for folder in (model.folder, adapter, model.answers) if folder is not None}
    paths = {Path(parent, name) for folder in folders for parent, _, names in os.walk(folder) for name in names}
    found = []
    for path in sorted(paths):
        # Gone meanwhile, or a link to nothing.
        with contextlib.suppress(OSError):
            stat = path.stat()
            found.append((str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)
