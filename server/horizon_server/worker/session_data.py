"""The documents of a session's call as the engine takes them, and what it answers about them.

Shapes: S = supervised tokens of all documents, in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from horizon_formats.checks import UNTRAINED
from horizon_server.engine.micro_batch import MicroBatch
from horizon_server.engine.objectives import SESSION_LOSSES, Documents, StepObjective
from horizon_server.records.session import Datum, Forward, ForwardBackward


def rows_of(call: Forward | ForwardBackward) -> tuple[list[MicroBatch], StepObjective]:
    """Return a row for each document, and the call's objective over all of them."""
    rows = [_row(datum) for datum in call.data]
    given = call.data
    documents = Documents(
        num_targets_K=torch.cat([row.num_targets_of_documents for row in rows]),
        recorded_S=_at_targets(given, [datum.logprobs for datum in given]),
        advantages_S=_at_targets(given, [datum.advantages for datum in given]),
    )
    # Without weights every target counts 1.
    weights = [datum.weights or (1.0,) * len(datum.tokens) for datum in given]
    return rows, StepObjective(
        objective=SESSION_LOSSES[call.loss](**call.options),
        documents=documents,
        weights_S=_at_targets(given, weights) if call.loss == "cross_entropy" else None,
    )


def by_position(data: Sequence[Datum], logprobs: Iterable[Tensor]) -> tuple[tuple[float, ...], ...]:
    """Return the log-probabilities of each document's targets, [supervised tokens] each, with zeros where nothing is
    predicted."""
    found = []
    for datum, of_datum in zip(data, logprobs, strict=True):
        known = iter(of_datum.tolist())
        found.append(tuple(0.0 if target == UNTRAINED else next(known) for target in datum.targets))
    return tuple(found)


def _row(datum: Datum) -> MicroBatch:
    return MicroBatch(
        input_ids_T=torch.tensor(datum.tokens),
        position_ids_T=torch.arange(len(datum.tokens)),
        labels_T=torch.tensor(datum.targets),
        document_lengths=(len(datum.tokens),),
    )


def _at_targets(data: Sequence[Datum], values: Sequence[Sequence[float]]) -> Tensor | None:
    """What is given for the targets, one after the other; None where nothing is. Shapes: [S], fp32."""
    if not any(values):
        return None
    numbers = [
        value
        for datum, of_datum in zip(data, values, strict=True)
        for target, value in zip(datum.targets, of_datum, strict=True)
        if target != UNTRAINED
    ]
    return torch.tensor(numbers, dtype=torch.float32)
