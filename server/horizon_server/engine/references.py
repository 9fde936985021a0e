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
from horizon_server.durable import PARTIAL_SUFFIX, is_out_of_space, sync_folder
from horizon_server.engine.data import PreparedDataset
from horizon_server.engine.micro_batch import grouped
from horizon_server.engine.trainer import Trainer
from horizon_server.errors import DiskFull
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
    ) -> References:
        """Compute them with the weights that the trainer has now, write them into `folder`, and open them.

        `before_group` is called before each call of the trainer with the number of supervised tokens done. What it raises ends the
        computation and is raised from here.

        `tokens_at_once` bounds how many tokens' documents are given to the trainer in one call, which streams the weights once for as
        many of them as fit into the memory of a step. A computation that was interrupted starts again from the first document.

        Raises:
            DiskFull: there is no space for 4 bytes for each supervised token.
            InvalidData: as `Trainer.log_probabilities`.
        """
        num_targets_D = dataset.num_targets_of_documents
        num_targets = int(num_targets_D.sum())
        target = _path(folder, key)
        # The process id, so that two jobs on the same data do not share an unfinished file; they write the same numbers.
        partial = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL_SUFFIX}")
        try:
            with partial.open("wb") as stream:
                stream.write(file_header([(_PLANE, "F32", (num_targets,), 4 * num_targets)]))
                num_done = 0
                for documents in grouped(
                    range(dataset.num_documents), dataset.document_lengths.tolist(), tokens_at_once
                ):
                    # Documents without a target have no number, and a group of nothing else would be refused.
                    documents = [document for document in documents if num_targets_D[document]]
                    if documents:
                        before_group(num_done)
                        num_done += int(num_targets_D[documents].sum())
                        rows = [dataset.micro_batch([document]) for document in documents]
                        stream.write(torch.cat(trainer.log_probabilities(rows)).numpy().tobytes())
                        progress.advance()
                stream.flush()
                os.fsync(stream.fileno())
            partial.replace(target)
        except BaseException as error:
            partial.unlink(missing_ok=True)
            if not is_out_of_space(error):
                raise
            raise DiskFull(
                f"no space left in {folder} for {4 * num_targets} bytes of reference log-probabilities ({error.strerror}); "
                "free some and resume the job"
            ) from error
        sync_folder(folder)
        found = cls.open(folder, dataset, key=key)
        assert found is not None, "it was written just now"
        return found

    def of(self, documents: Iterable[int]) -> Tensor:
        """The log-probabilities of these documents' supervised tokens, one document after the other. Shapes: [S], fp32."""
        spans = [slice(int(self._starts[document]), int(self._starts[document + 1])) for document in documents]
        return torch.cat([self._logprobs_M[span] for span in spans])


def _path(folder: Path, key: str) -> Path:
    return folder / f"references-{hashlib.blake2b(key.encode(), digest_size=16).hexdigest()}.safetensors"
