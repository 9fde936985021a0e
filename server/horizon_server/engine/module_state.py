"""Restores modules that change themselves when they run.

Some modules of transformers do: a rotary table grows with the longest position it has seen, or is
overwritten with other factors. A later call would then depend on an earlier one, and a resumed run on where it was stopped. Here
each call starts from the same state.

Owns the buffers and plain attributes of the modules it is given.
Thread: the thread that calls the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class _KeptBuffer:
    """A buffer, a copy of its content, and the version that autograd gave the buffer when it had that content."""

    buffer: Tensor
    content: Tensor
    version: int


class ModuleState:
    """The state of some modules as it is now."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        # Not the training mode, which is switched between calls on purpose.
        self._modules: list[tuple[nn.Module, dict[str, object], dict[str, _KeptBuffer]]] = []
        for module in modules:
            attributes = {name: value for name, value in vars(module).items() if name != "training"}
            # A buffer without storage belongs to the checkpoint: each call is given its values, so there is nothing to keep.
            buffers = {
                name: _KeptBuffer(buffer=buffer, content=buffer.clone(), version=buffer._version)
                for name, buffer in module.named_buffers(recurse=False)
                if not buffer.is_meta
            }
            self._modules.append((module, attributes, buffers))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put the modules back when the block ends."""
        try:
            yield
        finally:
            # Also after an error: the trials of a template run code that may fail halfway.
            for module, attributes, buffers in self._modules:
                _restore(module, attributes, buffers)

    def place(self, place: Callable[[Tensor], Tensor]) -> None:
        """Move the buffers to where compute reads them."""
        for module, _, buffers in self._modules:
            for name, kept in buffers.items():
                buffer, content = place(kept.buffer), place(kept.content)
                buffers[name] = _KeptBuffer(buffer=buffer, content=content, version=buffer._version)
                module._buffers[name] = buffer


def _restore(module: nn.Module, attributes: dict[str, object], buffers: dict[str, _KeptBuffer]) -> None:
    current = vars(module)
    # Compared by number first: this runs for every call of a layer.
    if len(current) != len(attributes) + 1:
        for name in [name for name in current if name not in attributes and name != "training"]:
            del current[name]
    for name, value in attributes.items():
        if current.get(name) is not value:
            current[name] = value
    for name, kept in buffers.items():
        if kept.buffer._version != kept.version:
            # Into a new tensor: backward may still need what the call wrote into the old one.
            with torch.no_grad():
                kept.buffer = kept.content.clone()
            kept.version = kept.buffer._version
        if module._buffers.get(name) is not kept.buffer:
            module._buffers[name] = kept.buffer
    for name, buffer in list(module._buffers.items()):
        if name not in buffers and buffer is not None and not buffer.is_meta:
            del module._buffers[name]
