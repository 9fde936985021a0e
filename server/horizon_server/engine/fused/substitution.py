"""Where a layer computes RMSNorm, rotary positions and SwiGLU: found by trial, never by a list of models.

A module that holds one vector is an RMSNorm if it gives the numbers of one on random inputs. A function that turns
queries and keys is compared with the usual formula in the same way; only for it transformers' name is asked. SwiGLU is
seen when a layer runs: what silu returned is multiplied.

Shapes: D = size of a vector, T = tokens of a trial, E = size of a head, R = size of rotary tables.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from horizon_server.engine.fused.rms_norm import NormRule, normalise
from horizon_server.engine.fused.rotary import turn
from horizon_server.engine.fused.swiglu import gated
from horizon_server.engine.layer_stubs import RUN_ERRORS

_ROTARY = "apply_rotary_pos_emb"
_NUM_TOKENS = 5
_PRODUCTS = frozenset({torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__, Tensor.__rmul__})
_DTYPES = (torch.float32, torch.bfloat16)
# A rule fits where fp32 differs by rounding only, and where hardly any element in bf16 is rounded to a neighbour.
_TOLERANCE = 1e-5
_MAX_NEIGHBOURS = 0.02
# The sizes of the second trial input: there eps is most of what the root is taken of.
_SMALL = 1e-4

Rotary = Callable[..., tuple[Tensor, Tensor]]
Dtypes = tuple[torch.dtype, torch.dtype]


@dataclass(frozen=True, kw_only=True)
class _Rotation:
    """A rotary function among the globals of a model's code, and the dtypes of values and tables that it is replaced
    for."""

    namespace: dict[str, Any]
    function: Rotary
    dtypes: frozenset[Dtypes]


class Substitution:
    """The places of a layer where the operators can stand. SwiGLU has none before the layer runs."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self.norms = {module: rule for module in layer.modules() if (rule := _norm_rule(module)) is not None}
        """The modules that compute RMSNorm."""
        namespaces = {id(space): space for module in layer.modules() if (space := _namespace(module)) is not None}
        self._rotations = [found for space in namespaces.values() if (found := _rotation(space)) is not None]

    @property
    def has_rotary(self) -> bool:
        """Whether the layer's code has a rotary function that can be replaced."""
        return bool(self._rotations)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside the block the layer computes with the operators. For one thread at a time, and for no other layer of
        the same code."""
        with ExitStack() as stack:
            # In the class, because a template puts the attributes of modules back after each call.
            for kind in {type(module) for module in self.norms}:
                stack.enter_context(_replaced(kind, self._norm_forward(kind.forward)))
            kind = type(self._layer)
            stack.enter_context(_replaced(kind, _layer_forward(kind.forward)))
            for rotation in self._rotations:
                rotation.namespace[_ROTARY] = _rotary_function(rotation)
                stack.callback(rotation.namespace.__setitem__, _ROTARY, rotation.function)
            yield

    def _norm_forward(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            rule = self.norms.get(module)
            if rule is None or len(args) != 1 or kwargs:
                return plain(module, *args, **kwargs)
            (values,), (weight,) = args, module.parameters(recurse=False)
            # A weight that is kept in fp32 in a bf16 model makes the result fp32.
            if values.dtype != weight.dtype or values.dtype not in _DTYPES:
                return plain(module, values)
            return normalise(values, weight, rule)

        return forward


@contextmanager
def _replaced(kind: type[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    inherited = "forward" not in vars(kind)
    plain = kind.forward
    kind.forward = forward
    try:
        yield
    finally:
        if inherited:
            del kind.forward
        else:
            kind.forward = plain


def _layer_forward(plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Gates():
            return plain(module, *args, **kwargs)

    return forward


class _Gates(TorchFunctionMode):
    """Replaces the product of what silu returned with a tensor of its shape. The value of silu is then dead code in a
    traced graph."""

    def __init__(self) -> None:
        super().__init__()
        # With the result itself, so that no other tensor can get its id meanwhile.
        self._activated: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and len(args) == 2 and not kwargs:
            for activated, up in (args, args[::-1]):
                _, gate = self._activated.get(id(activated), (None, None))
                if gate is not None and isinstance(up, Tensor) and (gate.shape, gate.dtype) == (up.shape, up.dtype):
                    return gated(gate, up)
        result = func(*args, **kwargs)
        if func is functional.silu and len(args) == 1 and not kwargs.get("inplace") and args[0].dtype in _DTYPES:
            self._activated[id(result)] = (result, args[0])
        return result


def _norm_rule(module: nn.Module) -> NormRule | None:
    """The rule of a module whose only parameter is a vector and which computes RMSNorm with it."""
    parameters = list(module.named_parameters(recurse=False))
    if len(parameters) != 1 or any(module.children()) or any(module.buffers()):
        return None
    ((name, weight_D),) = parameters
    if weight_D.dim() != 1:
        return None
    fits = []
    for eps in {value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1}:
        for offset, rounds_first in itertools.product((0.0, 1.0), (True, False)):
            rule = NormRule(eps=eps, offset=offset, rounds_first=rounds_first)
            if (misfit := _misfit(module, name, weight_D.shape[0], rule)) <= _MAX_NEIGHBOURS:
                fits.append((misfit, rule))
    return min(fits, key=lambda fit: fit[0])[1] if fits else None


def _misfit(module: nn.Module, name: str, size: int, rule: NormRule) -> float:
    """The share of elements in bf16 that differ from the rule's; 1 where a module computes something else."""
    generator = torch.Generator().manual_seed(0)
    differing = []
    for scale, dtype in itertools.product((1.0, _SMALL), _DTYPES):
        weight_D = (torch.randn(size, generator=generator) + 0.5).to(dtype)
        values_1TD = (scale * (torch.randn(1, _NUM_TOKENS, size, generator=generator) + 0.5)).to(dtype)
        try:
            with torch.no_grad():
                found = functional_call(module, {name: weight_D}, (values_1TD,))
                expected = normalise(values_1TD, weight_D, rule)
        except (*RUN_ERRORS, AttributeError):
            return 1.0
        if not _agree(found, expected):
            return 1.0
        if dtype is torch.bfloat16:
            differing.append(float((found != expected).float().mean()))
    return max(differing)


