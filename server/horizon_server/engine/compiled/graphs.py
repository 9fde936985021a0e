"""A decoder layer as two graphs of aten operations: forward, and recompute with backward. The number of tokens stays a
symbol.

The second graph computes gradients from the layer's input, so that products whose result no gradient needs are not in
it: what `skipped_projection` searches for in layers that run eagerly is dead code here.

Shapes: T = tokens of a micro-batch, D = hidden size.
Source: torch.fx.experimental.proxy_tensor.make_fx over torch.func.vjp.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vjp
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from horizon_server.engine.binding import Place, Strided
from horizon_server.engine.compiled.call_pattern import LayerCase, NotCompilable
from horizon_server.engine.compiled.equal_nodes import merge_equal
from horizon_server.engine.fp8 import Fp8Weight, by_columns, by_rows, cast_names
from horizon_server.engine.layer_stubs import LayerCall
from horizon_server.engine.linear import Accumulator, LinearMap, LinearMaps
from horizon_server.recipe import Matmul

log = logging.getLogger(__name__)

# Where a graph's conditions depend on the number of tokens, they are tried for these. One token is not among them: a
# dimension of size 1 broadcasts, so a graph for it would be another one.
_TRIED_SIZES = (2, 3, 4, 7, 8, 16, 31, 32, 64, 100, 127, 256, 511, 1024, 2048, 4096, 4097, 8192, 16384, 65536, 1 << 17)
# Of a weight in FP8, each way that it is cast: values and scales.
_CAST_TENSORS = 2
_FILLS = frozenset({"aten::full", "aten::full_like", "aten::zeros", "aten::zeros_like", "aten::new_zeros"})
_VIEWS = frozenset({"aten::view", "aten::reshape", "aten::expand", "aten::permute", "aten::t"})

Function = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A traced function of tensors. `inputs` are tensors without storage, of the shapes it was traced with."""

    module: GraphModule
    inputs: list[Tensor]
    shape_env: ShapeEnv

    def token_range(self, num_tokens: int) -> tuple[int, int]:
        """The least and the most tokens the graph is right for, around the number it was traced with.

        Compiling adds conditions too: ask after it.
        """
        return _token_range(self.shape_env, num_tokens)


@dataclass(frozen=True, kw_only=True)
class LayerGraphs:
    """Both graphs of a kind of layer.

    Inputs of `forward`: the layer's parameters in the order of `Template.places`, their `Template.norms`, the casts of
    weights in FP8 `by_rows`, the hidden state, the tensors of the call. Its output is the hidden state. `backward`
    takes after these: the gradient of the output, the casts `by_columns`, then for every place that `is_matrix` its
    accumulator and its flag. Its outputs: the gradient of the hidden state, then those of the parameters in `returned`.
    """

    forward: Graph
    backward: Graph
    returned: tuple[str, ...]


