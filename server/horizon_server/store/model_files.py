"""The files of a Hugging Face model folder apart from its weights: config.json and the files that travel with them.

Owns how config.json is read and which of its names mean the same number. Runs no code from the folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horizon_server.errors import InvalidModel

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 16_000_000

_PREDICTION_HEAD = "mtp"

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


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A multimodal config's text part, else the whole."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def num_decoder_layers(config: Mapping[str, Any]) -> int:
    """The number of decoder layers, which some configs give as a list of their kinds.

    Raises:
        InvalidModel: it is missing or not a positive integer.
    """
    kinds = config.get("layers_block_type")
    default = len(kinds) if isinstance(kinds, list) and kinds else None
    return config_size(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers", default=default)


def config_count(config: Mapping[str, Any], *names: str) -> int:
    """The first positive integer under one of these names, 0 where none is."""
    values = (config.get(name) for name in names)
    return next((value for value in values if type(value) is int and value > 0), 0)


def config_size(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The number under the first of these names that the config has.

    Raises:
        InvalidModel: it is not a positive integer, or is missing and has no default.
    """
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


def is_prediction_head(config: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor belongs to what some checkpoints have for predicting several tokens at once, and model classes leave out.

    It is either named so, or is a layer beyond the last one, as many as the config says.
    """
    if name.partition(".")[0] == _PREDICTION_HEAD:
        return True
    num_extra, numbers = config.get("num_nextn_predict_layers"), [part for part in name.split(".") if part.isdigit()]
    if type(num_extra) is not int or num_extra < 1 or not numbers:
        return False
    num_layers = num_decoder_layers(config)
    return num_layers <= int(numbers[0]) < num_layers + num_extra
