"""Model folders: what is pushed, and what is refused before anything is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from horizon_client import BadFile, Client
from horizon_client.local_files import links_outside, model_files


def safetensors(entries: dict[str, tuple[str, list[int], int, int]], data: bytes) -> bytes:
    """Return a safetensors file: name -> (dtype, shape, begin, end)."""
    header = {n: {"dtype": d, "shape": s, "data_offsets": [b, e]} for n, (d, s, b, e) in entries.items()}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return len(text).to_bytes(8, "little") + text + data


GOOD = safetensors({"a": ("BF16", [2, 3], 0, 12), "b": ("F32", [1], 12, 16)}, bytes(16))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small good model folder with files that must not be pushed."""
    root = tmp_path / "tiny"
    root.mkdir()
    (root / "config.json").write_text('{"model_type": "llama"}')
    (root / "model.safetensors").write_bytes(GOOD)
    (root / "tokenizer.json").write_text("{}")
    (root / "tokenizer_config.json").write_text("{}")
    (root / "chat_template.jinja").write_text("{{ messages }}")
    (root / "merges.txt").write_text("a b\n")
    (root / "pytorch_model.bin").write_bytes(b"\x80\x04pickle")
    (root / "modeling_custom.py").write_text("raise SystemExit")
    (root / "README.md").write_text("hi")
    (root / "LICENSE").write_bytes(b"caf\xe9")
    (root / "qwen.tiktoken").write_text("IQ== 0\n")
    (root / "notes.txt").write_text("hi")
    (root / "additional_chat_templates").mkdir()
    (root / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    (root / "additional_chat_templates" / "evil.py").write_text("raise SystemExit")
    return root


def test_only_what_a_model_needs_is_pushed(folder: Path) -> None:
    assert [file.path for file in model_files(folder)] == [
        "LICENSE",
        "README.md",
        "additional_chat_templates/rag.jinja",
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "model.safetensors",
        "qwen.tiktoken",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_model_is_pushed_once_and_deleted(client: Client, model_folder: Path) -> None:
    (kept,) = client.models.list()
    result = client.models.push(model_folder, name="tiny")
    assert (result.model.state, result.model.architecture) == ("READY", kept.architecture)
    assert result.model.num_parameters == kept.num_parameters > 0
    assert [file.path for file in result.model.files] == [file.path for file in model_files(model_folder)]
    assert client.models.push(model_folder, name="tiny-two").sent_bytes == 0
    for name in ("tiny", "tiny-two"):
        client.models.delete(name)
    assert client.models.list() == [kept]


def _write(name: str, content: bytes | str) -> Callable[[Path], object]:
    data = content.encode() if isinstance(content, str) else content
    return lambda root: (root / name).write_bytes(data)


def _pickle_only(root: Path) -> None:
    (root / "model.safetensors").unlink()


def _index_of_absent_file(root: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda root: (root / "config.json").unlink(), "contains no config.json"),
        (_write("config.json", "{"), "config.json, line 1: not JSON"),
        (_write("config.json", "[]"), "config.json must hold a JSON object"),
        (_write("tokenizer.json", b"\xff"), "tokenizer.json is not UTF-8"),
        (_write("merges.txt", b"ok\xff"), "merges.txt is not UTF-8 text at byte 3"),
        (_pickle_only, r"as pickle only \(pytorch_model.bin\).*save_pretrained"),
        (_index_of_absent_file, "names model-00002.safetensors, which is not in the folder"),
        (_write("model.safetensors", GOOD[:-1]), "describes 16 bytes of tensors, but it contains 15"),
        (_write("model.safetensors", GOOD[:40]), "it is smaller than its header"),
        (_write("model.safetensors", b"abc"), "is not a safetensors file"),
        (_write("model.safetensors", b"\x02" + bytes(7) + b"[]"), "not a JSON object"),
        (_write("model.safetensors", b"\x02" + bytes(7) + b"xx"), "header is not JSON"),
        (
            _write("model.safetensors", safetensors({"a": ("F32", [2], 0, 4)}, bytes(4))),
            "has another size than its shape",
        ),
        (_write("model.safetensors", safetensors({"a": ("F32", [1], 4, 8)}, bytes(8))), "leave a gap"),
        (
            _write("model.safetensors", safetensors({"a": ("F32", [1], 0, 4), "b": ("F32", [1], 0, 4)}, bytes(4))),
            "overlap",
        ),
        (_write("model.safetensors", safetensors({"a": ("F32", [-1], 0, 4)}, bytes(4))), "tensor 'a' is malformed"),
    ],
)
def test_bad_folders_are_refused_and_named(folder: Path, spoil: Callable[[Path], object], words: str) -> None:
    spoil(folder)
    with pytest.raises(BadFile, match=words) as caught:
        model_files(folder)
    assert str(folder) in caught.value.message


def test_links_of_a_download_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    cached = tmp_path / "snapshots" / "abc"
    cached.parent.mkdir()
    (tmp_path / "blobs").mkdir()
    folder.rename(cached)
    (cached / "model.safetensors").rename(tmp_path / "blobs" / "f00")
    (cached / "model.safetensors").symlink_to("../../blobs/f00")
    files = model_files(cached)
    assert "model.safetensors" in {file.path for file in files}
    assert links_outside(cached, files) == ""


def test_other_links_that_lead_out_of_the_folder_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    files = model_files(folder)
    assert "model.safetensors" in {file.path for file in files}
    expected = f"in {folder}, links to files outside it are pushed too: model.safetensors (1 in all)"
    assert links_outside(folder, files) == expected


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    with pytest.raises(BadFile, match="is not a folder"):
        model_files(tmp_path / "x")
