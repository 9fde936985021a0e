"""The header reader against files written by the safetensors library, and against every way a file can be broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

from horizon_server.errors import InvalidModel
from horizon_server.store.safetensors_files import read_safetensors_headers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = {"a": torch.arange(6, dtype=torch.float32).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    save_file(
        tensors | {"s": torch.tensor(3.0), "empty": torch.zeros(0, 5)}, tmp_path / "model.safetensors", {"x": "y"}
    )
    return tmp_path


def write_raw(file: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def test_reads_names_shapes_dtypes_and_places(folder: Path) -> None:
    headers = read_safetensors_headers(folder)
    assert {h.name: (h.shape, h.dtype) for h in headers.values()} == {
        "a": ((2, 3), "F32"),
        "b": ((4,), "BF16"),
        "s": ((), "F32"),
        "empty": ((0, 5), "F32"),
    }
    raw = headers["a"].file.read_bytes()[headers["a"].start : headers["a"].end]
    assert torch.equal(torch.frombuffer(bytearray(raw), dtype=torch.float32).view(2, 3), torch.arange(6.0).view(2, 3))


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_a_truncated_file_is_named(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(InvalidModel, match=r"model\.safetensors is truncated"):
        read_safetensors_headers(folder)


def test_a_file_that_goes_on_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    with pytest.raises(InvalidModel, match="followed by bytes that belong to no tensor"):
        read_safetensors_headers(folder)


def test_a_header_too_large_to_be_one_is_never_read(tmp_path: Path) -> None:
    file = tmp_path / "f.safetensors"
    file.write_bytes((2**60).to_bytes(8, "little") + b"PK\x03\x04")
    with pytest.raises(InvalidModel, match="not a safetensors file"):
        read_safetensors_headers(file.parent, stem=file.stem)


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\x80\x04nonsense", "not a safetensors file"),
        (b"[" * 100_000, "not a safetensors file"),
        ([1], "not a safetensors file"),
        (b'{"a":1,"a":2}', "a name occurs twice"),
        ({"a": 3}, "not an object"),
        ({"a": F32 | {"dtype": "F4"}}, "a has dtype 'F4'"),
        ({"a": F32 | {"dtype": ["F32"]}}, "a has dtype"),
        ({"a": F32 | {"shape": [-2]}}, "malformed"),
        ({"a": F32 | {"shape": [2.0]}}, "malformed"),
        ({"a": F32 | {"shape": [True, 2]}}, "malformed"),
        ({"a": F32 | {"data_offsets": [0]}}, "malformed"),
        ({"a": F32 | {"data_offsets": [0, 4]}}, "4 bytes long"),
        ({"a": F32 | {"data_offsets": [8, 0]}}, "bytes long"),
        ({"a": F32, "b": F32}, "overlaps"),
        ({"a": F32 | {"data_offsets": [4, 12]}}, "hole"),
    ],
)
def test_a_header_that_lies_is_refused_by_name(tmp_path: Path, header: object, message: str) -> None:
    file = write_raw(tmp_path / "torn.safetensors", header, b"\0" * 12)
    with pytest.raises(InvalidModel, match=message) as caught:
        read_safetensors_headers(file.parent, stem=file.stem)
    assert "torn.safetensors" in str(caught.value)


@given(position=st.integers(0, 400), value=st.integers(0, 255))
@settings(max_examples=150)
def test_no_single_byte_can_crash_the_reader(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    raw = bytearray(save({"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}))
    raw[position % len(raw)] = value
    file = tmp_path_factory.getbasetemp() / "flipped.safetensors"
    file.write_bytes(raw)
    try:
        headers = read_safetensors_headers(file.parent, stem=file.stem)
    except InvalidModel as error:
        assert "flipped.safetensors" in str(error)
    else:
        assert max(header.end for header in headers.values()) == len(raw)


def make_shards(folder: Path) -> dict[str, str]:
    save_file({"a": torch.ones(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.ones(3)}, folder / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    make_shards(tmp_path)
    assert {name: header.file.name for name, header in read_safetensors_headers(tmp_path).items()} == {
        "a": "model-1.safetensors",
        "b": "model-2.safetensors",
    }


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    make_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(InvalidModel, match=r"lacks the shard model-2\.safetensors"):
        read_safetensors_headers(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../secret.safetensors"}, "of the same folder"),
        ({"a": "/etc/passwd"}, "of the same folder"),
        ({"a": "model.bin"}, "of the same folder"),
        ({"a": 3}, "of the same folder"),
        ({}, "names no tensor"),
        ([], "not a shard index"),
        ({"a": "model-1.safetensors", "c": "model-1.safetensors"}, "c is in model-1.safetensors, but it is not"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, weight_map: object, message: str) -> None:
    make_shards(tmp_path)
    write_index(tmp_path, weight_map)
    with pytest.raises(InvalidModel, match=message):
        read_safetensors_headers(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    make_shards(tmp_path)
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "model-2.safetensors")
    with pytest.raises(InvalidModel, match=r"a is in both model-1\.safetensors and model-2\.safetensors"):
        read_safetensors_headers(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", "pickle.*save the model as safetensors"),
        ("adapter_model.safetensors", "adapter"),
        ("README.md", "holds neither model.safetensors"),
    ],
)
def test_a_folder_without_safetensors_says_what_to_do(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(InvalidModel, match=message):
        read_safetensors_headers(tmp_path)


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="is not a folder"):
        read_safetensors_headers(tmp_path / "nowhere")
