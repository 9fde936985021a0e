"""The other ranks of an attempt: processes that its worker starts, one for each further device, here and on other
nodes, and that end with it.

A rank that dies takes the attempt with it at once, and not at a collective's timeout: the others cannot continue, and a
new worker finds the weights in the same memory.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horizon_server.children.entry import Answer, Failure
from horizon_server.codec import to_plain
from horizon_server.errors import HorizonError, WorkerDied
from horizon_server.network import Address, bound_socket
from horizon_server.nodes.processes import RANK_MODULE, End, RankProcesses
from horizon_server.nodes.protocol import LOG_FOLLOWS, LOST_S, RankOrder
from horizon_server.nodes.remote import RemoteRanks
from horizon_server.records.execution import Execution
from horizon_server.store.model_files import CONFIG_FILE
from horizon_server.store.safetensors_files import read_safetensors_headers
from horizon_server.worker_link.request import Fleet, WorkerRequest

if TYPE_CHECKING:
    from horizon_server.engine.ranks import Meeting, Ranks

MEETING_FILE = "ranks"
"""In the attempt's folder: where ranks of one node find each other."""

log = logging.getLogger(__name__)

# How long the worker may take to end by itself once a rank has died.
_END_S = 3.0
# How long the cause of a lost connection may take to arrive: a node that says nothing is lost after LOST_S.
_CAUSE_S = LOST_S + 1.0
# How an error words that another rank is gone: of gloo, of NCCL, of torch while ranks meet, and of `engine.ranks`.
_GONE = (
    "gloo/transport",
    "remote process exited or there was a network error",
    "DistNetworkError",
    "DistStoreError",
    "another rank has died",
)
# How long ranks may take to end once the worker has closed its trainer.
_EXIT_S = 10.0


class OtherRanks:
    """The ranks from 1 up. Thread: the worker's main thread; others watch them."""

    def __init__(
        self, request: WorkerRequest, request_file: Path, *, alive_fd: int = -1, module: str = RANK_MODULE
    ) -> None:
        """Start them."""
        execution, fleet = request.plan.execution, request.fleet
        self._ranks: Ranks | None = None
        self._failures: list[Failure] = []
        self._changed = threading.Condition()
        self._is_closing = False
        self._file = request_file.with_name(MEETING_FILE)
        # Of a worker of this attempt that was killed.
        self._file.unlink(missing_ok=True)
        self._listener: socket.socket | None = None
        self._listening_at = Address(host="", port=0)
        meeting = ["--meeting-file", str(self._file)]
        if fleet is not None:
            self._listener = bound_socket(
                "fleet_address", Address(host=fleet.address, port=0), remedy="set another fleet_address"
            )
            self._listener.listen(execution.num_ranks)
            self._listening_at = Address(host=fleet.address, port=self._listener.getsockname()[1])
            meeting = ["--meeting-at", str(self._listening_at)]
        here = range(1, execution.ranks_per_node)
        self._here = RankProcesses(
            here,
            request_file,
            meeting=meeting,
            planes=request.planes,
            alive_fd=alive_fd,
            on_end=self._end,
            module=module,
        )
        elsewhere = [] if fleet is None else self._start_elsewhere(request, fleet)
        self._groups: list[RankProcesses | RemoteRanks] = [self._here, *elsewhere]

    @property
    def pids(self) -> Sequence[int]:
        """The process ids of those on this node."""
        return self._here.pids

    def join(self, execution: Execution) -> Ranks:
        """Meet them, as the first rank."""
        # Loads torch, as they have done meanwhile.
        from horizon_server.engine.ranks import Ranks

        ranks = Ranks.join(0, self._meeting(), execution, shared_fd=self._here.shared_fd)
        with self._changed:
            self._ranks = ranks
            ranks.is_broken = bool(self._failures)
        return ranks

    def cause_of(self, error: BaseException) -> BaseException:
        """What an error of the worker follows from: the failure of another rank, where there was one."""
        # What this rank found by itself, the others have found as well.
        if isinstance(error, HorizonError):
            return error
        follows = _follows_from_another(f"{type(error).__name__}: {error}")
        cause = self._wait_for_cause(_CAUSE_S if follows else 1.0)
        if cause is not None or not follows:
            return cause or error
        # It may work when it is done again, as after a rank's death.
        return WorkerDied(f"a rank lost its connection to another one: {error}")

    def close(self) -> None:
        """Wait for their end, once the trainer is closed, and end those that do not."""
        self._is_closing = True
        for group in self._groups:
            group.close(_EXIT_S)

    def kill(self) -> None:
        """End them at once. What waits for them in this process fails then."""
        self._is_closing = True
        if self._ranks is not None:
            self._ranks.is_broken = True
        for group in self._groups:
            group.kill()

    def _wait_for_cause(self, timeout_s: float) -> HorizonError | None:
        """The first failure of another rank that does not follow from one of a third; those of its neighbours may be
        heard of before."""

        def found() -> HorizonError | None:
            errors = (failure.error for failure in self._failures)
            return next((error for error in errors if not _follows_from_another(error.message)), None)

        with self._changed:
            self._changed.wait_for(found, timeout_s)
            return found()

    def _meeting(self) -> Meeting:
        from horizon_server.engine.ranks import Meeting

        if self._listener is None:
            return Meeting(file=self._file)
        # It is torch's from now on, which closes it.
        at, listener = self._listening_at, self._listener.detach()
        return Meeting(host=at.host, port=at.port, listener=listener)

    def _start_elsewhere(self, request: WorkerRequest, fleet: Fleet) -> list[RemoteRanks]:
        num_ranks = request.plan.execution.ranks_per_node
        headers = read_safetensors_headers(request.model)
        config = (request.model / CONFIG_FILE).read_text("utf-8")
        tensors = tuple((name, header.dtype, header.shape) for name, header in headers.items())
        plain: dict[str, Any] = {**to_plain(request), "fleet": None, "compiled": None, "digests": None, "trace": None}
        return [
            RemoteRanks(
                address,
                fleet.key_file,
                RankOrder(
                    job_id=request.job_id,
                    request=plain,
                    config=config,
                    tensors=tensors,
                    first_rank=node * num_ranks,
                    num_ranks=num_ranks,
                    meeting=str(self._listening_at),
                ),
                on_end=self._end,
            )
            for node, address in enumerate(fleet.others, start=1)
        ]

    def _end(self, who: str, end: End) -> None:
        """A rank has ended before its time: end the others, and this process where it does not end by itself."""
        if self._is_closing:
            return
        if isinstance(end, Answer):
            end = Failure(WorkerDied(f"{who} ended before the worker"))
        log.error("%s has ended, and the worker with it: %s", who, end.error.message)
        with self._changed:
            self._failures.append(end)
            if self._ranks is not None:
                self._ranks.is_broken = True
            self._changed.notify_all()
        if _follows_from_another(end.error.message):
            # A node whose ranks are ended says nothing more of them.
            self._wait_for_cause(_CAUSE_S)
        # So that no collective waits for a rank that waits for the one that is gone. Not here, where the thread is that
        # watches one of them.
        for group in self._groups:
            threading.Thread(target=group.kill, daemon=True).start()
        threading.Event().wait(_END_S)
        # Not by an exception, which would not reach a thread that waits for a device.
        if not self._is_closing:
            os.kill(os.getpid(), signal.SIGKILL)


def _follows_from_another(text: str) -> bool:
    """Whether an error of a rank says that another one is gone. What its log says may be of any rank of its node."""
    error, _, _ = text.partition(LOG_FOLLOWS)
    return any(words in error for words in _GONE)
