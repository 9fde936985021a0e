"""Models of a given shape with random weights, for benchmarks: a host store, and the same as plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
from horizon_server.engine.template import Template
from horizon_server.store.host_store import HostStore

SHAPES = {
    "6m": {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "vocab_size": 4096,
    },
    "40m": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 16384,
    },
    # The vocabulary's share of a 7 B model (7 %), where the 40 M one spends a fifth on it.
    "36m": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 12,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4096,
    },
    # As deep as a 7 B model is: what a step waits for at its two ends is one layer's worth, whatever their number.
    "deep": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 4096,
    },
    # As deep, of small layers, with the vocabulary's share of a 7 B model: for devices whose speed is emulated.
    "thin": {
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 1536,
    },
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
    },
    # The same with 6 of its layers and that share of its vocabulary, for machines without room for several copies of
    # it.
    "0.6b-short": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 32768,
    },
}
MOE_SHAPES: dict[str, dict[str, Any]] = {
    "mixtral-56m": {
        "model_type": "mixtral",
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4096,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "qwen3_moe-43m": {
        "model_type": "qwen3_moe",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "moe_intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "vocab_size": 4096,
        "num_experts": 16,
        "num_experts_per_tok": 4,
    },
}


def qwen3_config(shape: str) -> PretrainedConfig:
    """A tied Qwen3 config of a named shape."""
    config: PretrainedConfig = AutoConfig.for_model(
        "qwen3", **SHAPES[shape], max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0
    )
    return config


def moe_config(shape: str) -> PretrainedConfig:
    """A tied config of a named shape with experts."""
    config: PretrainedConfig = AutoConfig.for_model(
        **MOE_SHAPES[shape], max_position_embeddings=4096, tie_word_embeddings=True, pad_token_id=0
    )
    return config


def random_store(template: Template, *, grad_dtype: torch.dtype | None = torch.float32) -> HostStore:
    """A store with N(0, 0.02) weights and ones for norms, filled unit by unit."""
    store = HostStore.allocate(template.layout, grad_dtype=grad_dtype)
    generator = torch.Generator().manual_seed(0)
    for name, shape in template.shapes.items():
        store.write_master(
            name, torch.ones(shape) if len(shape) == 1 else 0.02 * torch.randn(shape, generator=generator)
        )
    return store


def plain_model(template: Template, store: HostStore, config: PretrainedConfig) -> torch.nn.Module:
    """The same weights as a plain module in fp32, ready to train with gradient checkpointing."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    merged = {}
    for unit in template.layout.units:
        buffer = torch.empty(unit.num_elements)
        store.merge_master(unit.index, buffer)
        for tensor in unit.tensors:
            merged[tensor.name] = buffer[tensor.offset : tensor.offset + tensor.num_elements].view(tensor.shape).clone()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(merged[name])
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    module: torch.nn.Module = model.train()
    return module


def random_rows(vocab_size: int, *, num_rows: int, row_tokens: int, seed: int = 0) -> list[MicroBatch]:
    """Rows of one document of random tokens each."""
    return rows_of(vocab_size, [(row_tokens,)] * num_rows, seed=seed)


def rows_of(vocab_size: int, document_lengths: Sequence[tuple[int, ...]], *, seed: int = 0) -> list[MicroBatch]:
    """A row of random tokens for each tuple of document lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for lengths in document_lengths:
        ids = torch.randint(1, vocab_size, (sum(lengths),), generator=generator)
        labels = ids.roll(-1)
        labels[torch.tensor(lengths).cumsum(0) - 1] = IGNORED_LABEL
        positions = torch.cat([torch.arange(length) for length in lengths])
        rows.append(MicroBatch(input_ids_T=ids, position_ids_T=positions, labels_T=labels, document_lengths=lengths))
    return rows
