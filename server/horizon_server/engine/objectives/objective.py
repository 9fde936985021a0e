"""The interface of objectives, and what they are given about the documents of a step.

Documents and supervised tokens have the order of the step's rows. The trainer may divide rows and join them, which
changes neither.

Shapes: K = documents of the step, S = its supervised tokens, P = pairs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from torch import Tensor

from horizon_server.engine.micro_batch import MicroBatch, refused


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of a step: how many supervised tokens each has, and what the data says of them.

    `pairs_P2` are numbers of documents, chosen and rejected. `labels_K` say what a document is to KTO. `recorded_S` are
    the log-probabilities under the policy that sampled the tokens, `advantages_S` what each of them was worth.
    """

    num_targets_K: Tensor
    pairs_P2: Tensor | None = None
    labels_K: Tensor | None = None
    recorded_S: Tensor | None = None
    advantages_S: Tensor | None = None

    @classmethod
    def of(
        cls,
        micro_batches: Sequence[MicroBatch],
        *,
        pairs_P2: Tensor | None = None,
        labels_K: Tensor | None = None,
        recorded_S: Tensor | None = None,
        advantages_S: Tensor | None = None,
        advantages_K: Tensor | None = None,
    ) -> Documents:
        """The documents of these rows. `advantages_K` are of whole documents, as GRPO has them, instead of
        `advantages_S`."""
        assert advantages_S is None or advantages_K is None, "give the advantages of tokens or of documents, not both"
        num_targets_K = torch.cat([row.num_targets_of_documents for row in micro_batches])
        if advantages_K is not None:
            if advantages_K.shape != num_targets_K.shape:
                raise refused(
                    "documents.advantages_K", f"needs one number for each of {num_targets_K.numel()} documents"
                )
            advantages_S = advantages_K.repeat_interleave(num_targets_K)
        return cls(
            num_targets_K=num_targets_K,
            pairs_P2=pairs_P2,
            labels_K=labels_K,
            recorded_S=recorded_S,
            advantages_S=advantages_S,
        )

    def sums(self, values_S: Tensor) -> Tensor:
        """Each document's sum of its tokens' values; 0 where it has no supervised token. Shapes: [S] to [K]."""
        # A document's tokens are neighbours. Unlike index_add_ this adds in the same order every time, on a GPU too.
        return torch.segment_reduce(values_S, "sum", lengths=self.num_targets_K, unsafe=True)

    def log_probabilities(self, logprobs_S: Tensor, weights_S: Tensor | None, *, average: bool) -> Tensor:
        """Each document's sum, or average, of its tokens' log-probabilities, weighted. Shapes: [S] to [K]."""
        sums_K = self.sums(logprobs_S if weights_S is None else weights_S.double() * logprobs_S)
        return sums_K / self.sizes(weights_S) if average else sums_K

    def sizes(self, weights_S: Tensor | None) -> Tensor:
        """What a document's average divides by: how many supervised tokens it has, or the sum of their weights. Shapes:
        [K]."""
        return self.num_targets_K.double() if weights_S is None else self.sums(weights_S.double())


