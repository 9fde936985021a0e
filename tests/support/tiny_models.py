"""Tiny models with random weights, and the plain in-memory PyTorch they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import pytest
import torch
import transformers
from tests.support.plans import settings
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from horizon_server.engine.compiled.layers import CompiledLayers
from horizon_server.engine.device.cuda import CudaDevice
from horizon_server.engine.device.host import HostDevice
from horizon_server.engine.micro_batch import IGNORED_LABEL, MicroBatch
from horizon_server.engine.template import Template
from horizon_server.engine.trainer import Trainer
from horizon_server.planning.model_folder import WITHOUT_ATTENTION
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import with_compressed_states

VOCAB = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 7,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts_per_tok": 2}
_NO_PDROP = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.0}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
_GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "qwen2": {},
    "mistral": {"sliding_window": 9},
    "gemma2": {"sliding_window": 9},
    "gemma3_text": {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "phi3": {},
    "olmo2": {},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7},
    "smollm3": {},
    "glm4": {},
    "cohere2": {"sliding_window": 9},
    "mixtral": {"num_local_experts": 4, **_MOE},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, **_MOE},
    "gpt_oss": {"num_local_experts": 4, **_MOE},
    "deepseek_v3": {"n_shared_experts": 1, "moe_intermediate_size": 24, **_LATENT, **_GROUPED, **_MOE},
    "qwen3_next": {
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        **_LINEAR,
        **_MOE,
    },
    "starcoder2": {},
    "gpt_neox": {},
    "gpt2": {"n_layer": 3, "n_head": 4, "n_embd": 32, "n_positions": 128, **_NO_PDROP},
    "bloom": {"n_layer": 3, "n_head": 4},
    "falcon": {},
    "gptj": {"n_layer": 3, "n_head": 4, "n_embd": 32, "rotary_dim": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "olmo_hybrid": {},
    "minimax": {"num_local_experts": 4, **_MOE},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 48, **_MOE},
    "nemotron": {},
    "phi": {},
    "stablelm": {},
    "mamba": {"state_size": 8},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v32": {
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "index_topk": 4,
        "index_n_heads": 2,
        "index_head_dim": 16,
        **_LATENT,
        **_GROUPED,
        **_MOE,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1},
    "phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0, **_MOE},
    "minicpm3": {**_LATENT},
    "falcon_mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "state_size": 8, "chunk_size": 8},
    "xlstm": {"num_heads": 4, "chunk_size": 16},
}
_OF_ATTENTION = frozenset({"num_attention_heads", "num_key_value_heads", "head_dim"})

# Sizes that its config computes from others.
_NOT_SET = {"falcon": frozenset({"head_dim"})}

ARCHITECTURES = [
    "qwen3",
    "llama",
    "qwen2",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "smollm3",
    "cohere2",
    "mixtral",
    "qwen3_moe",
    "glm4",
    # A buffer that belongs to the checkpoint (the routers' correction bias), dense and expert layers in one list.
    "deepseek_v3",
    # Tables of learned positions, names of their own, layers that answer with tuples, biases everywhere.
    "gpt2",
    "gpt_neox",
    "gptj",
    "phi",
    "stablelm",
    "starcoder2",
    "nemotron",
    # No attention without masks for chunks.
    "llama4_text",
    # The masks of these do not look for documents.
    "gpt_oss",
    "opt",
]
MIXES_DOCUMENTS = {
    "qwen3_next": "linear attention",
    "olmo_hybrid": "linear attention, and convolutions that are cut otherwise on disk",
    "minimax": "linear attention with buffers of the checkpoint",
    "mamba": "a state space, no positions at all",
    "falcon_mamba": "a state space, no positions at all",
    "mamba2": "a state space computed in chunks",
    "xlstm": "a matrix memory, no positions at all",
    "bloom": "distances instead of positions, a norm between embedding and layers",
}


def config_of(model_type: str, **changes: Any) -> PretrainedConfig:
    """A tiny config of an architecture."""
    left_out = _OF_ATTENTION if model_type in WITHOUT_ATTENTION else _NOT_SET.get(model_type, frozenset())
    sizes = {name: value for name, value in _SIZES.items() if name not in left_out}
    config: PretrainedConfig = AutoConfig.for_model(model_type, **{**sizes, **CHANGES[model_type], **changes})
    return config


_TEMPLATES: dict[str, Template] = {}


def template_of(config: PretrainedConfig) -> Template:
    """The template of a config, made once: trying a model out takes longer than most tests. A step leaves it as it was
    (`test_a_step_leaves_the_modules_as_they_were`), so what a test sees does not depend on the tests before it.
    """
    if torch.cuda.is_available():
        return Template.from_config(config)  # a template is for one device
    # Which function computes experts is no part of what a config writes down.
    key = f"{config._experts_implementation} {config.to_json_string(use_diff=False)}"
    if key not in _TEMPLATES:
        _TEMPLATES[key] = Template.from_config(copy.deepcopy(config))
    return _TEMPLATES[key]


def micro_batch(documents: Sequence[Tensor]) -> MicroBatch:
    """Documents packed into a row; every token predicts the next one of its document."""
    ignored = torch.tensor([IGNORED_LABEL])
    return MicroBatch(
        input_ids_T=torch.cat(list(documents)),
        position_ids_T=torch.cat([torch.arange(d.numel()) for d in documents]),
        labels_T=torch.cat([torch.cat([d[1:], ignored]) for d in documents]),
        document_lengths=tuple(d.numel() for d in documents),
    )


@dataclass(frozen=True, kw_only=True)
class TinyModel:
    """A model in memory, the template of the same config, and stores filled with the same weights."""

    config: PretrainedConfig
    template: Template
    weights: dict[str, Tensor]
    stores: list[HostStore]

    def reference(self) -> torch.nn.Module:
        """The model as plain PyTorch."""
        model: torch.nn.Module = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if name in self.weights:
                    tensor.copy_(self.weights[name])
        return model.train(False)

    def store(self, **options: Any) -> HostStore:
        """A new store with the model's weights and no moments."""
        store = HostStore.allocate(self.template.layout, num_threads=1, **options)
        for name, weight in self.weights.items():
            store.write_master(name, weight)
        self.stores.append(store)
        return store


