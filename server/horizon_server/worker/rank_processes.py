"""The other ranks of an attempt: processes that its worker starts, one for each further device, and that end with it.

A rank that dies takes the attempt with it at once, and not at a collective's timeout: the others cannot continue, and a
new worker finds the weights in the same memory.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from horizon_server.children.child import exit_reason
from horizon_server.children.entry import Answer, Failure, decode_line
from horizon_server.errors import HorizonError, WorkerDied
from horizon_server.records.execution import Execution
from horizon_server.store.planes import create_memory_file

if TYPE_CHECKING:
    from horizon_server.engine.ranks import Ranks

MEETING_FILE = "ranks"
"""In the attempt's folder: where its ranks find each other."""
RANK_MODULE = "horizon_server.worker.rank"

log = logging.getLogger(__name__)

# How long the worker may take to end by itself once a rank has died.
_END_S = 3.0
# How long ranks may take to end once the worker has closed its trainer.
_EXIT_S = 10.0


class RankProcesses:
    """The processes of ranks 1 and up. Thread: the worker's main thread; one for each process watches it."""

    def __init__(
        self, num_ranks: int, request_file: Path, *, planes: Mapping[str, int], alive_fd: int, module: str = RANK_MODULE
    ) -> None:
        """Start them; they inherit the descriptors of the planes, and the one that is locked while the attempt is
        alive."""
        self._meeting = request_file.with_name(MEETING_FILE)
        # Of a worker of this attempt that was killed.
        self._meeting.unlink(missing_ok=True)
        self._ranks: Ranks | None = None
        self._ends: list[Failure | Answer] = []
        self._changed = threading.Condition()
        self._is_closing = False
        # It ends with the processes that map it.
        self._shared_fd = create_memory_file("ranks", 0)
        self._processes = [
            self._start(module, rank, request_file, [*planes.values(), *([alive_fd] if alive_fd >= 0 else [])])
            for rank in range(1, num_ranks)
        ]

    @property
    def pids(self) -> Sequence[int]:
        """Their process ids."""
        return [process.pid for process in self._processes]

    def join(self, execution: Execution) -> Ranks:
        """Meet them, as the first rank."""
        # Loads torch, as they have done meanwhile.
        from horizon_server.engine.ranks import Ranks

        ranks = Ranks.join(0, self._meeting, execution, shared_fd=self._shared_fd)
        with self._changed:
            self._ranks = ranks
            ranks.is_broken = bool(self._failures())
        return ranks

    def cause_of(self, error: BaseException) -> BaseException:
        """What an error of the worker follows from: the failure of another rank, where there was one."""
        # What this rank found by itself, the others have found as well.
        if isinstance(error, HorizonError):
            return error
        with self._changed:
            self._changed.wait_for(self._failures, 1.0)
            failures = self._failures()
        return failures[0].error if failures else error

    def close(self) -> None:
        """Wait for their end, once the trainer is closed, and end those that do not."""
        self._is_closing = True
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_EXIT_S)
        self.kill()

    def kill(self) -> None:
        """End them at once. What waits for them in this process fails then."""
        self._is_closing = True
        if self._ranks is not None:
            self._ranks.is_broken = True
        for process in self._processes:
            process.kill()
            process.wait()

    def _failures(self) -> list[Failure]:
        return [end for end in self._ends if isinstance(end, Failure)]

    def _start(self, module: str, rank: int, request_file: Path, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
        reading, writing = os.pipe()
        try:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", module, str(request_file), "--rank", str(rank)),
                    *("--end-fd", str(writing), "--shared-fd", str(self._shared_fd)),
                ],
                # Open as long as this process lives.
                stdin=subprocess.PIPE,
                pass_fds=(*inherited, writing, self._shared_fd),
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
        if self._is_closing:
            return
        if isinstance(end, Answer):
            end = Failure(WorkerDied(f"rank {rank} ended before the worker"))
        log.error("rank %d has ended, and the worker with it: %s", rank, end.error.message)
        with self._changed:
            self._ends.append(end)
            if self._ranks is not None:
                self._ranks.is_broken = True
            self._changed.notify_all()
        # So that no collective waits for a rank that waits for the one that is gone.
        for other in self._processes:
            other.kill()
        threading.Event().wait(_END_S)
        # Not by an exception, which would not reach a thread that waits for a device.
        if not self._is_closing:
            os.kill(os.getpid(), signal.SIGKILL)
