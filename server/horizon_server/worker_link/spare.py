"""A worker's process that has loaded its libraries and waits for the attempt that it will serve.

The daemon starts it as `python -m MODULE FOLDER --spare-fd N --loading-fd M`. It closes M once its libraries are
loaded. When an attempt begins, one message over the socket N names the request's file and brings the descriptors that
a worker inherits otherwise: the lock `alive`, the log, and the planes. From then on it is the attempt's worker, which
outlives the daemon; until then it ends with the daemon.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from horizon_server.children.child import Limits, limit

# Descriptors and bytes of the one message.
_MOST_DESCRIPTORS = 128
_MOST_BYTES = 64 * 1024


class Spare:
    """The daemon's end. Thread: one thread at a time; `start` and `end` block."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        connection: socket.socket,
        loading: int,
        environment: dict[str, str],
        *,
        yields: bool,
    ) -> None:
        """Use `start`."""
        self.environment = environment
        """The variables that it was started with, which an attempt must want exactly."""
        self._process, self._connection, self._loading = process, connection, loading
        self._is_slow = yields

    @classmethod
    def start(cls, module: str, folder: Path, environment: Mapping[str, str], *, yields: bool) -> Spare:
        """Start one, in a process group of its own. `folder` only shows people whose it is; with `yields` others come
        first on the processors while it loads. Raises OSError."""
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        loading, held_while_loading = os.pipe()
        os.set_blocking(loading, False)
        with there, os.fdopen(held_while_loading, "wb"):
            try:
                process = subprocess.Popen(
                    [
                        *(sys.executable, "-m", module, folder),
                        *("--spare-fd", str(there.fileno()), "--loading-fd", str(held_while_loading)),
                        *(["--yields"] if yields else []),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=dict(environment),
                    pass_fds=(there.fileno(), held_while_loading),
                    start_new_session=True,
                )
            except BaseException:
                here.close()
                os.close(loading)
                raise
        limit(process.pid, Limits())
        return cls(process, here, loading, dict(environment), yields=yields)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def is_useful(self) -> bool:
        """Whether an attempt starts sooner with it than without: one that yields must have loaded its libraries."""
        if self._is_slow:
            with contextlib.suppress(BlockingIOError):
                self._is_slow = bool(os.read(self._loading, 1))
        return not self._is_slow and self.is_running

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def hand_over(
        self, request_file: Path, *, alive: int, log: int, planes: Mapping[str, int]
    ) -> subprocess.Popen[bytes] | None:
        """Make it the worker of the attempt with that request, and return its process; None where it has ended."""
        text = json.dumps({"request": str(request_file), "planes": list(planes)}).encode("ascii")
        try:
            socket.send_fds(self._connection, [text], [alive, log, *planes.values()])
        except OSError:
            self.end()
            return None
        self._close()
        return self._process

    def end(self) -> None:
        """End it at once, and return when it is gone."""
        self._close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _close(self) -> None:
        self._connection.close()
        if self._loading >= 0:
            os.close(self._loading)
            self._loading = -1


@dataclass(frozen=True, kw_only=True)
class HandOver:
    """What a spare worker is given: its request, the lock that it holds from now on, and the planes' descriptors."""

    request_file: Path
    alive_fd: int
    planes: dict[str, int]


def wait_for_attempt(descriptor: int) -> HandOver:
    """Wait in a spare worker for the attempt that it will serve; its output goes to that one's log from then on. Ends
    the process where the daemon has ended or wants no attempt of it."""
    with socket.socket(fileno=descriptor) as connection:
        data, descriptors, _, _ = socket.recv_fds(connection, _MOST_BYTES, _MOST_DESCRIPTORS)
    if not data:
        os._exit(0)
    for received in descriptors:
        os.set_inheritable(received, False)
    message = json.loads(data)
    alive_fd, log_fd, *planes = descriptors
    for standard in (1, 2):
        os.dup2(log_fd, standard)
    os.close(log_fd)
    return HandOver(
        request_file=Path(message["request"]),
        alive_fd=alive_fd,
        planes=dict(zip(message["planes"], planes, strict=True)),
    )
