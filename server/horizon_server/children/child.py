"""A child process: started with a log file, an event pipe up and a control pipe down, and never outlived by what it was lent.

The child sees the end of its control pipe when the daemon dies, and takes that as an order to checkpoint and stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from horizon_server.errors import WorkerFailed
from horizon_server.events import MAX_LINE_BYTES, WorkerLine, decode

STOP = b"stop\n"
"""Checkpoint at the next step boundary and end."""
CANCEL = b"cancel\n"
"""End at the next step boundary."""


class Child:
    """One running child.

    Thread: belongs to one event loop.
    """

    def __init__(
        self, process: asyncio.subprocess.Process, events: asyncio.StreamReader, transport: asyncio.ReadTransport
    ) -> None:
        self._process = process
        self._events = events
        self._transport = transport

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: Sequence[str],
        *,
        log: Path,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> Child:
        """Run `python -m module arguments --events-fd N` in a process group of its own, its output in `log`."""
        read_fd, write_fd = os.pipe()
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, "-m", module, *arguments, "--events-fd", str(write_fd),
                    stdin=asyncio.subprocess.PIPE, stdout=output, stderr=output, env=dict(environment),
                    pass_fds=(write_fd, *pass_fds), start_new_session=True,
                )  # fmt: skip
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        events = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        pipe = os.fdopen(read_fd, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(events), pipe
        )
        return cls(process, events, transport)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def lines(self) -> AsyncIterator[WorkerLine]:
        """Yield what it reports, until it closes its pipe.

        Raises:
            WorkerFailed: when it writes something that is no event, or a line without end.
        """
        while True:
            try:
                line = await self._events.readline()
            except ValueError as error:
                raise WorkerFailed(f"a child process wrote a line of more than {MAX_LINE_BYTES} bytes") from error
            if not line.endswith(b"\n"):
                return
            yield decode(line)

    def tell(self, order: bytes) -> None:
        """Send STOP or CANCEL; a child that is gone needs no order."""
        if self._process.stdin is not None and not self._process.stdin.is_closing():
            with contextlib.suppress(ConnectionError):
                self._process.stdin.write(order)

    def kill(self) -> None:
        """End it and whatever it started, at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def wait(self) -> int:
        """Return its exit code (negative: the signal that ended it) once it is gone."""
        code = await self._process.wait()
        self._transport.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        return code


def exit_reason(code: int, *, oom_killed: bool, who: str = "the worker") -> str:
    """Say in one sentence why a child that reported no end has ended."""
    if code == -signal.SIGKILL and oom_killed:
        return f"{who} was killed at the memory limit by the kernel's out-of-memory killer"
    if code == -signal.SIGKILL:
        return f"{who} was killed by SIGKILL: by hand, or by the kernel for want of memory"
    if code < 0:
        return f"{who} was ended by signal {signal.Signals(-code).name}"
    return f"{who} ended with exit code {code} and did not say why"


def log_tail(log: Path, *, num_lines: int = 20, num_bytes: int = 8192) -> str:
    """Return the last lines of a log."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - num_bytes))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return "\n".join(lines[-num_lines:])
