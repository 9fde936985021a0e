"""What all peers of a run read: the model's folder and the rows.

Rows are random, but there is something to learn: a few tokens are frequent, and each is followed by its own successor
half of the time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from bench.models import qwen3_config

NUM_HELD_OUT = 8
_FIRST_WORD = 2


def write_model(folder: Path, shape: str) -> None:
    """A folder as `save_pretrained` writes it, with random weights that bfloat16 holds, in fp32; and a tokenizer whose
    words are the ids."""
    config = qwen3_config(shape)
    config.eos_token_id = 1
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.to(torch.float32).save_pretrained(folder)
    words = ["<pad>", "</s>", *(f"t{i}" for i in range(_FIRST_WORD, config.vocab_size))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))  # noqa: S106
    tokenizer.pre_tokenizer = WhitespaceSplit()
    options: dict[str, Any] = {"tokenizer_object": tokenizer, "pad_token": "<pad>", "eos_token": "</s>"}
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(**options).save_pretrained(folder)


def write_rows(folder: Path, *, vocab_size: int, num_rows: int, row_tokens: int, seed: int = 0) -> None:
    """`rows.npy` and `held_out.npy`."""
    random = np.random.default_rng(seed)
    successors = random.integers(_FIRST_WORD, vocab_size, vocab_size)
    for name, number in (("rows", num_rows), ("held_out", NUM_HELD_OUT)):
        ids = _FIRST_WORD + random.zipf(1.3, (number, row_tokens)) % (vocab_size - _FIRST_WORD)
        follows = random.random((number, row_tokens)) < 0.5
        for column in range(1, row_tokens):
            ids[:, column] = np.where(follows[:, column], successors[ids[:, column - 1]], ids[:, column])
        np.save(folder / f"{name}.npy", ids.astype(np.int64))
