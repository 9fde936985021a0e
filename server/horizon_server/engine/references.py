"""Reference log-probabilities of a prepared dataset: computed once, before the first step, and kept next to its tokens.

Objectives that compare with the starting weights need one number for each supervised token. The starting weights are
streamed forward over the data for them, so no second model is in memory, then or later. They are computed in the rows
and steps of the run's first epoch: how a kernel rounds depends on how many tokens it is given, and so the first step's
own forward, of the same weights, gives the same bits. The file is named by a key, which the caller makes of what else
the numbers depend on: the model's content, and what it is computed in; and by the plan of the steps. What the data is,
the folder stands for.

Shapes: M = supervised tokens of the dataset, D = documents, S = supervised tokens of some documents.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from horizon_server import progress
from horizon_server.durable import PARTIAL_SUFFIX, is_out_of_space
from horizon_server.engine.data import StepPlan
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import DiskFull
from horizon_server.store.growing_file import GrowingFile
from horizon_server.store.safetensors_files import file_header

_PLANE, _ORDER = "logprobs", "documents"


class References:
    """The log-probabilities of all supervised tokens of a dataset, mapped from disk. Use `open` or `computed`."""

    def __init__(self, logprobs_M: Tensor, documents_D: NDArray[np.int32], num_targets_D: NDArray[np.int64]) -> None:
        """The numbers are those of `documents_D`, in this order; `num_targets_D` are by the document's number."""
        self._logprobs_M, self._num_targets_D = logprobs_M, num_targets_D
        counts_D = num_targets_D[documents_D]
        self._starts_D = np.empty_like(counts_D)
        self._starts_D[documents_D] = np.cumsum(counts_D) - counts_D

    @classmethod
    def open(cls, folder: Path, plan: StepPlan, *, key: str) -> References | None:
        """What was computed for the plan's dataset, which is in `folder`, and this key; None where that was not done
        yet."""
        path, num_targets_D = _path(folder, plan, key), plan.dataset.num_targets_of_documents
        try:
            # torch's tensors are views of the mapped file.
            with safe_open(path, framework="pt") as tensors:
                logprobs_M, documents_D = tensors.get_tensor(_PLANE), tensors.get_tensor(_ORDER).numpy()
        except (OSError, SafetensorError):
            # Not there, or damaged: it can be computed again either way.
            return None
        num_targets = int(num_targets_D.sum())
        if logprobs_M.dtype != torch.float32 or logprobs_M.shape != (num_targets,):
            return None
        if documents_D.dtype != np.int32 or not np.array_equal(np.sort(documents_D), np.arange(len(num_targets_D))):
            return None
        return cls(logprobs_M, documents_D, num_targets_D)

    @classmethod
    def computed(
        cls,
        folder: Path,
        plan: StepPlan,
        trainer: Trainer,
        *,
        key: str,
        before_step: Callable[[int], None] = lambda _num_done: None,
        unfinished: Path | None = None,
        data_digest: str = "",
    ) -> References:
        """Compute them with the weights that the trainer has now, write them into `folder`, and open them.

        They are computed step by step, as the plan has them in its first epoch. `before_step` is called before each
        call of the trainer with the number of supervised tokens done. What it raises ends the computation and is raised
        from here.

        `unfinished` is a file where a computation that was ended, also by a kill, is continued by the next one of the
        same key, plan and data, which `data_digest` names: it computes the steps that are missing, and the result has
        the same bits. Without, nothing is left of it.

        Raises:
            DiskFull: there is no space for 4 bytes for each supervised token and each document.
            InvalidData: as `Trainer.log_probabilities`.
        """
        dataset, num_targets_D = plan.dataset, plan.dataset.num_targets_of_documents
        num_targets, num_documents = int(num_targets_D.sum()), dataset.num_documents
        target, facts = _path(folder, plan, key), f"{key} {plan.identity} {data_digest}"
        # The process id, so that two jobs on the same data do not share an unfinished file; they write the same
        # numbers.
        private = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL_SUFFIX}")
        planes = [
            (_PLANE, "F32", (num_targets,), 4 * num_targets),
            (_ORDER, "I32", (num_documents,), 4 * num_documents),
        ]
        order_D = np.empty(num_documents, dtype=np.int32)
        num_done = num_placed = 0
        try:
            with GrowingFile(
                unfinished or private, facts=facts, header=file_header(planes), is_kept=unfinished is not None
            ) as growing:
                first = growing.place
                try:
                    for place, rows in enumerate(plan.first_epoch(), 1):
                        documents = list(chain.from_iterable(rows))
                        order_D[num_placed : num_placed + len(documents)] = documents
                        num_placed += len(documents)
                        num_new = int(num_targets_D[documents].sum())
                        # A step without a target has no number, and would be refused.
                        if place > first and num_new:
                            before_step(num_done)
                            logprobs_S = torch.cat(
                                trainer.log_probabilities([dataset.micro_batch(row) for row in rows])
                            )
                            growing.append(logprobs_S.numpy().tobytes(), place=place)
                            progress.advance()
                        num_done += num_new
                    assert num_placed == num_documents, "an epoch has every document once"
                    # Which the place says too: from then on, nothing is missing.
                    if first <= place:
                        growing.append(order_D.tobytes(), place=place + 1)
                except BaseException as error:
                    if not is_out_of_space(error):
                        growing.keep()
                    raise
                growing.finish(target)
        except OSError as error:
            if not is_out_of_space(error):
                raise
            raise DiskFull(
                f"no space left for {4 * (num_targets + num_documents)} bytes of reference log-probabilities "
                f"({error.strerror}); free some and resume the job"
            ) from error
        found = cls.open(folder, plan, key=key)
        assert found is not None, "it was written just now"
        return found

    def of(self, documents: Iterable[int]) -> Tensor:
        """The log-probabilities of these documents' supervised tokens, one document after the other. Shapes: [S],
        fp32."""
        begins = [(int(self._starts_D[document]), int(self._num_targets_D[document])) for document in documents]
        return torch.cat([self._logprobs_M[begin : begin + length] for begin, length in begins])


def _path(folder: Path, plan: StepPlan, key: str) -> Path:
    digest = hashlib.blake2b(f"{key} {plan.identity}".encode(), digest_size=16).hexdigest()
    return folder / f"references-{digest}.safetensors"
