"""Additions in a traced graph that a norm's operator can do: of a residual before it, and of the gradients after it.

A norm reads or writes what is added anyway, whatever the model: between two of its operators no other code is looked
at.
"""

from __future__ import annotations

import operator
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from horizon_server.engine.fused.rms_norm import rms_norm, rms_norm_backward, rms_norm_backward_added, rms_norm_of_sum
from horizon_server.engine.fused.rotary import rotary, rotary_backward
from horizon_server.engine.fused.swiglu import swiglu, swiglu_backward

_NORM, _NORM_BACKWARD = rms_norm._opoverload, rms_norm_backward._opoverload
_OF_SUM, _BACKWARD_ADDED = rms_norm_of_sum._opoverload, rms_norm_backward_added._opoverload
_FUSED = {_NORM, _NORM_BACKWARD, _OF_SUM, _BACKWARD_ADDED}
_FUSED |= {kernel._opoverload for kernel in (rotary, rotary_backward, swiglu, swiglu_backward)}


def has_fused_operators(module: GraphModule) -> bool:
    """Whether a graph calls one of the operators."""
    return any(node.target in _FUSED for node in module.graph.nodes)


def fuse_sums(module: GraphModule) -> None:
    """Give the operators of norms the additions before and after them."""
    graph = module.graph
    for norm in graph.find_nodes(op="call_function", target=_NORM):
        total, weight, *rule = norm.args
        if _is_sum(total) and weight.op == "placeholder":
            fused = _insert(graph, total, _OF_SUM, (*total.args, weight, *rule), (total, norm))
            norm.replace_all_uses_with(fused[1])
            total.replace_all_uses_with(fused[0])
    for norm in graph.find_nodes(op="call_function", target=_NORM_BACKWARD):
        results = {node.args[1]: node for node in norm.users}
        for_values, for_weight = results.get(0), results.get(1)
        total = next(iter(for_values.users)) if for_values and len(for_values.users) == 1 else None
        # The fused operator takes the sum's place, so nothing may need the other result before.
        if not for_weight or any(user.op != "output" for user in for_weight.users) or not _is_sum(total):
            continue
        one, other = total.args
        if one is not other:
            added = other if one is for_values else one
            fused = _insert(graph, total, _BACKWARD_ADDED, (added, *norm.args), (total, for_weight))
            total.replace_all_uses_with(fused[0])
            for_weight.replace_all_uses_with(fused[1])
    graph.eliminate_dead_code()
    module.recompile()


def _is_sum(node: object) -> TypeGuard[Node]:
    """Whether a node adds two tensors of its own shape and dtype."""
    if not isinstance(node, Node) or node.target is not torch.ops.aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    values = [argument.meta.get("val") if isinstance(argument, Node) else None for argument in (node, *node.args)]
    # As text: comparing sizes that depend on the tokens would make the graph right for fewer of them.
    kinds = {(str(list(value.shape)), value.dtype) for value in values if isinstance(value, Tensor)}
    return len(kinds) == 1 and None not in values


def _insert(graph: Graph, place: Node, target: Any, args: tuple[Any, ...], like: tuple[Node, Node]) -> list[Node]:
    """Two results of an operator before a node; they are tensors like those of two others."""
    with graph.inserting_before(place):
        called = graph.call_function(target, args)
        results = [graph.call_function(operator.getitem, (called, index)) for index in range(2)]
    for result, other in zip(results, like, strict=True):
        result.meta["val"] = other.meta["val"]
    called.meta["val"] = tuple(result.meta["val"] for result in results)
    return results
