"""Which model folders are taken, and what is said of the others."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from horizon_server.errors import InvalidModel
from horizon_server.records.blob import BlobFile
from horizon_server.services import model_check
from horizon_server.services.model_check import ModelFacts, check_config, check_folder, check_names

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "vocab_size": 32,
    "num_attention_heads": 2,
    "tie_word_embeddings": False,
}
SHAPES = {
    "model.embed_tokens.weight": (32, 8),
    **{f"model.layers.{i}.mlp.up_proj.weight": (16, 8) for i in range(2)},
    "model.norm.weight": (8,),
    "lm_head.weight": (32, 8),
}
NUM_PARAMETERS = 32 * 8 * 2 + 2 * 16 * 8 + 8


def safetensors(shapes: dict[str, tuple[int, ...]], dtype: str = "BF16", size: int = 2) -> bytes:
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in shapes.items():
        num = 1
        for side in shape:
            num *= side
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num * size]}
        offset += num * size
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + bytes(offset)


def write(folder: Path, *, config: dict[str, Any] | None = None, weights: bytes | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    (folder / "model.safetensors").write_bytes(safetensors(SHAPES) if weights is None else weights)
    return folder


def test_a_sound_folder_tells_architecture_and_parameters(tmp_path: Path) -> None:
    facts = check_folder(write(tmp_path / "m"))
    assert facts == {"architecture": "llama", "num_parameters": NUM_PARAMETERS}


def test_tied_weights_count_once(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    assert check_folder(write(tmp_path / "m", config=config))["num_parameters"] == NUM_PARAMETERS - 32 * 8
    without_head = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    silent = {name: value for name, value in CONFIG.items() if name != "tie_word_embeddings"}
    folder = write(tmp_path / "o", config=silent, weights=safetensors(without_head))
    assert check_folder(folder)["num_parameters"] == NUM_PARAMETERS - 32 * 8


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": ""}, "has no model_type"),
        ({"model_type": None}, "has no model_type"),
        ({"is_encoder_decoder": True}, "only decoder-only"),
        ({"architectures": ["BertForMaskedLM"]}, "'BertForMaskedLM'"),
        ({"auto_map": {"AutoModel": "modeling.X"}}, "auto_map"),
        ({"quantization_config": {"bits": 4}}, "quantised weights cannot be trained"),
        ({"num_hidden_layers": 3}, "num_hidden_layers = 3"),
    ],
)
def test_configs_that_cannot_be_trained_are_refused(tmp_path: Path, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidModel, match=sentence):
        check_folder(write(tmp_path / "m", config={**CONFIG, **change}))


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        ({"vocab_size": 33, "hidden_size": 8}, "model.embed_tokens.weight has shape [32, 8], .* ask for 33 x 8"),
        ({"vocab_size": 32, "hidden_size": 9}, "model.embed_tokens.weight has shape [32, 8], .* ask for 32 x 9"),
        ({"word_embed_proj_dim": 16}, "config.json: word_embed_proj_dim is 16 and the hidden size is 8"),
        ({"text_config": {**CONFIG, "vocab_size": 30}}, "model.embed_tokens.weight has shape .* 30 x 8"),
    ],
)
def test_tables_that_do_not_fit_the_config_are_named(tmp_path: Path, change: dict[str, Any], tensor: str) -> None:
    pattern = tensor.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(InvalidModel, match=pattern) as caught:
        check_folder(write(tmp_path / "m", config={**CONFIG, **change}))
    assert str(tmp_path) not in caught.value.message


def test_an_untied_projection_that_does_not_fit_is_named_and_a_tied_one_is_left_out(tmp_path: Path) -> None:
    weights = safetensors({**SHAPES, "lm_head.weight": (8, 32)})
    config = {**CONFIG, "vocab_size": 32, "hidden_size": 8}
    with pytest.raises(InvalidModel, match=r"lm_head\.weight has shape \[8, 32\], .* ask for 32 x 8"):
        check_folder(write(tmp_path / "m", config=config, weights=weights))

    check_folder(write(tmp_path / "n", config={**config, "tie_word_embeddings": True}, weights=weights))


@pytest.mark.parametrize(
    "config",
    [
        {"vocab_size": 32, "hidden_size": 8},
        {"vocab_size": 32, "hidden_size": 8, "word_embed_proj_dim": 8},
        {"text_config": {**CONFIG}, "vocab_size": None},
    ],
)
def test_tables_that_fit_are_taken(tmp_path: Path, config: dict[str, Any]) -> None:
    assert check_folder(write(tmp_path / "m", config={**CONFIG, **config}))["num_parameters"] == NUM_PARAMETERS


@pytest.mark.parametrize("shape", [(), (32,), (4, 8, 8)])
def test_a_table_of_another_rank_is_named(tmp_path: Path, shape: tuple[int, ...]) -> None:
    weights = safetensors({**SHAPES, "model.embed_tokens.weight": shape})
    with pytest.raises(InvalidModel, match=r"model\.embed_tokens\.weight has shape"):
        check_folder(write(tmp_path / "m", config={**CONFIG, "vocab_size": 32}, weights=weights))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_config_must_be_a_json_object(tmp_path: Path, content: bytes) -> None:
    folder = write(tmp_path / "m")
    (folder / "config.json").write_bytes(content)
    with pytest.raises(InvalidModel, match=r"config\.json (is|must)"):
        check_folder(folder)


def test_a_base_model_whose_embedding_is_its_projection_is_taken(tmp_path: Path) -> None:
    tied = {name.removeprefix("model."): shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    config = CONFIG | {"architectures": ["Qwen3Model"], "model_type": "qwen3", "tie_word_embeddings": True}
    facts = check_folder(write(tmp_path / "m", config=config, weights=safetensors(tied)))
    assert facts == ModelFacts(architecture="qwen3", num_parameters=NUM_PARAMETERS - 32 * 8)
    with pytest.raises(InvalidModel, match="no tensor is the output projection"):
        check_folder(write(tmp_path / "n", config=config | {"tie_word_embeddings": False}, weights=safetensors(tied)))


@pytest.mark.parametrize("architecture", ["BertModel", "BertForMaskedLM"])
def test_an_encoder_is_refused_by_its_config_alone(architecture: str) -> None:
    with pytest.raises(InvalidModel, match=f"config.json names '{architecture}'; only decoder-only"):
        check_config({"model_type": "bert", "architectures": [architecture]})
    if architecture.endswith("Model"):
        assert check_config({"model_type": "bert", "architectures": [architecture], "is_decoder": True}) == "bert"


def test_a_tokenizer_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    (folder / "tokenizer_config.json").write_bytes(b'{"auto_map": {"AutoTokenizer": ["x.Y", null]}}')
    with pytest.raises(InvalidModel, match=r"tokenizer_config\.json names custom code"):
        check_folder(folder)


def test_a_tokenizer_config_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "m")
    (folder / "tokenizer_config.json").write_bytes(b"{}" + b" " * 99)
    monkeypatch.setattr(model_check, "_MAX_TOKENIZER_CONFIG_BYTES", 101)
    check_folder(folder)
    monkeypatch.setattr(model_check, "_MAX_TOKENIZER_CONFIG_BYTES", 100)
    with pytest.raises(
        InvalidModel, match=r"tokenizer_config\.json is larger than 100 bytes, which no tokenizer needs"
    ):
        check_folder(folder)


@pytest.mark.parametrize("cut", [0, 7, 20, -1])
def test_torn_weights_are_refused_without_telling_where_they_lie(tmp_path: Path, cut: int) -> None:
    folder = write(tmp_path / "m", weights=safetensors(SHAPES)[:cut])
    with pytest.raises(InvalidModel, match=r"model\.safetensors") as caught:
        check_folder(folder)
    assert str(tmp_path) not in caught.value.message


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="F8_E4M3"):
        check_folder(write(tmp_path / "m", weights=safetensors(SHAPES, "F8_E4M3", 1)))


def test_an_index_must_be_complete(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": dict.fromkeys(SHAPES, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert check_folder(folder)["num_parameters"] == NUM_PARAMETERS
    index["weight_map"]["model.norm.weight"] = "model-00002-of-00002.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidModel, match="lacks the shard model-00002-of-00002"):
        check_folder(folder)


def named(*paths: str) -> list[BlobFile]:
    return [BlobFile(path=path, sha256="ab" * 32, size_bytes=1) for path in paths]


@pytest.mark.parametrize(
    ("paths", "sentence"),
    [
        (["config.json", "pytorch_model.bin"], "never accepted"),
        (["config.json", "model.safetensors", "training_args.bin"], "training_args.bin may be a pickle"),
        (["config.json", "model.safetensors", "sub/optimizer.PT"], "may be a pickle"),
        (["config.json", "model.safetensors", "modeling_odd.py"], "is code"),
        (["model.safetensors"], "no config.json"),
        (["config.json", "tokenizer.json"], "no .safetensors weights"),
        (["config.json", "sub/model.safetensors"], "no .safetensors weights"),
    ],
)
def test_folders_are_judged_by_their_names_before_anything_is_sent(paths: list[str], sentence: str) -> None:
    with pytest.raises(InvalidModel) as caught:
        check_names(named(*paths))
    assert sentence in caught.value.message


def test_every_bad_name_is_told() -> None:
    with pytest.raises(InvalidModel, match="and 1 more") as caught:
        check_names(named("config.json", "a.bin", "model.safetensors", "b.py"))
    assert [violation.field for violation in caught.value.violations] == ["files[1].path", "files[3].path"]
    check_names(named("config.json", "model.safetensors", "README.md", "chat_template.jinja", "sub/x.jinja"))
