"""Which stored tensors make up each parameter of a model: names and forms on disk, as transformers converts them when
it loads.

A checkpoint may name and split its tensors differently from the model class (one tensor per expert where the class has
them fused). The store keeps the checkpoint's tensors, so that an export has the names and forms of the source. Here the
model's parameters are found among them: as strided views into a unit's flat buffer where the layout allows it, else as
views to be joined.

Units: elements.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from horizon_server.engine.meta_model import checkpoint_tensors
from horizon_server.errors import InvalidModel
from horizon_server.store.layout import StoreLayout, TensorLayout, natural_order


@dataclass(frozen=True, kw_only=True)
class Strided:
    """A view into a flat buffer."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def contiguous(cls, offset: int, shape: Sequence[int]) -> Strided:
        """A contiguous tensor."""
        strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        return cls(offset=offset, shape=tuple(shape), strides=strides)

    def read(self, flat: Tensor) -> Tensor:
        """The view. Shapes: `flat` is one-dimensional and contiguous."""
        # as_strided counts from the storage, and `flat` may itself be a part of one.
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset)

    def add(self, flat: Tensor, values: Tensor) -> None:
        """Add to the values there."""
        self.read(flat).add_(values)

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Overwrite the values there."""
        self.read(flat).copy_(values)

    def shifted(self, elements: int) -> Strided:
        """The same, further on in the buffer."""
        return replace(self, offset=self.offset + elements)

    def transposed(self, dim0: int, dim1: int) -> Strided:
        """With two dimensions swapped."""
        order = list(range(len(self.shape)))
        order[dim0], order[dim1] = dim1, dim0
        shape, strides = (tuple(values[dim] for dim in order) for values in (self.shape, self.strides))
        return replace(self, shape=shape, strides=strides)

    def narrowed(self, dim: int, start: int, length: int) -> Strided:
        """Part of it along a dimension."""
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return replace(self, offset=self.offset + start * self.strides[dim], shape=shape)


@dataclass(frozen=True, kw_only=True)
class Joined:
    """Parts that are joined along a dimension when they are read, because they are not one view."""

    parts: tuple[Piece, ...]
    dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        first = self.parts[0].shape
        return (*first[: self.dim], sum(part.shape[self.dim] for part in self.parts), *first[self.dim + 1 :])

    def read(self, flat: Tensor) -> Tensor:
        """A copy of the parts, joined."""
        return torch.cat([part.read(flat) for part in self.parts], dim=self.dim)

    def add(self, flat: Tensor, values: Tensor) -> None:
        """Add to each part."""
        sizes = [part.shape[self.dim] for part in self.parts]
        for part, share in zip(self.parts, torch.split(values, sizes, dim=self.dim), strict=True):
            part.add(flat, share)

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Overwrite each part."""
        sizes = [part.shape[self.dim] for part in self.parts]
        for part, share in zip(self.parts, torch.split(values, sizes, dim=self.dim), strict=True):
            part.write(flat, share)

    def shifted(self, elements: int) -> Joined:
        """The same, further on in the buffer."""
        return replace(self, parts=tuple(part.shifted(elements) for part in self.parts))

    def transposed(self, dim0: int, dim1: int) -> Joined:
        """With two dimensions swapped."""
        dim = {dim0: dim1, dim1: dim0}.get(self.dim, self.dim)
        return Joined(parts=tuple(part.transposed(dim0, dim1) for part in self.parts), dim=dim)

    def narrowed(self, dim: int, start: int, length: int) -> Piece:
        """Part of it along a dimension."""
        if dim != self.dim:
            return replace(self, parts=tuple(part.narrowed(dim, start, length) for part in self.parts))
        kept: list[Piece] = []
        position = 0
        for part in self.parts:
            first, last = max(start, position), min(start + length, position + part.shape[dim])
            if first < last:
                kept.append(part.narrowed(dim, first - position, last - first))
            position += part.shape[dim]
        return concatenate(kept, dim)


Piece = Strided | Joined


