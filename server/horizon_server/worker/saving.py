"""When an attempt writes checkpoints, and what it does while the disk has no room for one: nothing that was trained is
lost by that."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from horizon_server import progress
from horizon_server.children.entry import EventWriter
from horizon_server.errors import DiskFull
from horizon_server.events import CheckpointWritten, Message
from horizon_server.jobs.folders import CheckpointFolder
from horizon_server.records.job import StopRequest
from horizon_server.spec import CheckpointSpec
from horizon_server.store.checkpoint import AdapterExport, save_checkpoint
from horizon_server.store.host_store import HostStore
from horizon_server.store.model_card import ResultFacts
from horizon_server.worker_link.orders import Orders

MAX_WRITING_SHARE = 0.05
"""Checkpoints by the clock take no more of the time than this."""

RETRY_S, LONGEST_RETRY_S = 30.0, 600.0
"""Until a checkpoint that the disk had no room for is tried again; the first of several times, and the last."""

_POLL_S = 0.2


class CheckpointWriter:
    """Writes one attempt's checkpoints. `saved` is the newest step that has one, 0 where none has.

    Thread: the worker's main thread, between steps.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        spec: CheckpointSpec,
        *,
        source: Path,
        events: EventWriter,
        orders: Orders,
        min_free_bytes: int | None = None,
        adapter: AdapterExport | None = None,
        answer_ends: Collection[int] = (),
        facts_of: Callable[[int], ResultFacts] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.saved = 0
        self._folder, self._spec, self._source = folder, spec, source
        self._events, self._orders, self._clock = events, orders, clock
        self._min_free_bytes, self._retry_s, self._adapter = min_free_bytes, RETRY_S, adapter
        self._answer_ends, self._facts_of = answer_ends, facts_of
        self._not_before_s = float("-inf")
        self._ended_s, self._duration_s = clock(), 0.0

    def is_due(self, step: int) -> bool:
        """Whether a step is to have a checkpoint before the next one begins."""
        if step <= self.saved or self._clock() < self._not_before_s:
            return False
        every_steps, every_s = self._spec.every_steps, 60.0 * self._spec.every_minutes
        # One that the disk had no room for is still due.
        is_late = self._not_before_s > float("-inf")
        if is_late or (every_steps and step % every_steps == 0):
            return True
        pause_s = max(every_s, self._duration_s * (1 / MAX_WRITING_SHARE - 1))
        return every_s > 0 and self._clock() - self._ended_s >= pause_s

    def try_to_write(self, step: int, store: HostStore, state: Mapping[str, Any], eval_loss: float | None) -> bool:
        """Write a checkpoint. False: the disk has no room for it; it stays due and is tried again later, and training
        continues."""
        try:
            self._write(step, store, state, eval_loss)
        except DiskFull as error:
            self._report_lack(step, error, "training continues")
            return False
        return True

    def write(self, step: int, store: HostStore, state: Mapping[str, Any], eval_loss: float | None) -> bool:
        """Write a checkpoint, and wait for room where the disk is full. False: a cancel or a pause came before there
        was any."""
        # A pause that led here is for a job whose steps are kept. One that comes during the wait is for one whose user
        # has read why.
        self._orders.gives_up_waiting = False
        while True:
            try:
                self._write(step, store, state, eval_loss)
                return True
            except DiskFull as error:
                self._report_lack(
                    step, error, "the job waits for it, until it is paused (without this checkpoint) or cancelled"
                )
            # The daemon's own orders do not end it: they are for a job whose steps are kept, and this is where they are
            # kept.
            while self._clock() < self._not_before_s:
                if self._orders.current is StopRequest.CANCEL:
                    return False
                if self._orders.gives_up_waiting:
                    self._report_loss(step)
                    return False
                progress.advance()
                time.sleep(_POLL_S)

    def _write(self, step: int, store: HostStore, state: Mapping[str, Any], eval_loss: float | None) -> None:
        started_s = self._clock()
        self._folder.path.mkdir(parents=True, exist_ok=True)
        infinite: list[str] = []
        manifest = save_checkpoint(
            store,
            self._folder.of_step(step),
            source=self._source,
            trainer_state=state,
            dtype=self._spec.dtype,
            min_free_bytes=self._min_free_bytes,
            adapter=self._adapter,
            on_overflow=infinite.append,
            answer_ends=self._answer_ends,
            facts=None if self._facts_of is None else self._facts_of(step),
        )
        self._ended_s = self._clock()
        self._duration_s = self._ended_s - started_s
        self.saved, self._not_before_s, self._retry_s = step, float("-inf"), RETRY_S
        written = CheckpointWritten(
            step=step, duration_s=self._duration_s, size_bytes=manifest.size_bytes, eval_loss=eval_loss
        )
        self._events.send(written)
        if infinite:
            more = f" and {len(infinite) - 1} more tensors" if len(infinite) > 1 else ""
            text = (
                f"the checkpoint of step {step} cannot be used as a model: {min(infinite)}{more} hold numbers beyond "
                "65504, the largest of "
                "fp16, which are infinite there. Training continues with the exact numbers, which trainer/ has; for a "
                "model that can be used, set checkpoint.dtype: bf16 or fp32"
            )
            self._events.send(Message(level="warning", text=text))
        # After the new one is complete, so that there is always one to resume from.
        self._folder.apply_retention(keep_last=self._spec.keep_last, keep_best=self._spec.keep_best)

    def _report_loss(self, step: int) -> None:
        start = f"the checkpoint of step {self.saved}" if self.saved else "its beginning"
        text = (
            f"the job was paused while it waited for disk space: the checkpoint of step {step} is not written, so the "
            f"job continues from {start} and repeats the steps since"
        )
        self._events.send(Message(level="warning", text=text))

    def _report_lack(self, step: int, error: DiskFull, meanwhile: str) -> None:
        text = (
            f"the checkpoint of step {step} could not be written: {error.message}; {meanwhile}; next try in "
            f"{self._retry_s:g} s"
        )
        self._events.send(Message(level="warning", text=text))
        self._not_before_s = self._clock() + self._retry_s
        self._retry_s = min(2 * self._retry_s, LONGEST_RETRY_S)
