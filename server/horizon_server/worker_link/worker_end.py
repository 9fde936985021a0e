"""The worker's end: keeps the journal of its reports, serves the daemon that connects, and hears its orders.

A worker works on while no daemon is there. `python -m MODULE REQUEST` starts one by hand too: its journal is next to
the request then.
"""

from __future__ import annotations

import argparse
import array
import json
import logging
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from horizon_server import progress
from horizon_server.children.entry import MAX_LINE_BYTES, Answer, EventWriter, Failure, Line, encode_line, end_of
from horizon_server.durable import is_out_of_space, replace_file
from horizon_server.errors import OutOfMemory, WorkerFailed
from horizon_server.events import CallDone, MemoryReleased, TurnEnded, TurnWanted, WorkerProgress
from horizon_server.records.job import StopRequest
from horizon_server.version import VERSION
from horizon_server.worker_link.orders import Orders, stop_order
from horizon_server.worker_link.protocol import (
    GREETING_S,
    JOURNAL_FILE,
    MAX_GREETING_BYTES,
    PID_FILE,
    PROTOCOL,
    REQUEST_FILE,
    SOCKET_FILE,
    DaemonGreeting,
    WorkerGreeting,
    decode_greeting,
    encode_greeting,
    short_path,
    start_time_of,
)
from horizon_server.worker_link.spare import wait_for_attempt

log = logging.getLogger(__name__)

# A daemon that started this worker and has not connected after this is gone.
_FIRST_DAEMON_S = 30.0
_DISK_POLL_S = 5.0
_PIECE_BYTES = 64 * 1024
_MOST_ORDER_BYTES = 4096
# How often the daemon hears that the work advances. Its setting silence_limit_s must be much longer.
PROGRESS_EVERY_S = 10.0
# How long the last line may take to reach the daemon. It is in the journal in any case.
_LAST_LINE_S = 2.0
# Making the journal durable may take this part of the time of one thread.
_SYNC_SHARE = 0.01


