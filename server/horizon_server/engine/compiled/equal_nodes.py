"""Equal operations of a traced graph become one: maps that share their input, such as those of queries, keys and
values, cast it to FP8 once."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_flatten


def merge_equal(module: GraphModule) -> None:
    """Compute what a graph computes twice once.

    torch's own pass (`fx_graph_cse`) keeps apart what an operator that writes lies between, and the sums of weight
    gradients lie between all casts of backward.
    """
    first: dict[tuple[object, ...], Node] = {}
    for node in list(module.graph.nodes):
        if not _is_pure(node):
            continue
        arguments, structure = tree_flatten((node.args, node.kwargs))
        # With types: True equals 1, and 1 equals 1.0.
        key = (node.target, str(structure), *((type(value), value) for value in arguments))
        found = first.setdefault(key, node)
        if found is not node:
            node.replace_all_uses_with(found)
            module.graph.erase_node(node)
    module.recompile()


def _is_pure(node: Node) -> bool:
    """Whether a node gives equal results for equal arguments, does nothing else, and nothing writes to its result."""
    operator = node.target
    # Sizes are computed by Python's operators.
    if getattr(operator, "__module__", "") == "_operator":
        return True
    return (
        isinstance(operator, torch._ops.OpOverload)
        and not operator._schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in operator.tags
        and not any(_writes(user, node) for user in node.users)
    )


def _writes(user: Node, node: Node) -> bool:
    """Whether an operator writes to the result of a node."""
    if not isinstance(user.target, torch._ops.OpOverload):
        return False
    given = {**user.kwargs, **dict(zip((a.name for a in user.target._schema.arguments), user.args, strict=False))}
    return any(
        argument.alias_info is not None and argument.alias_info.is_write and given.get(argument.name) is node
        for argument in user.target._schema.arguments
    )
