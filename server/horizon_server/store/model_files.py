"""The config.json of a Hugging Face model folder, and which of its names mean the same number. Runs no code from the
folder.

Raises: InvalidModel, which names the file or the field, wherever a value cannot be that of a model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horizon_server.errors import InvalidModel
from horizon_server.store.safetensors_files import list_number

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 16_000_000

# Of a width or a count in config.json. The widest published models are below 1 << 17.
MAX_SIZE = 1 << 20
# Where another limit holds, by the first of the names that mean the same number.
_SIZE_LIMITS: Mapping[str, int] = {
    "vocab_size": 1 << 24,
    "num_attention_heads": 1 << 13,
    "num_key_value_heads": 1 << 13,
    "head_dim": 1 << 13,
    "num_local_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "max_position_embeddings": 1 << 40,
}


def read_config(folder: Path) -> dict[str, Any]:
    """The object in a folder's config.json."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise InvalidModel(f"holds no {CONFIG_FILE}; give a folder written by save_pretrained", file=folder)
    # Before it is read: what users push is parsed with bounded memory.
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise InvalidModel(f"is larger than {MAX_CONFIG_BYTES} bytes, which no model config is", file=file)
    return parse_config(file.read_bytes(), file)


def parse_config(content: bytes, file: Path = Path(CONFIG_FILE)) -> dict[str, Any]:
    """The object in the content of a config.json; `file` names it in messages."""
    try:
        config = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"is not valid JSON: {error}", file=file) from error
    if not isinstance(config, dict):
        raise InvalidModel(f"must hold a JSON object, not a {type(config).__name__}", file=file)
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A multimodal config's text part, else the whole."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def num_decoder_layers(config: Mapping[str, Any]) -> int:
    """The number of decoder layers, which some configs give as a list of their kinds."""
    kinds = config.get("layers_block_type")
    default = len(kinds) if isinstance(kinds, list) and kinds else None
    return config_size(config, "num_hidden_layers", "n_layer", "n_layers", "num_layers", default=default)


def config_count(config: Mapping[str, Any], *names: str) -> int:
    """The first positive integer under one of these names, 0 where none is."""
    name = next((name for name in names if type(config.get(name)) is int and config[name] > 0), None)
    return 0 if name is None else _checked(name, config[name], names[0])


def config_size(config: Mapping[str, Any], *names: str, default: int | None = None) -> int:
    """The number under the first of these names that the config has; a missing one is refused where there is no
    default."""
    name = next((name for name in names if config.get(name) is not None), None)
    if name is not None:
        return _checked(name, config[name], names[0])
    if default is None:
        raise InvalidModel(f"config.json: {names[0]} is missing; give the config.json that belongs to the weights")
    return default


def _checked(name: str, value: object, first_name: str) -> int:
    limit = _SIZE_LIMITS.get(first_name, MAX_SIZE)
    # `type`, because isinstance takes True for a whole number.
    if type(value) is not int or not 1 <= value <= limit:
        # In ASCII, because some characters cannot be sent on.
        shown = ascii(value)
        raise InvalidModel(
            f"config.json: {name} is {shown if len(shown) <= 40 else shown[:40] + '...'}; "
            f"it must be a whole number from 1 to {limit}"
        )
    return value


def is_prediction_head(config: Mapping[str, Any], name: str) -> bool:
    """Whether a tensor belongs to what some checkpoints have for predicting several tokens at once, and model classes
    leave out.

    It is either named so, or is a layer beyond the last one, as many as the config says.
    """
    if name.partition(".")[0] == "mtp":
        return True
    # DeepSeek-V3 and its relatives append these layers to the list of decoder layers.
    num_extra = config_count(config, "num_nextn_predict_layers")
    number = next((n for part in name.split(".") if (n := list_number(part)) is not None), None)
    if not num_extra or number is None:
        return False
    num_layers = num_decoder_layers(config)
    return num_layers <= number < num_layers + num_extra
