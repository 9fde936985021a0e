"""What an open page is told: one stream of changes of the jobs that its user may see, of the queue and the node, and
the events of the jobs that it shows.

Pages of callers who see the same share one look at the daemon, which is taken when the journal has something new. A
page is sent what differs from what it was sent last: one that reads slowly gets fewer and larger changes, and nothing
is kept for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from sse_starlette import ServerSentEvent

from horizon_server.api.cached_on import cached_on
from horizon_server.api.http import bodies
from horizon_server.api.http.middleware import error_body
from horizon_server.api.services import OpenStreams, Services
from horizon_server.api.sharing import QueueEntry
from horizon_server.errors import HorizonError, InvalidSpec, NotFound, TooManyCalls
from horizon_server.events import JobEvent, StepDone, kind_of
from horizon_server.figures import QueueFigures
from horizon_server.records.account import Principal
from horizon_server.records.job import ENDED, JobRecord, JobState
from horizon_server.services.node import NodeStatus
from horizon_server.spec import JobSpec

SEPARATOR = "\n"
"""Of lines. The page splits frames at an empty line; the library's default is CRLF."""
RETRY_MS = 2000
MAX_PAGES_PER_USER = 16
MAX_SHOWN_JOBS = 8
"""Jobs whose events one page is sent."""
MAX_STEPS_AT_ONCE = 100
MAX_QUEUE = 200
# Jobs of a first look: the newest, and the newest of those that have not ended.
_NEWEST = 100
# A look is taken when something has changed, no more often than this, and without news for what the journal does not
# know: estimates, the memory and disk of the node, and changes by commands on the node.
CHANGES_EVERY_S = 1.0
_LOOK_EVERY_S = 5.0
_ACTIVE = frozenset(JobState) - ENDED
TOPICS = ("jobs", "queue", "node")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a look has found."""

    jobs: dict[str, JobRecord]
    queue: tuple[QueueEntry, ...]
    node: NodeStatus


class View:
    """What callers see who may see the same. Thread: one event loop."""

    def __init__(self, services: Services, principal: Principal) -> None:
        self._services = services
        self._principal = principal
        self._news = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._pages: set[asyncio.Event] = set()
        self._seen: Seen | None = None

    @contextmanager
    def shown_to(self, page: asyncio.Event) -> Iterator[None]:
        """Set `page` at each change, until the end of the block."""
        self._pages.add(page)
        if self._looking is None:
            self._looking = asyncio.create_task(self._look_on(), name="live-view")
            self._looking.add_done_callback(lambda _: self._tell())
        try:
            yield
        finally:
            self._pages.discard(page)

    async def rest(self) -> None:
        """Look no more where no page shows it."""
        if self._looking is not None and not self._pages:
            looking, self._looking = self._looking, None
            looking.cancel()
            await asyncio.wait([looking])

    def now(self) -> Seen | None:
        """Return what the last look has found; None before the first one."""
        if self._looking is not None and self._looking.done():
            self._looking.result()  # raises what has ended it
        return self._seen

    @property
    def is_shown(self) -> bool:
        """Whether any page shows it."""
        return bool(self._pages)

    async def _look_on(self) -> None:
        with self._services.jobs.journal.told(self._news):
            while True:
                self._news.clear()
                with suppress(HorizonError):  # a database that is busy for long; looked at again
                    await self._look()
                await asyncio.sleep(CHANGES_EVERY_S)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), _LOOK_EVERY_S - CHANGES_EVERY_S)

    async def _look(self) -> None:
        jobs, caller = self._services.jobs, self._principal
        newest, _ = await jobs.list(caller, page_size=_NEWEST)
        active, _ = await jobs.list(caller, page_size=_NEWEST, states=_ACTIVE)
        queue = [QueueEntry.seen_by(caller, job) for job in (await jobs.queue(caller))[:MAX_QUEUE]]
        seen = Seen(
            jobs={job.job_id: job for job in (*newest, *active)},
            queue=tuple(queue),
            node=await self._services.node.describe(caller),
        )
        if seen != self._seen:
            self._seen = seen
            self._tell()

    def _tell(self) -> None:
        for page in self._pages:
            page.set()


@dataclass(kw_only=True)
class _ShownJob:
    """A job whose events a page is sent, up to event `sequence`."""

    job_id: str
    sequence: int
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.news.set()  # what there is at first


class _Page:
    """What one open page was sent last."""

    def __init__(self, services: Services, principal: Principal, topics: Iterable[str], shown: list[_ShownJob]) -> None:
        self._services = services
        self._principal = principal
        self._topics = frozenset(topics)
        self.shown = shown
        self._jobs: dict[str, JobRecord] | None = None
        self._queue: tuple[QueueEntry, ...] | None = None
        self._node: NodeStatus | None = None
        self._node_sent_s = float("-inf")

    async def changes(self, seen: Seen | None) -> AsyncIterator[ServerSentEvent]:
        """Yield what has changed since the last call."""
        if seen is not None:
            if "jobs" in self._topics and (jobs := await self._changed_jobs(seen.jobs)) is not None:
                yield jobs
            if "queue" in self._topics and seen.queue != self._queue:
                self._queue = seen.queue
                yield frame("queue", bodies.QueueBody.model_validate({"jobs": seen.queue}).model_dump(mode="json"))
            now_s = asyncio.get_running_loop().time()
            is_due = now_s - self._node_sent_s >= _LOOK_EVERY_S
            if "node" in self._topics and seen.node != self._node and is_due:
                self._node, self._node_sent_s = seen.node, now_s
                yield frame("node", bodies.NodeBody.model_validate(seen.node).model_dump(mode="json"))
        for job in self.shown:
            if not job.news.is_set():
                continue
            job.news.clear()
            while events := await self._services.jobs.journal.after(job.job_id, job.sequence):
                job.sequence = events[-1].sequence
                listed = ",".join(
                    cached_on(event, "live", functools.partial(_event_json, event)) for event in _few(events)
                )
                yield text_frame("job", f'{{"job_id":{json.dumps(job.job_id)},"events":[{listed}]}}')

    async def _changed_jobs(self, jobs: dict[str, JobRecord]) -> ServerSentEvent | None:
        before, self._jobs = self._jobs, jobs
        changed = [job for job_id, job in jobs.items() if before is None or before.get(job_id) != job]
        # Others have only become older than those that a look finds.
        gone = [job_id for job_id in (before or {}).keys() - jobs.keys() if await self._is_gone(job_id)]
        if before is not None and not changed and not gone:
            return None
        listed = ",".join(cached_on(job, "summary", functools.partial(_summary_json, job)) for job in changed)
        return text_frame("jobs", f'{{"jobs":[{listed}],"gone":{json.dumps(sorted(gone))}}}')

    async def _is_gone(self, job_id: str) -> bool:
        try:
            return (await self._services.jobs.get(self._principal, job_id)).job_id != job_id
        except NotFound:
            return True


class LivePages:
    """The open pages. Thread: one event loop."""

    def __init__(self, services: Services, streams: OpenStreams) -> None:
        self._services = services
        self._streams = streams
        self._num_of_user: Counter[str] = Counter()
        self._views: dict[tuple[object, ...], View] = {}

    def require_room(self, user: str) -> None:
        """Let pass a further page of a user. Raises TooManyCalls."""
        if self._num_of_user[user] >= MAX_PAGES_PER_USER:
            raise TooManyCalls(
                f"{user} has {MAX_PAGES_PER_USER} pages open, the maximum; close some", retry_after_s=30.0
            )

    async def shown_jobs(self, principal: Principal, keys: Sequence[str], after: Sequence[int]) -> list[_ShownJob]:
        """Return the jobs of a page, and after which events each is followed: those that follow now, unless it says
        another. Raises NotFound and InvalidSpec."""
        if len(keys) > MAX_SHOWN_JOBS:
            raise InvalidSpec.of("jobs", f"jobs names {len(keys)}; one stream takes at most {MAX_SHOWN_JOBS}")
        if after and len(after) != len(keys):
            raise InvalidSpec.of("after", f"after has {len(after)} numbers for {len(keys)} jobs; give one for each")
        found = [await self._services.jobs.get(principal, key) for key in keys]
        sequences = after or [job.last_sequence for job in found]
        return [_ShownJob(job_id=job.job_id, sequence=number) for job, number in zip(found, sequences, strict=True)]

    async def frames(
        self, principal: Principal, topics: Iterable[str], shown: list[_ShownJob]
    ) -> AsyncIterator[ServerSentEvent]:
        """Yield the frames of a page until its caller is gone; a last `problem` says that the daemon stops or that the
        caller may see less now."""
        yield ServerSentEvent(retry=RETRY_MS, sep=SEPARATOR)
        news = asyncio.Event()
        loop = asyncio.get_running_loop()
        try:
            # Ended by a timeout of this very task, so it must be the one that iterates: EventSourceResponse does.
            async with self._streams.one(principal), self._page_of(principal, news, shown) as view:
                page = _Page(self._services, principal, topics, shown)
                while True:
                    news.clear()
                    sent_s = loop.time()
                    async for changed in page.changes(view.now()):
                        yield changed
                    await news.wait()
                    await asyncio.sleep(max(0.0, sent_s + CHANGES_EVERY_S - loop.time()))
        except HorizonError as error:
            yield frame("problem", error_body(error).model_dump())

    @asynccontextmanager
    async def _page_of(
        self, principal: Principal, news: asyncio.Event, shown: Iterable[_ShownJob]
    ) -> AsyncIterator[View]:
        """Count an open page, and let it be told of what is new for the block."""
        self.require_room(principal.name)
        key = (principal.name, principal.role, *sorted(principal.memberships.items()))
        view = self._views.setdefault(key, View(self._services, principal))
        self._num_of_user[principal.name] += 1
        try:
            with ExitStack() as told:
                told.enter_context(view.shown_to(news))
                for job in shown:
                    for one in (job.news, news):
                        told.enter_context(self._services.jobs.journal.watching(job.job_id, one))
                yield view
        finally:
            self._num_of_user[principal.name] -= 1
            if not view.is_shown and self._views.get(key) is view:
                del self._views[key]
            await view.rest()


def frame(event: str, body: object, *, number: str | None = None) -> ServerSentEvent:
    """Return a frame of plain data."""
    text = json.dumps(bodies.finite(body), separators=(",", ":"), allow_nan=False)
    return text_frame(event, text, number=number)


def text_frame(event: str, text: str, *, number: str | None = None) -> ServerSentEvent:
    """Return a frame of JSON."""
    return ServerSentEvent(text, event=event, id=number, sep=SEPARATOR)


def event_body(event: JobEvent) -> dict[str, Any]:
    """Return an event of a job as streams show it."""
    return {"sequence": event.sequence, "time_s": event.time_s, **dataclasses.asdict(event.payload)}


def _event_json(event: JobEvent) -> str:
    body = bodies.finite({"kind": kind_of(event.payload), **event_body(event)})
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def _summary_json(job: JobRecord) -> str:
    body = bodies.JobBody.model_validate(job).model_dump(mode="json", exclude=_NOT_IN_SUMMARY)
    return json.dumps(body, separators=(",", ":"), allow_nan=False)


def _few(events: Sequence[JobEvent]) -> Iterator[JobEvent]:
    """Yield the events, but of many steps only the last ones."""
    left_out = sum(isinstance(event.payload, StepDone) for event in events) - MAX_STEPS_AT_ONCE
    for event in events:
        if isinstance(event.payload, StepDone) and left_out > 0:
            left_out -= 1
        else:
            yield event


_OF_QUEUES = {field.name for field in dataclasses.fields(QueueFigures)}
_OF_STEP = _OF_QUEUES | {"model_flops", "host_memory_bytes", "device_memory_bytes"}
_OF_EVALUATION = _OF_QUEUES | {"answers"}
_NOT_IN_SUMMARY: Any = {
    "plan": True,
    "data_report": True,
    "task_results": True,
    "first_eval": True,
    "last_step": _OF_STEP,
    "best_eval": _OF_EVALUATION,
    "last_eval": _OF_EVALUATION,
    "spec": JobSpec.model_fields.keys() - {"name", "model", "dataset", "method"},
}
"""What a list of jobs does not show."""