class WorkerEnd(EventWriter):
    """Thread: `send` and `close` belong to the worker's main thread; a thread of its own each listens, sends what the
    socket did not take at once, makes the journal durable, and reports progress."""

    def __init__(
        self,
        folder: Path,
        *,
        planes: Mapping[str, int],
        orders: Orders,
        progress_every_s: float = PROGRESS_EVERY_S,
        alive_fd: int = -1,
    ) -> None:
        """`planes` are the descriptors of the memory that the daemon lent, by name: a later daemon gets them from
        here. `alive_fd` is the one that is locked while a process of the attempt lives."""
        super().__init__()
        self.orders, self.alive_fd, self.request_file = orders, alive_fd, folder / REQUEST_FILE
        self._planes, self._progress_every_s = dict(planes), progress_every_s
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        self._journal = os.open(folder / JOURNAL_FILE, flags, 0o600)
        self._size = self._num_lines = 0
        self._changed = threading.Condition()
        self._connection: socket.socket | None = None
        # Of this connection: the part of the journal that was taken for it, what is being sent, and lines about turns,
        # which go first.
        self._taken, self._pending, self._urgent = 0, b"", deque[bytes]()
        self._turn = WorkerGreeting(
            protocol=PROTOCOL, version=VERSION, pid=os.getpid(), turn="none", holds_memory=False, planes=()
        )
        self._listener = _listen(folder / SOCKET_FILE)
        for work in (self._serve_daemons, self._send_rest, self._keep_durable, self._report_progress):
            threading.Thread(target=work, name=work.__name__, daemon=True).start()

    def send(self, line: Line) -> None:
        """Keep a report in the journal, or pass on what is about turns and calls; waits for nothing but space on the
        disk."""
        self._log(line)
        data = encode_line(line)
        if isinstance(line, TurnWanted | TurnEnded | MemoryReleased | CallDone):
            with self._changed:
                if not isinstance(line, CallDone):
                    self._note(line)
                if self._connection is not None:
                    self._urgent.append(data)
                    self._pump()
            return
        self._write(data)
        with self._changed:
            self._size += len(data)
            self._num_lines += 1
            self._pump()
            self._changed.notify_all()

    def close(self) -> None:
        """Give a daemon that is connected a moment to read the last line."""
        end_s = time.monotonic() + _LAST_LINE_S
        with self._changed:
            while self._connection is not None and self._pump() and time.monotonic() < end_s:
                self._changed.wait(0.01)
        os.fdatasync(self._journal)

    def _note(self, line: TurnWanted | TurnEnded | MemoryReleased) -> None:
        """Keep how turns stand, for the daemon that connects next."""
        now = self._stand()
        match line:
            case TurnWanted():
                self._turn = replace(now, turn="wanted")
            case TurnEnded(released=released):
                self.orders.was_granted = False
                self._turn = replace(now, turn="none", holds_memory=now.holds_memory and not released)
            case MemoryReleased():
                self._turn = replace(now, holds_memory=False)

    def _stand(self) -> WorkerGreeting:
        # A grant is heard, or taken, by another thread.
        is_held = self._turn.turn != "none" and self.orders.was_granted
        return replace(self._turn, turn="held", holds_memory=True) if is_held else self._turn

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._journal, rest) :]
            except OSError as error:
                if not is_out_of_space(error):
                    raise
                log.error("the disk is full, so the worker waits: its journal cannot be written")
                progress.advance()  # it waits on purpose
                self.orders.pause(_DISK_POLL_S)

    def _pump(self) -> bool:
        """Send what the socket takes at once; whether something is left. The lock is held."""
        while (connection := self._connection) is not None:
            if not self._pending:
                if self._urgent:
                    self._pending = self._urgent.popleft()
                elif self._taken < self._size:
                    self._pending = self._lines_from(self._taken)
                    self._taken += len(self._pending)
                else:
                    return False
            try:
                self._pending = self._pending[connection.send(self._pending, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                return True
            except OSError:
                self._leave(connection)
        return False

    def _lines_from(self, offset: int) -> bytes:
        """Return whole lines of the journal: a line about turns must not come in the middle of one."""
        size = _PIECE_BYTES
        while True:
            piece = os.pread(self._journal, min(size, self._size - offset), offset)
            if end := piece.rfind(b"\n") + 1:
                return piece[:end]
            assert size < 2 * MAX_LINE_BYTES, "no line is longer"
            size *= 2

    def _leave(self, connection: socket.socket) -> None:
        with self._changed:
            if self._connection is connection:
                self._connection = None
                self.orders.lose_daemon()
        connection.close()

    def _send_rest(self) -> None:
        while True:
            with self._changed:
                while not self._pump():
                    self._changed.wait()
                connection = self._connection
            if connection is not None:
                with suppress(OSError, ValueError):  # it may be closed by now
                    select.select([], [connection], [], 1.0)

    def _keep_durable(self) -> None:
        synced = 0
        while True:
            with self._changed:
                while self._size == synced:
                    self._changed.wait()
                synced = self._size
            began_s = time.monotonic()
            with suppress(
                OSError
            ):  # a disk in trouble: the lines are in the kernel's memory, and the next ones try again
                os.fdatasync(self._journal)
            time.sleep((time.monotonic() - began_s) / _SYNC_SHARE)

    def _report_progress(self) -> None:
        reported = progress.count()
        while True:
            time.sleep(self._progress_every_s)
            if (now := progress.count()) == reported:
                continue
            reported = now
            with self._changed:
                # Where lines are being sent, the daemon hears of the worker without this one.
                if self._connection is not None and not self._pump():
                    self._urgent.append(encode_line(WorkerProgress()))
                    self._pump()
                    self._changed.notify_all()

    def _serve_daemons(self) -> None:
        self._listener.settimeout(_FIRST_DAEMON_S)
        while True:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._listener.settimeout(None)
                self.orders.lose_daemon()
                continue
            self._listener.settimeout(None)
            try:
                self._greet(connection)
                self._hear(connection)
            except (OSError, WorkerFailed) as error:
                log.warning("the daemon's connection ended: %s", error)
            finally:
                self._leave(connection)

    def _greet(self, connection: socket.socket) -> None:
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        if struct.unpack("3i", credentials)[1] not in (os.geteuid(), 0):
            raise WorkerFailed("a process of another account has connected")
        connection.settimeout(GREETING_S)
        received = b""
        while not received.endswith(b"\n"):
            piece = connection.recv(MAX_GREETING_BYTES)
            if not piece or len(received) > MAX_GREETING_BYTES:
                raise WorkerFailed("the daemon sent no greeting")
            received += piece
        try:
            greeting = decode_greeting(DaemonGreeting, received)
        except WorkerFailed:
            # So that a daemon of another version learns of this one.
            connection.sendall(encode_greeting(self._turn))
            raise
        with self._changed:
            self._taken = self._offset_of(greeting.after)
            self._pending = b""
            self._urgent.clear()
            self.orders.meet_daemon()
            planes = self._planes if greeting.wants_planes else {}
            answer = replace(self._stand(), planes=tuple(planes))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", planes.values()))] if planes else []
            connection.sendmsg([encode_greeting(answer)], rights)
            connection.settimeout(None)
            self._connection = connection
            self._pump()
            self._changed.notify_all()

    def _hear(self, connection: socket.socket) -> None:
        pending = b""
        while data := connection.recv(_MOST_ORDER_BYTES):
            lines, newline, pending = (pending + data).rpartition(b"\n")
            if len(pending) > _MOST_ORDER_BYTES:
                raise WorkerFailed("the daemon sent an order that does not end")
            self.orders.handle(lines + newline)

    def _offset_of(self, num_lines: int) -> int:
        """Where the journal's lines after that many begin."""
        if num_lines > self._num_lines:
            raise WorkerFailed(f"the daemon has {num_lines} lines of a journal of {self._num_lines}")
        offset = 0
        while num_lines:
            piece = os.pread(self._journal, _PIECE_BYTES, offset)
            count = piece.count(b"\n")
            if count > num_lines:
                piece = b"\n".join(piece.split(b"\n", num_lines)[:num_lines]) + b"\n"
                count = num_lines
            offset, num_lines = offset + len(piece), num_lines - count
            if not num_lines and not piece.endswith(b"\n"):
                offset -= len(piece) - piece.rfind(b"\n") - 1
        return offset


Work = Callable[[Any, WorkerEnd], Any]
"""Takes the request and returns the answer, both plain data."""


def serve_worker(
    work: Work, *, who: str, progress_every_s: float = PROGRESS_EVERY_S, load: Callable[[bool], None] | None = None
) -> NoReturn:
    """Do `work` on the request that the command line names, report how it ended, and end the process. A spare worker
    does `load` while it has no request yet, which is given whether others come first on the processors."""
    parser = argparse.ArgumentParser(description=f"Entry of {who}; started by horizond.")
    parser.add_argument(
        "request", type=Path, help="JSON file with the request; the worker's other files are next to it"
    )
    parser.add_argument("--alive-fd", type=int, default=-1, help="descriptor that is locked while the worker lives")
    parser.add_argument("--spare-fd", type=int, help="socket that a worker without a request waits for one on")
    parser.add_argument("--loading-fd", type=int, help="descriptor that it closes when it has loaded its libraries")
    parser.add_argument("--yields", action="store_true", help="let others come first on the processors until then")
    arguments = parser.parse_args()
    orders = Orders()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    # A machine that shuts down, and a daemon of another version, ask in this way.
    signal.signal(signal.SIGTERM, lambda *_: orders.handle(stop_order(StopRequest.DRAIN)))
    request_file, alive_fd, planes = arguments.request, arguments.alive_fd, None
    if arguments.spare_fd is not None:
        os.set_inheritable(arguments.spare_fd, False)
        if load is not None:
            load(arguments.yields)
        os.close(arguments.loading_fd)
        handed = wait_for_attempt(arguments.spare_fd)
        request_file, alive_fd, planes = handed.request_file, handed.alive_fd, handed.planes
    elif alive_fd >= 0:
        os.set_inheritable(alive_fd, False)
    request = json.loads(request_file.read_bytes())
    if planes is not None:
        # Descriptors have other numbers in a process that did not inherit them.
        request["planes"] = planes
    folder = request_file.parent
    replace_file(folder / PID_FILE, f"{os.getpid()} {start_time_of(os.getpid())}")
    link = WorkerEnd(
        folder,
        planes=request["planes"],
        orders=orders,
        progress_every_s=progress_every_s,
        alive_fd=alive_fd,
    )
    link.request_file = request_file
    end = end_of(lambda: work(request, link), who)
    # Made here, where the memory that the work took is free again.
    link.send(end or Failure(OutOfMemory(f"{who} ran out of memory")))
    link.close()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through the interpreter's end: it would take libraries apart for seconds, and the job waits for the process to
    # be gone.
    os._exit(0 if isinstance(end, Answer) else 1)


def _listen(file: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    file.unlink(missing_ok=True)
    with short_path(file) as name:
        listener.bind(name)
    file.chmod(0o600)
    listener.listen(4)
    return listener
