"""The real daemon in a thread of the test's process: services, database, queue, gRPC and REST; only the worker is
scripted.

It has the methods of `DaemonProcess` that a process need not have, so that one scenario runs against both.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from tests.daemon_parts import DaemonParts, daemon_parts
from tests.support.loop_thread import LoopThread
from tests.support.processes import processes_of
from tests.support.resting import Resting

from horizon_client import Client
from horizon_server.api.grpc.server import GrpcServer, start_grpc_server
from horizon_server.api.http.server import HttpServer, make_app, start_http_server
from horizon_server.version import VERSION

Result = TypeVar("Result")


class ServedDaemon:
    """Starts and stops one daemon over one state folder, as often as a test likes. `options` are those of
    `daemon_parts`."""

    def __init__(self, state_dir: Path, **options: Any) -> None:
        self.state_dir = state_dir
        self.endpoints: dict[str, Any] = {}
        self.resting = Resting(state_dir)
        self._options = options
        self._http_port = 0
        self._thread = LoopThread()
        self._stack: AsyncExitStack | None = None
        self._parts: DaemonParts | None = None
        self._servers: tuple[GrpcServer, HttpServer] | None = None

    @property
    def parts(self) -> DaemonParts:
        """What is running; its coroutines are run with `call`."""
        assert self._parts is not None
        return self._parts

    def call(self, work: Coroutine[Any, Any, Result], timeout_s: float = 240.0) -> Result:
        """Run a coroutine where the daemon runs."""
        return self._thread.call(work, timeout_s)

    def start(self) -> ServedDaemon:
        """Start it; it is ready when this returns."""
        self.call(self._start())
        return self

    def terminate(self, timeout_s: float = 240.0) -> int:
        """Stop as on SIGTERM: checkpoint the running job, then end every call. Returns the exit code."""
        self.call(self._stop(drain_s=30.0), timeout_s)
        return 0

    def kill(self) -> None:
        """Leave the state folder as a daemon does that is killed; its workers train on."""
        self.call(self._crash())

    def close(self) -> None:
        """Leave nothing running, whatever happened."""
        try:
            self.call(self._stop(drain_s=0.0))
        finally:
            self._thread.close()
            for pid in self.worker_pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def user(self, name: str, role: str = "user") -> str:
        """Make a user and return a token of theirs."""
        self.call(self.parts.user(name, role=role))
        return self.call(self.parts.token(name))

    def client(self, token: str) -> Client:
        """A client of the running daemon."""
        return Client(self.endpoints["grpc"], token=token)

    def worker_pids(self) -> list[int]:
        """Processes of workers that belong to this state folder and are alive."""
        return processes_of("tests.scripted_worker", self.state_dir)

    async def _start(self) -> None:
        async with AsyncExitStack() as stack:
            parts = await stack.enter_async_context(daemon_parts(self.state_dir, **self._options))
            grpc_server = await start_grpc_server(parts.services, address="127.0.0.1:0", tls=None)
            stack.push_async_callback(grpc_server.stop, 0)
            app = make_app(
                parts.services,
                parts.parts.metrics,
                metrics_open=True,
                version=VERSION,
                ready=lambda: "the daemon is shutting down" if parts.parts.lifecycle.draining else None,
            )
            # At the address of before: an open page comes back to it.
            http_server = await start_http_server(app, "127.0.0.1", self._http_port)
            self._http_port = http_server.port
            stack.push_async_callback(http_server.stop)
            self._parts = parts
            self.endpoints = {"grpc": f"127.0.0.1:{grpc_server.port}", "http": f"127.0.0.1:{http_server.port}"}
            self._stack = stack.pop_all()

    async def _crash(self) -> None:
        await self.parts.vanish()
        await self._stop(drain_s=0.0)

    async def _stop(self, drain_s: float) -> None:
        stack, self._stack = self._stack, None
        if stack is None:
            return
        try:
            await self.parts.drain(drain_s)
        finally:
            self._parts = None
            await stack.aclose()
