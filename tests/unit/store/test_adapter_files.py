"""Adapter folders: what PEFT loads of what is written, and what is refused of what is read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tests.qwen3_folders import MakeModel
from transformers import AutoModelForCausalLM

from horizon_server.errors import InvalidModel
from horizon_server.store import base_digest
from horizon_server.store.adapter_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    AdapterConfig,
    adapter_config_text,
    parse_adapter_config,
    read_adapter_folder,
)
from horizon_server.store.base_digest import DigestBook, model_digest
from horizon_server.store.merging import merged_bytes, write_merged
from horizon_server.store.safetensors_files import read_safetensors_headers

# PEFT asks for a property by its older name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")

IDS = torch.arange(24).reshape(2, 12) * 5 % 120


@pytest.fixture
def adapter_of(tmp_path: Path) -> Callable[..., Path]:
    """Writes an adapter of a base folder with PEFT, with random B, and returns its folder."""

    def write(base: Path, **options: Any) -> Path:
        torch.manual_seed(1)
        plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        config = LoraConfig(
            **{"r": 4, "lora_alpha": 12, "task_type": "CAUSAL_LM", "target_modules": ["q_proj", "down_proj"], **options}
        )
        model = get_peft_model(plain, config)
        for name, parameter in model.named_parameters():
            if "lora_magnitude" in name:
                parameter.data += 0.3 * torch.randn_like(parameter)
            elif "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        folder = tmp_path / "adapter"
        model.save_pretrained(str(folder))
        return folder

    return write


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS).logits
    return found


@pytest.mark.parametrize("options", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"])
def test_a_merged_folder_computes_what_base_and_adapter_compute(
    make_model: MakeModel, adapter_of: Callable[..., Path], tmp_path: Path, options: dict[str, bool]
) -> None:
    base = make_model(dtype=torch.bfloat16)
    folder = adapter_of(base, **options)
    found = read_adapter_folder(folder)
    assert found.config.scale == (6.0 if "use_rslora" in options else 3.0)
    assert found.config.dora == ("use_dora" in options)
    merged = tmp_path / "merged"
    merged.mkdir()
    files = write_merged(merged, base=base, adapter=found, dtype="fp32", shard_bytes=20_000)

    assert len([name for name in files if name.endswith(".safetensors")]) > 1
    assert sum(record.size_bytes for record in files.values()) <= merged_bytes(base, "fp32")
    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wanted = logits(PeftModel.from_pretrained(plain, folder))
    got = logits(AutoModelForCausalLM.from_pretrained(merged))
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert (got - logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))).abs().max() > 0.01


def test_a_merged_folder_in_bfloat16_is_rounded_once(
    make_model: MakeModel, adapter_of: Callable[..., Path], tmp_path: Path
) -> None:
    base = make_model(dtype=torch.bfloat16)
    found = read_adapter_folder(adapter_of(base))
    merged, whole = tmp_path / "merged", tmp_path / "whole"
    merged.mkdir()
    whole.mkdir()
    write_merged(merged, base=base, adapter=found)
    write_merged(whole, base=base, adapter=found, dtype="fp32")

    rounded, exact = load_file(merged / "model.safetensors"), load_file(whole / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in rounded.items()} == dict.fromkeys(exact, torch.bfloat16)
    for name, tensor in exact.items():
        assert torch.equal(rounded[name], tensor.bfloat16()), name
    assert json.loads((merged / "config.json").read_text())["dtype"] == "bfloat16"


def test_merging_takes_bounded_memory_and_reports_what_it_reads(
    make_model: MakeModel, adapter_of: Callable[..., Path], tmp_path: Path
) -> None:
    base, read = make_model(dtype=torch.float32), list[int]()
    (tmp_path / "merged").mkdir()
    write_merged(tmp_path / "merged", base=base, adapter=read_adapter_folder(adapter_of(base)), advance=read.append)
    headers = read_safetensors_headers(base)
    assert sum(read) == sum(header.end - header.start for header in headers.values())


@pytest.mark.parametrize("targets", [["q_proj"], ["model.layers.1.mlp.down_proj", "model.layers.2.self_attn.o_proj"]])
def test_a_written_config_means_the_same_modules_to_peft(
    make_model: MakeModel, adapter_of: Callable[..., Path], tmp_path: Path, targets: list[str]
) -> None:
    base = make_model()
    folder = adapter_of(base, target_modules=targets)
    found = read_adapter_folder(folder)
    modules = [name.removesuffix(".weight") for name in read_safetensors_headers(base) if name.endswith(".weight")]
    wanted = load_file(folder / ADAPTER_FILE)
    (folder / ADAPTER_CONFIG_FILE).write_text(adapter_config_text(found.config, found.adapters, modules))

    plain: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(plain, folder)
    got = {n.replace(".default", ""): p for n, p in loaded.named_parameters() if "lora_" in n}
    assert set(got) == set(wanted)
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())
    written = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())["target_modules"]
    assert written == sorted(targets)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA is supported, so merge the adapter into its base"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is .*; it trains whole modules"),
        (
            {"target_parameters": ["mlp.experts.gate_up_proj"]},
            r"'target_parameters' is .*; .* train the experts themselves, without adapters \(train.trainable: "
            r"\[experts\]\), or merge",
        ),
        ({"rank_pattern": {"q_proj": 8}}, "'rank_pattern' is .*; the ranks of an adapter must all be r"),
        ({"alpha_pattern": {"q_proj": 8}}, "'alpha_pattern' is .*; the scales"),
        ({"bias": "all"}, "'bias' is 'all'; only none is supported"),
        ({"use_dora": "yes"}, "use_dora is 'yes'; it must be true or false"),
        ({"an_option_of_tomorrow": 3}, "'an_option_of_tomorrow' is 3; that is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base's weights"),
        ({"r": 0}, "r is 0; it must be a whole number from 1 to 4096"),
        ({"r": True}, "r is True"),
        ({"r": 8}, r"with r 8 they must be \[8, inputs\] and \[outputs, 8\]"),
        ({"lora_alpha": math.nan}, "lora_alpha is nan; it must be a number from 0"),
        ({"use_rslora": "yes"}, "use_rslora is 'yes'; it must be true or false"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(
    make_model: MakeModel, adapter_of: Callable[..., Path], change: dict[str, Any], words: str
) -> None:
    folder = adapter_of(make_model())
    file = folder / ADAPTER_CONFIG_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(InvalidModel, match=words):
        read_adapter_folder(folder)


def test_options_of_other_versions_that_are_off_are_no_obstacle() -> None:
    found = parse_adapter_config({"peft_type": "LORA", "r": 2, "an_option_of_tomorrow": None, "use_dora": False})
    assert found == AdapterConfig(rank=2, alpha=8.0)


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (ADAPTER_CONFIG_FILE, None, "has no adapter_config.json"),
        (ADAPTER_CONFIG_FILE, b"{", "is not valid JSON"),
        (ADAPTER_CONFIG_FILE, b"[]", "must hold a JSON object"),
        (ADAPTER_CONFIG_FILE, b" " * 2_000_000, "is larger than"),
        (ADAPTER_FILE, None, "has no adapter_model.safetensors; save the adapter as safetensors"),
        (ADAPTER_FILE, b"PK", "truncated"),
    ],
)
def test_broken_files_are_named(
    make_model: MakeModel, adapter_of: Callable[..., Path], file: str, content: bytes | None, words: str
) -> None:
    folder = adapter_of(make_model())
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(InvalidModel, match=words):
        read_adapter_folder(folder)


def test_tensors_of_other_methods_and_shapes_are_refused(
    make_model: MakeModel, adapter_of: Callable[..., Path]
) -> None:
    base = make_model()
    folder = adapter_of(base)
    tensors = load_file(folder / ADAPTER_FILE)
    first = next(name for name in tensors if "lora_A" in name)

    save_file({**tensors, "base_model.model.lm_head.weight": torch.zeros(2, 2)}, folder / ADAPTER_FILE)
    with pytest.raises(InvalidModel, match=r"lm_head\.weight is not a tensor of plain LoRA"):
        read_adapter_folder(folder)
    magnitude = first.replace("lora_A.weight", "lora_magnitude_vector")
    save_file({**tensors, magnitude: torch.zeros(2)}, folder / ADAPTER_FILE)
    with pytest.raises(InvalidModel, match=r"lora_magnitude_vector is not a tensor of plain LoRA"):
        read_adapter_folder(folder)
    save_file({n: t for n, t in tensors.items() if n != first}, folder / ADAPTER_FILE)
    with pytest.raises(InvalidModel, match="has no counterpart"):
        read_adapter_folder(folder)
    save_file({**tensors, first: torch.zeros(4, 31)}, folder / ADAPTER_FILE)
    found = read_adapter_folder(folder)
    shapes = {name: header.shape for name, header in read_safetensors_headers(base).items()}
    with pytest.raises(InvalidModel, match=r"is for a weight of shape .* the base's is"):
        found.of_weights(shapes)
    with pytest.raises(InvalidModel, match="which the base model does not have"):
        found.of_weights({})


def test_magnitudes_have_the_length_of_their_outputs(make_model: MakeModel, adapter_of: Callable[..., Path]) -> None:
    folder = adapter_of(make_model(), use_dora=True)
    tensors = load_file(folder / ADAPTER_FILE)
    first = next(name for name in tensors if "magnitude" in name)
    save_file({**tensors, first: torch.zeros(3)}, folder / ADAPTER_FILE)
    with pytest.raises(InvalidModel, match=r"have shape \[3\]; they must be \[\d+\], one for each output"):
        read_adapter_folder(folder)
    save_file({name: tensor for name, tensor in tensors.items() if name != first}, folder / ADAPTER_FILE)
    with pytest.raises(InvalidModel, match="has no counterpart"):
        read_adapter_folder(folder)


def test_values_that_are_not_finite_are_not_merged(
    make_model: MakeModel, adapter_of: Callable[..., Path], tmp_path: Path
) -> None:
    base = make_model()
    folder = adapter_of(base)
    tensors = load_file(folder / ADAPTER_FILE)
    first = next(iter(tensors))
    save_file({**tensors, first: torch.full_like(tensors[first], math.nan)}, folder / ADAPTER_FILE)
    (tmp_path / "merged").mkdir()
    with pytest.raises(InvalidModel, match="NaN or infinite"):
        write_merged(tmp_path / "merged", base=base, adapter=read_adapter_folder(folder))


def copied(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_digest_is_of_every_byte_and_is_computed_once(make_model: MakeModel, tmp_path: Path) -> None:
    base, book = copied(make_model(), tmp_path / "base"), DigestBook(tmp_path / "digests")
    assert book.known(base) == ""
    first = book.digest(base)
    assert first == book.known(base) == model_digest(base)
    content = bytearray((base / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (base / "model.safetensors").write_bytes(content)
    os.utime(base / "model.safetensors", ns=(0, 0))
    assert book.known(base) == ""
    assert book.digest(base) == model_digest(base) != first
    for file in (tmp_path / "digests").iterdir():
        file.write_text(first[:20])
    assert book.digest(base) == model_digest(base)


def test_a_digest_is_made_again_where_only_the_time_of_the_change_tells(make_model: MakeModel, tmp_path: Path) -> None:
    base, book = copied(make_model(), tmp_path / "base"), DigestBook(tmp_path / "digests")
    file = base / "model.safetensors"
    before, first = file.stat(), book.digest(base)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync --times and cp --preserve do
    assert book.known(base) == ""
    assert book.digest(base) == model_digest(base) != first


def test_further_links_to_pushed_contents_leave_their_digest_known(make_model: MakeModel, tmp_path: Path) -> None:
    """A model is a folder of links to contents that nobody writes any more; other models and backups link to them
    later."""
    book, content = DigestBook(tmp_path / "digests"), copied(make_model(), tmp_path / "contents")
    folders, first = [tmp_path / name for name in ("model", "again")], ""
    for folder in folders:
        folder.mkdir()
        for file in content.iterdir():
            os.link(file, folder / file.name)
        first = first or book.digest(folder)
        assert book.known(folder) == book.known(folders[0]) == first


def test_a_digest_does_not_depend_on_the_files_that_tensors_are_in(make_model: MakeModel, tmp_path: Path) -> None:
    one, many = make_model(), make_model(shard="20KB")
    assert len(list(many.glob("*.safetensors"))) > 1
    assert model_digest(one) == model_digest(many)
    again = copied(one, tmp_path / "again")
    config = json.loads((again / "config.json").read_bytes())
    (again / "config.json").write_text(json.dumps(config | {"transformers_version": "9"}))
    assert model_digest(again) == model_digest(one), "nor on what a program says of itself"
    (again / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert model_digest(again) != model_digest(one)


def test_the_book_of_digests_is_bounded(make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base_digest, "MAX_KNOWN", 2)
    book = DigestBook(tmp_path / "digests")
    for number in range(4):
        book.digest(copied(make_model(), tmp_path / str(number)))
    assert len(list((tmp_path / "digests").iterdir())) == 2
    assert book.known(tmp_path / "3")


def test_a_book_that_cannot_be_written_costs_another_reading_only(make_model: MakeModel, tmp_path: Path) -> None:
    (tmp_path / "digests").write_text("no folder can be made here, as on a full disk")
    base = copied(make_model(), tmp_path / "base")
    assert DigestBook(tmp_path / "digests").digest(base) == model_digest(base)
