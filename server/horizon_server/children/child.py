"""A child process, from the daemon's side: started with a request, limited, watched while it reports, and gone when it
has answered.

The child runs as `python -m MODULE REQUEST --events-fd N --held`. REQUEST is a JSON file. Events, and at the end one
answer or one error, come up the pipe N. The child waits for a byte on its standard input, which the daemon sends once
the limits are set. A child that stays after its answer gets further requests there; one that answers several calls at a
time is a `children.shared.SharedChild`. `children.entry` is the other side. A child ends with the daemon; a worker does
not, which `worker_link` is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from horizon_server.children.entry import BEGIN, MAX_LINE_BYTES, MAX_REQUEST_BYTES, Answer, Failure, decode_line
from horizon_server.control_groups import oom_kills
from horizon_server.errors import HorizonError, OutOfMemory, Stalled, WorkerCrashed, WorkerDied, WorkerFailed
from horizon_server.events import WorkerLine

OnEvent = Callable[[WorkerLine], Awaitable[None]]

_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
# What C++, Rust, OpenBLAS and the C library write before they end a process that was refused memory, which looks like a
# crash then.
_LAST_WORDS_WITHOUT_MEMORY = (
    "bad_alloc",
    "memory allocation of ",
    "Memory allocation still failed",
    "cannot allocate memory for thread-local data",
)
LONG_LINE_BYTES = 64 * 1024
"""From which on a line is parsed in a thread."""
OUT_OF_MEMORY_KILLER = "the kernel's out-of-memory killer"
# How long a child that has answered, or has closed its pipe, may take to exit.
_EXIT_S = 10.0
# Events that wait for a reader who is slow.
_WAITING_LINES = 256

log = structlog.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one child may take; None: no limit. The limits of memory, processor time and files hold for each process
    that it starts."""

    memory_bytes: int | None = None  # private memory: of files, libraries map far more than they use
    cpu_s: int | None = None
    file_bytes: int | None = None  # the largest file that it may write, its log included
    wall_s: float | None = None
    silence_s: float | None = None  # longest time between two events
    # What the kernel's out-of-memory killer chooses by, from 0 to 1000. Any child goes before the daemon, checks before
    # workers.
    oom_score_adj: int = 500


@dataclass(frozen=True, kw_only=True)
class ChildTask:
    """What a child is started for: `python -m MODULE`, with these limits. `who` names it in error messages: "the
    preview".

    `meanings` says what a bad end means for whoever asked: instead of an error of one of these classes, such as
    WorkerCrashed, `run`, `stream`, `Child.answer` and `Child.ask` raise the error that stands here.
    """

    module: str
    who: str
    environment: Mapping[str, str]
    limits: Limits = Limits()
    meanings: Mapping[type[HorizonError], HorizonError] = field(default_factory=dict)

    async def run(
        self, request: Mapping[str, Any], on_event: OnEvent | None = None, *, log_file: Path | None = None
    ) -> Any:
        """Return the answer of a child. A caller who is cancelled ends it. Raises as `Child.answer` does."""
        child = await self.start(request, log_file=log_file)
        return await child.answer(on_event)

    def stream(self, request: Mapping[str, Any]) -> AsyncGenerator[WorkerLine | Answer, None]:
        """Yield the events of a child as they come, and then its answer. Closing the generator ends it. Raises as `run`
        does."""
        return streamed(lambda on_event: self.run(request, on_event))

    async def start(
        self, request: Mapping[str, Any], *, request_file: Path | None = None, log_file: Path | None = None
    ) -> Child:
        """Start a child in a process group of its own."""
        with contextlib.ExitStack() as resources:
            # Request and log are kept in the two files where these are given, else in memory for as long as the child
            # lives.
            request_fd = _open(request_file, resources)
            os.ftruncate(request_fd, 0)
            # Indented where it is kept, for people who look at it.
            with os.fdopen(os.dup(request_fd), "wb") as stream:
                stream.write(json.dumps(request, indent=1 if request_file else None).encode("ascii"))
            log_fd = _open(log_file, resources)
            read_fd, write_fd = os.pipe()
            events = asyncio.StreamReader(limit=MAX_LINE_BYTES)
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(events), os.fdopen(read_fd, "rb", buffering=0)
            )
            resources.callback(transport.close)
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    self.module,
                    request_file or f"/proc/self/fd/{request_fd}",
                    "--events-fd",
                    str(write_fd),
                    "--held",
                    stdin=asyncio.subprocess.PIPE,
                    stdout=log_fd,
                    stderr=log_fd,
                    env=dict(self.environment),
                    pass_fds=(write_fd, request_fd),
                    start_new_session=True,
                )
            finally:
                os.close(write_fd)  # the child has its own; while any is open, the pipe does not end with the child
            limit(process.pid, self.limits)
            assert process.stdin is not None
            process.stdin.write(BEGIN)
            log_file = log_file or Path(f"/proc/self/fd/{log_fd}")
            return Child(process, self, events=events, resources=resources.pop_all(), log_file=log_file)


