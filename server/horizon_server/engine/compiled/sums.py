"""Sums of products in a traced graph, as products that add to what is there: one pass over memory for each product but
the first, and one rounding for all of them.

The gradient of what several maps read (queries, keys and values; gate and up) is the sum of a product for each. Traced,
each product is written by itself, and the compiler reads them all to add them up.

Shapes: T = tokens, I = inputs of a map, O = its outputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

_ADD, _PRODUCT = torch.ops.aten.add.Tensor, torch.ops.aten.mm.default
_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten._unsafe_view.default})


@torch.library.custom_op("horizon::sum_of_products", mutates_args=())
def sum_of_products(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    """The sum of `left @ right` over both lists, each [T, O] and [O, I]: every product but the first adds to the result
    in place, and its sums are in fp32 inside."""
    result_TI = lefts[0].mm(rights[0])
    for left_TO, right_OI in zip(lefts[1:], rights[1:], strict=True):
        torch.addmm(result_TI, left_TO, right_OI, out=result_TI)
    return result_TI


@sum_of_products.register_fake
def _(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> Tensor:
    return lefts[0].new_empty(lefts[0].shape[0], rights[0].shape[1])


def sum_products(module: GraphModule) -> list[int]:
    """Replace sums of products that nothing else reads; returns how many products each sum has."""
    graph, found = module.graph, []
    # From the end, so that the outermost of nested sums comes first.
    for total in reversed(graph.find_nodes(op="call_function", target=_ADD)):
        terms = _terms(total) if total.users else None
        if terms is None:
            continue
        lefts, rights = ([product.args[side] for product, _ in terms] for side in (0, 1))
        (first, viewed), *_ = terms
        with graph.inserting_before(total):
            result = graph.call_function(torch.ops.horizon.sum_of_products.default, (lefts, rights))
            result.meta["val"] = first.meta["val"]
            if viewed is not first and not isinstance(viewed.target, str):
                result = graph.call_function(viewed.target, (result, *viewed.args[1:]))
                result.meta["val"] = total.meta["val"]
        total.replace_all_uses_with(result)
        graph.eliminate_dead_code()
        found.append(len(terms))
    module.recompile()
    return found[::-1]


def _terms(total: Node) -> list[tuple[Node, Node]] | None:
    """The products that a sum adds up, in order, each with the view of it that is added; None where it adds anything
    else, or where something else reads one of them."""
    if total.target is not _ADD or len(total.args) != 2 or total.kwargs:
        return None
    found = []
    for side in total.args:
        if not isinstance(side, Node) or len(side.users) != 1:
            return None
        if (terms := _terms(side)) is not None:
            found += terms
        elif (product := _product(side)) is not None:
            found.append((product, side))
        else:
            return None
    return found


def _product(node: Node) -> Node | None:
    """The product that a node is, or the only view of."""
    source = node.args[0] if node.target in _VIEWS else node
    is_product = isinstance(source, Node) and source.target is _PRODUCT and len(source.users) == 1
    return source if is_product and isinstance(source, Node) else None
