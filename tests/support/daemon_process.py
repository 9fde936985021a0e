"""A real `horizond` in a process of its own, as the scenario and fault tests use it; and waits that both kinds of
daemons share."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.processes import processes_of
from tests.support.rates import write_rates
from tests.support.resting import Resting

from horizon_client import Client
from horizon_client.resources import Job
from horizon_server.db.database import Database
from horizon_server.planning.machine import RATES_FILE
from horizon_server.services.accounts import Accounts

# A limit for what hangs; on a busy machine a start takes many seconds.
READY_S = 240.0
# PR_SET_PDEATHSIG: a run of the tests that is killed leaves no daemon. In a program of its own, as forking with gRPC's
# threads is unsafe.
_ENDS_WITH_ITS_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class DaemonProcess:
    """Starts, stops and kills one daemon over one state folder, as often as a test likes."""

    def __init__(self, state_dir: Path, *flags: str, **settings: float | str | None) -> None:
        """`flags` are those of `horizond serve`, `settings` lines of its configuration file, without those that are
        None. SIGTERM drains where these do not differ, and nothing is done ahead of jobs.

        One that `measures`, which is no setting, finds no rates of its machine in a new state folder.
        """
        self.state_dir = state_dir
        self._measures = bool(settings.pop("measures", False))
        self._flags = flags
        usual = {"on_sigterm": "drain", "spare_worker": False, "compile_pushed_models": 0, **settings}
        self._settings = {name: value for name, value in usual.items() if value is not None}
        self.environment: dict[str, str] = {}
        """Variables of the daemon and of all its children, besides the test's own."""
        self.resting = Resting(state_dir)
        """Where its children rest, once `let_children_rest` was called."""
        self.program: tuple[str, ...] = ("-m", "horizon_server")
        """What Python runs."""
        self.tokens: dict[str, str] = {}
        """Of users that the state folder had from the beginning."""
        self.process: subprocess.Popen[bytes] | None = None
        self.endpoints: dict[str, Any] = {}

    def let_children_rest(self) -> DaemonProcess:
        """Have children, from the next start on, that rest where `resting` says."""
        self.environment |= self.resting.environment()
        return self

    def start(self) -> DaemonProcess:
        """Start it and wait until it is ready. A restarted daemon listens where it did before, as its clients
        expect."""
        self.launch()
        self.wait_until_ready()
        return self

    def launch(self) -> None:
        """Start it and do not wait."""
        self.state_dir.mkdir(parents=True, exist_ok=True)
        if not self._measures and not (self.state_dir / RATES_FILE).exists():
            write_rates(self.state_dir, num_threads=int(self._settings.get("num_threads", 0)))
        kinds = ("grpc", "http")
        addresses = [flag for kind in kinds for flag in (f"--{kind}", self.endpoints.get(kind) or free_address())]
        config = self.state_dir / "test.toml"
        lines = (f"{name} = {json.dumps(value)}\n" for name, value in self._settings.items())
        config.write_text("".join(lines), "ascii")
        flags = ["--state-dir", str(self.state_dir), *addresses, "--config", str(config)]
        flags += self._flags
        with (self.state_dir / "test.log").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-ISc", _ENDS_WITH_ITS_PARENT, *self.program, "serve", *flags],
                stdout=output,
                stderr=output,
                env=os.environ | self.environment,
            )

    def wait_until_ready(self) -> None:
        """Wait until it listens, and read where."""
        assert self.comes_up(), self.log()
        self.endpoints = json.loads((self.state_dir / "endpoints.json").read_text("utf-8"))

    def comes_up(self) -> bool:
        """Wait until it listens; return False where it ended instead."""
        path = self.state_dir / "endpoints.json"
        wait_for(lambda: path.is_file() or self.process is None or self.process.poll() is not None, READY_S)
        return path.is_file()

    @property
    def pid(self) -> int:
        """The process that its children belong to."""
        assert self.process is not None
        return self.process.pid

    def terminate(self, timeout_s: float = 240.0) -> int:
        """Send SIGTERM and return the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout_s)
        self.process = None
        return code

    def kill(self) -> None:
        """End it at once, as a crash would; its worker notices by itself."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(180)
        self.process = None
        (self.state_dir / "endpoints.json").unlink(missing_ok=True)

    def close(self) -> None:
        """Leave nothing running, whatever happened."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(180)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(180)
        for pid in self.worker_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def admin(self, *arguments: str) -> str:
        """Run another horizond command beside the daemon and return what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "horizon_server", *arguments, "--state-dir", str(self.state_dir)],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
            env=os.environ | self.environment,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def user(self, name: str, role: str = "user") -> str:
        """Make a user and return a token of theirs: what `horizond user add` and `token create` do, without the start
        of two processes."""
        if name in self.tokens:
            return self.tokens[name]

        async def make() -> str:
            async with Database.opened(self.state_dir / "horizon.db") as database:
                accounts = Accounts(database)
                await accounts.add_user(name, role=role)
                return (await accounts.create_token(name, lifetime_s=None))[1]

        return asyncio.run(make())

    def client(self, token: str) -> Client:
        """A client of the running daemon."""
        return Client(self.endpoints["grpc"], token=token)

    def worker_pids(self) -> list[int]:
        """Processes of workers that belong to this state folder and are alive."""
        return processes_of("horizon_server.worker", self.state_dir)

    def log(self) -> str:
        """What the daemon has logged."""
        return (self.state_dir / "test.log").read_text("utf-8", "replace")


def free_address() -> str:
    """An address that stays free while a daemon is away: below the ports that the kernel gives to those who ask for
    any."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(10_240, 32_000)))
            return f"127.0.0.1:{probe.getsockname()[1]}"


def wait_for(condition: Any, timeout_s: float, every_s: float = 0.05) -> None:
    """Wait until `condition()` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so after {timeout_s} s"
        time.sleep(every_s)


def wait_for_state(client: Client, job_id: str, *states: str, timeout_s: float = 240.0) -> Job:
    """Wait until the job is in one of the states, and return it as it was then."""
    seen: list[Job] = []

    def is_there() -> bool:
        seen[:] = [client.jobs.get(job_id)]
        return seen[0].state in states

    wait_for(is_there, timeout_s)
    return seen[0]


def wait_for_step(client: Client, job_id: str, step: int, timeout_s: float = 240.0) -> None:
    """Wait until a job has finished a step."""
    wait_for(lambda: client.jobs.get(job_id).step >= step, timeout_s)
