"""A layer's last projection, whose value backward does not need.

Recomputing a layer before its backward calculates every intermediate value again. The output of the last projection
(back to the hidden size, in most decoders) is only added to the residual: no gradient depends on it. So it is skipped
there, a fifth to a quarter of the recompute. Whether that holds for a layer is found by watching what autograd saves,
not by the architecture's name.

Shapes: T = tokens, I = inputs of the projection, O = its outputs.
Thread: a layer is called by one thread at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from horizon_server.engine.layer_stubs import RUN_ERRORS, LayerCall
from horizon_server.engine.linear import linear_without_value


class SkippedProjection:
    """Replaces a projection's forward: it computes, except inside `skipped`.

    `weight` is its weight's name in the layer, `num_parameters` are its elements; skipping it saves twice as many
    operations per token.
    """

    def __init__(self, projection: nn.Module, name: str) -> None:
        assert isinstance(projection, nn.Linear)
        self._projection, self._skips, self.weight = projection, False, f"{name}.weight"
        self.num_parameters = projection.weight.numel()
        # Replaced on the instance: a hook would come too late, when the value has been computed.
        projection.forward = self._forward  # type: ignore[assignment]

    @contextmanager
    def skipped(self) -> Iterator[None]:
        """Inside the block the projection returns uninitialised memory of the right shape; its gradients are exact."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def _forward(self, inputs: Tensor) -> Tensor:
        weight, bias = self._projection.weight, self._projection.bias
        # Products of other layouts are multiplied in another order, so of those the bits would differ.
        if self._skips and inputs.is_contiguous():
            return linear_without_value(inputs, weight, bias)
        return functional.linear(inputs, weight, bias)


def find_skipped_projection(layer: nn.Module, call: LayerCall, *, hidden_size: int) -> SkippedProjection | None:
    """The projection after which autograd saves nothing more, if a layer has one. The layer has no storage."""
    args, kwargs = call.without_storage(hidden_size=hidden_size)
    # On a copy: some layers move what they hold to where they find the hidden state.
    trial = copy.deepcopy(layer)
    called: list[nn.Module] = []
    saves_after_it = False

    def on_call(module: nn.Module, _inputs: object, _output: object) -> None:
        nonlocal saves_after_it
        called.append(module)
        saves_after_it = False

    def on_save(tensor: Tensor) -> Tensor:
        nonlocal saves_after_it
        saves_after_it = True
        return tensor

    for module in trial.modules():
        if type(module) is nn.Linear:
            module.register_forward_hook(on_call)
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(on_save, lambda tensor: tensor):
            trial(*args, **kwargs)
    except RUN_ERRORS:
        # Layers that cannot run without storage (experts are chosen by values) are computed as they are.
        return None
    # One that is called twice would be skipped the first time too, where its value may be needed.
    if not called or saves_after_it or called.count(called[-1]) > 1:
        return None
    name = {module: name for name, module in trial.named_modules()}[called[-1]]
    return SkippedProjection(layer.get_submodule(name), name)
