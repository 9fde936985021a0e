"""`report_to`: a job's figures in the trackers of the node (docs/adr/0016-trackers-follow-events.md).

A follower a job and tracker reads the stored events like any other watcher, in batches, and hands them to a child
process, which answers once they are written. The database is the buffer: a tracker that is slow or away costs neither
memory nor training, and is tried again until it takes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog

from horizon_formats.trackers import TRACKERS, ending_of, is_installed, package_problem
from horizon_server.children.child import Child, ChildTask, Limits
from horizon_server.codec import to_plain
from horizon_server.errors import BadSetting, DatabaseUnavailable, Draining, HorizonError, InvalidSpec
from horizon_server.events import EvalDone, JobEvent, Message, StateChanged, StepDone, encode
from horizon_server.jobs.journal import Journal, Lifecycle
from horizon_server.jobs.tracking_child import OpenRequest, WriteRequest
from horizon_server.records.job import ENDED, RESIDENT, JobRecord, JobState
from horizon_server.settings import Settings
from horizon_server.spec import JobSpec

log = structlog.get_logger(__name__)

_BATCH = 200
# Between two batches of one job: quick steps are written many at a time.
_PACE_S = 1.0
_FIRST_RETRY_S, _LONGEST_RETRY_S = 5.0, 300.0
# How long an ended job's figures are tried to be written.
_GIVE_UP_S = 7 * 86400.0
# Children that work at the same time.
_AT_ONCE = 4
_LIMITS = Limits(memory_bytes=4 * 2**30, file_bytes=8 * 2**30, wall_s=180.0, oom_score_adj=1000)
# What a file of keys may set.
_KEYS = (
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "WANDB_API_KEY",
    "WANDB_BASE_URL",
    "WANDB_ENTITY",
)
_KEYS_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class NodeTrackers:
    """What `report_to` may name on this node, and with whose keys."""

    settings: Settings

    @property
    def folder(self) -> Path:
        """Where trackers write what is local."""
        return self.settings.tracker_dir or self.settings.state_dir / "trackers"

    def check(self, spec: JobSpec, *, owner: str, project: str) -> None:
        """Let pass a job whose trackers can be written to from here.

        Raises:
            InvalidSpec: naming the tracker, and what to do instead.
        """
        for tracker in spec.report_to:
            if problem := self._problem(tracker, owner, project):
                raise InvalidSpec.of(
                    "report_to",
                    f"report_to names {tracker}: {problem}; or follow it from your machine: horizon job watch JOB "
                    f"--to {tracker}",
                )

    def _problem(self, tracker: str, owner: str, project: str) -> str:
        allowed = self.settings.trackers
        if tracker not in allowed:
            listed = ", ".join(allowed) or "none"
            return f"an admin has not allowed it on this node (setting trackers: {listed})"
        if not is_installed(tracker):
            return f"it {package_problem(tracker)} on the node"
        if tracker == "wandb" and "WANDB_API_KEY" not in self.keys(owner, project):
            return f"the node has no key of user {owner} or project {project}; an admin puts WANDB_API_KEY there"
        return ""

    def environment(self, owner: str, project: str) -> dict[str, str]:
        """Return the variables of a child that writes for this user. Raises BadSetting where a file of keys cannot be
        used."""
        return {"TRACKIO_DIR": str(self.folder / "trackio"), **self.keys(owner, project)}

    def keys(self, owner: str, project: str) -> dict[str, str]:
        """Return the keys for a user's job in a project: the user's own, then the project's, then everybody's."""
        folder, found = self.settings.tracker_keys_dir, dict[str, str]()
        if folder is not None:
            for name in (f"user-{owner}.env", f"project-{project}.env", "everybody.env"):
                found = {**dict(_keys_of(folder / name)), **found}
        return found


def _keys_of(file: Path) -> Iterator[tuple[str, str]]:
    try:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise BadSetting(f"{file} holds keys and can be read by others; an admin runs: chmod 600 {file}")
        with file.open(encoding="utf-8") as stream:
            lines = stream.read(_KEYS_BYTES).splitlines()
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise BadSetting(f"{file} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, is_set, value = text.partition("=")
        if not is_set or name.strip() not in _KEYS:
            raise BadSetting(f"{file}, line {number}: write NAME=value, with one of {', '.join(_KEYS)}")
        yield name.strip(), value.strip().strip("\"'")


@dataclass(kw_only=True, eq=False)
class Tracking:
    """The followers of all jobs. Thread: belongs to one event loop.

    A file in `trackers/open` of the state folder, for each job and tracker, has the number of the last event that was
    written, from the job's submission until everything is: the next daemon goes on there.
    """

    journal: Journal
    lifecycle: Lifecycle
    trackers: NodeTrackers
    environment: Mapping[str, str]
    limits: Limits = _LIMITS
    pace_s: float = _PACE_S
    first_retry_s: float = _FIRST_RETRY_S
    _tasks: dict[tuple[str, str], asyncio.Task[None]] = field(default_factory=dict)
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_AT_ONCE))

    def follow(self, job: JobRecord) -> None:
        """Follow a job that was submitted or resumed, where its spec names trackers."""
        for tracker in job.spec.report_to:
            key = (job.job_id, tracker)
            if key in self._tasks and not self._tasks[key].done():
                continue
            place = _Place(self._open_folder / f"{job.job_id}.{tracker}.json")
            place.keep(place.sequence)
            task = asyncio.create_task(self._write_all(job, tracker, place), name=f"{tracker} of {job.job_id}")
            self._tasks[key] = task
            task.add_done_callback(partial(self._forget, key))

    async def recover(self) -> None:
        """Go on with what an earlier daemon has followed."""
        store = self.journal.store
        jobs = {job.job_id: job for job in await store.in_states([state for state in JobState if state not in ENDED])}
        for file in sorted(self._open_folder.glob("*.json")):
            job_id, tracker = file.name.split(".")[:2]
            job = jobs.get(job_id) or await store.get(job_id)
            if job is None or tracker not in TRACKERS:
                file.unlink(missing_ok=True)
            else:
                jobs[job_id] = job
        for job in jobs.values():
            self.follow(job)

    async def close(self) -> None:
        """End all followers; the next daemon goes on with them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, key: tuple[str, str], task: asyncio.Task[None]) -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]

    @property
    def _open_folder(self) -> Path:
        folder = self.trackers.settings.state_dir / "trackers" / "open"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return folder

    async def _write_all(self, job: JobRecord, tracker: str, place: _Place) -> None:
        """Write what happens to a job until it has ended and all of it is written."""
        writer = _Writer(self, job, tracker)
        try:
            async for event in self.journal.follow(job.job_id, place.sequence):
                if event.sequence <= place.sequence:
                    continue
                batch = await self.journal.store.events_after(job.job_id, place.sequence, _BATCH)
                if not await writer.write(batch):
                    break
                place.keep(batch[-1].sequence)
                await self.lifecycle.pause(self.pace_s)
            place.remove()
        except (Draining, DatabaseUnavailable):
            return
        except Exception:
            # A follower that breaks must cost neither the daemon nor the job anything; the next daemon tries again.
            log.exception("a tracker's follower broke", job_id=job.job_id, tracker=tracker)
        finally:
            await writer.end()


