"""Model folders made to exhaust time or memory are refused at once, by a message that names the limit."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from horizon_server.errors import InvalidModel
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.services.model_check import _MAX_TOKENIZER_CONFIG_BYTES as MAX_TOKENIZER_CONFIG_BYTES
from horizon_server.services.model_check import check_folder
from horizon_server.store import safetensors_files
from horizon_server.store.model_files import MAX_CONFIG_BYTES
from horizon_server.store.safetensors_files import MAX_TENSORS, read_safetensors_headers

CONFIG = {
    "model_type": "llama",
    "hidden_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 2,
    "tie_word_embeddings": True,
}
TENSORS: dict[str, Any] = {
    "model.embed_tokens.weight": {"dtype": "F32", "shape": [2, 4], "data_offsets": [0, 32]},
    "model.layers.0.mlp.weight": {"dtype": "F32", "shape": [4], "data_offsets": [32, 48]},
}


def write(folder: Path, *, config: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    header = json.dumps(TENSORS | (tensors or {})).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(48))
    return folder


def refused(work: Callable[[], object], *, seconds: float = 2.0, mebibytes: int = 64) -> str:
    """The message of the refusal, which may take no longer and no more memory than this."""
    tracemalloc.start()
    start_s = time.process_time()
    try:
        with pytest.raises(InvalidModel) as caught:
            work()
        elapsed_s, (_, peak_bytes) = time.process_time() - start_s, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert elapsed_s < seconds
    assert peak_bytes < mebibytes << 20
    assert len(caught.value.message) < 1000
    return caught.value.message


def empty_tensor(shape: list[int]) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [48, 48]}


def test_the_plain_folder_is_fine(tmp_path: Path) -> None:
    assert open_model_folder(write(tmp_path)).layout.num_parameters == 12


@pytest.mark.parametrize("num_layers", [20_000_000, 1_000_000_000, 10**30, 10**4000])
def test_a_huge_number_of_layers_is_refused_at_once(tmp_path: Path, num_layers: int) -> None:
    folder = write(tmp_path, config={"num_hidden_layers": num_layers})
    assert "num_hidden_layers" in refused(lambda: open_model_folder(folder), seconds=0.5, mebibytes=4)


@pytest.mark.parametrize("num_layers", [2, 1_000_000])
def test_more_layers_than_tensors_take_no_memory(tmp_path: Path, num_layers: int) -> None:
    folder = write(tmp_path, config={"num_hidden_layers": num_layers})
    message = refused(lambda: open_model_folder(folder), seconds=0.5, mebibytes=4)
    assert f"num_hidden_layers = {num_layers}" in message


@pytest.mark.parametrize(
    "field",
    ["hidden_size", "intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads", "vocab_size"],
)
@pytest.mark.parametrize("value", [10**18, 10**30, -1, "4", 2.5, True])
def test_a_size_no_model_has_names_its_field_and_the_range(tmp_path: Path, field: str, value: object) -> None:
    message = refused(lambda: open_model_folder(write(tmp_path, config={field: value})))
    assert f"config.json: {field} is" in message and "must be a whole number from 1 to" in message


@pytest.mark.parametrize("field", ["num_experts", "num_local_experts", "moe_intermediate_size", "num_experts_per_tok"])
def test_experts_are_bounded_too(tmp_path: Path, field: str) -> None:
    others = {} if field == "num_experts" else {"num_local_experts": 2}
    folder = write(tmp_path, config={**others, field: 10**18})
    assert f"config.json: {field} is" in refused(lambda: open_model_folder(folder))


@pytest.mark.parametrize("num_dimensions", [50_000, 9])
def test_a_tensor_of_many_dimensions_is_refused(tmp_path: Path, num_dimensions: int) -> None:
    folder = write(tmp_path, tensors={"bomb": empty_tensor([2**62] * num_dimensions)})
    assert "at most 8 dimensions" in refused(lambda: read_safetensors_headers(folder))


def test_a_product_of_dimensions_stops_at_63_bits_although_one_is_zero(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors={"bomb": empty_tensor([0, 2**62, 4])})
    assert "bomb are malformed" in refused(lambda: read_safetensors_headers(folder))


@pytest.mark.parametrize("num_parts", [5, 20_000, 100_000])
def test_a_name_of_many_numbers_is_refused(tmp_path: Path, num_parts: int) -> None:
    folder = write(tmp_path, tensors={".".join(["a", *["0"] * num_parts, "w"]): empty_tensor([0])})
    assert "a name may have at most 512 characters and 4 numbers" in refused(lambda: open_model_folder(folder))


def test_more_tensors_than_a_model_has_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors={f"t{i}": empty_tensor([0]) for i in range(MAX_TENSORS)})
    assert f"at most {MAX_TENSORS}" in refused(lambda: read_safetensors_headers(folder))


def test_a_long_list_in_a_header_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors={"bomb": empty_tensor([0] * 5_000_000)})
    assert "more values than" in refused(lambda: read_safetensors_headers(folder))


def test_the_headers_of_all_shards_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_files, "MAX_TENSORS", 100)
    names = [f"model-{i}.safetensors" for i in range(4)]
    for i, name in enumerate(names):
        tensors = {f"s{i}.t{k}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for k in range(30)}
        header = json.dumps(tensors).encode()
        (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header)
    index = {"weight_map": {f"s{i}.t0": name for i, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "at most 100" in refused(lambda: read_safetensors_headers(tmp_path))


@pytest.mark.parametrize("part", ["\u00b2", "1" * 5000, "\u0663", "\ud800"])
def test_digits_that_are_not_numbers_are_refused(tmp_path: Path, part: str) -> None:
    folder = write(tmp_path, tensors={f"model.layers.{part}.w": empty_tensor([0])})
    refused(lambda: open_model_folder(folder)).encode()


@pytest.mark.parametrize(
    ("name", "limit_bytes"), [("config.json", MAX_CONFIG_BYTES), ("tokenizer_config.json", MAX_TOKENIZER_CONFIG_BYTES)]
)
def test_a_config_larger_than_any_is_not_read(tmp_path: Path, name: str, limit_bytes: int) -> None:
    folder = write(tmp_path)
    with (folder / name).open("ab") as file:
        file.truncate(limit_bytes + 1)  # zeros that take no space
    assert f"{name} is larger than {limit_bytes} bytes" in refused(lambda: check_folder(folder), mebibytes=4)


def test_a_number_too_long_to_be_an_index_is_a_word(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors={f"model.layers.{'1' * 400}.w": empty_tensor([0])})
    assert open_model_folder(folder).layout.num_parameters == 12


@pytest.mark.parametrize("shard", ["a\0.safetensors", "a" * 300 + ".safetensors", "\ud800.safetensors", "x" * 10**6])
def test_the_name_of_a_shard_is_a_file_name(tmp_path: Path, shard: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    assert "must be in a .safetensors file" in refused(lambda: read_safetensors_headers(tmp_path))
