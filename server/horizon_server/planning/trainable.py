"""Which tensors of a model a job trains, and how its store is laid out for that: the same for the plan and for the worker. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import regex

from horizon_server.errors import FieldViolation, InvalidSpec
from horizon_server.planning.model_folder import ModelFolder
from horizon_server.spec import EVERYTHING, TrainSpec
from horizon_server.store.layout import StoreLayout, with_decay, with_trained

_FIELD = "train.trainable"
# For all names of a model and all expressions together: users write expressions, and some take forever.
_TIMEOUT_S = 2.0
_SHOWN_NAMES = 3


def laid_out(folder: ModelFolder, train: TrainSpec) -> StoreLayout:
    """The store's layout for a job: what is frozen has no moments and no gradient, and no `lo` half where the folder has it in bfloat16.

    Raises:
        InvalidSpec: an expression of `train.trainable` fits no tensor, or takes too long.
    """
    layout = with_decay(folder.layout, train.decay)
    if train.trainable == EVERYTHING:
        return layout
    names = [tensor.name for _, tensor in layout.tensors()]
    trained = {name for expression in train.trainable for name in _fitting(expression, names)}
    return with_trained(
        layout,
        trained.__contains__,
        is_bfloat16=lambda name: name in folder.headers and folder.headers[name].dtype == "BF16",
    )


def _fitting(expression: str, names: Sequence[str]) -> list[str]:
    pattern = regex.compile(expression)
    try:
        found = [name for name in names if pattern.search(name, timeout=_TIMEOUT_S / len(names))]
    except TimeoutError as error:
        raise _refusal(
            f"{expression!r} takes too long to compare with a tensor's name; write it without nested repetitions"
        ) from error
    if not found:
        examples = ", ".join(names[:: max(1, len(names) // _SHOWN_NAMES)][:_SHOWN_NAMES])
        raise _refusal(
            f"{expression!r} fits none of the model's {len(names)} tensors, whose names are such as {examples}"
        )
    return found


def _refusal(problem: str) -> InvalidSpec:
    violation = FieldViolation(field=_FIELD, description=f"{_FIELD} {problem}")
    return InvalidSpec(f"{_FIELD} {problem}", violations=[violation])
