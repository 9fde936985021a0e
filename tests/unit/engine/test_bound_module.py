"""A module called with given parameters, against torch's own functional_call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from horizon_server.engine.bound_module import BoundModule


class Tied(nn.Module):
    """Two maps of one weight, a buffer, and an argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, inputs: Tensor, *, scale: float = 1.0) -> Tensor:
        if scale < 0:
            raise ValueError("a scale below zero")
        found: Tensor = self.second(self.first(inputs).tanh()) * scale + self.shift
        return found


def given() -> dict[str, Tensor]:
    return {"first.weight": torch.randn(4, 4), "second.bias": torch.randn(4), "shift": torch.randn(4)}


def test_it_computes_what_functional_call_does_with_tensors_that_have_several_names() -> None:
    module, inputs, parameters = Tied(), torch.randn(3, 4), given()
    found = BoundModule(module)(parameters, inputs, scale=2.0)
    assert torch.equal(found, functional_call(module, parameters, (inputs,), {"scale": 2.0}))
    by_the_other_name = {**parameters, "second.weight": parameters["first.weight"]}
    del by_the_other_name["first.weight"]
    assert torch.equal(found, BoundModule(module)(by_the_other_name, inputs, scale=2.0))


@pytest.mark.parametrize("scale", [1.0, -1.0])
def test_the_module_has_its_own_parameters_afterwards_even_after_an_error(scale: float) -> None:
    module = Tied()
    before = dict(module.state_dict(keep_vars=True))
    try:
        BoundModule(module)({**given(), "second.weight": torch.randn(4, 4)}, torch.randn(3, 4), scale=scale)
    except ValueError:
        assert scale < 0
    after = module.state_dict(keep_vars=True)
    assert all(after[name] is value for name, value in before.items())
    assert module.second.weight is module.first.weight


def test_gradients_reach_the_given_parameters() -> None:
    parameters = {"first.weight": torch.randn(4, 4, requires_grad=True)}
    BoundModule(Tied())(parameters, torch.randn(3, 4)).sum().backward()
    assert parameters["first.weight"].grad is not None


def test_only_arguments_that_its_forward_has_are_accepted() -> None:
    assert BoundModule(Tied()).accepted({"inputs": 1, "scale": 2, "use_cache": 3}) == {"inputs": 1, "scale": 2}
