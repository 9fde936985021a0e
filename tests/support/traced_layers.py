"""Traced layers, and how far they are from the layers themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from horizon_server.engine.compiled.call_pattern import CallPattern, LayerCase
from horizon_server.engine.compiled.graphs import LayerGraphs, trace_layer
from horizon_server.engine.compiled.trial import relative_differences
from horizon_server.engine.fp8 import Fp8Visit, by_columns, by_rows
from horizon_server.engine.linear import LinearMap, LinearMaps
from horizon_server.engine.template import Template
from horizon_server.recipe import Matmul

FP32, CPU = torch.float32, torch.device("cpu")
TRACED_FOR = (20, 28)
# Other numbers of tokens and of documents than those that were traced.
ROWS = [(20, 28), (11, 13, 7, 3), (37,), (2,)]

TRACED = {
    "qwen3",
    "gemma2",
    "gemma3_text",
    "olmo2",
    "cohere2",
    "gpt2",
    "gpt_neox",
    "gptj",
    "starcoder2",
    "llama4_text",
    "opt",
}
"""Architectures of which every kind of layer can be traced."""


def trace(
    template: Template,
    group: int,
    pattern: CallPattern,
    lengths: tuple[int, ...] = TRACED_FOR,
    *,
    matmul: Matmul = "bf16",
    dtype: torch.dtype = FP32,
    device: torch.device = CPU,
) -> LayerGraphs:
    case = LayerCase(
        template=template, layer=group, pattern=pattern, lengths=lengths, dtype=dtype, device=device, matmul=matmul
    )
    return trace_layer(case)


def greatest_difference(
    template: Template,
    group: int,
    pattern: CallPattern,
    graphs: LayerGraphs,
    lengths: tuple[int, ...],
    *,
    matmul: Matmul = "bf16",
) -> tuple[float, str]:
    """Between the graphs and the layer under autograd, relative, and where it is."""
    generator = torch.Generator().manual_seed(0)
    places = template.places[group + 1]
    parameters = {p.name: 0.3 * torch.randn(p.piece.shape, generator=generator) for p in places}
    hidden, gradient = (torch.randn(1, sum(lengths), template.hidden_size, generator=generator) for _ in range(2))
    call = template.probe_calls(lengths, FP32)[group]
    tensors = pattern.tensors_of(call)
    if tensors is None:
        return 0.0, "served by the eager layer"
    trained = [place.name for place in places if place.trained]
    leaves = {name: parameters[name].clone().requires_grad_() for name in trained}
    leaf = hidden.clone().requires_grad_()
    own = {**parameters, **leaves}
    casts = Fp8Visit(places, matmul, for_backward=True).of(parameters)
    maps = LinearMaps((own[name], LinearMap(cast=cast)) for name, cast in casts.items())
    output = template.layer(group, own, leaf, call, maps)
    found = torch.autograd.grad(output, [leaf, *leaves.values()], gradient, allow_unused=True)
    expected = {"output": output.detach(), **dict(zip(["hidden state", *trained], found, strict=True))}

    matrices = [place.name for place in places if place.is_matrix]
    # Not zeros: what is there before the first product must not count.
    outs = {name: torch.full_like(parameters[name], torch.nan) for name in matrices}
    flags = {name: torch.tensor(True) for name in matrices}
    targets = [part for name in matrices for part in (outs[name], flags[name])]
    with torch.no_grad():
        inputs = [*parameters.values(), *by_rows(casts), hidden, *tensors]
        (output,) = graphs.forward.module(*inputs)
        hidden_gradient, *others = graphs.backward.module(*inputs, gradient, *by_columns(casts), *targets)
    got: dict[str, Tensor] = {"output": output, "hidden state": hidden_gradient}
    got |= {name: out for name, out in outs.items() if not flags[name]}
    for name, value in zip(graphs.returned, others, strict=True):
        got[name] = got[name] + value if name in got else value
    differences = relative_differences({name: value for name, value in expected.items() if value is not None}, got)
    worst = max(differences, key=differences.__getitem__)
    return differences[worst], worst