class _Place:
    """How far a job was written, on disk."""

    def __init__(self, file: Path) -> None:
        self._file = file
        try:
            self.sequence = int(json.loads(file.read_text("utf-8"))["sequence"])
        except (OSError, ValueError, KeyError, TypeError):
            self.sequence = 0  # what is written again, the tracker's run leaves out

    def keep(self, sequence: int) -> None:
        """Remember that everything up to this event is written."""
        self.sequence = sequence
        with contextlib.suppress(OSError):
            new = self._file.with_suffix(".new")
            new.write_text(json.dumps({"sequence": sequence}), "utf-8")
            new.replace(self._file)

    def remove(self) -> None:
        """Forget the job: everything is written."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)


class _Writer:
    """The child of one job and tracker: started when there are figures, ended when the job leaves memory."""

    def __init__(self, tracking: Tracking, job: JobRecord, tracker: str) -> None:
        self._tracking, self._job, self._tracker = tracking, job, tracker
        self._child: Child | None = None
        self._has_told = False

    async def write(self, batch: list[JobEvent]) -> bool:
        """Write the figures of a batch, however often that has to be tried. False once an ended job is given up."""
        states = [event.payload.job_state for event in batch if isinstance(event.payload, StateChanged)]
        last = states[-1] if states else ""
        ending = ending_of(last)
        figures = [(e.time_s, encode(e.payload)) for e in batch if isinstance(e.payload, StepDone | EvalDone)]
        if not figures and ending is None:
            return True
        request = to_plain(WriteRequest(events=figures, ending=ending.value if ending else ""))
        began_s, pause_s = time.monotonic(), self._tracking.first_retry_s
        while (problem := await self._tried(request)) is not None:
            await self._tell(problem)
            if ending is not None and time.monotonic() - began_s > _GIVE_UP_S:
                return False
            await self._tracking.lifecycle.pause(pause_s)
            if self._tracking.lifecycle.draining:
                raise Draining("the daemon is shutting down")
            pause_s = min(2 * pause_s, _LONGEST_RETRY_S)
        self._has_told = False
        if last and JobState(last) not in RESIDENT:
            await self.end()
        return True

    async def end(self) -> None:
        """End the child, where there is one."""
        child, self._child = self._child, None
        if child is not None:
            await child.end()

    async def _tried(self, request: dict[str, object]) -> str | None:
        """Send a request to the child, which is started first where there is none. Return what went wrong."""
        async with self._tracking._slots:
            try:
                if self._child is None:
                    self._child = await self._started()
                await self._child.ask(request)
            except (HorizonError, OSError) as error:
                await self.end()
                return error.message if isinstance(error, HorizonError) else str(error)
        return None

    async def _started(self) -> Child:
        job, trackers = self._job, self._tracking.trackers
        keys = await asyncio.to_thread(trackers.environment, job.owner, job.project)
        await asyncio.to_thread(lambda: trackers.folder.mkdir(mode=0o750, parents=True, exist_ok=True))
        task = ChildTask(
            module="horizon_server.jobs.tracking_child",
            who=f"the follower for {self._tracker}",
            environment={**self._tracking.environment, **keys},
            limits=self._tracking.limits,
        )
        request = OpenRequest(
            tracker=self._tracker,
            job_id=job.job_id,
            name=job.spec.name,
            owner=job.owner,
            spec={**job.spec.to_mapping(), "project": job.project},
            folder=trackers.folder,
            uri=trackers.settings.mlflow_tracking_uri or "",
        )
        child = await task.start(to_plain(request))
        where = await child.answer(stays=True)
        log.info("a tracker follows a job", tracker=self._tracker, job_id=job.job_id, where=where)
        return child

    async def _tell(self, problem: str) -> None:
        """Say it in the log each time, to the owner once for each time that the tracker stays away."""
        log.warning(
            "a tracker did not take a job's figures", tracker=self._tracker, job_id=self._job.job_id, why=problem
        )
        if self._has_told:
            return
        self._has_told = True
        text = (
            f"{problem} (report_to). Training continues, and the figures are written once {self._tracker} takes them."
        )
        # With a full disk, or of a job that is being deleted, the log has it.
        with contextlib.suppress(HorizonError):
            await self._tracking.journal.append_now(self._job.job_id, Message(level="warning", text=text))
