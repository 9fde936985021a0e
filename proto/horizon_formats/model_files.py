"""Which files of a model folder are pushed, kept next to a checkpoint's weights, and refused."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import PurePosixPath

CONFIG_FILE = "config.json"

TOKENIZER_FILES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "special_tokens_map.json",
    ),
    *("added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "spm.model"),
    *(
        "sentencepiece.model",
        "sentencepiece.bpe.model",
        "tekken.json",
        "*.tiktoken",
        "additional_chat_templates/*.jinja",
    ),
)
"""Everything that decides how a model reads text, apart from its config."""

COMPANION_FILES = (
    "generation_config.json",
    *TOKENIZER_FILES,
    *("preprocessor_config.json", "processor_config.json", "LICENSE", "LICENSE.*", "NOTICE", "NOTICE.*", "README.md"),
)
"""What belongs next to config and weights: data only, never code, never a pickle."""

WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")

# Templates and settings alone make no tokenizer: they hold no vocabulary.
_SETTINGS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
_VOCABULARIES = tuple(pattern for pattern in TOKENIZER_FILES if pattern not in _SETTINGS)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
_CODE = (".py", ".pyc", ".so", ".sh")


def is_companion(path: str) -> bool:
    """Whether a file, by its path in the folder, belongs next to the weights."""
    return _matches(path, COMPANION_FILES)


def is_pushed(path: str) -> bool:
    """Whether a file of a local model folder is pushed."""
    return path == CONFIG_FILE or _matches(path, WEIGHT_FILES) or is_companion(path)


def decides_tokens(path: str) -> bool:
    """Whether a file has a part in how the model reads text."""
    return path == CONFIG_FILE or _matches(path, TOKENIZER_FILES)


def holds_vocabulary(path: str) -> bool:
    """Whether a file holds the vocabulary of a tokenizer, or a part of it."""
    return _matches(path, _VOCABULARIES)


def is_pickle(path: str) -> bool:
    """Whether a file may be a pickle, by its name."""
    return PurePosixPath(path).suffix.lower() in _PICKLES


def refusal(path: str) -> str | None:
    """Return why a file is never taken, as the rest of a sentence about it, or None."""
    if is_pickle(path):
        return (
            "may be a pickle, which can run code when it is opened and is never accepted; leave it out, and save the weights as "
            "safetensors (save_pretrained writes them)"
        )
    if PurePosixPath(path).suffix.lower() in _CODE:
        return "is code, which is never accepted or run; leave it out, and use an architecture that transformers has built in"
    return None


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    # A star does not cross folders: fnmatch alone would take `sub/model.safetensors` for weights.
    return any(path.count("/") == pattern.count("/") and fnmatchcase(path, pattern) for pattern in patterns)
