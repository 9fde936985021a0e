"""A model folder's tokenizer: text to token ids, and back to the characters that each covers.

Only the children for preparation and preview import this, as it may load transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from horizon_server.datasets.recipe import require_tokenizer
from horizon_server.datasets.tokens.chat_template import ChatTemplate
from horizon_server.errors import InvalidModel

# Classes that are nothing but their tokenizer.json, and the settings that do not change how they encode.
_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PLAIN_SETTINGS = {
    *_SPECIAL_TOKEN_KEYS,
    *("tokenizer_class", "backend", "model_max_length", "clean_up_tokenization_spaces", "chat_template"),
    *("padding_side", "truncation_side", "is_local", "local_files_only"),
}


class TextCodec:
    """Encodes text exactly as transformers' tokenizer of the same folder does."""

    def __init__(
        self, tokenizer: Tokenizer, special_tokens: Mapping[str, str], chat_template: str | None, vocab_size: int | None
    ) -> None:
        # tokenizer.json may ask for both; how long rows may be is the job's to say.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        # What the tokenizer puts before a text by itself: the beginning-of-text token, or nothing. One that
        # also appends the end-of-text token does so to the empty text.
        self.leading_ids: list[int] = list(tokenizer.encode("").ids)
        self.eos_id: int | None = tokenizer.token_to_id(special_tokens.get("eos_token", ""))
        if self.leading_ids and self.leading_ids[-1] == self.eos_id:
            self.leading_ids.pop()
        # What training puts after a text, so that a model learns where texts end.
        self.trailing_ids: list[int] = [] if self.eos_id is None else [self.eos_id]
        # A post-processor may trim offsets to exclude spaces; without it, they are the characters themselves.
        tokenizer.post_processor = None
        self.tokenizer = tokenizer  # adds no special tokens by itself from here on
        self.vocab_size = vocab_size
        highest_id = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
        self._ids_may_be_too_high = vocab_size is not None and highest_id >= vocab_size
        self.chat_template: ChatTemplate | None = None
        added = tokenizer.get_added_tokens_decoder()
        # A tokenizer may name its end-of-text token without calling it special.
        named = {self.eos_id} if self.eos_id is not None else set()
        self.special_ids: frozenset[int] = frozenset(named | {token for token, about in added.items() if about.special})
        self._is_blank: dict[int, bool] = {}
        if chat_template is not None:
            end_markers = [token.content for token in added.values() if token.special]
            self.chat_template = ChatTemplate(chat_template, special_tokens, end_markers=end_markers)

    @classmethod
    def from_folder(cls, folder: Path) -> TextCodec:
        """Load the tokenizer of a model folder. Raises: InvalidModel when it holds no usable tokenizer."""
        require_tokenizer(folder)
        settings = _read_json(folder / "tokenizer_config.json")
        config = _read_json(folder / "config.json")
        # Models that also see images keep that of their language model apart.
        vocab_size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
        try:
            loaded = _load_plain(folder, settings) or _load_with_transformers(folder)
        except InvalidModel:
            raise
        except Exception as error:
            # The tokenizers library raises bare Exception for an unreadable file, and transformers passes it on.
            raise InvalidModel(f"holds no tokenizer that can be loaded: {error}", file=folder) from error
        return cls(*loaded, vocab_size)

    def encode(self, text: str) -> Any:
        """Return the `tokenizers.Encoding` of a text as it is: special tokens that it spells out are recognised, none
        are added."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def encode_all(self, texts: Sequence[str]) -> list[Any]:
        """Return `encode` of each text, a little faster."""
        encodings: list[Any] = self.tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return encodings

    def encode_ids(self, text: str) -> list[int]:
        """Return the ids that `encode` gives."""
        # Faster, as the characters that each covers are not kept.
        ids: list[int] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones spelled out."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def token_text(self, token: int) -> str:
        """Return a token as the vocabulary spells it."""
        text: str | None = self.tokenizer.id_to_token(token)
        return f"token {token}" if text is None else text

    def is_blank(self, token: int) -> bool:
        """Whether a token is white space only, and no special one."""
        if token not in self._is_blank:
            self._is_blank[token] = token not in self.special_ids and not self.decode([token]).strip()
        return self._is_blank[token]

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse tokens that the model has no embedding for. Raises: InvalidModel."""
        # The highest id of the vocabulary says for nearly every model that no token of a row need be looked at.
        if self._ids_may_be_too_high and ids and max(ids) >= (self.vocab_size or 0):
            token = self.tokenizer.id_to_token(max(ids))
            raise InvalidModel(
                f"the tokenizer gives {token!r} the id {max(ids)}, but config.json has vocab_size {self.vocab_size}; "
                "the tokenizer belongs to another model"
            )


Loaded = tuple[Tokenizer, dict[str, str], str | None]


def _load_plain(folder: Path, settings: Mapping[str, Any]) -> Loaded | None:
    """Return the tokenizer where tokenizer.json alone decides how text is encoded, else None."""
    # `tokenizers` alone starts at once; transformers is needed where only it knows what a class adds.
    path = folder / "tokenizer.json"
    plain_class = settings.get("tokenizer_class") in _PLAIN_CLASSES and settings.keys() <= _PLAIN_SETTINGS
    if not path.is_file() or not plain_class or (folder / "special_tokens_map.json").exists():
        return None
    special_tokens = {key: settings[key] for key in _SPECIAL_TOKEN_KEYS if settings.get(key) is not None}
    chat_template = settings.get("chat_template")
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        chat_template = template_file.read_text(encoding="utf-8")
    if not all(isinstance(value, str) for value in (*special_tokens.values(), chat_template or "")):
        return None
    tokenizer = Tokenizer.from_file(str(path))
    if any(tokenizer.token_to_id(token) is None for token in special_tokens.values()):
        return None
    return tokenizer, special_tokens, chat_template


def _load_with_transformers(folder: Path) -> Loaded:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    tokenizer = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(tokenizer, Tokenizer):
        raise InvalidModel(
            "holds only a slow tokenizer; save it with tokenizer.json and push the model again", file=folder
        )
    special_tokens = {key: str(value) for key, value in loaded.special_tokens_map.items() if isinstance(value, str)}
    template = loaded.chat_template
    chat_template = template.get("default") if isinstance(template, dict) else template
    return tokenizer, special_tokens, chat_template


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidModel(f"is not JSON: {error}", file=path) from error
    if not isinstance(content, dict):
        raise InvalidModel("does not hold a JSON object", file=path)
    return content
