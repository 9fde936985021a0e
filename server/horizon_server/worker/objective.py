"""What a job's steps and evaluations are for, by its method: from the spec and the documents of a step to the engine's
objective.

Shapes: K = documents of a step, S = their supervised tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from horizon_server.engine.data import PreparedDataset, StepPlan
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.objectives import (
    OBJECTIVES,
    Documents,
    Objective,
    StepObjective,
    WeightedSFT,
)
from horizon_server.engine.references import References
from horizon_server.engine.trainer import Trainer
from horizon_server.figures import EvalFigures, total_evaluation
from horizon_server.spec import JobSpec, check_kind


def objective_of(spec: JobSpec) -> Objective | None:
    """Return the engine's objective of a job; None where its method is plain cross-entropy."""
    options = spec.options
    return None if options is None else OBJECTIVES[spec.method](**options.model_dump())


class MethodData:
    """A prepared dataset as the job's method reads it: the rows of a step with what the objective is given about their
    documents.

    Weights of text are for training alone: an evaluation counts every target alike, so that its loss is that of a
    token.

    `references` are the log-probabilities of the starting weights; where the method needs them, they are set before the
    first step. Thread: not thread-safe.
    """

    def __init__(self, folder: Path, spec: JobSpec, *, is_evaluated: bool = False) -> None:
        """Open the dataset. Text can be evaluated in jobs of every method, with cross-entropy.

        Raises:
            InvalidSpec: the method does not learn from data of its kind.
        """
        self.folder, self.dataset = folder, PreparedDataset.open(folder)
        is_plain = is_evaluated and self.dataset.kind == "text"
        if not is_plain:
            check_kind(spec.method, str(self.dataset.kind))
        self._objective = None if is_plain else objective_of(spec)
        self.needs_references = self._objective is not None and spec.needs_references
        self.references: References | None = None
        self._logprobs: list[Tensor] = []
        self._documents: list[int] = []

    def step(self, plan: StepPlan, i: int) -> tuple[list[MicroBatch], StepObjective | None]:
        """Return the rows of step i of a plan of this data, and the step's objective; None for cross-entropy without
        weights."""
        rows = plan.documents_of(i)
        documents = list(chain.from_iterable(rows))
        objective = self._weighted(documents) if self._objective is None else self._step_objective(documents)
        return [self.dataset.micro_batch(row) for row in rows], objective

    def evaluate(self, trainer: Trainer, plan: StepPlan, i: int) -> EvalFigures:
        """Evaluate the documents of step i of a plan; `total` has what the method says of all that were evaluated since
        the last total."""
        if self._objective is None:
            return trainer.evaluate(plan.step(i))
        documents = plan.documents_of(i)
        logprobs, figures = trainer.evaluate_tokens([self.dataset.micro_batch(row) for row in documents])
        self._logprobs += logprobs
        self._documents += chain.from_iterable(documents)
        return figures

    def total(self, parts: Iterable[EvalFigures]) -> EvalFigures:
        """Return the figures of an evaluation that ran in parts. Those of a method are of all documents together, as if
        they were one step: an estimate over a batch, as KTO's of the divergence, is over the whole evaluation set."""
        total = total_evaluation(parts)
        if not self._logprobs:
            return total
        logprobs_S, objective = torch.cat(self._logprobs), self._step_objective(self._documents)
        self.forget()
        assert objective is not None, "log-probabilities are kept for objectives alone"
        loss, _ = objective(logprobs_S)
        return dataclasses.replace(total, eval_loss=float(loss), method_figures=objective.figures(logprobs_S))

    def forget(self) -> None:
        """Drop what was evaluated, as before an evaluation that starts again."""
        self._logprobs, self._documents = [], []

    def _weighted(self, documents: list[int]) -> StepObjective | None:
        weights_S = self.dataset.weights_of(documents)
        # Equal weights are the plain mean.
        if weights_S is None or bool((weights_S == weights_S[0]).all()):
            return None
        known = Documents(num_targets_K=torch.from_numpy(self.dataset.num_targets_of_documents[documents]))
        return StepObjective(objective=WeightedSFT(), documents=known, weights_S=weights_S)

    def _step_objective(self, documents: Iterable[int]) -> StepObjective | None:
        if self._objective is None:
            return None
        listed, dataset = list(documents), self.dataset
        needs = self._objective.needs
        known = Documents(
            num_targets_K=torch.from_numpy(dataset.num_targets_of_documents[listed]),
            # The plan keeps pairs together, the chosen document first.
            pairs_P2=torch.arange(len(listed)).view(-1, 2) if "documents.pairs_P2" in needs else None,
            labels_K=dataset.labels_of(listed) if "documents.labels_K" in needs else None,
            recorded_S=dataset.old_logprobs_of(listed) if "documents.recorded_S" in needs else None,
            advantages_S=dataset.advantages_of(listed) if "documents.advantages_S" in needs else None,
        )
        references_S = None if self.references is None else self.references.of(listed)
        return StepObjective(objective=self._objective, documents=known, references_S=references_S)