def trace_layer(case: LayerCase) -> LayerGraphs:
    """Trace a layer as its template runs it.

    Raises:
        NotCompilable: the layer's code depends on values, or on the number of tokens.
    """
    template, layer, pattern, num_tokens = case.template, case.layer, case.pattern, case.num_tokens
    dtype, device = case.dtype, case.device
    places, norm_sizes = template.places[layer + 1], template.norm_sizes(layer)
    names = [*(place.name for place in places), *norm_sizes]
    matrices = [place for place in places if place.is_matrix]
    trained = [place.name for place in places if place.trained]
    num_tensors = len(pattern.tensors)
    call_tensors = pattern.tensors_of(case.call) or []
    casts = _Casts(places, case.matmul)

    def split(
        inputs: Sequence[Tensor],
    ) -> tuple[dict[str, Tensor], Sequence[Tensor], Tensor, LayerCall, Sequence[Tensor]]:
        parameters = dict(zip(names, inputs, strict=False))
        rows, (hidden_1TD, *rest) = casts.split(inputs[len(names) :])
        return parameters, rows, hidden_1TD, pattern.call_with(case.call, rest[:num_tensors]), rest[num_tensors:]

    def forward(*inputs: Tensor) -> list[Tensor]:
        parameters, rows, hidden_1TD, call, _ = split(inputs)
        maps = [(parameters[name], LinearMap(cast=cast)) for name, cast in casts.of(rows).items()]
        return [template.layer(layer, parameters, hidden_1TD, call, LinearMaps(maps, is_traced=True))]

    def backward(*inputs: Tensor) -> list[Tensor]:
        parameters, rows, hidden_1TD, call, (gradient_1TD, *rest) = split(inputs)
        columns, targets = casts.split(rest)
        in_fp8 = casts.of(rows, columns)
        pairs = zip(targets[::2], targets[1::2], strict=True)
        accumulators = {
            place.name: Accumulator(out=out, first=first) for place, (out, first) in zip(matrices, pairs, strict=True)
        }

        def output(trained_parameters: Mapping[str, Tensor], hidden_1TD: Tensor) -> Tensor:
            # In here, because differentiation wraps the parameters, and the mode knows them by identity.
            own = {**parameters, **trained_parameters}
            maps = [
                (own[name], LinearMap(accumulator=accumulators.get(name), cast=in_fp8.get(name)))
                for name in accumulators.keys() | in_fp8.keys()
            ]
            return template.layer(layer, own, hidden_1TD, call, LinearMaps(maps, is_traced=True))

        gradients_of = vjp(output, {name: parameters[name] for name in trained}, hidden_1TD)[1]
        gradients, hidden_gradient_1TD = gradients_of(gradient_1TD)
        return [hidden_gradient_1TD, *(gradients[name] for name in trained)]

    def inputs(fake: _Inputs, *, with_gradients: bool) -> list[Tensor]:
        hidden = (1, num_tokens, template.hidden_size)
        found = [fake.fixed(place, place.dtype_in(dtype)) for place in places]
        found += [fake.of_tokens(torch.empty(size, device=device), (size,)) for size in norm_sizes.values()]
        found += casts.inputs(fake, by_rows)
        found.append(fake.of_tokens(torch.empty(hidden, dtype=dtype, device=device), (None, None, hidden[-1])))
        for tensor, shape in zip(call_tensors, pattern.tensors, strict=True):
            found.append(fake.of_tokens(tensor, shape.sizes))
        if with_gradients:
            found.append(fake.of_tokens(torch.empty(hidden, dtype=dtype, device=device), (None, None, hidden[-1])))
            found += casts.inputs(fake, by_columns)
            for place in matrices:
                found += [fake.fixed(place, torch.float32), fake.flag()]
        return found

    try:
        forward_graph = _trace(forward, lambda fake: inputs(fake, with_gradients=False), num_tokens, device)
        backward_graph = _trace(backward, lambda fake: inputs(fake, with_gradients=True), num_tokens, device)
    except NotCompilable:
        raise
    except Exception as error:  # Tracing raises whatever the layer's code and torch make of tensors without values.
        # What torch says is for the log: it names its own files and types.
        log.warning("a layer cannot be traced: %s: %s", type(error).__name__, error)
        raise NotCompilable(_why_not_traced(places)) from error
    returned = _drop_zeros(backward_graph.module, trained)
    if case.matmul != "bf16":
        for graph in (forward_graph, backward_graph):
            merge_equal(graph.module)
    return LayerGraphs(forward=forward_graph, backward=backward_graph, returned=returned)


def _why_not_traced(places: Sequence[Place]) -> str:
    """In words why a layer's code could not be turned into a graph for rows of any length."""
    names = [place.name for place in places]
    if any("experts" in name for name in names):
        return (
            "it chooses experts by values, and the products of experts cannot be compiled in this type of "
            "computation on this device"
        )
    if any(part in name for name in names for part in ("conv1d", "A_log", "in_proj_qkvz", "linear_attn")):
        return "its recurrent layers are computed in steps whose number depends on the length of a row"
    return "its code in transformers decides by values or by the length of a row"


