"""The built-in model and dataset, made from nothing but a seed: what `horizond demo` trains."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

# Made without torch and transformers, so that plain transformers, which loads the folder, is an independent check of
# it.
import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from horizon_server.store.safetensors_files import TensorBytes, write_sharded

Chat = list[dict[str, str]]

# Questions from the training set, to hear what the model has learned.
DEMO_PROMPTS = ("Why keep weights in RAM?", "What is overfitting?", "Why is my job waiting?")

DEMO_SPEC: dict[str, Any] = {
    "name": "demo",
    "method": "sft",
    "train": {
        "max_steps": 80,
        "sequence_length": 256,
        "tokens_per_step": 1024,
        "learning_rate": 2e-3,
        "lr_schedule": "cosine",
        "warmup_steps": 8,
        "weight_decay": 0.0,
        "betas": [0.9, 0.98],
        "max_grad_norm": 1.0,
        "seed": 0,
        "train_on": "assistant",
    },
    "checkpoint": {"every_steps": 40, "keep_last": 1},
}
"""The job that the demo submits, but for the names of the model and the dataset it pushed."""

_VOCABULARY = 1024
_HIDDEN = 256
_LAYERS = 3
_HEADS = 8
_KEY_VALUE_HEADS = 4
_HEAD_DIM = 32
_INTERMEDIATE = 768
# About 1 / sqrt(hidden): the usual 0.02 is meant for wide models and would cost a third of the demo's steps.
_INIT_STD = 0.06

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")

_CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}\n"
    "{%- if message['role'] == 'assistant' -%}\n"
    "{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}\n"
    "{%- else -%}\n"
    "{{- message['content'] + '<|im_end|>' -}}\n"
    "{%- endif -%}\n"
    "{{- '\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}\n"
)

_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "head_dim": _HEAD_DIM,
    "hidden_act": "silu",
    "hidden_size": _HIDDEN,
    "initializer_range": _INIT_STD,
    "intermediate_size": _INTERMEDIATE,
    "max_position_embeddings": 1024,
    "num_attention_heads": _HEADS,
    "num_hidden_layers": _LAYERS,
    "num_key_value_heads": _KEY_VALUE_HEADS,
    "pad_token_id": 3,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": _VOCABULARY,
}
# As many base models: they end texts with another token than their template ends turns with, which training teaches.
_GENERATION_CONFIG = {"eos_token_id": 0, "pad_token_id": 3, "do_sample": False}
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": "<|endoftext|>",
    "pad_token": "<|pad|>",
    "model_max_length": 1024,
    "clean_up_tokenization_spaces": False,
}

_HAND_WRITTEN = Path(__file__).with_name("chats.jsonl")

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_OPPOSITES = (
    *(("hot", "cold"), ("big", "small"), ("fast", "slow"), ("high", "low"), ("full", "empty"), ("open", "closed")),
    *(("early", "late"), ("loud", "quiet"), ("light", "dark"), ("host", "device"), ("forward", "backward")),
    *(("up", "down"), ("first", "last"), ("on", "off"), ("cheap", "dear"), ("right", "wrong"), ("old", "new")),
)


def write_demo_model(folder: Path, seed: int = 0) -> Path:
    """Write a Hugging Face folder of a tiny Qwen3 with random weights; the same seed writes the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    configs = {"config": _CONFIG, "generation_config": _GENERATION_CONFIG, "tokenizer_config": _TOKENIZER_CONFIG}
    for name, content in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="ascii")
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE, encoding="ascii")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _SPECIAL_TOKENS],
        # Every byte, so that any text of a user's own chats can be written; sorted, so that the ids are the same in
        # every process.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = [message[key] for chat in demo_chats() for message in chat for key in ("role", "content")]
    tokenizer.train_from_iterator(corpus, trainer)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    write_sharded(folder, "model", _weights(seed))
    return folder


