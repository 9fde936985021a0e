"""Products of a layer's forward that stay in memory until its backward, whose recompute takes them instead of computing
them again.

What is kept is the output of each matrix product and of attention; norms, rotations and activation functions are cheap
and computed again. A product is only taken where the same operator comes with tensors of the same form, in the same
order; from the first one that differs, everything is computed. So a result has the same bits whatever is kept.

Thread: compute's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# Registers the operator.
from horizon_server.engine.attention import kernels as _kernels  # noqa: F401

_aten = torch.ops.aten
# Not products of batches: attention with masks is made of them, and its scores are all pairs of tokens.
_KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten._scaled_mm.default,
        torch.ops.horizon.attention.default,
    }
)


class KeptProducts:
    """The products of one layer for one micro-batch, in the order in which they came."""

    def __init__(self) -> None:
        self._entries: deque[tuple[object, Any, int]] = deque()

    @property
    def num_bytes(self) -> int:
        """What they take."""
        return sum(tensor.untyped_storage().nbytes() for _, output, _ in self._entries for tensor in _tensors(output))

    def drop_last(self) -> None:
        """Forget the product that came last, which backward does not compute."""
        if self._entries:
            self._entries.pop()

    def recording(self) -> TorchDispatchMode:
        """Inside the block, products are kept."""
        return _Recording(self._entries)

    def taken(self) -> TorchDispatchMode:
        """Inside the block, products that are kept are taken, each once."""
        return _Taking(self._entries)


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, entries: deque[tuple[object, Any, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries = entries

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in _KEPT:
            # Another tensor of the same memory, so that nothing which autograd attaches to the layer's own is kept.
            kept = tuple(t.detach() for t in output) if isinstance(output, tuple) else output.detach()
            self._entries.append((_form(func, args, kwargs), kept, _num_changes(kept)))
        return output


class _Taking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, entries: deque[tuple[object, Any, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries = entries

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEPT and self._entries:
            form, output, num_changes = self._entries.popleft()
            # Its memory may have become another value's in forward.
            if form == _form(func, args, kwargs) and num_changes == _num_changes(output):
                return output
            self._entries.clear()
        return func(*args, **(kwargs or {}))


def _form(func: Any, args: Any, kwargs: Any) -> object:
    """What decides which kernel runs: the operator, and the form of every tensor that it is given."""
    given = (*args, *(kwargs or {}).values())
    # The place in its memory tells weights of one shape apart: a layer's are views of one slot.
    return func, [
        (arg.shape, arg.stride(), arg.storage_offset(), arg.dtype) if isinstance(arg, Tensor) else arg for arg in given
    ]


def _tensors(output: Any) -> Iterator[Tensor]:
    yield from output if isinstance(output, tuple) else (output,)


def _num_changes(output: Any) -> int:
    return sum(tensor._version for tensor in _tensors(output))
