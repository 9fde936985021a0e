"""Equal operations of a graph become one, but for those whose results are written to."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from horizon_server.engine.compiled.equal_nodes import merge_equal


def traced(function: Callable[..., Tensor], *inputs: Tensor) -> GraphModule:
    module = make_fx(function)(*inputs)
    merge_equal(module)
    return module


def count(module: GraphModule, operator: str) -> int:
    return sum(str(node.target).startswith(f"aten.{operator}.") for node in module.graph.nodes)


def test_equal_operations_become_one_even_around_one_that_writes() -> None:
    def function(values: Tensor, total: Tensor) -> Tensor:
        one = values.abs().amax(1)
        torch.ops.horizon.add_sum(total, one, torch.tensor(False))
        return one + values.abs().amax(1) + values.abs().amax(0)

    values, total = torch.randn(4, 4), torch.zeros(4)
    module = traced(function, values, total)

    assert (count(module, "abs"), count(module, "amax")) == (1, 2)
    wanted = function(values, torch.zeros(4))
    assert torch.equal(module(values, total), wanted)


def test_what_is_written_to_stays_apart() -> None:
    def function(values: Tensor) -> Tensor:
        one, other = values * 2, values * 2
        one.add_(1)
        return one + other

    values = torch.randn(4)
    module = traced(function, values)

    assert count(module, "mul") == 2
    assert torch.equal(module(values), function(values))
