"""Which stored tensors make up each parameter of a model: names and forms on disk, as transformers converts them when it loads.

A checkpoint may name and split its tensors differently from the model class (one tensor per expert where the class has them
fused). The store keeps the checkpoint's tensors, so that an export has the names and forms of the source. Here the model's
parameters are found among them, as views where the layout allows it.

Owns that translation and the messages about a checkpoint that does not fit. Must not know how units travel or compute.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from horizon_server.engine.pieces import Piece, Strided, concatenate, stack
from horizon_server.errors import InvalidModel
from horizon_server.store.layout import StoreLayout, TensorLayout, natural_order

Pieces = dict[str, list[Piece]]


@dataclass(frozen=True, kw_only=True)
class Binding:
    """One parameter, or buffer that the checkpoint holds, by the name its model knows it by, and its place in a unit."""

    name: str
    unit_index: int
    piece: Piece
    is_buffer: bool
    stored_names: tuple[str, ...]


@dataclass
class _Sources:
    """The stored tensors of one parameter: by the pattern of the conversion that they belong to, if any."""

    converter: WeightConverter | None
    by_pattern: dict[str, list[TensorLayout]] = field(default_factory=dict)
    unit_indices: set[int] = field(default_factory=set)

    def tensors(self) -> list[TensorLayout]:
        return [tensor for tensors in self.by_pattern.values() for tensor in tensors]


def bind(model: PreTrainedModel, layout: StoreLayout) -> list[Binding]:
    """Every parameter of the model, and every floating-point buffer that belongs to its checkpoint, in the layout's order.

    Raises:
        InvalidModel: a tensor is missing, unknown to the model, misshapen, or stored in a form that cannot be trained in.
    """
    wanted = checkpoint_tensors(model)
    bindings = []
    all_sources, unknown = _sources_of(model, layout, wanted)
    for name, sources in all_sources.items():
        for target, piece in _pieces_of(name, sources, wanted).items():
            if target not in wanted:
                raise InvalidModel(f"tensor {sources.tensors()[0].name} makes {target}, which the model does not have")
            if piece.shape != tuple(wanted[target].shape):
                raise InvalidModel(_misshapen(target, piece, sources, tuple(wanted[target].shape)))
            bindings.append(
                Binding(
                    name=target,
                    unit_index=_unit_of(target, sources),
                    piece=piece,
                    is_buffer=not isinstance(wanted[target], nn.Parameter),
                    stored_names=tuple(tensor.name for tensor in sources.tensors()),
                )
            )
    # By identity, because tied parameters go by two names and are stored under one.
    bound = {id(wanted[binding.name]) for binding in bindings}
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
    return bindings


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of the model holds: its parameters, and the floating-point buffers it does not compute again."""
    state: dict[str, Tensor] = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if tensor.is_floating_point()}


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
    for unit, tensor in sorted(layout.tensors(), key=lambda item: natural_order(item[1].name)):
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
        f"{name}: the checkpoint stores it in a form that takes {kind} to convert, which is not supported; load the model with "
        "transformers and save it again in the form of its class (save_original_format=False)"
    )


def _check_lists(sources: _Sources) -> None:
    """A list of tensors has every number, each of one shape; the first that is missing, or that differs from the most, is named."""
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


def _misshapen(target: str, piece: Piece, sources: _Sources, shape: Sequence[int]) -> str:
    tensors = sources.tensors()
    if len(tensors) == 1:
        return f"tensor {tensors[0].name} has shape {list(piece.shape)}, the model's config asks for {list(shape)}"
    return (
        f"tensors {tensors[0].name} to {tensors[-1].name} together have shape {list(piece.shape)}, "
        f"the model's config asks for {list(shape)} as {target}"
    )


def _unit_of(target: str, sources: _Sources) -> int:
    if len(sources.unit_indices) != 1:
        names = sorted(tensor.name for tensor in sources.tensors())
        raise InvalidModel(
            f"tensors {names[0]} and {names[-1]} make one parameter, {target}, but belong to different layers"
        )
    return next(iter(sources.unit_indices))
