"""What all calls of a kind of layer have in common, and what of them depends on the tokens.

Shapes: T = tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from horizon_server.engine.layer_stubs import LayerCall
from horizon_server.engine.template import Template
from horizon_server.recipe import Matmul


class NotCompilable(Exception):
    """A layer cannot be compiled; the message completes "not compiled: "."""


@dataclass(frozen=True, kw_only=True)
class TensorPattern:
    """A tensor of a call. `sizes` has None where a dimension depends on the tokens."""

    dtype: torch.dtype
    sizes: tuple[int | None, ...]

    def matches(self, tensor: Tensor) -> bool:
        """Whether a tensor can take this one's place."""
        return (
            tensor.dtype == self.dtype
            and tensor.dim() == len(self.sizes)
            and all(size in (None, found) for size, found in zip(self.sizes, tensor.shape, strict=True))
        )


@dataclass(frozen=True, kw_only=True)
class CallPattern:
    """The calls that one compiled layer serves: their structure, their constants, and their tensors in order."""

    structure: TreeSpec
    constants: tuple[Any, ...]
    tensors: tuple[TensorPattern, ...]
    keyword: str | None

    @classmethod
    def through(cls, one: LayerCall, other: LayerCall) -> CallPattern:
        """The pattern of two calls with different numbers of tokens and of documents.

        Raises:
            NotCompilable: the calls differ in more than the sizes of tensors.
        """
        (leaves, structure), (others, other_structure) = _flat(one), _flat(other)
        if structure != other_structure or one.keyword != other.keyword:
            raise NotCompilable("the arguments of a layer depend on the number of tokens")
        constants, tensors = [], []
        for leaf, match in zip(leaves, others, strict=True):
            if isinstance(leaf, Tensor) != isinstance(match, Tensor):
                raise NotCompilable("the arguments of a layer depend on the number of tokens")
            if not isinstance(leaf, Tensor):
                constants.append(leaf)
                if not _same(leaf, match):
                    raise NotCompilable(
                        f"a layer is called with {match!r} instead of {leaf!r} for another number of tokens"
                    )
            elif leaf.dtype != match.dtype or leaf.dim() != match.dim():
                raise NotCompilable("the kinds of tensors among a layer's arguments depend on the number of tokens")
            else:
                sizes = tuple(a if a == b else None for a, b in zip(leaf.shape, match.shape, strict=True))
                tensors.append(TensorPattern(dtype=leaf.dtype, sizes=sizes))
        return cls(structure=structure, constants=tuple(constants), tensors=tuple(tensors), keyword=one.keyword)

    def tensors_of(self, call: LayerCall) -> list[Tensor] | None:
        """The tensors of a call, in order, or None where the call is another than the compiled ones."""
        leaves, structure = _flat(call)
        if call.keyword != self.keyword or structure != self.structure:
            return None
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        if len(tensors) != len(self.tensors) or len(constants) != len(self.constants):
            return None
        if not all(map(_same, constants, self.constants)):
            return None
        return tensors if all(p.matches(tensor) for p, tensor in zip(self.tensors, tensors, strict=True)) else None

    def call_with(self, example: LayerCall, tensors: Sequence[Tensor]) -> LayerCall:
        """The call of `example` with other tensors in place of its own."""
        leaves, structure = _flat(example)
        replacements = iter(tensors)
        replaced = [next(replacements) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(replaced, structure)
        return LayerCall(args=args, kwargs=kwargs, keyword=example.keyword)


@dataclass(frozen=True, kw_only=True)
class LayerCase:
    """A layer that is traced and tried for all of its kind, on a row of documents of `lengths`, whose tokens are the
    number that the code will be best for. Its products are computed in `matmul`."""

    template: Template
    layer: int
    pattern: CallPattern
    lengths: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    matmul: Matmul = "bf16"

    @property
    def num_tokens(self) -> int:
        """Tokens of the row."""
        return sum(self.lengths)

    @cached_property
    def call(self) -> LayerCall:
        """The layer's call for the row."""
        return self.template.probe_calls(self.lengths, self.dtype)[self.layer]


def _flat(call: LayerCall) -> tuple[list[Any], TreeSpec]:
    return tree_flatten((call.args, dict(call.kwargs)))


def _same(one: object, other: object) -> bool:
    # By type too: True equals 1.
    return one is other or (type(one) is type(other) and isinstance(one, (bool, int, float, str)) and one == other)
