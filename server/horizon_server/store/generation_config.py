"""Where answers end by a model folder's generation_config.json, and that file with more ends in it. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

GENERATION_CONFIG_FILE = "generation_config.json"

_CONFIG_FILE = "config.json"
_EOS = "eos_token_id"
# What transformers takes from config.json for generation where a folder has no generation_config.json.
_FROM_CONFIG = ("bos_token_id", "pad_token_id", "decoder_start_token_id")
# Larger than any that is one; what users push is parsed with bounded memory.
_MAX_BYTES = 1_000_000


def listed_ends(folder: Path) -> tuple[int, ...]:
    """The tokens that end answers by generation_config.json, or where that names none, by config.json. In their
    order."""
    found: dict[int, None] = {}
    for name in (GENERATION_CONFIG_FILE, _CONFIG_FILE):
        config = _read_object(folder / name)
        text = config.get("text_config")
        for part in (config, text if isinstance(text, dict) else {}):
            ids = part.get(_EOS)
            listed = ids if isinstance(ids, list) else [ids]
            found |= dict.fromkeys(token for token in listed if type(token) is int)
        if _EOS in config:
            break
    return tuple(found)


def text_with_ends(folder: Path, ends: Collection[int]) -> str | None:
    """The folder's generation_config.json with these tokens as ends of answers too. None: it lists all of them as it
    is."""
    listed = listed_ends(folder)
    missing = [token for token in ends if token not in listed]
    if not missing:
        return None
    config = dict(_read_object(folder / GENERATION_CONFIG_FILE))
    if not config:
        of_model = _read_object(folder / _CONFIG_FILE)
        config = {name: of_model[name] for name in _FROM_CONFIG if of_model.get(name) is not None}
    config[_EOS] = [*listed, *missing]
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _read_object(path: Path) -> Mapping[str, Any]:
    """The object in a file; nothing where there is none, because no model needs it."""
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
