"""The daemon's end: starts a worker, or finds one that an earlier daemon started, reads its reports and sends it
orders."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from horizon_server.children.child import Limits, death_of, limit
from horizon_server.children.entry import MAX_LINE_BYTES, Answer, Failure, decode_line
from horizon_server.control_groups import WorkerGroup, oom_kills
from horizon_server.errors import WorkerFailed, WorkerSilent
from horizon_server.events import WorkerLine
from horizon_server.worker_link.protocol import (
    ALIVE_FILE,
    GREETING_S,
    JOURNAL_FILE,
    LOG_FILE,
    MAX_GREETING_BYTES,
    PID_FILE,
    PROTOCOL,
    REQUEST_FILE,
    SOCKET_FILE,
    DaemonGreeting,
    OtherVersion,
    WorkerGreeting,
    decode_greeting,
    encode_greeting,
    short_path,
    start_time_of,
)
from horizon_server.worker_link.spare import Spare

log = structlog.get_logger(__name__)

WHO = "the worker"
_POLL_S = 0.02
# How long a process may take from its start to its socket: Python's own start, on a busy machine.
_START_S = 60.0
# How long a worker that has answered, or has ended its connection, may take to exit.
_EXIT_S = 10.0
# Descriptors that one message can carry.
_MOST_PLANES = 64
_REPORT_EVERY_S = 60.0
# Silence is counted in pieces of this length, each of which this process was awake to wait for: a daemon that was
# stopped itself, or stored for long what it had read, does not take that for silence of the worker.
_SILENCE_PIECE_S = 0.5

OnLine = Callable[[WorkerLine, int], Awaitable[None]]
"""Takes a report and its number in the worker's journal; those that are in none, about turns and progress, have that of
the report before them."""

SilenceLimit = Callable[[], float | None]
"""How long the worker may say nothing from now on, in seconds; None while nothing is expected of it."""


class Worker:
    """A worker's process and the connection to it. Thread: belongs to one event loop."""

    def __init__(
        self, folder: Path, pid: int, process: subprocess.Popen[bytes] | None, group: WorkerGroup | None = None
    ) -> None:
        """`process` where this daemon started it; `group` where the worker has a control group of its own.

        Raises ProcessLookupError when it has ended, and is not this daemon's child.
        """
        self.pid = pid
        self.num_lines = 0
        """Lines of its journal that were read, or that an earlier daemon had stored."""
        self._folder, self._process, self._group = folder, process, group
        self._oom_kills_before = self._oom_kills()
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._pidfd = os.pidfd_open(pid)
        self._gone = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_gone)

    @classmethod
    async def start(
        cls,
        module: str,
        request: Mapping[str, Any],
        *,
        folder: Path,
        environment: Mapping[str, str],
        group: WorkerGroup | None = None,
        spare: Spare | None = None,
    ) -> Worker:
        """Start `module` on the request, whose `planes` are descriptors that it inherits, in a process group of its
        own; or give the request to `spare`, a process of the same module and environment that waits for one.

        Raises:
            OSError: when its files cannot be written, or the process cannot be started.
        """
        process = await asyncio.to_thread(_spawn, module, request, folder, environment, spare)
        pid = process.pid
        # At once: what it allocates before stays with the daemon's own group.
        if group is not None and (why := group.add(pid)):
            log.warning("the worker is not in a control group of its own", why=why)
        return cls(folder, pid, process, group)

    @classmethod
    async def find(cls, folder: Path, group: WorkerGroup | None = None) -> Worker | None:
        """Return the worker of an attempt where a process of it is alive; one that is just starting is waited for."""
        reported_s = time.monotonic()
        while await asyncio.to_thread(_is_alive, folder):
            with contextlib.suppress(OSError, ValueError):
                pid, started = (folder / PID_FILE).read_text("ascii").split()
                worker = cls(folder, int(pid), None, group)
                # Again, now that the descriptor keeps the number from being given to another process.
                if start_time_of(int(pid)) == started:
                    return worker
                worker.leave()
            if time.monotonic() - reported_s > _REPORT_EVERY_S:
                reported_s = time.monotonic()
                log.error("an attempt has a process that does not say which it is", folder=str(folder))
            await asyncio.sleep(_POLL_S)
        return None

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self._gone.is_set()

    async def connect(self, *, after: int, wants_planes: bool) -> tuple[WorkerGreeting, dict[str, int]]:
        """Connect, and have it send its reports after the first `after`. Returns where it stands, and its planes'
        descriptors.

        Raises:
            OtherVersion: when it speaks another version of the protocol, or does not answer.
            WorkerFailed: when it does not listen.
            ConnectionError: when it has ended.
        """
        self.num_lines = after
        end_s = time.monotonic() + _START_S
        while True:
            try:
                connection, greeting, planes = await asyncio.to_thread(self._greet, after, wants_planes)
                break
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if self.is_gone:
                    raise ConnectionResetError("the worker has ended") from error
                if time.monotonic() > end_s:
                    raise WorkerFailed(f"{WHO} did not listen within {_START_S:.0f} s of its start") from error
                await asyncio.sleep(_POLL_S)
            except (BrokenPipeError, ConnectionResetError) as error:
                # It closes the connection when it dies, and when it does not accept this daemon.
                if await self.wait(_EXIT_S):
                    raise
                raise OtherVersion(f"{WHO} ended the connection without a greeting") from error
        self._connection = await asyncio.open_unix_connection(sock=connection, limit=MAX_LINE_BYTES)
        return greeting, planes

    async def answer(self, on_line: OnLine, silence_limit: SilenceLimit = lambda: None) -> Any:
        """Pass every report to `on_line`, and return the answer. At the end the worker is gone, but after WorkerSilent.

        Raises:
            HorizonError: that the worker reported: the same class, reason, message and violations.
            WorkerDied: when it ended without an answer; WorkerCrashed when its own code made it end.
            WorkerFailed: when it wrote a line that is not a report.
            WorkerSilent: when it lives and said nothing for longer than `silence_limit` allows.
        """
        async for raw in self._lines(silence_limit):
            match decode_line(raw):
                case Answer(value):
                    await self._exit()
                    return value
                case Failure(error):
                    await self._exit()
                    raise error
                case line:
                    await on_line(line, self.num_lines)
        code = None if self._process is None else self._process.wait()
        killed = self._oom_kills() > self._oom_kills_before
        raise death_of(WHO, code, oom_killed=killed, log_file=self._folder / LOG_FILE)

    def send_order(self, order: bytes) -> None:
        """Send one of the orders of `worker_link.orders`; a worker that is gone needs none."""
        if self._connection is not None:
            with contextlib.suppress(ConnectionError):
                self._connection[1].write(order)

    def ask_to_stop(self) -> None:
        """Have it checkpoint and end, whatever version of the protocol it speaks."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def kill(self) -> None:
        """End it and all processes that it started, at once."""
        # The group has the worker's own number, which is not given to another process before a dead worker is
        # collected.
        is_collected = self._process.returncode is not None if self._process is not None else self.is_gone
        if not is_collected:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is gone; False where it is not in time."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._gone.wait(), timeout_s)
        return self.is_gone

    async def wait_for_all(self) -> None:
        """Wait, once it is gone, until all processes that it started on the attempt's memory are; the kernel ends them
        with it."""
        await asyncio.to_thread(_wait_until_gone, self._folder)

    def leave(self) -> None:
        """End the connection. A worker that is alive continues."""
        if self._process is not None and self._process.poll() is None:
            self._process.returncode = 0  # Popen would complain that nobody has waited for its end
        if self._connection is not None:
            self._connection[1].close()
            self._connection = None
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._group is not None:
            self._group.remove()  # which the kernel refuses while the worker lives

    def _oom_kills(self) -> int:
        return oom_kills() if self._group is None else self._group.oom_kills()

    def _on_gone(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._gone.set()

    def _greet(self, after: int, wants_planes: bool) -> tuple[socket.socket, WorkerGreeting, dict[str, int]]:
        with contextlib.ExitStack() as on_error:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            on_error.callback(connection.close)
            connection.settimeout(GREETING_S)
            with short_path(self._folder / SOCKET_FILE) as name:
                connection.connect(name)
            connection.sendall(
                encode_greeting(DaemonGreeting(protocol=PROTOCOL, after=after, wants_planes=wants_planes))
            )
            try:
                # The first byte brings the descriptors. Not one byte is read beyond the line: what follows belongs to
                # the stream.
                line, descriptors, _, _ = socket.recv_fds(connection, 1, _MOST_PLANES)
                while line and not line.endswith(b"\n") and len(line) < MAX_GREETING_BYTES:
                    byte = connection.recv(1)
                    line = line + byte if byte else b""
                if not line:
                    raise ConnectionResetError("the connection has ended")
                greeting: WorkerGreeting = decode_greeting(WorkerGreeting, line)
            except TimeoutError as error:
                raise OtherVersion(f"{WHO} did not answer within {GREETING_S:.0f} s") from error
            connection.setblocking(False)
            on_error.pop_all()
            return connection, greeting, dict(zip(greeting.planes, descriptors, strict=True))

    async def _lines(self, silence_limit: SilenceLimit) -> AsyncIterator[bytes]:
        """Yield every line, also those that it wrote when its connection had ended."""
        while True:
            while raw := await self._read_line(silence_limit):
                yield raw
            if await self.wait(_EXIT_S):
                break
            # It lives, and its connection does not.
            with contextlib.suppress(ConnectionError):
                await self.connect(after=self.num_lines, wants_planes=False)
        async for raw in rest_of_journal(self._folder, self.num_lines):
            self.num_lines += 1
            yield raw

    async def _read_line(self, silence_limit: SilenceLimit) -> bytes:
        """Return the next line, or nothing at the end of the connection."""
        if self._connection is None:  # it had ended before it was connected
            return b""
        try:
            raw = await _line_of(self._connection[0], silence_limit)
        except ValueError as error:
            raise WorkerFailed(f"{WHO} wrote a line of more than {MAX_LINE_BYTES} bytes") from error
        except ConnectionError:
            return b""
        if not raw.endswith(b"\n"):  # it died while it wrote this one
            return b""
        if not raw.startswith(_UNKEPT_LINES):
            self.num_lines += 1
        return raw

    async def _exit(self) -> None:
        """Let it exit by itself; one that does not is killed."""
        if not await self.wait(_EXIT_S):
            self.kill()
            await self.wait()


# As `events.encode` begins the lines that are in no journal.
_UNKEPT_LINES = tuple(
    f'{{"kind":"{kind}"'.encode() for kind in ("turn_wanted", "turn_ended", "memory_released", "progress", "call_done")
)


async def _line_of(stream: asyncio.StreamReader, silence_limit: SilenceLimit) -> bytes:
    silent_s = 0.0
    while True:
        # A part of a line that was read when the piece ended stays in the stream.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SILENCE_PIECE_S):
                return await stream.readline()
        limit_s = silence_limit()
        silent_s = 0.0 if limit_s is None else silent_s + _SILENCE_PIECE_S
        if limit_s is not None and silent_s > limit_s:
            raise WorkerSilent(f"{WHO} made no progress for {silent_s:.0f} s, and was killed")


async def replay_journal(folder: Path, after: int, on_line: OnLine) -> Any:
    """Pass on what a worker that is gone has reported since `after`, and return its answer. Raises as `Worker.answer`
    does."""
    async for raw in rest_of_journal(folder, after):
        after += 1
        match decode_line(raw):
            case Answer(value):
                return value
            case Failure(error):
                raise error
            case line:
                await on_line(line, after)
    raise death_of(WHO, None, oom_killed=False, log_file=folder / LOG_FILE)


async def rest_of_journal(folder: Path, after: int) -> AsyncIterator[bytes]:
    """Yield the whole lines of the journal after the first `after`."""

    def open_there() -> Any:
        try:
            stream = (folder / JOURNAL_FILE).open("rb")
        except FileNotFoundError:
            return None
        for _ in range(after):
            stream.readline()
        return stream

    stream = await asyncio.to_thread(open_there)
    if stream is None:
        return
    with stream:
        while lines := await asyncio.to_thread(stream.readlines, 1 << 20):
            for line in lines:
                # The last one may be torn: the worker was killed while it wrote it.
                if line.endswith(b"\n"):
                    yield line


def _spawn(
    module: str, request: Mapping[str, Any], folder: Path, environment: Mapping[str, str], spare: Spare | None
) -> subprocess.Popen[bytes]:
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    with contextlib.ExitStack() as opened:

        def open_file(name: str, more: int) -> int:
            descriptor = os.open(folder / name, flags | more, 0o600)
            opened.callback(os.close, descriptor)
            return descriptor

        # Indented, for people who look at it.
        os.write(open_file(REQUEST_FILE, os.O_TRUNC), json.dumps(request, indent=1).encode("ascii"))
        # Before the worker is there: a daemon that is killed in between leaves no worker that nobody knows of.
        alive = open_file(ALIVE_FILE, 0)
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        output = open_file(LOG_FILE, os.O_APPEND)
        if spare is not None:
            process = spare.hand_over(folder / REQUEST_FILE, alive=alive, log=output, planes=request["planes"])
            if process is not None:
                return process
        process = subprocess.Popen(
            [sys.executable, "-m", module, folder / REQUEST_FILE, "--alive-fd", str(alive)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            pass_fds=(alive, *request["planes"].values()),
            start_new_session=True,
        )
        limit(process.pid, Limits())
        return process


def _wait_until_gone(folder: Path) -> None:
    end_s = time.monotonic() + _EXIT_S
    while _is_alive(folder) and time.monotonic() < end_s:
        time.sleep(_POLL_S)


def _is_alive(folder: Path) -> bool:
    """Whether a process of the attempt has the lock."""
    try:
        descriptor = os.open(folder / ALIVE_FILE, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
