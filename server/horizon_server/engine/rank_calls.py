"""What the first rank's trainer gives the others with a call: rows, and what they need of its objective."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from horizon_server.engine.micro_batch import MicroBatch, joined_tokens
from horizon_server.engine.objectives import Documents, Objective, RemoteObjective, StepObjective, WeightedSFT
from horizon_server.engine.ranks import Call


def call_with(name: str, rows: Sequence[MicroBatch], objective: StepObjective | None = None) -> Call:
    """A call that is given rows. Of an objective the other ranks need its weights, where it is cross-entropy; of any
    other, that there is one."""
    is_summed = objective is not None and objective.objective.is_cross_entropy and objective.objective.is_sum
    assert not is_summed, "the other ranks take cross-entropy for a mean"
    kind = None if objective is None else "weighted" if objective.objective.is_cross_entropy else "remote"
    weights = {"weights": objective.weights_S} if objective is not None and objective.weights_S is not None else {}
    return Call(
        name=name,
        values={"documents": [list(row.document_lengths) for row in rows], "objective": kind},
        tensors={
            "input_ids": joined_tokens([row.input_ids_T for row in rows]),
            "position_ids": joined_tokens([row.position_ids_T for row in rows]),
            "labels": joined_tokens([row.labels_T for row in rows]),
            **(weights if kind == "weighted" else {}),
        },
    )


def given_rows(call: Call) -> tuple[list[MicroBatch], StepObjective | None]:
    """What `call_with` has put into a call."""
    documents: list[list[int]] = call.values["documents"]
    sizes = [sum(lengths) for lengths in documents]
    names = ("input_ids", "position_ids", "labels")
    parts = zip(*(torch.split(call.tensors[name], sizes) for name in names), strict=True)
    rows = [
        MicroBatch(input_ids_T=ids, position_ids_T=positions, labels_T=labels, document_lengths=tuple(lengths))
        for (ids, positions, labels), lengths in zip(parts, documents, strict=True)
    ]
    objective: Objective | None = {"weighted": WeightedSFT(), "remote": RemoteObjective()}.get(call.values["objective"])
    if objective is None:
        return rows, None
    return rows, StepObjective(objective=objective, documents=Documents.of(rows), weights_S=call.tensors.get("weights"))
