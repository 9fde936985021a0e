"""Where every parameter is in the host store's planes: the one arithmetic that the daemon plans by and the worker
allocates by.

It reads parameter names and shapes only, and knows no architecture by name.

A unit's tensors come in five groups: those that are trained with compressed states, others that are trained, frozen
ones whose exact value takes both halves, frozen ones that bfloat16 holds exactly, and packed ones. So what a plane
holds of a unit is always one stretch of it, and one offset of a tensor serves all planes and the device; but packed
tensors have a plane of their own.

Units: offsets and sizes are elements unless a name says bytes.
Source: Horizon-LM (arXiv 2602.04816) for the flat layer-contiguous store.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Literal

from horizon_server.errors import InvalidModel
from horizon_server.store.safetensors_files import TensorHeader, list_number

# Bytes of an element of each plane, which is a parameter except in `scales`; `grad` and `packed` come on top where they
# are wanted. The first four are an exact parameter's; a compressed one has `hi` and the last four.
PLANE_BYTES: Mapping[str, int] = {
    "hi": 2,
    "lo": 2,
    "exp_avg": 4,
    "exp_avg_sq": 4,
    "lo8": 1,
    "exp_avg8": 1,
    "root8": 1,
    "scales": 2,
}
EXACT_PLANES = ("lo", "exp_avg", "exp_avg_sq")
COMPRESSED_PLANES = ("lo8", "exp_avg8", "root8", "scales")
MOMENT_PLANES = ("exp_avg", "exp_avg_sq", "exp_avg8", "root8", "scales")
COMPRESSED_GROUP = 32
"""Elements that have one scale for each moment, next to each other in `scales`; groups begin where tensors do."""
EXACT_BYTES = 12
"""Of a trained parameter, without its gradient."""
COMPRESSED_BYTES = 5.125
"""The same, where its states are compressed."""
SMALLEST_COMPRESSED = 4096
"""Elements of a tensor. What is smaller stays exact: together it is next to nothing."""

# 64 bytes in bf16: one cache line and one AVX-512 register.
TENSOR_ALIGN_ELEMENTS = 32
# 4 KiB in bf16: one page, so that a unit can be registered and advised by itself.
UNIT_ALIGN_ELEMENTS = 2048

UnitKind = Literal["embedding", "layer", "head"]
# How a frozen tensor is kept: as it is computed with, or in fewer bits (`store.packing`).
Packing = Literal["none", "int8", "nf4"]
NF4_BLOCK, BLOCKS_PER_GROUP = 64, 256
PACKED_PIECE_ELEMENTS = 1 << 22
"""Of a tensor, packed or unpacked at once: a multiple of a group's."""
# Packed codes and scales begin at multiples of this.
PACKED_ALIGN_BYTES = 64
# What weight decay applies to: what the Hugging Face Trainer decays; the matrices of layers and head; every parameter.
DecayRule = Literal["trainer", "matrices", "all"]

# Of the tensors of a unit, in the planes' order: compressed, trained, exact, packed.
_GROUPS = (
    (True, True, True, False),
    (False, True, True, False),
    (False, False, True, False),
    (False, False, False, False),
    (False, False, False, True),
)

_TRAINER_SPARES = re.compile(
    # The patterns of transformers' Trainer.get_decay_parameter_names ...
    r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)"
    # ... and the names that its models give to modules of class nn.LayerNorm, which it spares whatever their name is.
    r"|(?:^|\.)(?:pre_)?ln(?:_?[a-z0-9]+)?\.weight$|(?:^|\.)(?:norm_[0-9]|layer_norm_?[a-z0-9]+)\.|(?:^|transformer\.)norm_f\."
)

