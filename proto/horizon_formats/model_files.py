"""Which files of a model folder are pushed, kept next to a checkpoint's weights, and refused."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

CONFIG_FILE = "config.json"
ADAPTER_CONFIG_FILE = "adapter_config.json"
"""What a folder of an adapter has in the place of config.json."""
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_BASE_FILE = "base.sha256"
"""The digest of the model that an adapter of a job was trained on."""
WEIGHT_PATTERNS = ("*.safetensors", "*.safetensors.index.json")

_VOCABULARY_PATTERNS = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt"),
    *("spiece.model", "spm.model", "sentencepiece*.model", "tekken.json", "*.tiktoken"),
    *("tokenizer.model.v*", "tokenizer_v*.model.v*", "vocab.bpe", "bpe.codes"),
)
_TEXT_PATTERNS = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *_VOCABULARY_PATTERNS,
)
COMPANION_PATTERNS = (
    "generation_config.json",
    *_TEXT_PATTERNS,
    *("preprocessor_config.json", "processor_config.json", "configuration.json", "params.json"),
    *("LICENSE*", "NOTICE*", "README.md", "USE_POLICY*", "model_card.md", "MODEL_CARD.md"),
)
"""What is kept with the weights of every checkpoint: data only, never code, never a pickle."""

HUB_ID = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB_ID = re.compile(HUB_ID)

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
_CODE = (".py", ".pyc", ".so", ".sh")


def companion_files(folder: Path) -> list[str]:
    """Return the paths, in the folder, of the files that belong next to its weights."""
    return _found(folder, COMPANION_PATTERNS)


def pushed_files(folder: Path) -> list[str]:
    """Return the paths, in a local folder of a model or an adapter, of the files that are pushed."""
    if is_adapter(path.name for path in folder.iterdir()):
        return _found(folder, (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, ADAPTER_BASE_FILE, *COMPANION_PATTERNS))
    return _found(folder, (CONFIG_FILE, *WEIGHT_PATTERNS, *COMPANION_PATTERNS))


def pushed_names(names: Iterable[str]) -> set[str]:
    """Return those of the paths in a model's folder, wherever it is, that are pushed."""
    patterns = (CONFIG_FILE, *WEIGHT_PATTERNS, *COMPANION_PATTERNS)
    return {
        name
        for name in names
        if any(name.count("/") == pattern.count("/") and fnmatchcase(name, pattern) for pattern in patterns)
    }


def is_hub_id(text: str) -> bool:
    """Whether a model's name is the id of a repository of the Hugging Face hub, such as Qwen/Qwen3-8B."""
    return _HUB_ID.fullmatch(text) is not None


def is_adapter(names: Iterable[str]) -> bool:
    """Whether a folder with these files at its top is an adapter: a model's folder may hold one besides, which is left
    out."""
    found = set(names)
    return ADAPTER_CONFIG_FILE in found and CONFIG_FILE not in found


def files_that_decide_tokens(folder: Path) -> list[str]:
    """Return the paths of the files that have a part in how the model reads text; config.json holds the size of the
    vocabulary."""
    return _found(folder, (CONFIG_FILE, *_TEXT_PATTERNS))


def has_vocabulary(names: Iterable[str]) -> bool:
    """Whether there is a tokenizer among the files: templates and settings alone make none."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in _VOCABULARY_PATTERNS)


def is_pickle(path: str) -> bool:
    """Whether a file may be a pickle, by its name."""
    return PurePosixPath(path).suffix.lower() in _PICKLES


def refusal(path: str) -> str | None:
    """Return why a file is never accepted (the part of a message after its name), or None."""
    if is_pickle(path):
        return (
            "may be a pickle, which can run code when it is opened and is never accepted; leave it out, and save the "
            "weights as safetensors (save_pretrained writes them)"
        )
    if PurePosixPath(path).suffix.lower() in _CODE:
        return (
            "is code, which is never accepted or run; leave it out, and use an architecture that transformers has "
            "built in"
        )
    return None


def _found(folder: Path, patterns: Iterable[str]) -> list[str]:
    found = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    return sorted(path.relative_to(folder).as_posix() for path in found)