class Objective(ABC):
    """A loss of a step's log-probabilities.

    Arithmetic: float64, where the log-probabilities are, without waiting for them.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """The fields of `Documents` and `StepObjective` that must be given."""

    is_cross_entropy: ClassVar[bool] = False
    """Whether the loss is the cross-entropy weighted by `weights_S`: their mean, or their sum (`is_sum`). Its
    derivatives are known before any log-probability is, so a training step computes it in the head's single pass, a
    mean with label smoothing where that is on."""

    is_sum: ClassVar[bool] = False
    """Whether the loss is a sum over tokens, divided neither by their number nor by their weights. So weights may be
    negative, or all 0."""

    def __call__(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> tuple[Tensor, Tensor]:
        """The loss, and its derivative by each token's log-probability. Shapes: [], [S], both float64."""
        with torch.enable_grad():
            leaf_S = logprobs_S.detach().double().requires_grad_()
            loss = self._loss(leaf_S, None if references_S is None else references_S.double(), weights_S, documents)
            (gradient_S,) = torch.autograd.grad(loss, leaf_S)
        return loss.detach(), gradient_S

    @abstractmethod
    def _loss(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        """The loss, in a form that autograd differentiates by `logprobs_S`. All are float64. Shapes: []."""

    def figures(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> dict[str, Tensor]:
        """What to report besides the loss, by the names that TRL has for it, without gradients; all tensors are float64
        or absent.

        Shapes: [] each. A figure of nothing, as the mean over no document, is left out.
        """
        del logprobs_S, references_S, weights_S, documents
        return {}

    def check(self, step: StepObjective) -> None:  # noqa: B027 - most have nothing to add
        """Check what this objective alone asks of a step, after what all have in common. Raises: InvalidData."""


class RemoteObjective(Objective):
    """Of a rank that follows: the first one has the objective, and sends the others each token's derivative."""

    def _loss(
        self, logprobs_S: Tensor, references_S: Tensor | None, weights_S: Tensor | None, documents: Documents
    ) -> Tensor:
        raise AssertionError("the first rank has the objective")


@dataclass(frozen=True, kw_only=True)
class StepObjective:
    """An objective with all that it is given in one step, on the CPU.

    `references_S` are the log-probabilities of the reference model. `weights_S` weigh each token in the sums and
    averages that the objective takes over tokens; None weighs all alike.
    """

    objective: Objective
    documents: Documents
    references_S: Tensor | None = None
    weights_S: Tensor | None = None

    def check(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Check that this belongs to these rows.

        Raises:
            InvalidData: something is missing, of another length than the rows, not finite, or not what the objective
                takes.
        """
        documents, name = self.documents, type(self.objective).__name__
        expected_K = torch.cat([row.num_targets_of_documents for row in micro_batches])
        if not torch.equal(documents.num_targets_K, expected_K):
            raise refused("objective.documents", "are not those of the rows; make them with Documents.of(rows)")
        given = {**_tensors(self), **{f"documents.{key}": value for key, value in _tensors(documents).items()}}
        for field in sorted(self.objective.needs):
            if given.get(field) is None:
                raise refused(f"objective.{field}", f"is missing; {name} needs it")
        num_documents, num_targets = expected_K.numel(), int(expected_K.sum())
        for field, tensor in given.items():
            if tensor is None:
                continue
            size = num_targets if field.endswith("_S") else num_documents
            if field.endswith(("_S", "_K")) and tensor.shape != (size,):
                what = "supervised token" if field.endswith("_S") else "document"
                raise refused(
                    f"objective.{field}",
                    f"has shape {list(tensor.shape)}; it needs one number for each {what}: [{size}]",
                )
            if not bool(torch.isfinite(tensor).all()):
                raise refused(f"objective.{field}", "holds a number that is not finite")
        pairs_P2 = documents.pairs_P2
        if pairs_P2 is not None and (
            pairs_P2.dim() != 2 or pairs_P2.shape[1] != 2 or bool(((pairs_P2 < 0) | (pairs_P2 >= num_documents)).any())
        ):
            raise refused(
                "objective.documents.pairs_P2", f"must be pairs of document numbers from 0 to {num_documents - 1}"
            )
        bounded_S = None if self.objective.is_sum else self.weights_S
        if bounded_S is not None and (bool((bounded_S < 0).any()) or not bool((bounded_S > 0).any())):
            raise refused("objective.weights_S", "must not be negative, and at least one must be above 0")
        self.objective.check(self)

    def placed(self, place: Callable[[Tensor], Tensor]) -> StepObjective:
        """A copy whose tensors are where compute reads them."""
        documents = {key: place(value) for key, value in _tensors(self.documents).items() if value is not None}
        own = {key: place(value) for key, value in _tensors(self).items() if value is not None}
        return StepObjective(objective=self.objective, documents=Documents(**documents), **own)

    def __call__(self, logprobs_S: Tensor) -> tuple[Tensor, Tensor]:
        """As `Objective.__call__`, with what this step gives it."""
        return self.objective(logprobs_S, self.references_S, self.weights_S, self.documents)

    def figures(self, logprobs_S: Tensor) -> dict[str, float]:
        """As `Objective.figures`, of log-probabilities that are where this step's tensors are."""
        references_S = None if self.references_S is None else self.references_S.double()
        found = self.objective.figures(logprobs_S.detach().double(), references_S, self.weights_S, self.documents)
        return {name: float(value) for name, value in found.items()}


def _tensors(record: StepObjective | Documents) -> dict[str, Tensor | None]:
    """The fields of a record that are tensors or absent; a shape suffix marks them."""
    names = [field.name for field in fields(record) if field.name.endswith(("_S", "_K", "_P2"))]
    return {name: getattr(record, name) for name in names}
