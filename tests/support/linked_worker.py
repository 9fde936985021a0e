"""A worker in a process of its own, and a daemon's end of its link that a test reads and writes by hand."""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

from horizon_server.children.entry import Line, decode_line
from horizon_server.events import WorkerProgress
from horizon_server.worker_link.protocol import (
    PROTOCOL,
    SOCKET_FILE,
    DaemonGreeting,
    WorkerGreeting,
    decode_greeting,
    encode_greeting,
    short_path,
)

WAIT_S = 240.0


class LinkedWorker:
    """Starts `module` on the request file; `connect` as often as a daemon would."""

    def __init__(self, request_file: Path, *, module: str = "horizon_server.worker", **environment: str) -> None:
        self.folder = request_file.parent
        planes: dict[str, int] = json.loads(request_file.read_bytes())["planes"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(request_file)],
            stdin=subprocess.DEVNULL,
            pass_fds=tuple(planes.values()),
            start_new_session=True,
            env={**os.environ, **environment},
        )
        self.planes: dict[str, int] = {}
        self._connection: socket.socket | None = None

    def connect(self, *, after: int = 0, wants_planes: bool = False, protocol: int = PROTOCOL) -> WorkerGreeting:
        """Connect, however long the worker needs to listen, and return where it stands."""
        self.hang_up()
        end_s = time.monotonic() + WAIT_S
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(WAIT_S)
            try:
                with short_path(self.folder / SOCKET_FILE) as name:
                    connection.connect(name)
                break
            except OSError:
                connection.close()
                assert time.monotonic() < end_s and self.process.poll() is None, "the worker does not listen"
                time.sleep(0.02)
        # Kept at once, so that it is closed whatever comes.
        self._connection = connection
        greeting = DaemonGreeting(protocol=protocol, after=after, wants_planes=wants_planes)
        connection.sendall(encode_greeting(greeting))
        line, rights, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(64 * array.array("i").itemsize))
        while not line.endswith(b"\n"):
            byte = connection.recv(1)
            assert byte, "the worker sent no greeting"
            line += byte
        answer: WorkerGreeting = decode_greeting(WorkerGreeting, line)
        descriptors = array.array("i", b"".join(data for _, _, data in rights))
        self.planes = dict(zip(answer.planes, descriptors, strict=True))
        return answer

    def order(self, orders: bytes) -> None:
        """Send orders."""
        assert self._connection is not None
        self._connection.sendall(orders)

    def lines(self) -> Generator[Line]:
        """Yield what it says, to the end of the connection, without the signs of life, which come by the clock."""
        assert self._connection is not None
        # A worker that is killed before it has read an order resets it; what it said has arrived by then.
        with self._connection.makefile("rb") as stream, suppress(ConnectionResetError):
            for line in map(decode_line, stream):
                if not isinstance(line, WorkerProgress):
                    yield line

    def hang_up(self) -> None:
        """End the connection, as a daemon does that dies."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def wait(self) -> int:
        """Return its exit code."""
        return self.process.wait(WAIT_S)

    def __enter__(self) -> LinkedWorker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.hang_up()
        for descriptor in self.planes.values():
            os.close(descriptor)
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(WAIT_S)
