"""What a step in several lanes takes beside one in a single lane, by the arithmetic of `engine.lane_sums`, and what one
takes that is divided by layers or among nodes. Torch-free.

Units: bytes, unless a name says elements or tokens.
"""

from __future__ import annotations

import math

from horizon_server.planning.lane_tree import NodeTree, lanes_of_rank, num_buffers, num_sums, roots_of
from horizon_server.records.execution import Execution
from horizon_server.store.layout import COMPRESSED_BYTES, EXACT_BYTES, PLANE_BYTES, StoreLayout, TensorLayout
from horizon_server.store.ownership import Ownership, length

_FP32, _FP64 = 4, 8


def tokens_of_rank(tokens_per_step: int, execution: Execution, *, longest: int) -> int:
    """The most tokens of a step that one rank computes layers of; documents, of up to `longest` tokens, are not
    divided."""
    if execution.num_ranks == 1 or execution.parallel == "layers":
        return tokens_per_step
    most = max(len(lanes) for lanes in _lanes(execution))
    if execution.deals_lanes:
        most = execution.lanes - execution.num_ranks + 1
    return min(tokens_per_step, math.ceil(tokens_per_step * most / execution.lanes) + longest)


def lane_gradient_bytes(layout: StoreLayout, execution: Execution, tokens_per_step: int) -> int:
    """Of the device's memory for gradients, beside the slots."""
    if execution.lanes == 1:
        return 0
    ownership, lanes = Ownership.of(layout, execution), _lanes(execution)
    roots = [len(roots_of(of_rank)) for of_rank in lanes]
    most_buffers, most_roots, num_roots = max(num_buffers(of_rank) for of_rank in lanes), max(roots), sum(roots)
    num_open = num_sums(sorted(root for of_rank in lanes for root in roots_of(of_rank)))
    if execution.deals_lanes:
        # However they are dealt: a rank may have any neighbours.
        depth = execution.lanes.bit_length()
        most_buffers = most_roots = num_open = 2 * depth
        num_roots = execution.lanes
    elements, exchanged = _lane_buffer_elements(layout, execution, most_buffers), layout.units
    if execution.parallel == "layers":
        exchanged = layout.units[:1] + layout.units[-1:]
    if layout.shares_gradient:
        elements += _most(ownership, 0)
    if execution.num_ranks > 1:
        largest = max(_most(ownership, unit.index) for unit in exchanged)
        if execution.num_nodes == 1:
            elements += num_roots * largest
        else:
            tree = NodeTree.of(lanes, execution.num_nodes)
            elements += max(tree.num_elements(node, largest) for node in range(execution.num_nodes))
        if ownership.has_rows:
            num_rows, width = max(len(rows) for rows in ownership.rows()), layout.units[0].tensors[0].shape[1]
            received = min(most_roots * tokens_per_step, num_roots * num_rows)
            elements += (num_open * min(tokens_per_step, num_rows) + received) * width
    return elements * _FP32


def sent_row_bytes(layout: StoreLayout, execution: Execution, tokens_per_step: int) -> int:
    """Of the device's memory for weights: rows of the embedding table that a rank sends to the others."""
    ownership = Ownership.of(layout, execution)
    has_rows = ownership.has_rows or (execution.num_nodes > 1 and ownership.is_table_alone)
    if execution.num_ranks == 1 or not has_rows:
        return 0
    num_rows, width = max(len(rows) for rows in ownership.rows()), layout.units[0].tensors[0].shape[1]
    num_sent = min(tokens_per_step, execution.num_ranks * num_rows)
    if execution.parallel == "layers":
        # Every rank embeds all tokens, so each of them gets all rows in use.
        num_sent = execution.num_ranks * min(tokens_per_step, num_rows)
    return num_sent * width * execution.element_bytes


def own_share(plane_bytes: dict[str, int], layout: StoreLayout, execution: Execution) -> dict[str, int]:
    """Of the planes' bytes by component, what one node has: packed weights whole, of all else its part."""
    packed = sum(unit.packed_bytes for unit in layout.units)
    divided = {name: size - packed * (name == "weights") for name, size in plane_bytes.items()}
    return {name: -(-size // execution.num_nodes) + packed * (name == "weights") for name, size in divided.items()}


def in_flight_bytes(layout: StoreLayout) -> int:
    """Host memory of the first node for tensors that belong to others, while a model or a checkpoint is read or
    written: one for each thread."""

    def num_bytes(place: TensorLayout) -> float:
        # A checkpoint's files are written at once: its model and the rounding bits from both halves of the weights, and
        # the other planes as they are.
        low = PLANE_BYTES["lo8" if place.compressed else "lo"]
        of_planes = COMPRESSED_BYTES if place.compressed else EXACT_BYTES
        return place.num_elements * (of_planes + PLANE_BYTES["hi"] + 2 * low)

    return math.ceil(max(num_bytes(place) for _, place in layout.tensors()))


def lane_number_bytes(layout: StoreLayout, execution: Execution) -> int:
    """Of the host's memory: what a rank notes of the gradients of two steps."""
    if execution.lanes == 1:
        return 0
    return 2 * Ownership.of(layout, execution).num_numbers * _FP64


def owned_elements(layout: StoreLayout, execution: Execution, unit_index: int) -> int:
    """The most trained elements of a unit that one rank owns."""
    return _most(Ownership.of(layout, execution), unit_index)


def _lane_buffer_elements(layout: StoreLayout, execution: Execution, most_buffers: int) -> int:
    """What lanes add up in beside the slot; `most_buffers`, the slot's among them, is for a rank's own lanes."""
    layer = max(unit.trained_elements for unit in layout.units if unit.kind == "layer")
    edge = max(layout.units[0].trained_elements, layout.units[-1].trained_elements, layout.head_gradient_elements)
    if execution.parallel == "rows":
        return (most_buffers - 1) * max(layer, edge)
    # A rank sums all lanes of its layers, and its own of embedding and head, in the same memory.
    of_layers, of_edges = num_buffers(range(execution.lanes)) - 1, most_buffers - 1
    both = min(of_layers, of_edges)
    return both * max(layer, edge) + (of_layers - both) * layer + (of_edges - both) * edge


def _lanes(execution: Execution) -> list[range]:
    return [lanes_of_rank(rank, execution.num_ranks, execution.lanes) for rank in range(execution.num_ranks)]


def _most(ownership: Ownership, unit_index: int) -> int:
    return max(map(length, ownership.trained(unit_index)))
