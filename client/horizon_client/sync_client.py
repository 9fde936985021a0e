"""`Client`: the blocking face of `AsyncClient`. Holds no logic: every method runs its twin in an event loop on a thread of its own.

That thread makes it usable in scripts and notebooks alike, and an interrupt cancels the call that is under way.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar, cast

from horizon_client.async_client import AsyncClient
from horizon_client.checkpoints import AsyncCheckpoints
from horizon_client.connection import STREAM_RETRY, UNARY_RETRY, RetryPolicy
from horizon_client.datasets import AsyncDatasets
from horizon_client.jobs import AsyncJobs, SpecLike
from horizon_client.models import AsyncModels
from horizon_client.node import AsyncNode
from horizon_client.progress import OnNotice, OnProgress, ignore_notice, ignore_progress
from horizon_client.resources import (
    Checkpoint,
    CheckpointPull,
    Dataset,
    DatasetPreview,
    DatasetPush,
    Job,
    JobEvent,
    Model,
    ModelPush,
    Node,
    PlannedJob,
)

ValueT = TypeVar("ValueT")

_UNWIND_S = 5.0
"""How long cancelled work may take to clean up before it is left behind."""


class LoopThread:
    """An event loop on a daemon thread, started at once and stopped by `close` or when nobody holds it any more."""

    def __init__(self) -> None:
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(_ignore_shared_poller)
        thread = threading.Thread(target=_run_loop, args=(loop,), name="horizon-client", daemon=True)
        thread.start()
        self._loop = loop
        self._finalizer = weakref.finalize(self, _stop_loop, loop, thread)

    @property
    def is_open(self) -> bool:
        """Whether work can still be run."""
        return self._finalizer.alive

    def run(self, work: Coroutine[Any, Any, ValueT]) -> ValueT:
        """Run `work` to its end and return its result; an interrupt cancels it and goes on to the caller."""
        if not self.is_open:
            work.close()
            raise RuntimeError("this client is closed")
        unwound = threading.Event()
        future = asyncio.run_coroutine_threadsafe(_then_set(work, unwound), self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            unwound.wait(_UNWIND_S)
            raise

    def iterate(self, items: AsyncIterator[ValueT]) -> Iterator[ValueT]:
        """Yield what an async generator yields, and close it when the caller stops."""
        end = object()

        async def advance() -> object:
            return await anext(items, end)

        try:
            while (item := self.run(advance())) is not end:
                yield cast("ValueT", item)
        finally:
            if self.is_open:
                self.run(_close(items))

    def close(self) -> None:
        """Cancel what runs and stop the thread. May be called twice."""
        self._finalizer()


class Client:
    """Speaks to one daemon; blocks until an answer is there. `async_client.AsyncClient` documents arguments and errors.

    Thread: may be shared by threads. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        token: str | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        profile: str | None = None,
        unary_retry: RetryPolicy = UNARY_RETRY,
        stream_retry: RetryPolicy = STREAM_RETRY,
    ) -> None:
        inner = AsyncClient(
            server, token=token, ca_file=ca_file, profile=profile, unary_retry=unary_retry, stream_retry=stream_retry
        )
        self._inner = inner
        self._loop = LoopThread()
        self.server = inner.server
        self.jobs = Jobs(inner.jobs, self._loop)
        self.datasets = Datasets(inner.datasets, self._loop)
        self.models = Models(inner.models, self._loop)
        self.checkpoints = Checkpoints(inner.checkpoints, self._loop)
        self.node = NodeFace(inner.node, self._loop)

    def close(self) -> None:
        """Close the channel and stop the thread."""
        if self._loop.is_open:
            self._loop.run(self._inner.close())
            self._loop.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Jobs:
    """`client.jobs`, see `jobs.AsyncJobs`."""

    def __init__(self, inner: AsyncJobs, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    def submit(
        self,
        spec: SpecLike,
        *,
        overrides: Sequence[str] = (),
        request_id: str | None = None,
        push: bool = True,
        on_progress: OnProgress = ignore_progress,
        on_notice: OnNotice = ignore_notice,
    ) -> Job:
        """Queue a job, after pushing the local files it names."""
        return self._loop.run(
            self._inner.submit(
                spec,
                overrides=overrides,
                request_id=request_id,
                push=push,
                on_progress=on_progress,
                on_notice=on_notice,
            )
        )

    def plan(
        self,
        spec: SpecLike,
        *,
        overrides: Sequence[str] = (),
        push: bool = True,
        on_progress: OnProgress = ignore_progress,
        on_notice: OnNotice = ignore_notice,
    ) -> PlannedJob:
        """Return how much memory a job would take and whether it fits."""
        return self._loop.run(
            self._inner.plan(spec, overrides=overrides, push=push, on_progress=on_progress, on_notice=on_notice)
        )

    def get(self, job: str) -> Job:
        """Return one job."""
        return self._loop.run(self._inner.get(job))

    def cancel(self, job: str) -> Job:
        """End a job."""
        return self._loop.run(self._inner.cancel(job))

    def pause(self, job: str) -> Job:
        """Checkpoint a job and free the device."""
        return self._loop.run(self._inner.pause(job))

    def resume(self, job: str) -> Job:
        """Put a paused job back in the queue."""
        return self._loop.run(self._inner.resume(job))

    def set_priority(self, job: str, priority: int) -> Job:
        """Change a job's priority."""
        return self._loop.run(self._inner.set_priority(job, priority))

    def watch(self, job: str, *, after_sequence: int = 0, on_notice: OnNotice = ignore_notice) -> Iterator[JobEvent]:
        """Yield the job's events until it has ended, each once and in order, also across cuts."""
        return self._loop.iterate(self._inner.watch(job, after_sequence=after_sequence, on_notice=on_notice))

    def logs(
        self,
        job: str,
        *,
        attempt: int = 0,
        offset: int = 0,
        follow: bool = False,
        on_notice: OnNotice = ignore_notice,
    ) -> Iterator[bytes]:
        """Yield the log of a job's worker."""
        return self._loop.iterate(
            self._inner.logs(job, attempt=attempt, offset=offset, follow=follow, on_notice=on_notice)
        )

    def list(self, *, states: Iterable[str] = (), limit: int | None = None) -> list[Job]:
        """Return the caller's jobs, newest first."""
        return self._loop.run(self._inner.list(states=states, limit=limit))


class Datasets:
    """`client.datasets`, see `datasets.AsyncDatasets`."""

    def __init__(self, inner: AsyncDatasets, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    def push(
        self,
        files: Sequence[str | os.PathLike[str]],
        *,
        name: str,
        format: str = "auto",  # noqa: A002 - the name users know from the command and the contract
        field_map: Mapping[str, str] | None = None,
        request_id: str | None = None,
        on_progress: OnProgress = ignore_progress,
        on_notice: OnNotice = ignore_notice,
    ) -> DatasetPush:
        """Push local data files as dataset `name`."""
        return self._loop.run(
            self._inner.push(
                files,
                name=name,
                format=format,
                field_map=field_map,
                request_id=request_id,
                on_progress=on_progress,
                on_notice=on_notice,
            )
        )

    def get(self, name: str) -> Dataset:
        """Return one dataset by name or id."""
        return self._loop.run(self._inner.get(name))

    def delete(self, name: str) -> None:
        """Delete a dataset that no job still needs."""
        self._loop.run(self._inner.delete(name))

    def preview(
        self,
        name: str,
        *,
        model: str,
        num_rows: int = 3,
        offset: int = 0,
        train_on: str = "assistant",
        method: str = "sft",
        sequence_length: int = 1024,
    ) -> DatasetPreview:
        """Return rows as `model` would see them in a job with these options."""
        return self._loop.run(
            self._inner.preview(
                name,
                model=model,
                num_rows=num_rows,
                offset=offset,
                train_on=train_on,
                method=method,
                sequence_length=sequence_length,
            )
        )

    def list(self, *, limit: int | None = None) -> list[Dataset]:
        """Return the caller's datasets, newest first."""
        return self._loop.run(self._inner.list(limit=limit))


class Models:
    """`client.models`, see `models.AsyncModels`."""

    def __init__(self, inner: AsyncModels, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    def push(
        self,
        folder: str | os.PathLike[str],
        *,
        name: str,
        request_id: str | None = None,
        on_progress: OnProgress = ignore_progress,
        on_notice: OnNotice = ignore_notice,
    ) -> ModelPush:
        """Push a local model folder as model `name`."""
        return self._loop.run(
            self._inner.push(folder, name=name, request_id=request_id, on_progress=on_progress, on_notice=on_notice)
        )

    def get(self, name: str) -> Model:
        """Return one model by name or id."""
        return self._loop.run(self._inner.get(name))

    def delete(self, name: str) -> None:
        """Delete a model that no job still needs."""
        self._loop.run(self._inner.delete(name))

    def list(self, *, limit: int | None = None) -> list[Model]:
        """Return the caller's models, newest first."""
        return self._loop.run(self._inner.list(limit=limit))


class Checkpoints:
    """`client.checkpoints`, see `checkpoints.AsyncCheckpoints`."""

    def __init__(self, inner: AsyncCheckpoints, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    def list(self, job: str) -> list[Checkpoint]:
        """Return the complete checkpoints of a job, oldest first."""
        return self._loop.run(self._inner.list(job))

    def pull(
        self,
        job: str,
        to: str | os.PathLike[str],
        *,
        at: int | str = "last",
        with_trainer: bool = False,
        force: bool = False,
        on_progress: OnProgress = ignore_progress,
        on_notice: OnNotice = ignore_notice,
    ) -> CheckpointPull:
        """Bring a checkpoint into the folder `to`."""
        return self._loop.run(
            self._inner.pull(
                job,
                to,
                at=at,
                with_trainer=with_trainer,
                force=force,
                on_progress=on_progress,
                on_notice=on_notice,
            )
        )

    def delete(self, job: str, step: int) -> None:
        """Delete one checkpoint."""
        self._loop.run(self._inner.delete(job, step))


class NodeFace:
    """`client.node`, see `node.AsyncNode`."""

    def __init__(self, inner: AsyncNode, loop: LoopThread) -> None:
        self._inner = inner
        self._loop = loop

    def status(self) -> Node:
        """Return what the node is, how busy it is, and who the caller is to it."""
        return self._loop.run(self._inner.status())


async def _then_set(work: Coroutine[Any, Any, ValueT], unwound: threading.Event) -> ValueT:
    try:
        return await work
    finally:
        unwound.set()


async def _close(items: AsyncIterator[Any]) -> None:
    aclose: Callable[[], Coroutine[Any, Any, None]] | None = getattr(items, "aclose", None)
    if aclose is not None:
        await aclose()


def _run_loop(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    loop.run_forever()


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if (
        threading.current_thread() is thread
    ):  # the garbage collector may run anywhere, and a thread cannot wait for itself
        loop.stop()
        return
    asyncio.run_coroutine_threadsafe(_cancel_all(), loop).result(timeout=_UNWIND_S)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(timeout=_UNWIND_S)
    loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _ignore_shared_poller(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Leave out grpc's harmless complaint when two event loops of one process wait on its one wake-up socket."""
    if not isinstance(context.get("exception"), BlockingIOError):
        loop.default_exception_handler(context)
