"""Every kind of layer as traced graphs, run as plain operations: the same output and gradients as the layer itself, for
any row."""

from __future__ import annotations

import pytest
from bench.gpu.steps import with_base
from tests.support.tiny_models import config_of, template_of
from tests.support.traced_layers import FP32, ROWS, TRACED, TRACED_FOR, greatest_difference, trace

from horizon_server.engine.compiled.call_pattern import CallPattern, NotCompilable
from horizon_server.engine.compiled.layers import call_patterns
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
