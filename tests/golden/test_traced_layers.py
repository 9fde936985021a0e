"""Every kind of layer as traced graphs, run as plain operations: the same output and gradients as the layer itself, for
any row."""

from __future__ import annotations

from typing import Any

import pytest
from bench.gpu.steps import with_base
from tests.support.tiny_models import config_of, template_of
from tests.support.traced_layers import CPU, FP32, ROWS, TRACED, TRACED_FOR, greatest_difference, trace

from horizon_server.engine.compiled.call_pattern import CallPattern, NotCompilable
from horizon_server.engine.compiled.graphs import Graph
from horizon_server.engine.compiled.layers import call_patterns
from horizon_server.engine.compiled.library import Target, layer_key
from horizon_server.engine.template import Template

EXPERTS = "torch traces no grouped product in fp32"
RECURRENT = "loops or chunks whose number depends on the tokens"
EAGER = {
    "mixtral": ({0}, EXPERTS),
    # The first layers are dense.
    "deepseek_v3": ({1}, EXPERTS),
    "gpt_oss": ({0, 1}, EXPERTS),
    "bloom": ({0}, "torch traces no baddbmm of unknown sizes"),
    "mamba": ({0}, RECURRENT),
    # Some layers have attention.
    "olmo_hybrid": ({0}, RECURRENT),
}
"""Kinds of layers, by the first of each, that run eagerly, and why."""
# Of a recurrent layer: more than one of its chunks of 64 tokens, because the code for one of them holds for every
# shorter row.
LENGTHS = {"olmo_hybrid": (60, 68)}


@pytest.mark.parametrize("architecture", sorted(TRACED | EAGER.keys()))
def test_a_traced_layer_computes_what_the_layer_computes(architecture: str) -> None:
    template, eager = template_of(config_of(architecture)), set()
    for group, pattern in call_patterns(template, FP32).items():
        try:
            if isinstance(pattern, NotCompilable):
                raise pattern
            graphs = trace(template, group, pattern, LENGTHS.get(architecture, TRACED_FOR))
        except NotCompilable as error:
            eager.add(group)
            # For the job's events, where no Python error is of use.
            assert "Error" not in str(error) and "torch" not in str(error) and "/" not in str(error), str(error)
            continue
        for lengths in ROWS:
            difference, worst = greatest_difference(template, group, pattern, graphs, lengths)
            # Norms and activations are taken apart when they are traced, which rounds otherwise.
            assert difference <= 5e-6, (lengths, worst)
    # A kind that a later torch can trace moves out of the list.
    assert eager == EAGER.get(architecture, (set(), ""))[0]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "starcoder2"])
def test_a_frozen_layer_with_adapters_is_traced_with_biases_and_without(architecture: str) -> None:
    config = config_of(architecture)
    layout = with_base(template_of(config).layout, "bf16")
    template = Template.from_config(config, layout=layout)
    pattern = call_patterns(template, FP32)[0]
    assert isinstance(pattern, CallPattern)

    # torch takes a frozen map with a bias apart in C++, which fixed the number of tokens.
    graphs = trace(template, 0, pattern, TRACED_FOR)

    for lengths in ROWS:
        difference, worst = greatest_difference(template, 0, pattern, graphs, lengths)
        assert difference <= 5e-6, (lengths, worst)


def test_a_loop_over_chunks_of_tokens_is_refused_without_following_it() -> None:
    template = template_of(config_of("olmo_hybrid"))
    pattern = call_patterns(template, FP32)[0]
    assert isinstance(pattern, CallPattern)
    # 1,024 chunks, whose 64 rounds each would take an hour.
    with pytest.raises(NotCompilable, match="differs for every number of tokens"):
        trace(template, 0, pattern, (1 << 16,))


# Other numbers of layers, of tokens, and other ids of special tokens.
OTHERS: dict[str, Any] = {"vocab_size": 160, "num_hidden_layers": 5, "pad_token_id": 3, "eos_token_id": 4}


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "olmo2", "cohere2"])
def test_models_that_differ_around_their_layers_share_keys_and_layers_with_one_key_have_one_graph(
    architecture: str,
) -> None:
    one, other = template_of(config_of(architecture)), template_of(config_of(architecture, **OTHERS))
    target = Target(dtype=FP32, device=CPU, num_threads=1, num_tokens=sum(TRACED_FOR))
    graphs: dict[str, set[tuple[str, ...]]] = {}
    for template in (one, other):
        for kind, pattern in call_patterns(template, FP32).items():
            assert isinstance(pattern, CallPattern)
            traced = trace(template, kind, pattern)
            text = (*_text_of(traced.forward), *_text_of(traced.backward), *traced.returned)
            graphs.setdefault(layer_key(template, kind, target), set()).add(text)
    # Among more layers there may be one of a further kind.
    assert len(graphs) == max(len(set(one.layer_kinds)), len(set(other.layer_kinds)))
    assert all(len(texts) == 1 for texts in graphs.values())


def _text_of(graph: Graph) -> list[str]:
    shapes = [(tensor.dtype, tuple(map(str, tensor.shape)), tensor.stride()) for tensor in graph.inputs]
    return [graph.module.code, str(shapes)]


@pytest.mark.parametrize("change", [{"hidden_act": "gelu"}, {"rms_norm_eps": 1e-3}, {"max_position_embeddings": 64}])
def test_models_whose_layers_may_differ_share_no_key(change: dict[str, Any]) -> None:
    target = Target(dtype=FP32, device=CPU, num_threads=1, num_tokens=sum(TRACED_FOR))
    one, other = (template_of(config_of("llama", **more)) for more in ({}, change))
    assert layer_key(one, 0, target) != layer_key(other, 0, target)