def stack(pieces: Sequence[Piece], dim: int) -> Piece:
    """Pieces of one shape, one after the other along a new dimension."""
    first = pieces[0]
    distance = math.prod(first.shape)
    # Tensors of one list (a projection of every expert) may be at equal distances with others between them: that is one
    # view too.
    if len(pieces) > 1 and isinstance(first, Strided) and isinstance(pieces[1], Strided):
        distance = max(distance, pieces[1].offset - first.offset)

    def unsqueezed(piece: Piece) -> Piece:
        if isinstance(piece, Joined):
            return Joined(parts=tuple(unsqueezed(part) for part in piece.parts), dim=piece.dim + (piece.dim >= dim))
        shape, strides = piece.shape, piece.strides
        return replace(piece, shape=(*shape[:dim], 1, *shape[dim:]), strides=(*strides[:dim], distance, *strides[dim:]))

    return concatenate([unsqueezed(piece) for piece in pieces], dim)


def concatenate(pieces: Sequence[Piece], dim: int) -> Piece:
    """Pieces one after the other along a dimension they have."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    for one, other in itertools.pairwise(pieces):
        if not isinstance(one, Strided) or not isinstance(other, Strided) or one.strides != other.strides:
            return Joined(parts=tuple(pieces), dim=dim)
        step = one.shape[dim] * one.strides[dim]
        if step <= 0 or other.offset - one.offset != step:
            return Joined(parts=tuple(pieces), dim=dim)
    assert isinstance(first, Strided)
    total = sum(piece.shape[dim] for piece in pieces)
    return replace(first, shape=(*first.shape[:dim], total, *first.shape[dim + 1 :]))


@dataclass(frozen=True, kw_only=True)
class Exact:
    """A piece that is always read in fp32: in a bf16 buffer from its end, where the layer stream puts both halves of
    the master.

    `before_end` counts fp32 elements from its first one to the buffer's end. Its gradient is where every other piece
    has it.
    """

    piece: Piece
    before_end: int

    @property
    def shape(self) -> tuple[int, ...]:
        """As the piece."""
        return self.piece.shape

    def read(self, flat: Tensor) -> Tensor:
        """The view into the end of the buffer, or the piece where the buffer is in fp32 itself."""
        if flat.dtype == torch.float32:
            return self.piece.read(flat)
        return self.end_of(flat).view(self.shape)

    def end_of(self, flat: Tensor) -> Tensor:
        """Where its values are put in a bf16 buffer. Shapes: one-dimensional, fp32."""
        start = flat.numel() - 2 * self.before_end
        return flat[start : start + 2 * math.prod(self.shape)].view(torch.float32)

    def add(self, flat: Tensor, values: Tensor) -> None:
        """Add to the values of the piece."""
        self.piece.add(flat, values)

    def write(self, flat: Tensor, values: Tensor) -> None:
        """Overwrite the values of the piece."""
        self.piece.write(flat, values)


Pieces = dict[str, list[Piece]]


@dataclass(frozen=True, kw_only=True)
class Place:
    """A parameter inside a unit's flat buffer, under the name its model (or, in `Template`, its module) knows it by.

    A buffer that belongs to the checkpoint has a place too; it is no parameter. The store keeps a gradient of what
    `has_gradient`.
    """

    name: str
    unit_index: int
    piece: Piece | Exact
    stored_names: tuple[str, ...]
    is_parameter: bool
    has_gradient: bool
    adapts: str = ""
    """The weight that it belongs to the adapter of; empty for the model's own."""

    @property
    def trained(self) -> bool:
        """Whether it is differentiated."""
        return self.is_parameter and self.has_gradient

    @property
    def is_matrix(self) -> bool:
        """Whether a matrix product may write the parameter's gradient to where it belongs: it must be one matrix
        there."""
        return self.trained and isinstance(self.piece, Strided) and len(self.piece.shape) == 2

    def dtype_in(self, dtype: torch.dtype) -> torch.dtype:
        """What the parameter is read as where the others are in `dtype`."""
        return torch.float32 if isinstance(self.piece, Exact) else dtype


