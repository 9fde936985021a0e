"""Before a job's first step: the log-probabilities of the weights that it starts with, over its data, where its method
compares with them.

They are kept with the prepared data under a key of all that the numbers depend on, so that another attempt, or another
job that starts with the same weights, finds them. What an attempt has not finished waits in the job's folder for the
next one.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from horizon_server.children.entry import EventWriter
from horizon_server.engine.data import StepPlan
from horizon_server.engine.references import References
from horizon_server.engine.trainer import Trainer
from horizon_server.events import Message, ReferencesDone
from horizon_server.jobs.folders import UNFINISHED_REFERENCES
from horizon_server.records.job import StopRequest
from horizon_server.spec import LORA
from horizon_server.store.adapter_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from horizon_server.store.base_digest import files_digest
from horizon_server.store.growing_file import remove_others
from horizon_server.worker.device_turn import DeviceTurn
from horizon_server.worker.objective import MethodData
from horizon_server.worker_link.orders import Orders
from horizon_server.worker_link.request import WorkerRequest

_REPORTED_PERCENT = 5
"""Progress is reported when it has grown by this."""
_LEAST_SHOWN_S = 60.0


class _Stopped(Exception):
    """An order came, or the job's time was over."""


class ReferencePass:
    """Finds or computes the reference log-probabilities of a job's data. Thread: the worker's main thread."""

    def __init__(
        self,
        request: WorkerRequest,
        data: Sequence[tuple[MethodData, StepPlan]],
        *,
        weights: StartingWeights,
        compiled: Sequence[str],
        events: EventWriter,
        orders: Orders,
        turn: DeviceTurn,
    ) -> None:
        """`data` come with the plans by which they are trained on or evaluated. `compiled` are the keys of the compiled
        layers: they round in an order of their own.
        """
        self._request, self._events, self._orders, self._turn = request, events, orders, turn
        self._data = [(each, plan) for each, plan in data if each.needs_references]
        self._unfinished = request.checkpoints.with_name(UNFINISHED_REFERENCES)
        train, execution = request.spec.train, request.plan.execution
        facts = {
            "weights": weights.model,
            # New adapters change nothing, but those of an earlier job do, and so does a base that is kept in fewer
            # bits.
            "adapter": weights.adapter,
            "base": train.lora.base if train.trainable == LORA else "source",
            "device": execution.device_kind,
            "compute_dtype": execution.compute_dtype,
            "matmul": train.matmul,
            # These change only how sums are rounded; with them, a job's result does not depend on which job has
            # computed the file.
            "tokens_per_step": train.tokens_per_step,
            "micro_batch_tokens": execution.micro_batch_tokens,
            "num_threads": execution.num_threads,
            "compiled": list(compiled),
        }
        self._key = json.dumps(facts, sort_keys=True)

    def find(self) -> bool:
        """Open what was computed before. Returns whether nothing is missing."""
        for data, plan in self._data:
            data.references = References.open(data.folder, plan, key=self._key)
        return all(data.references is not None for data, _ in self._data)

    def compute(self, trainer: Trainer) -> bool:
        """Compute what is missing with the weights that the trainer has now, in turns with the other jobs of the
        device.

        Returns whether all is there; False where an order came, or the time was over. What is done then, or where the
        worker is killed, is continued by the job's next attempt; of a cancelled job nothing is left.

        Raises:
            DiskFull: there is no space for 4 bytes for each supervised token.
        """
        missing = [
            (self._unfinished_file(data, plan), data, plan) for data, plan in self._data if data.references is None
        ]
        # Those of other weights or of other data than this attempt has.
        remove_others(self._unfinished, {file.name for file, _, _ in missing})
        total = sum(_num_targets(data) for data, _ in self._data)
        done = sum(_num_targets(data) for data, _ in self._data if data.references is not None)
        begun_at, reported, start_s = done, -_REPORTED_PERCENT, time.monotonic()
        is_new_file = False

        def before_step(num_done: int) -> None:
            nonlocal begun_at, reported, is_new_file
            if is_new_file and num_done:
                begun_at += num_done
                text = f"reference log-probabilities: continues, {num_done} tokens were computed before this attempt"
                self._events.send(Message(level="info", text=text))
            is_new_file = False
            self._turn.boundary()
            if self._orders.current is not StopRequest.NOTHING or not self._turn.take():
                raise _Stopped
            percent = 100 * (done + num_done) // total
            if percent >= reported + _REPORTED_PERCENT:
                reported = percent
                # By the pace of this attempt.
                computed, left = done + num_done - begun_at, total - done - num_done
                left_s = (time.monotonic() - start_s) * left / computed if computed else 0.0
                # Of a pass that is over in a moment there is nothing to plan by.
                how_long = f", about {math.ceil(left_s / 60)} min left" if left_s > _LEAST_SHOWN_S else ""
                self._events.send(Message(level="info", text=f"reference log-probabilities: {percent} %{how_long}"))
                self._events.send(ReferencesDone(done_tokens=done + num_done, total_tokens=total))

        try:
            for file, data, plan in missing:
                is_new_file = True
                # Another job on the same data may have been faster.
                data.references = References.open(data.folder, plan, key=self._key) or References.computed(
                    data.folder,
                    plan,
                    trainer,
                    key=self._key,
                    before_step=before_step,
                    unfinished=file,
                    data_digest=file.name,
                )
                done += _num_targets(data)
        except _Stopped:
            self._turn.give_back(release=True)
            if self._orders.current is StopRequest.CANCEL:
                remove_others(self._unfinished, set())
            return False
        remove_others(self._unfinished, set())
        self._turn.boundary()
        if missing:
            text = (
                f"reference log-probabilities: 100 %, of {total} tokens, kept with the prepared data ({4 * total} "
                "bytes)"
            )
            self._events.send(Message(level="info", text=text))
        return True

    def _unfinished_file(self, data: MethodData, plan: StepPlan) -> Path:
        # By the key, the plan and by every byte of the data, so that a file of the job is never continued with others.
        digest = hashlib.blake2b(f"{self._key} {plan.identity}".encode(), digest_size=16)
        digest.update(self._request.tokens_digest(data.folder).encode())
        return self._unfinished / digest.hexdigest()


def _num_targets(data: MethodData) -> int:
    return int(data.dataset.num_targets_of_documents.sum())


@dataclass(frozen=True, kw_only=True)
class StartingWeights:
    """What a job starts with, named by content: a copy in another folder, or a model pushed again under another name,
    is the same."""

    model: str
    adapter: str | None

    @classmethod
    def of(cls, request: WorkerRequest) -> StartingWeights:
        """Read the weights, unless the book of digests knows them.

        Raises:
            InvalidModel: the folder has no config or no weights.
        """
        adapter = request.adapter
        return cls(
            model=request.model_digest(),
            adapter=None if adapter is None else files_digest(adapter, [ADAPTER_CONFIG_FILE, ADAPTER_FILE]),
        )
