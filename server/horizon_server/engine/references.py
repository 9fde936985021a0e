"""Reference log-probabilities of a prepared dataset: computed once, before the first step, and kept next to its tokens.

Objectives that compare with the starting weights need one number for each supervised token. The starting weights are streamed forward
over the data for them, so no second model is in memory, then or later. The file is named by a key, which the caller makes of what else
the numbers depend on: the model's content, and what it is computed in. What the data is, the folder stands for.

Shapes: M = supervised tokens of the dataset, D = documents, S = supervised tokens of some documents.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from horizon_server import progress
from horizon_server.durable import PARTIAL_SUFFIX, is_out_of_space
from horizon_server.engine.data import PreparedDataset
from horizon_server.engine.micro_batch import grouped
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import DiskFull
from horizon_server.store.growing_file import GrowingFile
from horizon_server.store.safetensors_files import file_header

_PLANE = "logprobs"


class References:
    """The log-probabilities of all supervised tokens of a dataset, mapped from disk. Use `open` or `computed`."""

    def __init__(self, logprobs_M: Tensor, num_targets_D: NDArray[np.int64]) -> None:
        self._logprobs_M = logprobs_M
        self._starts = np.concatenate([[0], np.cumsum(num_targets_D)])

    @classmethod
    def open(cls, folder: Path, dataset: PreparedDataset, *, key: str) -> References | None:
        """What was computed for this dataset, which is in `folder`, and this key; None where that was not done yet."""
        path, num_targets_D = _path(folder, key), dataset.num_targets_of_documents
        try:
            # torch's tensors are views of the mapped file.
            with safe_open(path, framework="pt") as tensors:
                logprobs_M = tensors.get_tensor(_PLANE)
        except (OSError, SafetensorError):
            # Not there, or damaged: it can be computed again either way.
            return None
        if logprobs_M.dtype != torch.float32 or logprobs_M.shape != (int(num_targets_D.sum()),):
            return None
        return cls(logprobs_M, num_targets_D)

    @classmethod
    def computed(
        cls,
        folder: Path,
        dataset: PreparedDataset,
        trainer: Trainer,
        *,
        key: str,
        tokens_at_once: int,
        before_group: Callable[[int], None] = lambda _num_done: None,
        unfinished: Path | None = None,
        data_digest: str = "",
    ) -> References:
        """Compute them with the weights that the trainer has now, write them into `folder`, and open them.

        `before_group` is called before each call of the trainer with the number of supervised tokens done. What it raises ends the
        computation and is raised from here.

        `unfinished` is a file where a computation that was ended, also by a kill, is continued by the next one of the same key and the
        same data, which `data_digest` names: it computes the documents that are missing, and the result has the same bits. Without,
        nothing is left of it.

        `tokens_at_once` bounds how many tokens' documents are given to the trainer in one call, which streams the weights once for as
        many of them as fit into the memory of a step.

        Raises:
            DiskFull: there is no space for 4 bytes for each supervised token.
            InvalidData: as `Trainer.log_probabilities`.
        """
        num_targets_D = dataset.num_targets_of_documents
        num_targets = int(num_targets_D.sum())
        target, facts = _path(folder, key), f"{key} {data_digest} {tokens_at_once}"
        # The process id, so that two jobs on the same data do not share an unfinished file; they write the same numbers.
        private = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL_SUFFIX}")
        header = file_header([(_PLANE, "F32", (num_targets,), 4 * num_targets)])
        try:
            with GrowingFile(
                unfinished or private, facts=facts, header=header, is_kept=unfinished is not None
            ) as growing:
                first = growing.place
                num_done = int(num_targets_D[:first].sum())
                lengths = dataset.document_lengths[first:].tolist()
                try:
                    # A group is full, or a document begins one: from any group's end on, they are those of a whole computation.
                    for group in grouped(range(first, dataset.num_documents), lengths, tokens_at_once):
                        # Documents without a target have no number, and a group of nothing else would be refused.
                        documents = [document for document in group if num_targets_D[document]]
                        if documents:
                            before_group(num_done)
                            num_done += int(num_targets_D[documents].sum())
                            rows = [dataset.micro_batch([document]) for document in documents]
                            logprobs_S = torch.cat(trainer.log_probabilities(rows))
                            growing.append(logprobs_S.numpy().tobytes(), place=group[-1] + 1)
                            progress.advance()
                except BaseException as error:
                    if not is_out_of_space(error):
                        growing.keep()
                    raise
                growing.finish(target)
        except OSError as error:
            if not is_out_of_space(error):
                raise
            raise DiskFull(
                f"no space left for {4 * num_targets} bytes of reference log-probabilities in {folder} ({error.strerror}); "
                "free some and resume the job"
            ) from error
        found = cls.open(folder, dataset, key=key)
        assert found is not None, "it was written just now"
        return found

    def of(self, documents: Iterable[int]) -> Tensor:
        """The log-probabilities of these documents' supervised tokens, one document after the other. Shapes: [S], fp32."""
        spans = [slice(int(self._starts[document]), int(self._starts[document + 1])) for document in documents]
        return torch.cat([self._logprobs_M[span] for span in spans])


def _path(folder: Path, key: str) -> Path:
    return folder / f"references-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.safetensors"