@dataclass
class _Sources:
    """The stored tensors of one parameter: by the pattern of the conversion that they belong to, if any."""

    converter: WeightConverter | None
    by_pattern: dict[str, list[TensorLayout]] = field(default_factory=dict)
    unit_indices: set[int] = field(default_factory=set)

    def tensors(self) -> list[TensorLayout]:
        return [tensor for tensors in self.by_pattern.values() for tensor in tensors]


def bind(model: PreTrainedModel, layout: StoreLayout) -> list[Place]:
    """Every parameter of the model, and every floating-point buffer that belongs to its checkpoint, in the layout's
    order; no adapters.

    Raises:
        InvalidModel: a tensor is missing, unknown to the model, misshapen, or stored in a form that cannot be trained
            in.
    """
    wanted = checkpoint_tensors(model)
    all_sources, unknown = _sources_of(model, layout, wanted)
    places = [
        _place(target, piece, sources, wanted.get(target))
        for name, sources in all_sources.items()
        for target, piece in _pieces_of(name, sources, wanted).items()
    ]
    # By identity, because tied parameters go by two names and are stored under one.
    bound = {id(wanted[place.name]) for place in places}
    for name, tensor in wanted.items():
        if id(tensor) not in bound:
            raise InvalidModel(
                f"tensor {name} is missing: the model's config asks for it with shape {list(tensor.shape)}"
            )
    # Last: where a name is wrong, the tensor that is missing says more than the one that is left over.
    if unknown:
        raise InvalidModel(
            f"tensor {unknown[0]} is in the checkpoint, but the model of this config has no such parameter"
        )
    return places


