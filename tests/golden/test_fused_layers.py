"""Layers with fused operators in place of their norms, rotary positions and SwiGLU: found for what it is, and the same
numbers."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from tests.support.tiny_models import config_of, template_of
from tests.support.traced_layers import CPU, FP32, ROWS, TRACED, TRACED_FOR, greatest_difference, trace
from torch import nn

from horizon_server.engine.compiled.call_pattern import CallPattern, LayerCase
from horizon_server.engine.compiled.graphs import LayerGraphs, trace_layer
from horizon_server.engine.compiled.layers import call_patterns
from horizon_server.engine.compiled.trial import relative_differences
from horizon_server.engine.fused.graphs import fuse_sums, has_fused_operators
from horizon_server.engine.fused.rms_norm import NormRule
from horizon_server.engine.fused.substitution import Substitution

LLAMA = NormRule(eps=1e-6, offset=0.0, rounds_first=True)
GEMMA = NormRule(eps=1e-6, offset=1.0, rounds_first=False)
# Norms of a layer with their rule, rotations (of queries and of keys), gated products.
FOUND: dict[str, tuple[int, NormRule | None, int, int]] = {
    "llama": (2, LLAMA, 2, 1),
    "qwen3": (4, LLAMA, 2, 1),
    "mistral": (2, LLAMA, 2, 1),
    "phi3": (2, NormRule(eps=1e-5, offset=0.0, rounds_first=True), 2, 1),
    # Their gates are those of gelu.
    "gemma2": (4, GEMMA, 2, 0),
    "gemma3_text": (6, GEMMA, 2, 0),
    "olmo2": (4, NormRule(eps=1e-5, offset=0.0, rounds_first=False), 2, 1),
    # Norms that subtract the mean; neighbouring elements are turned.
    "cohere2": (0, None, 0, 1),
    "starcoder2": (0, None, 2, 0),
    "gpt_neox": (0, None, 2, 0),
    # Complex numbers are multiplied; the norm of queries and keys has no weight; experts are gated too.
    "llama4_text": (2, NormRule(eps=1e-5, offset=0.0, rounds_first=True), 0, 2),
    "gpt2": (0, None, 0, 0),
    "gptj": (0, None, 0, 0),
    "opt": (0, None, 0, 0),
}
# Residuals that a norm adds: forward and recompute before the second norm of a layer; backward after both.
SUMS = dict.fromkeys(("llama", "qwen3", "mistral", "phi3", "llama4_text", "gemma2", "gemma3_text"), (2, 2))


def operators(graphs: LayerGraphs) -> Counter[str]:
    """How often each of our operators is called forward, and backward."""
    found: Counter[str] = Counter()
    for graph in (graphs.forward, graphs.backward):
        for node in graph.module.graph.nodes:
            if "horizon" in str(node.target):
                found[str(node.target).removeprefix("horizon.").removesuffix(".default")] += 1
    return found


@pytest.mark.parametrize("architecture", sorted(FOUND))
def test_a_layer_with_operators_computes_what_the_layer_computes(architecture: str) -> None:
    num_norms, rule, num_rotations, num_gates = FOUND[architecture]
    template = template_of(config_of(architecture))
    for group, pattern in call_patterns(template, FP32).items():
        assert isinstance(pattern, CallPattern)
        substitution = Substitution(template.groups[group])
        assert [*substitution.norms.values()] == num_norms * [rule]
        with substitution.active():
            graphs = trace(template, group, pattern)
        found = operators(graphs)
        # Once forward; once in recompute, but for what no gradient needs.
        assert (found["rms_norm_backward"], found["rotary_backward"], found["swiglu_backward"]) == (
            num_norms,
            num_rotations,
            num_gates,
        )
        assert (found["rotary"], found["swiglu"]) == (2 * num_rotations, 2 * num_gates)
        for graph in (graphs.forward, graphs.backward):
            fuse_sums(graph.module)
        found = operators(graphs)
        assert (found["rms_norm_of_sum"], found["rms_norm_backward_added"]) == SUMS.get(architecture, (0, 0))
        for lengths in ROWS:
            difference, worst = greatest_difference(template, group, pattern, graphs, lengths)
            assert difference <= 5e-6, (lengths, worst)


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16])
@pytest.mark.parametrize("architecture", sorted(FOUND))
def test_values_have_the_bits_of_the_layers_own_code(architecture: str, dtype: torch.dtype) -> None:
    template, generator = template_of(config_of(architecture)), torch.Generator().manual_seed(0)
    for group, layer in template.groups.items():
        places = template.places[group + 1]
        parameters = {p.name: (0.3 * torch.randn(p.piece.shape, generator=generator)).to(dtype) for p in places}
        hidden = torch.randn(1, 29, template.hidden_size, generator=generator).to(dtype)
        call = template.probe_calls((20, 9), dtype)[group]
        results = []
        for context in (nullcontext(), Substitution(layer).active()):
            leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}
            with context:
                output = template.layer(group, leaves, hidden, call)
            found = torch.autograd.grad(output, [*leaves.values()], hidden)
            results.append({"output": output.detach(), **dict(zip(leaves, found, strict=True))})
        assert torch.equal(results[0]["output"], results[1]["output"])
        # Backward rounds once where autograd rounds after each operation.
        tolerance = 5e-6 if dtype is FP32 else 2e-2
        assert max(relative_differences(*results).values()) <= tolerance


def test_outside_nothing_is_changed() -> None:
    template = template_of(config_of("qwen3"))
    (pattern,) = call_patterns(template, FP32).values()
    assert isinstance(pattern, CallPattern)
    with Substitution(template.groups[0]).active():
        assert has_fused_operators(trace(template, 0, pattern).forward.module)
    assert not has_fused_operators(trace(template, 0, pattern).forward.module)
    assert FOUND.keys() >= TRACED


class ClippedNorm(nn.Module):
    """Almost one of the known norms."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.weight * nn.functional.rms_norm(values, (8,), eps=self.eps).clamp(-1.5, 1.5)


class Root(ClippedNorm):
    """One of them, written differently."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        wide = values.float()
        return self.weight * (wide / (wide.square().sum(-1, keepdim=True) / 8 + self.eps).sqrt()).to(values.dtype)


def test_norms_are_known_by_their_numbers_alone() -> None:
    layer = nn.ModuleList(
        [ClippedNorm(), nn.LayerNorm(8, bias=False), nn.Linear(8, 8), Root(), nn.RMSNorm(8, eps=1e-5)]
    )
    found = Substitution(layer.to("meta")).norms
    assert found == {layer[3]: LLAMA, layer[4]: NormRule(eps=1e-5, offset=0.0, rounds_first=False)}


def test_a_weight_kept_in_fp32_keeps_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    template = template_of(config_of("qwen3"))
    (pattern,) = call_patterns(template, torch.bfloat16).values()
    assert isinstance(pattern, CallPattern)
    case = LayerCase(template=template, layer=0, pattern=pattern, lengths=TRACED_FOR, dtype=torch.bfloat16, device=CPU)
    kinds = type(template.places[1][0])
    exact = {place.name for place in template.places[1] if "post_attention_layernorm" in place.name}
    assert exact
    monkeypatch.setattr(kinds, "dtype_in", lambda place, dtype: FP32 if place.name in exact else dtype)
    with Substitution(template.groups[0]).active():
        graphs = trace_layer(case)
    assert operators(graphs)["rms_norm_backward"] == 3