def write_demo_dataset(folder: Path) -> Path:
    """Write the built-in chats as JSON lines in the messages format and return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "lab-box-chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in demo_chats()), encoding="ascii")
    return path


def demo_chats() -> list[Chat]:
    """Return every chat of the built-in dataset, in the order of its file."""
    chats = [json.loads(line)["messages"] for line in _HAND_WRITTEN.read_text(encoding="ascii").splitlines()]
    pairs: list[tuple[str, str]] = []
    # The questions in other words, so that chats kept out of the training have relatives in it.
    for question, answer in ((chat[0]["content"], chat[1]["content"]) for chat in chats if len(chat) == 2):
        if question.startswith("What is "):
            pairs.append((f"Tell me what {question.removeprefix('What is ').rstrip('?')} is.", answer))
        elif question.endswith("?"):
            pairs.append((f"Please tell me: {question}", answer))
    for question, answer in itertools.chain(pairs, _patterns()):
        chats.append([{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    return chats


def _patterns() -> Iterator[tuple[str, str]]:
    for a, b in itertools.combinations_with_replacement(range(5), 2):
        yield f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."
    for today, tomorrow in zip(_DAYS, (*_DAYS[1:], _DAYS[0]), strict=True):
        yield f"Which day comes after {today}?", f"{tomorrow} comes after {today}."
        yield f"Which day comes before {tomorrow}?", f"{today} comes before {tomorrow}."
    for month, following in zip(_MONTHS, (*_MONTHS[1:], _MONTHS[0]), strict=True):
        yield f"Which month comes after {month}?", f"{following} comes after {month}."
    for word, opposite in _OPPOSITES:
        yield f"What is the opposite of {word}?", f"The opposite of {word} is {opposite}."
        yield f"What is the opposite of {opposite}?", f"The opposite of {opposite} is {word}."
    for number, word in enumerate(_NUMBERS):
        yield f"Write {number} as a word.", f"The number {number} is written {word}."
    for size in range(1, 9):
        answer = f"About {12 * size} GB of host memory: twelve bytes for each parameter."
        yield f"What does a model of {size} billion parameters need?", answer
        yield f"How many bits are in {size} bytes?", f"There are {8 * size} bits in {size} bytes."


def _weights(seed: int) -> list[TensorBytes]:
    query, key_value = _HEADS * _HEAD_DIM, _KEY_VALUE_HEADS * _HEAD_DIM
    layer = {
        "input_layernorm": (_HIDDEN,),
        "mlp.down_proj": (_HIDDEN, _INTERMEDIATE),
        "mlp.gate_proj": (_INTERMEDIATE, _HIDDEN),
        "mlp.up_proj": (_INTERMEDIATE, _HIDDEN),
        "post_attention_layernorm": (_HIDDEN,),
        "self_attn.k_norm": (_HEAD_DIM,),
        "self_attn.k_proj": (key_value, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, query),
        "self_attn.q_norm": (_HEAD_DIM,),
        "self_attn.q_proj": (query, _HIDDEN),
        "self_attn.v_proj": (key_value, _HIDDEN),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_VOCABULARY, _HIDDEN)}
    for number in range(_LAYERS):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (_HIDDEN,)
    tensors = []
    for index, (name, shape) in enumerate(shapes.items()):
        if len(shape) == 1:
            values = np.ones(shape, dtype=np.float32)
        else:
            values = np.random.default_rng((seed, index)).standard_normal(shape, dtype=np.float32) * _INIT_STD
        bits: NDArray[np.uint32] = values.astype("<f4").view("<u4")
        # Round to nearest, ties to even: add half of the dropped part, less one where the kept part is even.
        rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
        raw = memoryview(rounded.astype("<u2").tobytes())
        tensor = TensorBytes(name=name, dtype="BF16", shape=shape, size_bytes=raw.nbytes, pieces=partial(list, [raw]))
        tensors.append(tensor)
    return tensors