def _sources_of(
    model: PreTrainedModel, layout: StoreLayout, wanted: Mapping[str, Tensor]
) -> tuple[dict[str, _Sources], list[str]]:
    """The stored tensors of every parameter, and the names that no parameter goes by."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    prefix = model.base_model_prefix
    found: dict[str, _Sources] = {}
    unknown: list[str] = []
    known = dict(wanted)
    # In natural order, because the parts of a list are stacked in the order they come in: 10 after 9, not after 1.
    own = [(unit, tensor) for unit, tensor in layout.tensors() if not tensor.adapts]
    for unit, tensor in sorted(own, key=lambda item: natural_order(item[1].name)):
        name, pattern = rename_source_key(tensor.name, renamings, converters, prefix, known)
        # A checkpoint may have the class's own names already, which a renaming would spoil.
        if name not in wanted and tensor.name in wanted:
            name, pattern = tensor.name, None
        if name not in wanted:
            unknown.append(tensor.name)
            continue
        converter = converter_of[pattern] if pattern is not None else None
        sources = found.setdefault(name, _Sources(converter=converter))
        sources.by_pattern.setdefault(pattern or "", []).append(tensor)
        sources.unit_indices.add(unit.index)
    return found, unknown


def _pieces_of(name: str, sources: _Sources, wanted: Mapping[str, Tensor]) -> dict[str, Piece]:
    pieces: Pieces = {
        pattern: [Strided.contiguous(tensor.offset, tensor.shape) for tensor in tensors]
        for pattern, tensors in sources.by_pattern.items()
    }
    converter = sources.converter
    if converter is None:
        tensors = sources.tensors()
        if len(tensors) > 1:
            raise InvalidModel(f"tensors {tensors[0].name} and {tensors[1].name} are both the model's {name}; keep one")
        return {name: pieces[""][0]}
    _check_lists(sources)
    targets = converter.target_patterns
    for operation in converter.operations:
        pieces = _converted(operation, pieces, converter, name, wanted)
    return {name.replace(targets[0], target): only for target, (only,) in pieces.items()}


def _place(target: str, piece: Piece, sources: _Sources, wanted: Tensor | None) -> Place:
    tensors = sources.tensors()
    if wanted is None:
        raise InvalidModel(f"tensor {tensors[0].name} makes {target}, which the model does not have")
    shape = tuple(wanted.shape)
    if piece.shape != shape:
        asked = f"the model's config asks for {list(shape)}"
        if len(tensors) == 1:
            raise InvalidModel(f"tensor {tensors[0].name} has shape {list(piece.shape)}, {asked}")
        ends = f"{tensors[0].name} to {tensors[-1].name}"
        raise InvalidModel(f"tensors {ends} together have shape {list(piece.shape)}, {asked} as {target}")
    if len(sources.unit_indices) != 1:
        names = sorted(tensor.name for tensor in tensors)
        raise InvalidModel(
            f"tensors {names[0]} and {names[-1]} make one parameter, {target}, but belong to different layers"
        )
    if differing := [tensor.name for tensor in tensors if tensor.trained != tensors[0].trained]:
        raise InvalidModel(
            f"train.trainable trains only one of {tensors[0].name} and {differing[0]}, which the model computes with "
            f"as one parameter, {target}; train both or neither"
        )
    return Place(
        name=target,
        unit_index=next(iter(sources.unit_indices)),
        piece=piece,
        stored_names=tuple(tensor.name for tensor in tensors),
        is_parameter=isinstance(wanted, nn.Parameter),
        has_gradient=tensors[0].trained,
    )


def _converted(
    operation: object, pieces: Pieces, converter: WeightConverter, name: str, wanted: Mapping[str, Tensor]
) -> Pieces:
    """One operation of a conversion, on places instead of weights."""
    sources, targets = converter.source_patterns, converter.target_patterns
    kind, dim = type(operation).__name__, getattr(operation, "dim", 0)
    final = targets[0]
    only = next(iter(pieces.values()))[0]
    if kind == "MergeModulelist":
        # As in transformers: the last operation names the target, one with more to come keeps its sources apart.
        names = [final] if len(pieces) == 1 else list(pieces)
        return {key: [stack(parts, dim)] for key, parts in zip(names, pieces.values(), strict=True)}
    if kind == "Concatenate":
        return {final: [concatenate([part for source in sources for part in pieces.get(source, [])], dim)]}
    if kind == "Transpose" and len(pieces) == 1:
        dim0, dim1 = int(getattr(operation, "dim0", 0)), int(getattr(operation, "dim1", 1))
        fits = getattr(operation, "check_dims", False) and only.shape == tuple(wanted[name].shape)
        return {final: [only if fits else only.transposed(dim0, dim1)]}
    if kind in ("Chunk", "Split") and len(pieces) == 1 and not getattr(operation, "num_shards_attribute", None):
        sizes = [tuple(wanted[name.replace(final, target)].shape)[dim] for target in targets]
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return {t: [only.narrowed(dim, at, size)] for t, at, size in zip(targets, starts, sizes, strict=True)}
    raise InvalidModel(
        f"{name}: the checkpoint stores it in a form that takes {kind} to convert, which is not supported; load the "
        "model with "
        "transformers and save it again in the form of its class (save_original_format=False)"
    )


def _check_lists(sources: _Sources) -> None:
    """A list of tensors has every number, each of one shape; the first that is missing, or that differs from the most,
    is named."""
    lists: dict[tuple[str, str], dict[int, TensorLayout]] = {}
    for tensor in sources.tensors():
        match = re.fullmatch(r"(.*\.)(\d+)(\.\D*)", tensor.name)
        if match is None:
            return
        lists.setdefault((match[1], match[3]), {})[int(match[2])] = tensor
    highest = max(number for tensors in lists.values() for number in tensors)
    for number in range(highest + 1):
        for (before, after), tensors in lists.items():
            if number not in tensors:
                name = f"{before}{number}{after}"
                raise InvalidModel(f"tensor {name} is missing: the others of its list are in the checkpoint")
    for tensors in lists.values():
        (usual, _), *others = Counter(tensor.shape for tensor in tensors.values()).most_common()
        if others:
            odd = next(tensor for tensor in tensors.values() if tensor.shape != usual)
            raise InvalidModel(
                f"tensor {odd.name} has shape {list(odd.shape)}, the others of its list have {list(usual)}"
            )
