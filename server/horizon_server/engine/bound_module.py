"""Calls of a module with parameters that are given for the call alone.

What `torch.func.functional_call` does, which walks through all modules in every call: in steps of few tokens that took
longer than some of their products.

Thread: one at a time for a module.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from torch import Tensor, nn

# Where a parameter or buffer is kept: a module's own dictionary, and the name in it.
_Slot = tuple[dict[str, Any], str]


class BoundModule:
    """A module to call with parameters. Which names share a tensor is read when it is made: all of them are given what
    one of them is given."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        slots: dict[str, tuple[object, _Slot]] = {}
        for prefix, owner in module.named_modules(remove_duplicate=False):
            for kept in (owner._parameters, owner._buffers):
                for name, tensor in kept.items():
                    slots[f"{prefix}.{name}" if prefix else name] = (tensor, (kept, name))
        alike: dict[int, list[_Slot]] = {}
        for tensor, slot in slots.values():
            if tensor is not None:
                alike.setdefault(id(tensor), []).append(slot)
        self._slots = {name: alike.get(id(tensor), [slot]) for name, (tensor, slot) in slots.items()}

    def accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Those of the arguments that its forward has."""
        return {name: value for name, value in arguments.items() if name in self._names}

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(inspect.signature(self._module.forward).parameters)

    def __call__(self, parameters: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        """Call the module; it has the parameters that it had before when this returns or raises."""
        before: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for name, tensor in parameters.items():
                for kept, key in self._slots[name]:
                    before.append((kept, key, kept[key]))
                    kept[key] = tensor
            return self._module(*args, **kwargs)
        finally:
            # Backwards, because a name may be given twice where a tensor has several.
            for kept, key, value in reversed(before):
                kept[key] = value
