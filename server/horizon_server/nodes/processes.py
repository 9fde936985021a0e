"""The ranks of an attempt that run on one machine: a process each, which end together."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from horizon_server.children.child import exit_reason
from horizon_server.children.entry import Answer, Failure, decode_line
from horizon_server.errors import WorkerDied
from horizon_server.store.planes import create_memory_file

RANK_MODULE = "horizon_server.worker.rank"

End = Answer | Failure
OnEnd = Callable[[str, End], None]
"""Called with the name of a rank that has ended by itself, and with how it ended."""


class RankProcesses:
    """Thread: the one that starts them lives as long as they do, or they end with it; one for each process watches
    it."""

    def __init__(
        self,
        ranks: Sequence[int],
        request_file: Path,
        *,
        meeting: Sequence[str],
        planes: Mapping[str, int],
        on_end: OnEnd,
        alive_fd: int = -1,
        environment: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
        module: str = RANK_MODULE,
    ) -> None:
        """Start them; `meeting` are the arguments that say where ranks meet. They inherit the descriptors of the
        planes, and the one that is locked while the attempt is alive. They write to `log`, or where this process
        does."""
        self._on_end, self._is_closing = on_end, False
        self._lock, self._is_closed = threading.Lock(), False
        # It ends with the processes that map it.
        self.shared_fd = create_memory_file("ranks", 0)
        self._environment, self._log = environment, log
        inherited = [*planes.values(), *([alive_fd] if alive_fd >= 0 else [])]
        # One that ends at once ends those that are there.
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank in ranks:
            self._processes.append(self._start(module, rank, request_file, meeting, inherited))
        if self._is_closing:
            for process in self._processes:
                process.kill()

    @property
    def pids(self) -> Sequence[int]:
        """Their process ids."""
        return [process.pid for process in self._processes]

    @property
    def are_alive(self) -> bool:
        """Whether one of them has not ended yet."""
        return any(process.poll() is None for process in self._processes)

    def close(self, timeout_s: float) -> None:
        """Wait for their end, and end those that take longer."""
        self._is_closing = True
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """End them at once, and free what they were given."""
        self._is_closing = True
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
        with self._lock:
            for process in self._processes:
                assert process.stdin is not None, "they are started with a pipe"
                process.stdin.close()
            if not self._is_closed:
                os.close(self.shared_fd)
            self._is_closed = True

    def _start(
        self, module: str, rank: int, request_file: Path, meeting: Sequence[str], inherited: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", module, str(request_file), "--rank", str(rank)),
                    *("--end-fd", str(writing), "--shared-fd", str(self.shared_fd), *meeting),
                ],
                # Open as long as this process lives.
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                env=self._environment,
                pass_fds=(*inherited, writing, self.shared_fd),
            )
        finally:
            os.close(writing)
        watch = threading.Thread(target=self._watch, args=(rank, process, reading), name=f"rank {rank}", daemon=True)
        watch.start()
        return process

    def _watch(self, rank: int, process: subprocess.Popen[bytes], reading: int) -> None:
        with os.fdopen(reading, "rb") as pipe:
            line = pipe.read()
        code = process.wait()
        end = decode_line(line) if line else None
        if not isinstance(end, Answer | Failure):
            end = Failure(WorkerDied(exit_reason(code, oom_killed=False, who=f"rank {rank}")))
        with self._lock:
            if self._is_closing:
                return
            # The others are not told of: they end because this one has.
            self._is_closing = isinstance(end, Failure)
        if isinstance(end, Failure):
            # So that no collective waits for a rank that waits for the one that is gone.
            for other in self._processes:
                other.kill()
        self._on_end(f"rank {rank}", end)