@pytest.fixture(autouse=True)
def quiet_transformers() -> None:
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


@pytest.fixture
def tiny_model() -> Iterator[Callable[..., TinyModel]]:
    """Builds a tiny model of an architecture, with weights that leave no parameter without effect."""
    stores: list[HostStore] = []

    def build(model_type: str, **changes: Any) -> TinyModel:
        config = config_of(model_type, **changes)
        generator = torch.Generator().manual_seed(1)
        template = template_of(config)
        weights = {}
        for _, tensor in template.layout.tensors():
            noise = torch.randn(tensor.shape, generator=generator)
            is_norm = len(tensor.shape) == 1 and "norm" in tensor.name
            weights[tensor.name] = 1 + 0.1 * noise if is_norm else 0.08 * noise
        return TinyModel(config=config, template=template, weights=weights, stores=stores)

    yield build
    for store in stores:
        store.close()


def compressed(model: TinyModel, *, smallest: int = 256) -> TinyModel:
    """The same model with compressed optimizer states, of its smaller matrices too."""
    layout = with_compressed_states(model.template.layout, smallest=smallest)
    assert layout.is_compressed
    return replace(model, template=Template.from_config(model.config, layout=layout))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A trainer with what it works on."""

    trainer: Trainer
    store: HostStore
    device: HostDevice | CudaDevice

    def gradient(self, name: str) -> Tensor:
        """A parameter's gradient of the last step, in its own shape."""
        rows = self.trainer._sink.row_gradient
        unit, place = self.store.layout.find(name)
        if rows is None or unit.kind != "embedding":
            return self.store.tensor(name, "grad")
        table_VD = rows.values_RD.new_zeros(place.shape)
        table_VD[rows.rows_R] = rows.values_RD
        return table_VD

    def gradients(self) -> Tensor:
        """All of the last step, one after the other."""
        return torch.cat([self.gradient(tensor.name).reshape(-1) for _, tensor in self.store.layout.tensors()])


@pytest.fixture
def start() -> Iterator[Callable[..., Run]]:
    """Starts a trainer on a new store; `device` and config options by name."""
    runs: list[Run] = []

    def begin(
        model: TinyModel,
        *,
        device: HostDevice | CudaDevice | None = None,
        store: HostStore | None = None,
        compiled: CompiledLayers | None = None,
        **options: Any,
    ) -> Run:
        device = device or HostDevice(num_threads=1)
        store = store or model.store()
        num_steps = options.pop("num_steps", 20)
        recipe, execution = settings(**{"optimizer_threads": 1, **options})
        trainer = Trainer(model.template, store, device, recipe, execution, num_steps=num_steps, compiled=compiled)
        run = Run(trainer=trainer, store=store, device=device)
        runs.append(run)
        return run

    yield begin
    for run in runs:
        run.device.close()


@pytest.fixture
def documents() -> Callable[..., list[Tensor]]:
    """Random documents of the given lengths."""

    def draw(*lengths: int, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(VOCAB, (n,), generator=generator) for n in lengths]

    return draw


def summed_loss(model: torch.nn.Module, batch: MicroBatch) -> Tensor:
    """Plain PyTorch: the sum of the losses of a row's targets, the whole row's logits at once."""
    inputs = {"input_ids": batch.input_ids_T[None], "position_ids": batch.position_ids_T[None], "use_cache": False}
    base: Any = model.base_model
    known = {**signature(model.forward).parameters, **signature(base.forward).parameters}
    logits_TV = model(**{name: value for name, value in inputs.items() if name in known}).logits[0]
    return functional.cross_entropy(logits_TV.float(), batch.labels_T, reduction="sum", ignore_index=IGNORED_LABEL)


@pytest.fixture
def pack() -> Callable[[Sequence[Tensor]], MicroBatch]:
    """`micro_batch`, for tests."""
    return micro_batch


@pytest.fixture
def plain_loss() -> Callable[[torch.nn.Module, MicroBatch], Tensor]:
    """`summed_loss`, for tests."""
    return summed_loss


@dataclass(frozen=True, kw_only=True)
class Engine:
    """What a golden test is made of: tiny models, what starts a trainer on one, rows for it, and plain PyTorch."""

    tiny_model: Callable[..., TinyModel]
    start: Callable[..., Run]
    documents: Callable[..., list[Tensor]]
    pack: Callable[[Sequence[Tensor]], MicroBatch]
    plain_loss: Callable[[torch.nn.Module, MicroBatch], Tensor]


@pytest.fixture
def engine(
    tiny_model: Callable[..., TinyModel],
    start: Callable[..., Run],
    documents: Callable[..., list[Tensor]],
    pack: Callable[[Sequence[Tensor]], MicroBatch],
    plain_loss: Callable[[torch.nn.Module, MicroBatch], Tensor],
) -> Engine:
    """Closed with the test."""
    return Engine(tiny_model=tiny_model, start=start, documents=documents, pack=pack, plain_loss=plain_loss)