class _Casts:
    """The weights in FP8 among the inputs of a layer's graphs."""

    def __init__(self, places: Sequence[Place], matmul: Matmul) -> None:
        names = cast_names(places, matmul)
        self._places, self._is_full = [place for place in places if place.name in names], matmul == "fp8_full"

    def split(self, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The tensors of all weights, cast in one way, and the inputs after them."""
        size = _CAST_TENSORS * len(self._places)
        return inputs[:size], inputs[size:]

    def of(self, rows: Sequence[Tensor], columns: Sequence[Tensor] = ()) -> dict[str, Fp8Weight]:
        """The weights by name, of the tensors of both ways."""
        pairs, others = (list(zip(way[::2], way[1::2], strict=True)) for way in (rows, columns))
        return {
            place.name: Fp8Weight(pairs[i], others[i] if others else None, self._is_full)
            for i, place in enumerate(self._places)
        }

    def inputs(self, fake: _Inputs, way: Callable[[Mapping[str, Fp8Weight]], list[Tensor]]) -> list[Tensor]:
        """Tensors without storage, for a trace."""
        weights = {place.name: fake.fixed(place, torch.float32) for place in self._places}
        with fake.mode:
            return way({name: Fp8Weight.of(weight, for_backward=True) for name, weight in weights.items()})


class _Inputs:
    """Makes tensors without storage for one trace. Equal sizes that depend on the tokens become one symbol."""

    def __init__(self, mode: FakeTensorMode, device: torch.device) -> None:
        self.mode, self._device = mode, device

    def fixed(self, place: Place, dtype: torch.dtype) -> Tensor:
        """A parameter's view into a flat buffer, or a copy of its parts."""
        shape, piece = place.piece.shape, place.piece
        with self.mode:
            if isinstance(piece, Strided):
                return torch.empty_strided(shape, piece.strides, dtype=dtype, device=self._device)
            return torch.empty(shape, dtype=dtype, device=self._device)

    def of_tokens(self, tensor: Tensor, sizes: Sequence[int | None]) -> Tensor:
        """A tensor whose sizes are symbols where `sizes` has None and the tensor is longer than 1."""
        kinds = [
            DimDynamic.DUCK if size is None and found > 1 else DimDynamic.STATIC
            for size, found in zip(sizes, tensor.shape, strict=True)
        ]
        return self.mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))

    def flag(self) -> Tensor:
        """The flag of an accumulator, which is on the CPU for every device."""
        with self.mode:
            return torch.empty((), dtype=torch.bool)


class _Conditions(ShapeEnv):
    """Ends a trace once its conditions hold for no other number of tokens: a loop over chunks of them is not followed
    to its end."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self._num_tokens, self._num_seen, self.is_tracing = num_tokens, 0, True

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        found = super().evaluate_expr(*args, **kwargs)
        if self.is_tracing and len(self.guards) > self._num_seen:
            self._num_seen = len(self.guards)
            least, most = _token_range(self, self._num_tokens)
            if least == most:
                raise NotCompilable("its code differs for every number of tokens")
        return found


def _token_range(shape_env: ShapeEnv, num_tokens: int) -> tuple[int, int]:
    def holds_for(size: int) -> bool:
        return all(bool(guard.expr.subs(dict.fromkeys(guard.expr.free_symbols, size))) for guard in shape_env.guards)

    below = [size for size in _TRIED_SIZES if size < num_tokens]
    above = [size for size in _TRIED_SIZES if size > num_tokens]
    least, most = itertools.takewhile(holds_for, reversed(below)), itertools.takewhile(holds_for, above)
    return min([num_tokens, *least]), max([num_tokens, *most])


def _trace(
    function: Function, make_inputs: Callable[[_Inputs], list[Tensor]], num_tokens: int, device: torch.device
) -> Graph:
    shape_env = _Conditions(num_tokens)
    # Buffers that a layer computes itself (rotary tables) are real, and become constants of the graph.
    mode = FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)
    inputs = make_inputs(_Inputs(mode, device))
    # Without Python's dispatcher, torch 2.11 takes a product apart in C++, which asks for sizes that are symbols and
    # fails.
    with mode, enable_python_dispatcher():
        module = make_fx(function, tracing_mode="real", decomposition_table=select_decomp_table())(*inputs)
    shape_env.is_tracing = False  # the compiler's conditions narrow the range, and end nothing
    module.graph.eliminate_dead_code()
    module.recompile()
    return Graph(module=module, inputs=inputs, shape_env=shape_env)


def _drop_zeros(module: GraphModule, trained: Sequence[str]) -> tuple[str, ...]:
    """Take outputs away that are zeros by construction; returns the parameters whose gradients are left.

    `vjp` answers with zeros for a parameter that nothing used, or whose uses all add to an accumulator.
    """
    (output,) = module.graph.find_nodes(op="output")
    hidden, *gradients = output.args[0]
    kept = [(name, node) for name, node in zip(trained, gradients, strict=True) if not _is_fill(node)]
    output.args = ([hidden, *(node for _, node in kept)],)
    module.graph.eliminate_dead_code()
    module.recompile()
    return tuple(name for name, _ in kept)


def _is_fill(node: Node) -> bool:
    # Through views, because zeros may be made in another shape.
    while _schema_name(node) in _VIEWS and isinstance(source := node.args[0], Node):
        node = source
    return _schema_name(node) in _FILLS


def _schema_name(node: Node) -> str:
    return str(getattr(getattr(node.target, "_schema", None), "name", ""))
