"""Weight decay applies to the parameters that the Hugging Face Trainer decays, whatever the family calls its norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from horizon_server.store.layout import build_layout

_TWO_LAYERS, _TWO_SHORT = {"num_hidden_layers": 2}, {"n_layer": 2}
_FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "qwen3", "gemma2", "gemma3_text", "olmo2", "cohere2", "phi", "starcoder2"), _TWO_LAYERS),
    **dict.fromkeys(("gpt_oss", "mixtral", "doge", "stablelm", "persimmon", "gpt_neox", "opt"), _TWO_LAYERS),
    **dict.fromkeys(("falcon", "mamba", "mamba2", "rwkv", "biogpt"), _TWO_LAYERS),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj", "codegen", "bloom", "openai-gpt"), _TWO_SHORT),
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "mpt": {"n_layers": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "qwen3_next": {"num_hidden_layers": 4, "num_experts": 4},
}


@pytest.mark.parametrize("model_type", _FAMILIES)
def test_the_decayed_parameters_are_those_of_the_trainer(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **_FAMILIES[model_type])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    num_layers = next(
        v for k in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if (v := getattr(config, k, 0))
    )
    layout = build_layout(shapes, num_layers=num_layers, tied=False)
    wanted = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    assert {tensor.name for _, tensor in layout.tensors() if tensor.decay} == set(wanted) & set(shapes)
