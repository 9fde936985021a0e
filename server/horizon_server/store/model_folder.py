"""A Hugging Face model folder as the store sees it: config.json, tensor headers, the layout they imply.

Owns what the daemon may know of a model without torch: its shape numbers, whether it is tied, which files travel with
it. Reads no weights, runs no code from the folder, and must not know how a model computes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server.errors import InvalidModel
from horizon_server.store.layout import (
    StoreLayout,
    build_layout,
    is_input_table,
    is_output_projection,
    parameter_shapes,
)
from horizon_server.store.safetensors_header import TensorHeader, read_safetensors_headers

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 16_000_000

_PREDICTION_HEAD = "mtp"

_TABLE_WIDTHS = ("word_embed_proj_dim", "embedding_size", "hidden_size", "n_embd", "d_model")
"""What configs call the columns of the embedding, the special names first."""

UNBOUNDED_POSITIONS = 1 << 40
"""Stands for a config without a limit on the sequence length."""

COMPANION_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
)
"""Files copied beside the weights of a checkpoint when the source has them: data only, never code, never a pickle."""


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Feed-forward layers of many experts, of which each token visits a few, and shared ones that every token visits."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    shared_intermediate_size: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder that memory depends on, under one name each whatever its config calls them."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    softcaps_attention: bool
    tied: bool
    experts: ExpertShape | None = None
    narrow_values: bool = False
    """Whether values are of another size than queries and keys, which rules out fused attention on a CPU."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, names: Iterable[str] | None = None) -> ModelShape:
        """Read the sizes from the object in config.json; a multimodal config's text part counts.

        `names` of the tensors decide whether the model is tied where its config does not say.

        Raises:
            InvalidModel: a size is missing or no positive integer; the message names it.
        """
        text = _text_config(config)
        hidden_size = _size(text, "hidden_size", "n_embd", "d_model")
        num_heads = _size(text, "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
        return cls(
            hidden_size=hidden_size,
            num_hidden_layers=_num_layers(text),
            vocab_size=_size(text, "vocab_size"),
            intermediate_size=_size(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden_size),
            num_attention_heads=num_heads,
            num_key_value_heads=_size(text, "num_key_value_heads", default=num_heads),
            head_dim=_size(text, "head_dim", default=max(1, hidden_size // num_heads)),
            max_position_embeddings=_size(text, "max_position_embeddings", "n_positions", default=UNBOUNDED_POSITIONS),
            # A soft cap on the scores rules out fused attention, so that the scores are kept.
            softcaps_attention=text.get("attn_logit_softcapping") is not None,
            tied=_is_tied(config, names),
            experts=_experts(text),
            narrow_values=_has_narrow_values(text),
        )


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """What a model folder announces, checked: its parsed config, its shape, its tensors and where each will lie."""

    path: Path
    config: Mapping[str, Any]
    shape: ModelShape
    headers: Mapping[str, TensorHeader]
    layout: StoreLayout


def open_model_folder(folder: Path) -> ModelFolder:
    """Read a folder's config and headers and lay its parameters out, without torch and without reading a weight.

    Raises:
        InvalidModel: the folder cannot be trained from; the message says which file and what to do.
    """
    config = read_config(folder)
    if "quantization_config" in config:
        raise InvalidModel(f"{folder} holds quantised weights, which cannot be fine-tuned; give the bfloat16 original")
    headers = read_safetensors_headers(folder)
    shape = ModelShape.from_config(config, names=headers)
    if not shape.tied and not any(is_output_projection(name) for name in headers):
        raise InvalidModel(
            f"{folder}: config.json says tie_word_embeddings = false, but no tensor is the output projection "
            f"(lm_head.weight); copy the folder again or correct the config"
        )
    shapes = stored_shapes(config, headers)
    check_edges(config, shapes, tied=shape.tied)
    layout = build_layout(shapes, num_layers=shape.num_hidden_layers, tied=shape.tied)
    return ModelFolder(path=folder, config=config, shape=shape, headers=headers, layout=layout)


def stored_shapes(config: Mapping[str, Any], headers: Mapping[str, TensorHeader]) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that go into the store: a folder's parameters without its heads that predict further tokens."""
    return {name: shape for name, shape in parameter_shapes(headers).items() if not is_prediction_head(config, name)}


def check_edges(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, tied: bool) -> None:
    """Hold the tables at both ends of the model against the sizes in its config, where it names them.

    The shapes in between depend on the architecture; they are checked against the model class when the weights are loaded.

    Raises:
        InvalidModel: a table has other rows than the vocabulary, or other columns than the hidden state; it is named.
    """
    text = _text_config(config)
    sizes = _count(text, "vocab_size"), _count(text, *_TABLE_WIDTHS)
    inputs = [name for name in shapes if is_input_table(name)]
    outputs = [name for name in shapes if is_output_projection(name) and not tied]
    for names in (inputs, outputs):
        # Where there are several, they may belong to other parts than the decoder.
        if len(names) != 1:
            continue
        found = shapes[names[0]]
        if len(found) != len(sizes) or any(size not in (0, side) for size, side in zip(sizes, found, strict=True)):
            wanted = " x ".join(str(size or "any") for size in sizes)
            raise InvalidModel(
                f"{names[0]} has shape {list(found)}, the sizes in config.json ask for {wanted}; "
                "config and weights must belong together"
            )


def is_prediction_head(config: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor belongs to what some checkpoints have for predicting several tokens at once, and model classes leave out.

    It is either named so, or is a layer beyond the last one, as many as the config says.
    """
    if name.partition(".")[0] == _PREDICTION_HEAD:
        return True
    num_extra, numbers = config.get("num_nextn_predict_layers"), [part for part in name.split(".") if part.isdigit()]
    if type(num_extra) is not int or num_extra < 1 or not numbers:
        return False
    num_layers = _num_layers(config)
    return num_layers <= int(numbers[0]) < num_layers + num_extra


def read_config(folder: Path) -> dict[str, Any]:
    """The object in a folder's config.json.

    Raises:
        InvalidModel: the file is missing, too large or no JSON object.
    """
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise InvalidModel(f"{folder} holds no {CONFIG_FILE}; give a folder written by save_pretrained")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise InvalidModel(f"{file} is larger than {MAX_CONFIG_BYTES} bytes, which no model config is")
    try:
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidModel(f"{file} must hold a JSON object, not a {type(config).__name__}")
    return config


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A multimodal config's text part, else the whole."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _is_tied(config: Mapping[str, Any], names: Iterable[str] | None) -> bool:
    for source in (config, _text_config(config)):
        if isinstance(source.get("tie_word_embeddings"), bool):
            return bool(source["tie_word_embeddings"])
    return names is not None and not any(is_output_projection(name) for name in names)


def _experts(text: Mapping[str, Any]) -> ExpertShape | None:
    num_experts = _count(text, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not num_experts:
        return None
    inner_size = _count(text, "moe_intermediate_size", "intermediate_size", "ffn_dim")
    num_shared = _count(text, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return ExpertShape(
        num_experts=num_experts,
        num_experts_per_token=_count(text, "num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k") or 1,
        intermediate_size=inner_size,
        shared_intermediate_size=_count(text, "shared_expert_intermediate_size") or num_shared * inner_size,
    )


def _has_narrow_values(text: Mapping[str, Any]) -> bool:
    query_size = _count(text, "qk_nope_head_dim") + _count(text, "qk_rope_head_dim")
    return 0 < query_size != _count(text, "v_head_dim") > 0


def _num_layers(config: Mapping[str, Any]) -> int:
    kinds = config.get("layers_block_type")
    default = len(kinds) if isinstance(kinds, list) and kinds else None
    return _size(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers", default=default)


def _count(config: Mapping[str, Any], *names: str) -> int:
    """The first positive integer under one of these names, 0 where none is."""
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)


def _size(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise InvalidModel(f"config.json: {name} is {value!r}; it must be a positive integer")
        return value
    if default is None:
        raise InvalidModel(f"config.json: {names[0]} is missing; give the config.json that belongs to the weights")
    return default
