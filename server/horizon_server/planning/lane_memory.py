"""What a step in several lanes takes beside one in a single lane, by the arithmetic of `engine.lane_sums`. Torch-free.

Units: bytes, unless a name says elements or tokens.
"""

from __future__ import annotations

import math

from horizon_server.planning.lane_tree import lanes_of_rank, num_buffers, num_sums, roots_of
from horizon_server.records.execution import Execution
from horizon_server.store.layout import StoreLayout
from horizon_server.store.ownership import Ownership, length

_FP32, _FP64 = 4, 8


def tokens_of_rank(tokens_per_step: int, execution: Execution, *, longest: int) -> int:
    """The most tokens of a step that one rank computes; documents, of up to `longest` tokens, are not divided."""
    if execution.num_ranks == 1:
        return tokens_per_step
    most = max(len(lanes) for lanes in _lanes(execution))
    if execution.deals_lanes:
        most = execution.lanes - execution.num_ranks + 1
    return min(tokens_per_step, math.ceil(tokens_per_step * most / execution.lanes) + longest)


def lane_gradient_bytes(layout: StoreLayout, execution: Execution, tokens_per_step: int) -> int:
    """Of the device's memory for gradients, beside the slots."""
    if execution.lanes == 1:
        return 0
    ownership, lanes = Ownership(layout=layout, num_ranks=execution.num_ranks), _lanes(execution)
    slot_elements = max(*(unit.trained_elements for unit in layout.units), layout.head_gradient_elements)
    roots = [len(roots_of(of_rank)) for of_rank in lanes]
    most_buffers, most_roots, num_roots = max(num_buffers(of_rank) for of_rank in lanes), max(roots), sum(roots)
    num_open = num_sums(sorted(root for of_rank in lanes for root in roots_of(of_rank)))
    if execution.deals_lanes:
        # However they are dealt: a rank may have any neighbours.
        depth = execution.lanes.bit_length()
        most_buffers = most_roots = num_open = 2 * depth
        num_roots = execution.lanes
    elements = (most_buffers - 1) * slot_elements
    if layout.shares_gradient:
        elements += _most(ownership, 0)
    if execution.num_ranks > 1:
        elements += num_roots * max(_most(ownership, unit.index) for unit in layout.units)
        if ownership.has_rows:
            num_rows, width = max(len(rows) for rows in ownership.rows()), layout.units[0].tensors[0].shape[1]
            received = min(most_roots * tokens_per_step, num_roots * num_rows)
            elements += (num_open * min(tokens_per_step, num_rows) + received) * width
    return elements * _FP32


def sent_row_bytes(layout: StoreLayout, execution: Execution, tokens_per_step: int) -> int:
    """Of the device's memory for weights: rows of the embedding table that a rank sends to the others."""
    ownership = Ownership(layout=layout, num_ranks=execution.num_ranks)
    if execution.num_ranks == 1 or not ownership.has_rows:
        return 0
    num_rows, width = max(len(rows) for rows in ownership.rows()), layout.units[0].tensors[0].shape[1]
    return min(tokens_per_step, execution.num_ranks * num_rows) * width * execution.element_bytes


def lane_number_bytes(layout: StoreLayout, execution: Execution) -> int:
    """Of the host's memory: what a rank notes of the gradients of two steps."""
    if execution.lanes == 1:
        return 0
    return 2 * Ownership(layout=layout, num_ranks=execution.num_ranks).num_numbers * _FP64


def owned_elements(layout: StoreLayout, execution: Execution, unit_index: int) -> int:
    """The most trained elements of a unit that one rank owns."""
    return _most(Ownership(layout=layout, num_ranks=execution.num_ranks), unit_index)


def _lanes(execution: Execution) -> list[range]:
    return [lanes_of_rank(rank, execution.num_ranks, execution.lanes) for rank in range(execution.num_ranks)]


def _most(ownership: Ownership, unit_index: int) -> int:
    return max(map(length, ownership.trained(unit_index)))