_INPUT_TABLES = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
    "tokens_embed.weight",
    "embeddings.weight",
)
# What belongs to the embedding's unit too: it is computed before the first layer.
_WITH_INPUT_TABLE = (
    "wpe.weight",
    "embed_positions.weight",
    "position_embeddings.weight",
    "positions_embed.weight",
    "word_embeddings_layernorm",
    "layernorm_embedding",
    "embeddings.norm",
    "project_in.weight",
)
OUTPUT_PROJECTIONS = ("lm_head.weight", "embed_out.weight", "output.weight", "head.weight")
# Stored by some checkpoints, although the model computes them from its config.
_DERIVED_BUFFERS = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", ".masked_bias")
_ATTENTION_MASKS = (".attn.bias", ".attention.bias")
_TRAINABLE_DTYPES = frozenset({"BF16", "F16", "F32"})


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """One parameter. `offset` counts from its unit's first element; `decay` says whether weight decay applies to it,
    and `lr_scale` multiplies its learning rate. A tensor that is not `trained` has no moments and no gradient; one that
    is not `exact` has no `lo` half either, because `hi` holds its value; and one that is packed is in the `packed`
    plane alone. One that is `compressed` has `lo8` for `lo`, and codes and scales for moments. A tensor of an adapter
    `adapts` the weight of that name, and is in no model folder.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    num_elements: int
    decay: bool
    trained: bool = True
    exact: bool = True
    lr_scale: float = 1.0
    adapts: str = ""
    norm_dim: int | None = None
    """Of a magnitude (DoRA): the dimension of the adapted weight that its norms run along, that of the map's inputs."""
    packing: Packing = "none"
    compressed: bool = False

    @property
    def low(self) -> Literal["lo", "lo8"] | None:
        """The plane of what its value has beside `hi`; None where that is nothing."""
        return "lo8" if self.compressed else "lo" if self.exact else None


