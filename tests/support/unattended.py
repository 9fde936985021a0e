"""A user's program that nobody looks after: it pushes a model and a dataset, submits a job, watches it to its end, and
retries by itself.

What the server has acknowledged is kept, so that a test can ask for it afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from horizon_client import AsyncClient, Progress, Reporter
from horizon_client.connection import STREAM_RETRY
from horizon_client.errors import DiskFull
from horizon_client.job_spec_types import JobSpec
from horizon_client.resources import Job, JobEvent

# A program that is to outlive a restart of the daemon gives unary calls as long as streams.
PATIENT = replace(STREAM_RETRY, max_attempts=1000, longest_wait_s=1.0)
_ROOM_POLL_S = 0.5

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What the program works with. Without a folder or file, the server has `demo-model` or `demo-chats` already."""

    spec: JobSpec
    model: Path | None = None
    dataset: Path | None = None


@dataclass(eq=False)
class UnattendedUser(threading.Thread):
    """Runs the program in a thread of its own. Thread: the fields are written by that thread and read by any."""

    server: str
    token: str
    inputs: Inputs
    request_ids: dict[str, str] = field(default_factory=dict)
    """One for each of `model`, `dataset` and `job`."""
    acknowledged: dict[str, str] = field(default_factory=dict)
    """The id that the server answered to each of them."""
    events: list[JobEvent] = field(default_factory=list)
    moment: str = ""
    """What it does right now: a kind with a phase of its push, `submit`, or `watch`."""
    job: Job | None = None
    error: BaseException | None = None
    _leave: Callable[[], object] = field(default=lambda: None)

    def __post_init__(self) -> None:
        super().__init__(name="user", daemon=True)
        self.request_ids = {kind: str(uuid.uuid4()) for kind in ("model", "dataset", "job")}

    def run(self) -> None:
        try:
            asyncio.run(self._work())
        except BaseException as error:
            self.error = error

    def leave(self, timeout_s: float = 120.0) -> None:
        """End the program at once; otherwise it would keep running and disturb the tests that follow."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._leave()
        self.join(timeout_s)

    @property
    def step(self) -> int:
        """The last step that it has seen."""
        return max((event.step for event in list(self.events) if event.kind == "step"), default=0)

    async def _work(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._leave = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        async with self.client() as client:
            await _until_there_is_room(lambda: self._push(client))
            self.moment = "submit"
            spec, request_id = self.inputs.spec, self.request_ids["job"]
            job = await _until_there_is_room(lambda: client.jobs.submit(spec, request_id=request_id, push=False))
            self.acknowledged["job"] = job.job_id
            self.moment = "watch"
            async for event in client.jobs.watch(job.job_id):
                self.events.append(event)
            self.job = await client.jobs.get(job.job_id)

    async def _push(self, client: AsyncClient) -> None:
        """Push what it has. Again, with the same ids, it is the same push."""
        ids, inputs = self.request_ids, self.inputs
        if inputs.model is not None:
            reporter = _Moments(self, "model")
            pushed = await client.models.push(
                inputs.model, name="demo-model", request_id=ids["model"], reporter=reporter
            )
            self.acknowledged["model"] = pushed.model.model_id
        if inputs.dataset is not None:
            reporter = _Moments(self, "dataset")
            stored = await client.datasets.push(
                [inputs.dataset], name="demo-chats", request_id=ids["dataset"], reporter=reporter
            )
            self.acknowledged["dataset"] = stored.dataset.dataset_id

    def client(self) -> AsyncClient:
        """A client as patient as the program."""
        return AsyncClient(self.server, token=self.token, unary_retry=PATIENT, stream_retry=PATIENT)


async def _until_there_is_room(call: Callable[[], Awaitable[Result]]) -> Result:
    """Repeat a call that is refused because the server's disk is full."""
    while True:
        try:
            return await call()
        except DiskFull:
            await asyncio.sleep(_ROOM_POLL_S)


class _Moments(Reporter):
    def __init__(self, user: UnattendedUser, kind: str) -> None:
        self._user, self._kind = user, kind

    def progress(self, progress: Progress) -> None:
        self._user.moment = f"{self._kind} {progress.phase}"
