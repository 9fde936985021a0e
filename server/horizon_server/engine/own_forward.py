"""Whether the engine calls a model's layers as the class's own forward does: found by running both, never by a list of
names.

The engine gives positions, because rows are packed; a user who loads the model gives tokens alone. Most classes count
0, 1, 2 themselves then. Some count from elsewhere (after the id of the padding), and would be trained with rows of
their table of positions that they never use. Both runs end at the first layer, so what they cost does not depend on the
size of the layers.

Shapes: T = tokens of a trial, D = hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_leaves_with_path
from transformers import PreTrainedModel

from horizon_server.engine.layer_stubs import RUN_ERRORS, Embed, LayerCall, Tape
from horizon_server.errors import InvalidModel

_NUM_TOKENS = 7
_TOLERANCE = 1e-5


def check_own_forward(
    model: PreTrainedModel,
    tape: Tape,
    embed: Embed,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    prefix: str,
    max_document_tokens: int | None,
) -> None:
    """Compare what the first layer gets, and every layer's other arguments, with and without positions that are given.

    `shapes` are the parameters of `embed`, which the model knows by the same names after `prefix`.

    Raises:
        InvalidModel: they differ, so that the engine would train another model than the class is.
    """
    values = {name: _values(shape, seed) for seed, (name, shape) in enumerate(sorted(shapes.items()))}
    ids_T = _token_ids(model, min(_NUM_TOKENS, max_document_tokens or _NUM_TOKENS))
    with torch.no_grad():
        given = embed(values, ids_T, torch.arange(ids_T.numel()))
        tape.start_capture()
        inputs = {"input_ids": ids_T[None], "use_cache": False}
        known = inspect.signature(model.forward).parameters
        own_values = {prefix + name: value for name, value in values.items()}
        try:
            functional_call(model, own_values, kwargs={name: value for name, value in inputs.items() if name in known})
            counted = tape.finish_capture()
        except RUN_ERRORS as error:
            if isinstance(error, InvalidModel):
                raise
            first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise InvalidModel(
                f"model_type {model.config.model_type!r}: its code cannot be run on tokens alone ({first_line:.120}), "
                "so "
                "it cannot be seen whether it would be trained rightly; it is not supported"
            ) from error
    where = _first_difference(given, counted)
    if where:
        raise InvalidModel(
            f"model_type {model.config.model_type!r}: its class counts positions otherwise than 0, 1, 2, ... ({where} "
            "differs), so it "
            "would be trained with positions that it does not have when it is used; it is not supported"
        )


def _values(shape: Sequence[int], seed: int) -> Tensor:
    """Random numbers in a shape, different in every row, in memory for one row and one column: each starts one after
    the one before."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(sum(size - 1 for size in shape) + 1, generator=generator)
    return numbers.as_strided(tuple(shape), (1,) * len(shape))


def _token_ids(model: PreTrainedModel, num_tokens: int) -> Tensor:
    """Different tokens, none of which means padding, begin or end to the class."""
    text = model.config.get_text_config()
    special: set[Any] = set()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        # Of ends there are often several.
        found = getattr(text, name, None)
        special.update(found if isinstance(found, (list, tuple)) else [found])
    table = model.get_input_embeddings()
    assert isinstance(table, torch.nn.Embedding), "the template has checked it"
    ids = [index for index in range(min(table.num_embeddings, 4 * num_tokens)) if index not in special]
    return torch.tensor([ids[place % len(ids)] for place in range(num_tokens)])


def _first_difference(given: tuple[Tensor, list[LayerCall]], counted: tuple[Tensor, list[LayerCall]]) -> str:
    """What differs, in words; empty where nothing does."""
    if not _equal(given[0], counted[0]):
        return "the input of its first layer"
    for index, (one, other) in enumerate(zip(given[1], counted[1], strict=True)):
        others = dict(_tensors(other))
        for path, tensor in _tensors(one):
            if path in others and not _equal(tensor, others[path]):
                return f"what its layer {index} is called with"
    return ""


def _tensors(call: LayerCall) -> Iterator[tuple[object, Tensor]]:
    for path, leaf in tree_leaves_with_path((call.args, dict(call.kwargs))):
        if isinstance(leaf, Tensor) and not leaf.is_meta:
            yield path, leaf


def _equal(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
