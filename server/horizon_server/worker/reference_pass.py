"""Before a job's first step: the log-probabilities of the weights that it starts with, over its data, where its method compares with them.

They are kept with the prepared data under a key of all that the numbers depend on, so that another attempt, or another job that starts
with the same weights, finds them.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

from horizon_server.children.entry import EventWriter
from horizon_server.engine.references import References
from horizon_server.engine.trainer import Trainer
from horizon_server.events import Message
from horizon_server.spec import LORA
from horizon_server.worker.device_turn import DeviceTurn
from horizon_server.worker.objective import MethodData
from horizon_server.worker.request import WorkerRequest
from horizon_server.worker_link.orders import Order, Orders

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
        data: Sequence[MethodData],
        *,
        compiled: Sequence[str],
        events: EventWriter,
        orders: Orders,
        turn: DeviceTurn,
    ) -> None:
        """`compiled` are the keys of the compiled layers: they round in an order of their own."""
        self._request, self._events, self._orders, self._turn = request, events, orders, turn
        self._data = [each for each in data if each.needs_references]
        train = request.spec.train
        facts = {
            "weights": weights_identity(request.model),
            # New adapters change nothing, but those of an earlier job do, and so does a base that is kept in fewer bits.
            "adapter": None if request.adapter is None else weights_identity(request.adapter),
            "base": train.lora.base if train.trainable == LORA else "source",
            "device": request.device,
            "compute_dtype": request.compute_dtype,
            "matmul": train.matmul,
            # These change only how sums are rounded; with them, a job's result does not depend on which job has computed the file.
            "tokens_per_step": train.tokens_per_step,
            "micro_batch_tokens": request.micro_batch_tokens,
            "num_threads": request.num_threads,
            "compiled": list(compiled),
        }
        self._key = json.dumps(facts, sort_keys=True)

    def find(self) -> bool:
        """Open what was computed before. Returns whether nothing is missing."""
        for data in self._data:
            data.references = References.open(data.folder, data.dataset, key=self._key)
        return all(data.references is not None for data in self._data)

    def compute(self, trainer: Trainer) -> bool:
        """Compute what is missing with the weights that the trainer has now, in turns with the other jobs of the device.

        Returns whether all is there; False where an order came, or the time was over: what was not finished starts again then.

        Raises:
            DiskFull: there is no space for 4 bytes for each supervised token.
        """
        missing = [data for data in self._data if data.references is None]
        total = sum(int(data.dataset.num_targets_of_documents.sum()) for data in missing)
        done, reported = 0, -_REPORTED_PERCENT
        start_s = time.monotonic()

        def before_group(num_done: int) -> None:
            nonlocal reported
            self._turn.boundary()
            if self._orders.current is not Order.CONTINUE or not self._turn.take():
                raise _Stopped
            percent = 100 * (done + num_done) // total
            if percent >= reported + _REPORTED_PERCENT:
                reported = percent
                left_s = (time.monotonic() - start_s) * (100 - percent) / percent if percent else 0.0
                # Of a pass that is over in a moment there is nothing to plan by.
                left = f", about {math.ceil(left_s / 60)} min left" if left_s > _LEAST_SHOWN_S else ""
                self._events.send(Message(level="info", text=f"reference log-probabilities: {percent} %{left}"))

        try:
            for data in missing:
                data.references = References.computed(
                    data.folder,
                    data.dataset,
                    trainer,
                    key=self._key,
                    tokens_at_once=self._request.spec.train.tokens_per_step,
                    before_group=before_group,
                )
                done += int(data.dataset.num_targets_of_documents.sum())
        except _Stopped:
            self._turn.give_back(release=True)
            return False
        self._turn.boundary()
        if missing:
            text = f"reference log-probabilities: 100 %, of {total} tokens, kept with the prepared data ({4 * total} bytes)"
            self._events.send(Message(level="info", text=text))
        return True


def weights_identity(model: Path) -> str:
    """Return what the weights in a folder are recognised by without reading them: name, size, inode and time of change of every file.

    Files of pushed models and of checkpoints are never changed and are linked, not copied, so that the same weights are recognised in
    another folder. A copy is not: its numbers are computed again.
    """
    digest = hashlib.sha256()
    for path in sorted([*model.glob("**/*.safetensors"), *model.glob("*.json")]):
        found = path.stat()
        digest.update(f"{path.relative_to(model)}\0{found.st_size}\0{found.st_ino}\0{found.st_mtime_ns}\0".encode())
    return digest.hexdigest()