@dataclass(frozen=True, kw_only=True)
class PackedPart:
    """Where a packed tensor is in its unit's block of the `packed` plane, in bytes. Only nf4 has `group_scales`."""

    codes: slice
    scales: slice
    group_scales: slice


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """The streaming grain: one block of each plane. `num_elements` is the unit's padded size where it is computed
    with."""

    name: str
    kind: UnitKind
    index: int
    offset: int
    num_elements: int
    tensors: tuple[TensorLayout, ...]

    @cached_property
    def compressed_elements(self) -> int:
        """Of the part with the tensors whose states are compressed, which is the first of the trained part."""
        return self._end_of([tensor for tensor in self.tensors if tensor.compressed])

    @cached_property
    def trained_elements(self) -> int:
        """Of the part with the trained tensors, which moments and gradients have."""
        return self._end_of([tensor for tensor in self.tensors if tensor.trained])

    @cached_property
    def exact_elements(self) -> int:
        """Of the part whose values take both halves."""
        return self._end_of([tensor for tensor in self.tensors if tensor.exact])

    @cached_property
    def unpacked_elements(self) -> int:
        """Of the part whose values are in `hi`."""
        return self._end_of([tensor for tensor in self.tensors if tensor.packing == "none"])

    @cached_property
    def packed_parts(self) -> dict[str, PackedPart]:
        """Where each packed tensor is in the unit's block of the `packed` plane, by name."""
        parts: dict[str, PackedPart] = {}
        end = 0

        def taken(num_bytes: int) -> slice:
            nonlocal end
            found = slice(end, end + num_bytes)
            end += -(-num_bytes // PACKED_ALIGN_BYTES) * PACKED_ALIGN_BYTES
            return found

        for tensor in self.tensors:
            if tensor.packing == "int8":
                num_rows = tensor.num_elements // tensor.shape[-1]
                parts[tensor.name] = PackedPart(
                    codes=taken(tensor.num_elements), scales=taken(2 * num_rows), group_scales=slice(0)
                )
            elif tensor.packing == "nf4":
                num_blocks = -(-tensor.num_elements // NF4_BLOCK)
                parts[tensor.name] = PackedPart(
                    codes=taken(-(-tensor.num_elements // 2)),
                    scales=taken(num_blocks),
                    group_scales=taken(4 * -(-num_blocks // BLOCKS_PER_GROUP)),
                )
        return parts

    @cached_property
    def packed_bytes(self) -> int:
        """Of the unit's block of the `packed` plane, padded."""
        return _padded(max((max(p.scales.stop, p.group_scales.stop) for p in self.packed_parts.values()), default=0))

    def held_in(self, plane: str) -> slice:
        """The elements of the unit that a plane holds, which is not `packed`."""
        if plane in COMPRESSED_PLANES:
            return slice(0, self.compressed_elements)
        if plane in EXACT_PLANES:
            stop = self.exact_elements if plane == "lo" else self.trained_elements
            return slice(self.compressed_elements, max(stop, self.compressed_elements))
        return slice(0, self.unpacked_elements if plane == "hi" else self.trained_elements)

    def elements_in(self, plane: str) -> int:
        """How many elements of a plane the unit has."""
        if plane == "packed":
            return self.packed_bytes
        held = self.held_in(plane)
        return _in_plane(plane, held.stop - held.start)

    def _end_of(self, tensors: Sequence[TensorLayout]) -> int:
        end = max((tensor.offset + tensor.num_elements for tensor in tensors), default=0)
        return min(_padded(end), self.num_elements)


@dataclass(frozen=True, kw_only=True)
class StoreLayout:
    """The whole store: embedding, layers in order, head. `num_elements` is that of all units, with padding."""

    units: tuple[UnitLayout, ...]
    num_elements: int
    tied: bool

    @property
    def num_parameters(self) -> int:
        """Elements that are parameters, without the padding."""
        return sum(tensor.num_elements for _, tensor in self.tensors())

    @property
    def num_trained_parameters(self) -> int:
        """Those that training changes."""
        return sum(tensor.num_elements for _, tensor in self.tensors() if tensor.trained)

    @cached_property
    def has_row_gradients(self) -> bool:
        """Whether the embedding's gradient is kept as rows: a table that is not the projection too, with nothing next
        to it."""
        (table, *others) = self.units[0].tensors
        return not self.tied and not others and table.trained

    @cached_property
    def shares_gradient(self) -> bool:
        """Whether the head adds to the gradient of the embedding's table."""
        return self.tied and any(tensor.trained and is_input_table(tensor.name) for tensor in self.units[0].tensors)

    @cached_property
    def first_trained_unit(self) -> int:
        """Backward ends there: what comes before it is frozen. Behind the last unit where everything is, as in a store
        whose weights are only read."""
        return next((unit.index for unit in self.units if unit.trained_elements), len(self.units))

    @property
    def num_skipped_layers(self) -> int:
        """Layers before the first trained unit, whose inputs no backward wants; the last layer's is always kept."""
        num_layers = len(self.units) - 2
        return max(0, min(self.first_trained_unit, num_layers) - 1)

    @property
    def head_gradient_elements(self) -> int:
        """Of the buffer of the head's gradient; where the table's is next to it, at the table's place among the
        weights."""
        embedding, head = self.units[0], self.units[-1]
        return head.num_elements + embedding.trained_elements if self.shares_gradient else head.trained_elements

    def offset_in(self, plane: str, unit: UnitLayout) -> int:
        """Where a unit starts in a plane. A `grad` plane has no room for an embedding whose gradient is kept as
        rows."""
        left_out = self.units[0].trained_elements if plane == "grad" and self.has_row_gradients else 0
        return self._offsets[plane][unit.index] - left_out

    def part_in(self, plane: str, unit: UnitLayout, part: slice) -> slice:
        """Where a plane, which is not `packed`, has what it holds of these elements of a unit; they begin and end with
        groups or tensors."""
        held, offset = unit.held_in(plane), self.offset_in(plane, unit)
        start = min(max(part.start, held.start), held.stop)
        stop = max(start, min(part.stop, held.stop))
        return slice(offset + _in_plane(plane, start - held.start), offset + _in_plane(plane, stop - held.start))

    @cached_property
    def is_compressed(self) -> bool:
        """Whether the states of some tensor are."""
        return any(unit.compressed_elements for unit in self.units)

    def find(self, name: str) -> tuple[UnitLayout, TensorLayout]:
        """The unit and the tensor of a parameter name; KeyError where the store has none."""
        return self._by_name[name]

    def tensors(self) -> Iterator[tuple[UnitLayout, TensorLayout]]:
        """Every parameter with its unit, in the planes' order."""
        for unit in self.units:
            for tensor in unit.tensors:
                yield unit, tensor

    @cached_property
    def _offsets(self) -> dict[str, list[int]]:
        planes = (*PLANE_BYTES, "packed", "grad")
        sizes = {plane: [unit.elements_in(plane) for unit in self.units] for plane in planes}
        return {plane: list(accumulate(found, initial=0)) for plane, found in sizes.items()}

    @cached_property
    def _by_name(self) -> dict[str, tuple[UnitLayout, TensorLayout]]:
        return {tensor.name: (unit, tensor) for unit, tensor in self.tensors()}


def build_layout(shapes: Mapping[str, tuple[int, ...]], *, num_layers: int, tied: bool) -> StoreLayout:
    """Lay out the parameters of a decoder, whatever its architecture, from their checkpoint names.

    The decoder's layers are the numbered list of `num_layers` entries that holds the most parameters; the input
    embedding is known by its name; the rest is the head. With `tied` the output projection is left out: the
    embedding's table serves for both. The result depends on names and shapes alone, not on the order they come in.

    Raises:
        InvalidModel: no such list of layers, or no input embedding.
    """
    prefix = _layer_list_prefix(shapes, num_layers)
    groups: dict[tuple[str, UnitKind], list[str]] = {
        ("embedding", "embedding"): [],
        **{(f"layers.{index}", "layer"): [] for index in range(num_layers)},
        ("head", "head"): [],
    }
    stored = [name for name in shapes if not (tied and is_output_projection(name))]
    for name in sorted(stored, key=lambda name: _order_in_unit(name, shapes[name], prefix)):
        if (layer := _layer_index(name, prefix)) is not None:
            groups[f"layers.{layer}", "layer"].append(name)
        elif name.endswith(_INPUT_TABLES) or any(part in name for part in _WITH_INPUT_TABLE):
            groups["embedding", "embedding"].append(name)
        else:
            groups["head", "head"].append(name)
    if not any(name.endswith(_INPUT_TABLES) for name in groups["embedding", "embedding"]):
        known = ", ".join("..." + table for table in _INPUT_TABLES)
        raise InvalidModel(f"no input embedding among the tensors; one of them must be named {known}")
    units: list[UnitLayout] = []
    for (unit_name, kind), names in groups.items():
        tensors, size = _place(names, kind, shapes)
        offset = units[-1].offset + units[-1].num_elements if units else 0
        units.append(
            UnitLayout(name=unit_name, kind=kind, index=len(units), offset=offset, num_elements=size, tensors=tensors)
        )
    return StoreLayout(units=tuple(units), num_elements=offset + size, tied=tied)


def with_decay(layout: StoreLayout, rule: DecayRule) -> StoreLayout:
    """The same layout with weight decay on other parameters."""
    units = (
        replace(unit, tensors=tuple(replace(t, decay=decays(t.name, t.shape, unit.kind, rule)) for t in unit.tensors))
        for unit in layout.units
    )
    return replace(layout, units=tuple(units))


def with_trained(
    layout: StoreLayout,
    is_trained: Callable[[str], bool],
    *,
    is_bfloat16: Callable[[str], bool],
    packing_of: Callable[[str], Packing] = lambda _: "none",
) -> StoreLayout:
    """The layout where only some tensors are trained, by their names; `is_bfloat16` tells which of the others bfloat16
    holds exactly, and `packing_of` how they are packed.

    Raises:
        ValueError: nothing is trained.
    """
    found = _grouped(layout, is_trained, is_bfloat16=is_bfloat16, packing_of=packing_of)
    if not any(unit.trained_elements for unit in found.units):
        raise ValueError("nothing is trained")
    return found


def weights_only(
    layout: StoreLayout, *, is_bfloat16: Callable[[str], bool], packing_of: Callable[[str], Packing] = lambda _: "none"
) -> StoreLayout:
    """The layout for weights that are read and never trained: without moments, and without a second half where bfloat16
    is exact."""
    return _grouped(layout, lambda _: False, is_bfloat16=is_bfloat16, packing_of=packing_of)


def _grouped(
    layout: StoreLayout,
    is_trained: Callable[[str], bool],
    *,
    is_bfloat16: Callable[[str], bool],
    packing_of: Callable[[str], Packing],
) -> StoreLayout:
    def kept(tensor: TensorLayout) -> TensorLayout:
        trained = is_trained(tensor.name)
        packing = "none" if trained else packing_of(tensor.name)
        exact = trained or (packing == "none" and not is_bfloat16(tensor.name))
        compressed = trained and tensor.compressed
        return replace(tensor, trained=trained, exact=exact, packing=packing, compressed=compressed)

    return _placed_again(layout, kept)


def with_compressed_states(
    layout: StoreLayout, *, is_exact: Callable[[str], bool] = lambda _: False, smallest: int = SMALLEST_COMPRESSED
) -> StoreLayout:
    """The same layout with compressed states: of the trained matrices outside of the embedding that have at least
    `smallest` elements, but for norms, biases and those that are `is_exact` by their names."""

    def compressed(unit: UnitLayout, tensor: TensorLayout) -> bool:
        is_matrix = decays(tensor.name, tensor.shape, unit.kind, "matrices")
        is_large = tensor.trained and tensor.num_elements >= smallest
        return is_matrix and is_large and not is_exact(tensor.name)

    units = (
        replace(unit, tensors=tuple(replace(tensor, compressed=compressed(unit, tensor)) for tensor in unit.tensors))
        for unit in layout.units
    )
    return _placed_again(replace(layout, units=tuple(units)), lambda tensor: tensor)


def _placed_again(layout: StoreLayout, change: Callable[[TensorLayout], TensorLayout]) -> StoreLayout:
    """The layout with other tensors of the same names, each in its group, and in the order of before within it."""
    units: list[UnitLayout] = []
    offset = 0
    for unit in layout.units:
        found = [change(tensor) for tensor in unit.tensors]
        tensors: list[TensorLayout] = []
        size = 0
        for key in _GROUPS:
            group = [t for t in found if (t.compressed, t.trained, t.exact, t.packing != "none") == key]
            placed, end = _placed(group, size)
            tensors += placed
            size = end
        assert len(tensors) == len(found), "each tensor is in one group"
        units.append(replace(unit, offset=offset, num_elements=size, tensors=tuple(tensors)))
        offset += size
    return StoreLayout(units=tuple(units), num_elements=offset, tied=layout.tied)


def with_lr_scales(layout: StoreLayout, scales: Mapping[str, float]) -> StoreLayout:
    """The same layout with these factors of the learning rate, by tensors' names, and 1 for all other tensors."""
    units = (
        replace(unit, tensors=tuple(replace(t, lr_scale=scales.get(t.name, 1.0)) for t in unit.tensors))
        for unit in layout.units
    )
    return replace(layout, units=tuple(units))


def plane_sizes(layout: StoreLayout, *, grad_dtype_bytes: int) -> dict[str, int]:
    """Bytes of every plane by name, to size its memory file; without a `grad` plane where `grad_dtype_bytes` is 0, and
    without those that hold nothing where nothing is packed or compressed.
    """
    is_packed = any(unit.packed_bytes for unit in layout.units)
    planes = {name: size for name, size in PLANE_BYTES.items() if layout.is_compressed or name not in COMPRESSED_PLANES}
    bytes_per_element, last = {**planes, "packed": int(is_packed), "grad": grad_dtype_bytes}, layout.units[-1]
    # No memory file is empty, also where only the table is trained, whose gradient is not in the plane.
    return {
        plane: max(UNIT_ALIGN_ELEMENTS, layout.offset_in(plane, last) + last.elements_in(plane)) * size
        for plane, size in bytes_per_element.items()
        if size
    }


def parameter_shapes(headers: Mapping[str, TensorHeader]) -> dict[str, tuple[int, ...]]:
    """Shapes of a folder's tensors that are parameters: floating point, and no table that can be computed again."""
    return {
        name: header.shape
        for name, header in headers.items()
        if header.dtype in _TRAINABLE_DTYPES
        and not name.endswith(_DERIVED_BUFFERS)
        # Old checkpoints hold causal masks, under names that elsewhere are biases.
        and not (name.endswith(_ATTENTION_MASKS) and len(header.shape) > 2)
    }


def is_output_projection(name: str) -> bool:
    """Whether a name is that of the projection onto the vocabulary, which tied models share with the embedding."""
    return _has_name(name, OUTPUT_PROJECTIONS)


def is_input_table(name: str) -> bool:
    """Whether a name is that of a table of token embeddings."""
    return _has_name(name, _INPUT_TABLES)


def _has_name(name: str, known_names: tuple[str, ...]) -> bool:
    # A numbered part makes it a tensor of one of the layers.
    is_numbered = any(list_number(part) is not None for part in name.split("."))
    return not is_numbered and any(name == known or name.endswith("." + known) for known in known_names)


def natural_order(name: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts names with their numbers in counting order: expert 2 before expert 10."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name))


def _order_in_unit(name: str, shape: tuple[int, ...], prefix: str) -> tuple[str, int, tuple[int, ...], str]:
    """Sorts a unit's tensors: name by name, but lists inside a layer (experts) entry by entry, and shape by shape
    within an entry."""
    # So a stack over the entries, and the pair of projections that many models fuse, are one strided view each.
    if _layer_index(name, prefix) is None:
        return (name, -1, (), "")
    inner = name[len(prefix) + 1 :].partition(".")[2]
    match = re.match(r"(.*?)\.(\d+)\.(.*)", inner)
    return (match[1], int(match[2]), shape, match[3]) if match else (inner, -1, (), "")


def decays(name: str, shape: tuple[int, ...], kind: UnitKind, rule: DecayRule) -> bool:
    """Whether weight decay applies to a parameter of a unit of this kind."""
    spared_by_name = _TRAINER_SPARES.search(name.lower()) is not None
    if rule == "matrices":
        return len(shape) > 1 and kind != "embedding" and not spared_by_name
    return rule == "all" or not spared_by_name


def _layer_list_prefix(shapes: Mapping[str, tuple[int, ...]], num_layers: int) -> str:
    indices: dict[str, set[int]] = {}
    parameters: dict[str, int] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        for position in range(1, len(parts) - 1):
            number = list_number(parts[position])
            if number is None:
                continue
            prefix = ".".join(parts[:position])
            indices.setdefault(prefix, set()).add(number)
            parameters[prefix] = parameters.get(prefix, 0) + math.prod(shape)
    # Compared by size and maximum: a set of num_layers numbers would take the memory that a config asks for.
    complete = [p for p, found in indices.items() if len(found) == num_layers and max(found) == num_layers - 1]
    if not complete:
        seen = ", ".join(f"{prefix}.0 to {prefix}.{max(found)}" for prefix, found in sorted(indices.items())[:4])
        raise InvalidModel(
            f"the config says num_hidden_layers = {num_layers}, but the tensors form no list of that length "
            f"(found {seen or 'no numbered tensors'}); either config.json and the weights do not belong "
            "together, or the architecture has its layers in several lists, which is not supported"
        )
    return max(complete, key=lambda prefix: (parameters[prefix], -len(prefix)))


def _layer_index(name: str, prefix: str) -> int | None:
    if not name.startswith(prefix + "."):
        return None
    return list_number(name[len(prefix) + 1 :].partition(".")[0])


def _place(
    names: list[str], kind: UnitKind, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[TensorLayout, ...], int]:
    """The tensors of a unit one after another, and its padded size."""
    tensors = [
        TensorLayout(
            name=name,
            shape=tuple(shapes[name]),
            offset=0,
            num_elements=math.prod(shapes[name]),
            decay=decays(name, tuple(shapes[name]), kind, "trainer"),
        )
        for name in names
    ]
    return _placed(tensors, 0)


def _placed(tensors: Sequence[TensorLayout], offset: int) -> tuple[tuple[TensorLayout, ...], int]:
    """The tensors one after another from an offset on, and where the next group may begin."""
    placed: list[TensorLayout] = []
    for tensor in tensors:
        placed.append(replace(tensor, offset=offset))
        offset += -(-tensor.num_elements // TENSOR_ALIGN_ELEMENTS) * TENSOR_ALIGN_ELEMENTS
    return tuple(placed), _padded(offset)


def _in_plane(plane: str, num_elements: int) -> int:
    """Of a unit's elements, how many elements of a plane are theirs."""
    return 2 * -(-num_elements // COMPRESSED_GROUP) if plane == "scales" else num_elements


def _padded(num_elements: int) -> int:
    return -(-num_elements // UNIT_ALIGN_ELEMENTS) * UNIT_ALIGN_ELEMENTS