class Child:
    """One running child of a task. Thread: belongs to one event loop."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        task: ChildTask,
        *,
        events: asyncio.StreamReader,
        resources: contextlib.ExitStack,
        log_file: Path,
    ) -> None:
        self.log = log_file
        self.pid = process.pid
        self._process = process
        self._task = task
        self._events = events
        self._resources = resources
        self._oom_kills_before = oom_kills()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended, as far as the daemon knows."""
        return self._process.returncode is None

    @property
    def who(self) -> str:
        """What it is, for error messages."""
        return self._task.who

    async def answer(self, on_event: OnEvent | None = None, *, stays: bool = False) -> Any:
        """Pass every event to `on_event`, and return the answer. At the end the child is gone, however that comes.

        With `stays`, for a module that serves so, a child that has answered stays: `ask` or `end` it.

        Raises:
            HorizonError: that the child reported: the same class, reason, message and violations; and what the task
                means by an end.
            Stalled: when it exceeds its limit of time, of processor time, or of silence.
            WorkerDied: when it ended without an answer; WorkerCrashed when its own code made it end, OutOfMemory for
                lack of memory.
            WorkerFailed: when it writes a line that is not an event.
        """
        return await self._answer(None, on_event, stays)

    async def ask(self, request: Mapping[str, Any], on_event: OnEvent | None = None) -> Any:
        """Send a further request to a child that stayed, and return its answer; then it stays again. Otherwise as
        `answer`."""
        line = json.dumps(request).encode("ascii") + b"\n"
        assert len(line) <= MAX_REQUEST_BYTES, len(line)
        return await self._answer(line, on_event, True)

    async def _answer(self, request: bytes | None, on_event: OnEvent | None, stays: bool) -> Any:
        has_answered = False
        try:
            answer = await self._in_time(request, on_event, stays)
            has_answered = True
            return answer
        except HorizonError as error:
            meant = self.meant(error)
            if meant is error:
                raise
            raise meant from error
        finally:
            if not (stays and has_answered):
                await self.end()

    def meant(self, error: HorizonError) -> HorizonError:
        """What an error means for whoever asked, by the task's `meanings`."""
        meant = next((meant for kind, meant in self._task.meanings.items() if isinstance(error, kind)), None)
        # A copy: an error that is raised keeps where that was.
        return error if meant is None else copy.copy(meant)

    async def end(self) -> None:
        """End it at once, and return when it is gone."""
        self.kill()
        await self.wait()

    async def _in_time(self, request: bytes | None, on_event: OnEvent | None, stays: bool) -> Any:
        wall_s = self._task.limits.wall_s
        scope = asyncio.timeout(wall_s)
        try:
            async with scope:
                if request is not None:
                    await self.send(request)
                answer = await self._read_to_the_answer(on_event)
                if not stays:
                    await self._exit_code()
                return answer
        except TimeoutError as error:
            if not scope.expired():  # one of `on_event`
                raise
            raise Stalled(f"{self._task.who} took longer than {wall_s:g} s") from error

    def kill(self) -> None:
        """End it and all processes that it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Return its exit code (negative: the signal that ended it) once it is gone. Closes a log that was kept in
        memory."""
        code = await self._process.wait()
        self._resources.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        return code

    async def send(self, data: bytes) -> None:
        """Write to its standard input, and wait until little of it is left to write."""
        self._oom_kills_before = oom_kills()
        self.write(data)
        # Of a child that is gone the events end, and that tells why.
        with contextlib.suppress(ConnectionError):
            await self._stdin.drain()

    def write(self, data: bytes) -> None:
        """Write to its standard input, where it is not gone."""
        if not self._stdin.is_closing():
            self._stdin.write(data)

    @property
    def _stdin(self) -> asyncio.StreamWriter:
        assert self._process.stdin is not None, "it was started with a pipe"
        return self._process.stdin

    async def _read_to_the_answer(self, on_event: OnEvent | None) -> Any:
        while raw := await self.read_line():
            # A long line is parsed in a thread: it would hold up the event loop.
            line = decode_line(raw) if len(raw) < LONG_LINE_BYTES else await asyncio.to_thread(decode_line, raw)
            match line:
                case Answer():
                    return line.value
                case Failure():
                    await self._exit_code()
                    raise line.error
                case event if on_event is not None:
                    await on_event(event)
        raise await self.death()

    async def death(self) -> HorizonError:
        """Why it ended without an answer."""
        code = await self._exit_code()
        if code == -signal.SIGXCPU:
            return Stalled(f"{self._task.who} took more than {self._task.limits.cpu_s} s of processor time")
        return death_of(self._task.who, code, oom_killed=oom_kills() > self._oom_kills_before, log_file=self.log)

    async def read_line(self) -> bytes:
        """Return the next line that it writes, or nothing at the end."""
        try:
            async with asyncio.timeout(self._task.limits.silence_s):
                line = await self._events.readline()
        except ValueError as error:
            raise WorkerFailed(f"a child process wrote a line of more than {MAX_LINE_BYTES} bytes") from error
        except TimeoutError as error:
            raise Stalled(f"{self._task.who} reported nothing for {self._task.limits.silence_s:g} s") from error
        return line if line.endswith(b"\n") else b""  # the child died while it wrote this one

    async def _exit_code(self) -> int:
        """Let it exit by itself; one that does not is killed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_S):
                return await self._process.wait()
        self.kill()
        return await self._process.wait()


async def streamed(ask: Callable[[OnEvent], Awaitable[Any]]) -> AsyncGenerator[WorkerLine | Answer, None]:
    """Yield the events that `ask` passes on as they come, and then what it returns. A reader who is slow makes the
    child wait.

    Closing the generator cancels `ask` and waits for its end. What `ask` raises is raised after the events before it.
    """
    lines: asyncio.Queue[WorkerLine | None] = asyncio.Queue(_WAITING_LINES)

    async def run() -> Any:
        try:
            return await ask(lines.put)
        finally:
            # Where the queue is full, the reader looks at this task when it is empty.
            with contextlib.suppress(asyncio.QueueFull):
                lines.put_nowait(None)

    running = asyncio.create_task(run(), name="child")
    try:
        while not (running.done() and lines.empty()):
            line = await lines.get()
            if line is None:
                break
            yield line
        yield Answer(await running)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def death_of(who: str, code: int | None, *, oom_killed: bool, log_file: Path) -> HorizonError:
    """Return the error of a child that ended without an answer. `code` is None where another daemon started it, so that
    nobody knows."""
    why, last_lines = exit_reason(code, oom_killed=oom_killed, who=who), log_tail(log_file)
    log.warning("a child process died", who=who, why=why, log=last_lines)
    if code != -signal.SIGKILL and any(words in last_lines for words in _LAST_WORDS_WITHOUT_MEMORY):
        return OutOfMemory(f"{who} ran out of memory")
    kind = WorkerCrashed if code is not None and -code in _CRASHES else WorkerDied
    return kind(why, retry_after_s=1.0 if code == -signal.SIGKILL else None)


def exit_reason(code: int | None, *, oom_killed: bool, who: str = "the worker") -> str:
    """Return why a child that reported no end has ended."""
    if code is None:
        return f"{who} ended while the daemon was away, or was started by an earlier one, and did not report why"
    if code == -signal.SIGKILL and oom_killed:
        return f"{who} was killed at the memory limit by {OUT_OF_MEMORY_KILLER}"
    if code == -signal.SIGKILL:
        return f"{who} was killed by SIGKILL: by hand, or by the kernel for lack of memory"
    if code < 0:
        return f"{who} was ended by signal {signal.Signals(-code).name}"
    return f"{who} ended with exit code {code} and did not report why"


def log_tail(log_file: Path, *, num_lines: int = 20, num_bytes: int = 8192) -> str:
    """Return the last lines of a log."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])


def _open(path: Path | None, resources: contextlib.ExitStack) -> int:
    """Return a descriptor of the file, or of one in memory, that is closed with `resources`."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.memfd_create("child") if path is None else os.open(path, flags, 0o600)
    resources.callback(os.close, descriptor)
    return descriptor


def limit(pid: int, limits: Limits) -> None:
    """Set the limits of a process that has just started."""
    bounds = {
        resource.RLIMIT_DATA: limits.memory_bytes,
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_CORE: 0,
    }
    with contextlib.suppress(OSError):  # it has ended already, which its end of the pipe will show
        for name, bound in bounds.items():
            if bound is not None:
                # At the hard limit of processor time the signal is SIGKILL, which would not show the reason.
                hard = bound + 5 if name == resource.RLIMIT_CPU else bound
                resource.prlimit(pid, name, (bound, hard))
        Path(f"/proc/{pid}/oom_score_adj").write_text(str(limits.oom_score_adj), "ascii")
