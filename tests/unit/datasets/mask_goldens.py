"""Five styles of chat templates, one chat, and what each way of training makes of them.

`python -m tests.unit.datasets.mask_goldens` writes the golden files anew: look at the difference before you commit it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from horizon_formats.files import Row
from horizon_formats.formats import DatasetFormat
from horizon_server.datasets.recipe import PrepareOptions
from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.datasets.tokens.tokenization import RowTokenizer
from horizon_server.demo.recipe import write_demo_model

FOLDER = Path(__file__).parent / "golden"

# For each style: its special tokens beside bos and eos, and whether one swallows the white space behind it, as Phi's
# do.
STYLES: dict[str, dict[str, Any]] = {
    "chatml": {"eos": "<|im_end|>", "special": ["<|im_start|>"]},
    "llama3": {
        "bos": "<|begin_of_text|>",
        "eos": "<|eot_id|>",
        "special": ["<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|eom_id|>"],
    },
    "mistral": {
        "bos": "<s>",
        "eos": "</s>",
        "special": ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    },
    "gemma": {"bos": "<bos>", "eos": "<eos>", "special": ["<start_of_turn>", "<end_of_turn>"]},
    "phi": {
        "eos": "<|endoftext|>",
        "special": [
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|tool|>",
            "<|end|>",
            "<|tool_call|>",
            "<|/tool_call|>",
        ],
        "rstrip": True,
    },
}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Z\u00fcrich"}}}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer briefly. \u8bf7\u7b80\u77ed\u3002"},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4 \u2713", "weight": 0},
    {"role": "user", "content": "And the weather in Z\u00fcrich?  "},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": '{"sky": "\u2600\ufe0f"}'},
    {"role": "assistant", "content": "Sunny \u2600\ufe0f all day."},
    {"role": "user", "content": "Thanks! \U0001f64f\U0001f3fd"},
    {"role": "assistant", "content": "You are welcome."},
]
TRAIN_ON = ("assistant", "last-assistant", "all")


def template_of(style: str, *, marked: bool) -> str:
    """Return the style's template with its generation markers, or the same without."""
    source = (FOLDER / f"{style}.jinja").read_text("utf-8")
    return source if marked else source.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")


def tokenizer_of(style: str, demo_model: Path) -> Tokenizer:
    """Return the demo's tokenizer with the special tokens of the style."""
    tokenizer = Tokenizer.from_file(str(demo_model / "tokenizer.json"))
    names = [*STYLES[style]["special"], *(STYLES[style][key] for key in ("bos", "eos") if key in STYLES[style])]
    strips = STYLES[style].get("rstrip", False)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False, rstrip=strips) for name in names])
    return tokenizer


def codec_of(style: str, demo_model: Path, *, marked: bool) -> TextCodec:
    """Return the codec of a model of that style."""
    special = {f"{key}_token": STYLES[style][key] for key in ("bos", "eos") if key in STYLES[style]}
    return TextCodec(
        tokenizer_of(style, demo_model),
        special_tokens=special,
        chat_template=template_of(style, marked=marked),
        vocab_size=None,
    )


def masks_of(codec: TextCodec, train_on: str) -> dict[str, Any]:
    """Return the rendered text, the trained pieces of it, and every token with its bit of the mask."""
    options = PrepareOptions(train_on=train_on, sequence_length=4096)
    tokenizer = RowTokenizer(codec, options, DatasetFormat.MESSAGES)
    row = Row(file="d.jsonl", number=1, columns={"messages": CHAT})
    shown, tokenized = tokenizer.show(row)[0], next(tokenizer.tokenize([row]))
    assert not tokenized.violations, tokenized.violations
    (document,) = tokenized.documents
    at, spans = 0, []
    for span in shown.spans:
        spans += [[at, at + len(span.text)]] if span.trained else []
        at += len(span.text)
    vocabulary = {number: token for token, number in codec.tokenizer.get_vocab(with_added_tokens=True).items()}
    return {
        "text": "".join(span.text for span in shown.spans),
        "spans": spans,
        "trained": [span.text for span in shown.spans if span.trained],
        "tokens": [f"{bit} {vocabulary[token]}" for token, bit in zip(document.ids, document.trained, strict=True)],
    }


def main() -> None:
    """Write the golden files."""
    with tempfile.TemporaryDirectory() as name:
        demo_model = write_demo_model(Path(name) / "model")
        for style in STYLES:
            codec = codec_of(style, demo_model, marked=True)
            golden = {train_on: masks_of(codec, train_on) for train_on in TRAIN_ON}
            (FOLDER / f"{style}.json").write_text(json.dumps(golden, indent=1, ensure_ascii=True) + "\n", "ascii")


if __name__ == "__main__":
    main()
