"""The tokenizer of a model folder, read the fast way or through transformers: the same tokens either way."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from horizon_server.datasets.tokens.codec import TextCodec
from horizon_server.demo.recipe import demo_chats
from horizon_server.errors import InvalidModel

TEXTS = ["Hello there,  world!\n\n\nx<|im_end|>\ny", "1234567 \u00e9\u65e5\U0001f600\t end ", "", "It's 5 o'clock.\r\n"]


@pytest.fixture(params=["demo_model", "bare_model", "tiny_base", "qwen_class_model"])
def model(request: pytest.FixtureRequest) -> Path:
    folder = request.getfixturevalue(request.param)
    assert isinstance(folder, Path)
    return folder


def test_tokens_are_those_of_transformers(model: Path) -> None:
    reference: Any = AutoTokenizer.from_pretrained(model)
    codec = TextCodec.from_folder(model)
    for text in TEXTS:
        assert (
            codec.encode(text).ids == codec.encode_ids(text) == reference(text, add_special_tokens=False)["input_ids"]
        )
    assert codec.leading_ids + codec.encode("a").ids == reference("a")["input_ids"]
    assert codec.eos_id == reference.eos_token_id


def test_chats_render_and_encode_as_in_transformers(model: Path) -> None:
    reference: Any = AutoTokenizer.from_pretrained(model)
    codec = TextCodec.from_folder(model)
    if codec.chat_template is None:
        assert reference.chat_template is None
        return
    for chat in demo_chats()[-160::8]:
        text = codec.chat_template.render(chat)
        assert text == reference.apply_chat_template(chat, tokenize=False)
        assert codec.encode(text).ids == reference.apply_chat_template(chat, return_dict=True)["input_ids"]


def test_starts_are_the_characters_themselves(demo_model: Path) -> None:
    text = "a  b \u00e9x<|im_end|>\n"
    starts = [start for start, _ in TextCodec.from_folder(demo_model).encode(text).offsets]
    assert starts[0] == 0
    assert starts == sorted(starts)
    assert starts[-2:] == [text.index("<"), text.index("\n")]


def test_a_plain_folder_needs_no_transformers_and_others_do(demo_model: Path, qwen_class_model: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from horizon_server.datasets.tokens.codec import TextCodec; "
        "TextCodec.from_folder(Path(sys.argv[1])); print('transformers' in sys.modules, 'torch' in sys.modules)"
    )
    for folder, expected in ((demo_model, "False False"), (qwen_class_model, "True")):
        done = subprocess.run(
            [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True, timeout=240
        )
        assert done.stdout.startswith(expected)


def test_unusable_tokenizers_are_refused_with_the_reason(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"holds no tokenizer; add tokenizer\.json"):
        TextCodec.from_folder(tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    # transformers makes an empty tokenizer of the model_type alone, with which every text is unknown.
    (bare / "config.json").write_text('{"model_type": "qwen3", "vocab_size": 1024}')
    (bare / "tokenizer_config.json").write_text('{"eos_token": "x"}')
    (bare / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(InvalidModel, match=r"holds no tokenizer; add tokenizer\.json"):
        TextCodec.from_folder(bare)
    torn = tmp_path / "torn"
    shutil.copytree(demo_model, torn)
    (torn / "tokenizer.json").write_text((torn / "tokenizer.json").read_text()[:1000])
    with pytest.raises(InvalidModel, match="torn holds no tokenizer that can be loaded"):
        TextCodec.from_folder(torn)
    (torn / "tokenizer_config.json").write_text("{")
    with pytest.raises(InvalidModel, match=r"tokenizer_config\.json is not JSON"):
        TextCodec.from_folder(torn)


def test_tokens_beyond_the_models_vocabulary_are_refused(demo_model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    shutil.copytree(demo_model, small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 3}))
    codec = TextCodec.from_folder(small)
    codec.check_ids([0, 2])
    with pytest.raises(InvalidModel, match=r"'<\|pad\|>' the id 3, but config.json has vocab_size 3"):
        codec.check_ids([0, 3])
