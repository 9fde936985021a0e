"""A second pair of graphs of a kind of layer: a forward that also returns its products, and a backward that takes them.

Both are cut from the graph that computes output and gradients at once. What is kept is the output of each matrix
product and of attention, where a gradient needs it; norms, rotations and activation functions are cheap, and backward
computes them again. No operation is changed, so as plain operations the gradients have the same bits.

Source: activation checkpointing that saves products, as in torch.utils.checkpoint's selective policy; cut as
torch._functorch.partitioners cuts a joint graph.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node

# Registers the operators.
from horizon_server.engine import fp8 as _fp8  # noqa: F401
from horizon_server.engine.attention import kernels as _kernels  # noqa: F401
from horizon_server.engine.compiled.call_pattern import NotCompilable
from horizon_server.engine.compiled.graphs import Graph, LayerGraphs

_aten = torch.ops.aten
_ATTENTION = torch.ops.horizon.attention.default
# Not products of batches: attention with masks is made of them, and its scores are all pairs of tokens.
PRODUCTS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_mm.default,
        torch.ops.horizon.scaled_product.default,
        _ATTENTION,
    }
)
"""The operators whose outputs are kept."""
# They write to accumulators, which nothing else in a graph reads.
_SUMS = frozenset({torch.ops.horizon.add_product.default, torch.ops.horizon.add_sum.default})


def keeping_products(graphs: LayerGraphs) -> LayerGraphs:
    """The pair of a traced layer that keeps products. Its `forward` returns them after the layer's output, and its
    `backward` takes them after all its other inputs, in the same order.

    Raises:
        NotCompilable: the layer changes tensors in place, and what is kept could be another value by then; or no
            gradient needs a product.
    """
    joint, num_inputs = graphs.joint, len(graphs.forward.inputs)
    nodes, placeholders = joint.module.graph.nodes, joint.module.graph.find_nodes(op="placeholder")
    (result,) = joint.module.graph.find_nodes(op="output")
    *gradients, output = result.args[0]
    forward_nodes = _needed([output], ())
    products = [
        tensor
        for node in nodes
        if node in forward_nodes and node.target in PRODUCTS
        for tensor in (node.users if node.target is _ATTENTION else [node])
    ]
    effects = [node for node in nodes if node.target in _SUMS]
    needed = _needed([*gradients, *effects], products)
    # A product that only leads to other products is not kept: they are.
    kept = [product for product in products if product in needed]
    if not kept:
        raise NotCompilable("its gradients need no products")
    given = {*placeholders, *kept}
    if any(_is_seen(node, given) for node in nodes if _changes(node) and node.target not in _SUMS):
        raise NotCompilable("it changes a tensor in place that is kept or used elsewhere")
    forward = _cut(joint, placeholders[:num_inputs], [output, *kept], ())
    backward = _cut(joint, [*placeholders, *kept], gradients, effects)
    return LayerGraphs(forward=forward, backward=backward, returned=graphs.returned, joint=joint)


def products_of(backward: Graph) -> list[Node]:
    """The products that a graph computes."""
    return [node for node in backward.module.graph.nodes if node.target in PRODUCTS]


def _needed(outputs: Sequence[Node], given: Collection[Node]) -> set[Node]:
    """What leads to some nodes, themselves included; not what leads to those that are `given`."""
    found, waiting = set[Node](), list(outputs)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += () if node in given else node.all_input_nodes
    return found


def _cut(joint: Graph, inputs: Sequence[Node], outputs: Sequence[Node], effects: Sequence[Node]) -> Graph:
    """The part of a graph between some of its nodes; `effects` are nodes that write, which are in it too."""
    graph, copies = FxGraph(), dict[Node, Node]()
    needed = _needed([*outputs, *effects], set(inputs))
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in joint.module.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in outputs])
    by_node = dict(zip(joint.module.graph.find_nodes(op="placeholder"), joint.inputs, strict=True))
    tensors: list[Tensor] = [by_node[node] if node in by_node else node.meta["val"] for node in inputs]
    return Graph(module=GraphModule(joint.module, graph), inputs=tensors, shape_env=joint.shape_env)


def _changes(node: Node) -> bool:
    """Whether an operation writes to one of its inputs."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _is_seen(change: Node, given: Collection[Node]) -> bool:
    """Whether what an operation changes is seen otherwise than in its result: by what is `given` to a graph, or by
    another user of the same memory."""
    changed = change.args[0]
    while isinstance(changed, Node) and changed not in given and len(changed.users) == 1:
        if not _shares_memory(changed):
            return False
        changed = changed.args[0]
    return True


def _shares_memory(node: Node) -> bool:
    """Whether a node's tensor is in the memory of its first argument: a view of it, or what was changed in place."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.arguments:
        return False
    # These do not say so.
    return schema.arguments[0].alias_info is not None or schema.name in ("aten::_unsafe_view", "aten::reshape")
