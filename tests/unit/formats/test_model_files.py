"""Which files of a model folder are pushed, which decide its tokens, and which are never accepted."""

from __future__ import annotations

import pytest

from horizon_formats.model_files import decides_tokens, holds_vocabulary, is_companion, is_pushed, refusal


@pytest.mark.parametrize(
    "path",
    [
        *("tokenizer.json", "spm.model", "sentencepiece.model", "tekken.json", "qwen.tiktoken", "vocab.txt"),
        *(
            "additional_chat_templates/tool_use.jinja",
            "LICENSE",
            "LICENSE.txt",
            "README.md",
            "preprocessor_config.json",
        ),
    ],
)
def test_companions_are_pushed(path: str) -> None:
    assert is_companion(path)
    assert is_pushed(path)
    assert refusal(path) is None


@pytest.mark.parametrize("path", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_config_and_weights_are_pushed_and_are_no_companions(path: str) -> None:
    assert is_pushed(path)
    assert not is_companion(path)


@pytest.mark.parametrize("path", ["sub/model.safetensors", "optimizer.pt", "modeling_x.py", "notes.docx", "a/LICENSE"])
def test_other_files_stay_where_they_are(path: str) -> None:
    assert not is_pushed(path)


def test_pickles_and_code_are_refused_with_the_reason() -> None:
    assert "may be a pickle" in str(refusal("pytorch_model.BIN"))
    assert "is code" in str(refusal("sub/modeling_x.py"))


def test_a_template_or_settings_alone_are_no_tokenizer() -> None:
    settings = ["chat_template.jinja", "tokenizer_config.json", "additional_chat_templates/rag.jinja"]
    assert all(decides_tokens(path) and not holds_vocabulary(path) for path in settings)
    assert holds_vocabulary("tokenizer.json")
    assert decides_tokens("config.json")
    assert not decides_tokens("model.safetensors")