def _agree(found: object, expected: Tensor) -> bool:
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    tolerance = _TOLERANCE if found.dtype is torch.float32 else torch.finfo(found.dtype).eps
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().mean()))


def _namespace(module: nn.Module) -> dict[str, Any] | None:
    """The globals of a module's code, where they have a rotary function."""
    found: dict[str, Any] = getattr(inspect.unwrap(type(module).forward), "__globals__", {})
    return found if callable(found.get(_ROTARY)) else None


def _rotation(namespace: dict[str, Any]) -> _Rotation | None:
    function: Rotary = namespace[_ROTARY]
    pairs = itertools.product(_DTYPES, _DTYPES)
    dtypes = frozenset(pair for pair in pairs if all(_turns_alike(function, pair, kept) for kept in (0, 4)))
    return _Rotation(namespace=namespace, function=function, dtypes=dtypes) if dtypes else None


def _turns_alike(function: Rotary, dtypes: Dtypes, num_kept: int) -> bool:
    """Whether the function gives the usual numbers for heads of which the last elements stay, if any."""
    generator = torch.Generator().manual_seed(0)
    size = 8
    # Any numbers: not each table repeats its first half, and what backward needs must hold for those that do not.
    cos, sin = (torch.randn(1, _NUM_TOKENS, size, generator=generator).to(dtypes[1]) for _ in range(2))
    query, key = (
        torch.randn(1, _NUM_TOKENS, heads, size + num_kept, generator=generator).to(dtypes[0]).transpose(1, 2)
        for heads in (4, 2)
    )
    try:
        with torch.no_grad():
            found = function(query, key, cos, sin)
    except (*RUN_ERRORS, AttributeError):
        # Heads of which a part stays are cut by the caller of most of these functions.
        return num_kept > 0
    expected = (turn(query, cos, sin), turn(key, cos, sin))
    return len(found) == 2 and all(_agree(*pair) for pair in zip(found, expected, strict=True))


def _rotary_function(rotation: _Rotation) -> Rotary:
    def function(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        tables_fit = cos.dim() == 3 and cos.shape == sin.shape and cos.dtype == sin.dtype and cos.shape[-1] % 2 == 0
        values = (query, key)
        if args or kwargs or not tables_fit or any((v.dtype, cos.dtype) not in rotation.dtypes for v in values):
            return rotation.function(query, key, cos, sin, *args, **kwargs)
        return turn(query, cos, sin), turn(key, cos, sin)

    return function
