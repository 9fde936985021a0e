"""Which files of a model folder are pushed, which decide its tokens, and which are never accepted."""

from __future__ import annotations

from pathlib import Path

from horizon_formats.model_files import (
    companion_files,
    files_that_decide_tokens,
    has_vocabulary,
    pushed_files,
    refusal,
)

TEXTS = ["additional_chat_templates/rag.jinja", "chat_template.jinja", "qwen.tiktoken", "spm.model", "tokenizer.json"]
OTHERS = ["LICENSE.txt", "README.md", "generation_config.json", "preprocessor_config.json"]
WEIGHTS = ["model.safetensors", "model.safetensors.index.json"]
LEFT = [
    "optimizer.pt",
    "modeling_x.py",
    "notes.docx",
    "sub/model.safetensors",
    "sub/tokenizer.json",
    ".git/config.json",
]


def folder_with(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    return folder


def test_what_is_pushed_is_kept_and_decides_tokens(tmp_path: Path) -> None:
    folder_with(tmp_path, "config.json", *TEXTS, *OTHERS, *WEIGHTS, *LEFT)
    assert pushed_files(tmp_path) == sorted(["config.json", *TEXTS, *OTHERS, *WEIGHTS])
    assert companion_files(tmp_path) == sorted([*TEXTS, *OTHERS])
    assert files_that_decide_tokens(tmp_path) == sorted(["config.json", *TEXTS])
    assert all(refusal(name) is None for name in pushed_files(tmp_path))


def test_pickles_and_code_are_refused_with_the_reason() -> None:
    assert "may be a pickle" in str(refusal("pytorch_model.BIN"))
    assert "is code" in str(refusal("sub/modeling_x.py"))


def test_a_template_or_settings_alone_are_no_tokenizer() -> None:
    assert not has_vocabulary(["chat_template.jinja", "tokenizer_config.json", "additional_chat_templates/rag.jinja"])
    assert has_vocabulary(["tokenizer.json"])
    assert has_vocabulary(["qwen.tiktoken"])
