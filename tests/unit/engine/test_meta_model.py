"""Modules are put back as they were, and a config alone says which tensors a model has."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from tests.support.tiny_models import config_of
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoConfig, GPTNeoXConfig

from horizon_server.engine.meta_model import ModuleState, draws_random_numbers, layer_signature, tensors_of_config
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.store.safetensors_files import write_outline


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("scale", torch.ones(2), persistent=False)
        self.longest = 3

    def forward(self, num_tokens: int) -> torch.Tensor:
        if num_tokens > self.longest:
            self.register_buffer("table", torch.arange(float(num_tokens)), persistent=False)
            self.register_buffer("extra", torch.ones(1), persistent=False)
            self.longest = num_tokens
            self.cache = "new"
        scale = self.scale
        assert isinstance(scale, torch.Tensor)
        scale.mul_(2)
        table = self.table
        assert isinstance(table, torch.Tensor)
        return table.sum() * scale[0]


def test_every_call_starts_from_the_same_state() -> None:
    module = Growing()
    state = ModuleState([module])
    answers = []
    for _ in range(3):
        with state.restored():
            answers.append(float(module(5)))

    assert answers == [20.0, 20.0, 20.0]
    assert {name: buffer.tolist() for name, buffer in module.named_buffers()} == {"table": [0, 1, 2], "scale": [1, 1]}
    assert module.longest == 3
    assert not hasattr(module, "cache")


def test_what_backward_needs_is_not_overwritten() -> None:
    module = Growing()
    leaf = torch.ones(2, requires_grad=True)
    with ModuleState([module]).restored():
        module(1)
        scale = module.scale
        assert isinstance(scale, torch.Tensor)
        product = (leaf * scale).sum()
    product.backward()  # type: ignore[no-untyped-call]

    assert leaf.grad is not None
    assert leaf.grad.tolist() == [2, 2]


def test_placed_buffers_are_what_is_restored() -> None:
    module = Growing()
    state = ModuleState([module])
    state.place(lambda tensor: tensor.double())
    for _ in range(2):
        with state.restored():
            module(7)

    table = module.get_buffer("table")
    assert (table.dtype, table.tolist()) == (torch.float64, [0, 1, 2])


def test_the_training_mode_is_not_part_of_it() -> None:
    module = Growing()
    state = ModuleState([module])
    module.train(False)
    with state.restored():
        pass

    assert not module.training


def test_dropout_that_only_other_heads_have_is_none_of_a_language_model() -> None:
    assert not draws_random_numbers(GPTNeoXConfig())
    assert not draws_random_numbers(GPTNeoConfig())
    assert not draws_random_numbers(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    assert draws_random_numbers(GPT2Config())
    assert draws_random_numbers(GPTNeoXConfig(hidden_dropout=0.1))


def test_layers_with_large_masks_are_compared_without_copies_of_them() -> None:
    def layer(last: float) -> nn.Module:
        module = nn.Linear(2, 2)
        mask = torch.ones(512, 512)
        mask[-1, -1] = last
        module.register_buffer("mask", mask, persistent=False)
        return module

    one, equal, other = layer(1.0), layer(1.0), layer(2.0)
    tracemalloc.start()
    signature = layer_signature(one)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert signature == layer_signature(equal) != layer_signature(other)
    assert peak_bytes < 512 * 512


# Tied and not, with experts, windows, compressed attention, one table of all layers' inputs, and no attention.
@pytest.mark.parametrize("model_type", ["qwen3", "llama", "gemma3_text", "gpt2", "mixtral", "deepseek_v3", "mamba"])
def test_a_config_alone_is_laid_out_as_large_as_the_folder_with_its_weights(model_type: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config_of(model_type))  # type: ignore[no-untyped-call]
    model.save_pretrained(tmp_path)
    of_weights = open_model_folder(tmp_path).layout
    tensors = tensors_of_config(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    write_outline(tmp_path / "model.safetensors", tensors)
    of_config = open_model_folder(tmp_path).layout
    assert of_config.num_parameters == of_weights.num_parameters
    assert len(of_config.units) == len(of_weights.units)
