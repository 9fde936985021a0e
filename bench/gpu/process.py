"""The parent's side of the process that runs stages. Only the standard library."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from bench.gpu.task import Task


class StageProcess:
    """Runs one stage after the other, so that torch is loaded once; to be replaced after one has failed.

    A process of their own, because an error of the driver, a crash or an endless wait must not take the whole bench
    along.
    """

    def __init__(self, *, folder: Path, environment: Mapping[str, str], plane_fds: Mapping[str, int]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 closed by `close`
        self._answers, answers_of_child = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.gpu.child", str(answers_of_child)],
            cwd=folder,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[answers_of_child, *plane_fds.values()],
            start_new_session=True,
        )
        # The only other end is the child's, so that its death shows as the end of its answers.
        os.close(answers_of_child)

    def run(self, module: str, task: Task) -> str | None:
        """Run a stage; returns None where it was done, else what it printed. `ended_with` says how the process ended,
        if it did."""
        log_start = os.fstat(self._log.fileno()).st_size
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([module, task.to_json()]).encode() + b"\n")
            self._process.stdin.flush()
            # Not select(), which refuses descriptors above 1023.
            poll = select.poll()
            poll.register(self._answers, select.POLLIN | select.POLLHUP)
            ready = poll.poll(1000 * max(0.0, task.end_s - time.monotonic()))
            if ready and os.read(self._answers, 64):
                return None
            if ready:
                self._process.wait()
        except BrokenPipeError:
            # The process ended after its last answer, so this stage cannot run. The stage is not the cause.
            self._process.wait()
        self._log.seek(log_start)
        return self._log.read().decode("utf-8", errors="replace")

    @property
    def ended_with(self) -> int | None:
        """The exit code, or None where it runs still."""
        return self._process.poll()

    def close(self) -> None:
        """End the process and what it has started."""
        # Where it has ended by itself, its group may be gone.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        os.close(self._answers)
        self._log.close()
