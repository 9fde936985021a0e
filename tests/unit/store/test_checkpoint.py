"""Checkpoints: bit-exact there and back, loadable by plain transformers, never half there."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from horizon_server.durable import durable_folder, remove_unfinished
from horizon_server.errors import AlreadyExists, DiskFull, InvalidModel
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.store.checkpoint import load_checkpoint, save_checkpoint
from horizon_server.store.exported import ExportDtype
from horizon_server.store.host_store import HostStore, merge_master
from horizon_server.store.manifest import is_complete, read_manifest, record_file
from horizon_server.store.model_load import load_model

MakeModel = Callable[..., Path]
PLANES = ("hi", "lo", "exp_avg", "exp_avg_sq")
STATE = {"step": 17, "rng": {"seed": 3}, "loss": 0.1 + 0.2}


def trained_store(folder: Path) -> HostStore:
    """A store whose lo halves and moments are not zero, as after training."""
    store = HostStore.allocate(open_model_folder(folder).layout, num_threads=1)
    load_model(store, folder)
    generator = torch.Generator().manual_seed(5)
    for _, place in store.layout.tensors():
        store.write_master(place.name, torch.randn(place.shape, generator=generator) * 0.02)
        store.tensor(place.name, "exp_avg").normal_(generator=generator)
        store.tensor(place.name, "exp_avg_sq").uniform_(generator=generator)
    return store


def master_of(store: HostStore, name: str) -> torch.Tensor:
    hi, lo = store.tensor(name, "hi").view(-1), store.tensor(name, "lo").view(-1)
    master = torch.empty(hi.numel())
    merge_master(hi, lo, master)
    return master.view(store.layout.find(name)[1].shape)


def write_ties(store: HostStore) -> None:
    """Make a third of the masters lie half way between two bfloat16 numbers, above even ones and above odd ones."""
    for _, place in store.layout.tensors():
        bits = master_of(store, place.name).view(torch.int32).view(-1)
        bits[::3] = (bits[::3] & ~0xFFFF) | 0x8000
        store.write_master(place.name, bits.view(torch.float32).view(place.shape))


def assert_same_planes(left: HostStore, right: HostStore) -> None:
    for plane in PLANES:
        assert torch.equal(left.plane(plane).view(torch.uint8), right.plane(plane).view(torch.uint8)), plane


@pytest.fixture
def saved(make_model: MakeModel, tmp_path: Path) -> Path:
    folder = make_model()
    save_checkpoint(trained_store(folder), tmp_path / "step-17", source=folder, trainer_state=STATE)
    return tmp_path / "step-17"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 8192])
def test_every_bit_comes_back(make_model: MakeModel, tmp_path: Path, tied: bool, shard_bytes: int) -> None:
    folder = make_model(tied=tied)
    store = trained_store(folder)
    target = tmp_path / "checkpoint"
    manifest = save_checkpoint(store, target, source=folder, trainer_state=STATE, shard_bytes=shard_bytes)
    assert ("model.safetensors.index.json" in manifest.files) == (shard_bytes == 8192)
    restored = HostStore.allocate(store.layout, num_threads=1)
    assert load_checkpoint(restored, target) == STATE
    assert_same_planes(store, restored)
    assert is_complete(target) and read_manifest(target) == manifest


TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 8192])
@pytest.mark.parametrize("dtype", ["source", *TORCH_DTYPES])
@pytest.mark.parametrize("source_dtype", TORCH_DTYPES.values())
def test_plain_transformers_loads_the_masters_rounded_as_torch_rounds(
    make_model: MakeModel, tmp_path: Path, tied: bool, shard_bytes: int, dtype: ExportDtype, source_dtype: torch.dtype
) -> None:
    folder = make_model(tied=tied, dtype=source_dtype)
    store = trained_store(folder)
    write_ties(store)
    target = tmp_path / "exported"
    save_checkpoint(store, target, source=folder, trainer_state=STATE, dtype=dtype, shard_bytes=shard_bytes)
    wanted = TORCH_DTYPES.get(dtype, source_dtype)
    model = AutoModelForCausalLM.from_pretrained(target)
    assert model.dtype == wanted and json.loads((target / "config.json").read_text())["dtype"] == str(wanted)[6:]
    parameters = dict(model.named_parameters())
    assert set(parameters) == {place.name for _, place in store.layout.tensors()}
    for name, parameter in parameters.items():
        assert torch.equal(parameter.detach().view(torch.uint8), master_of(store, name).to(wanted).view(torch.uint8)), (
            name
        )
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert torch.isfinite(model(input_ids=torch.tensor([[1, 2, 3]])).logits).all()


@pytest.mark.parametrize("dtype", ["source", *TORCH_DTYPES])
@pytest.mark.parametrize("source_dtype", TORCH_DTYPES.values())
def test_every_bit_comes_back_whatever_the_format(
    make_model: MakeModel, tmp_path: Path, dtype: ExportDtype, source_dtype: torch.dtype
) -> None:
    folder = make_model(dtype=source_dtype)
    store = trained_store(folder)
    write_ties(store)
    save_checkpoint(store, tmp_path / "c", source=folder, trainer_state=STATE, dtype=dtype, shard_bytes=8192)
    restored = HostStore.allocate(store.layout, num_threads=1)
    assert load_checkpoint(restored, tmp_path / "c") == STATE
    assert_same_planes(store, restored)


def test_each_tensor_keeps_its_own_format(make_model: MakeModel, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(make_model(), source)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, source / "model.safetensors")
    store = trained_store(source)
    save_checkpoint(store, tmp_path / "c", source=source, trainer_state=STATE)
    written = load_file(tmp_path / "c" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == {n: t.dtype for n, t in tensors.items()}
    assert json.loads((tmp_path / "c" / "config.json").read_text())["dtype"] == "bfloat16"
    restored = HostStore.allocate(store.layout, num_threads=1)
    load_checkpoint(restored, tmp_path / "c")
    assert_same_planes(store, restored)


def test_a_checkpoint_is_a_model_folder_too(saved: Path, tmp_path: Path) -> None:
    store = HostStore.allocate(open_model_folder(saved).layout, num_threads=1)
    load_model(store, saved)
    save_checkpoint(store, tmp_path / "again", source=saved, trainer_state={})
    for name, weight in AutoModelForCausalLM.from_pretrained(tmp_path / "again").state_dict().items():
        if name != "lm_head.weight":
            assert torch.equal(weight.float(), master_of(store, name)), name


def test_data_files_of_known_names_travel_and_no_others(make_model: MakeModel, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(make_model(), source)
    for name in (
        "tokenizer.json",
        "chat_template.jinja",
        "tokenizer.model",
        "additional_chat_templates/rag.jinja",
        "additional_chat_templates/evil.py",
        "tekken.json",
        "qwen.tiktoken",
        "spm.model",
        "sentencepiece.bpe.model",
        "preprocessor_config.json",
        "LICENSE",
        "README.md",
        "USE_POLICY.md",
        "params.json",
        "vocab.bpe",
        "bpe.codes",
        "tokenizer_v3.model.v3",
        "configuration.json",
        "model_card.md",
        "modeling_evil.py",
        "pytorch_model.bin",
        "x.txt",
    ):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    (source / "tokenizer.json").chmod(0o400)
    target = tmp_path / "checkpoint"
    manifest = save_checkpoint(trained_store(source), target, source=source, trainer_state=STATE)
    left = {"additional_chat_templates/evil.py", "modeling_evil.py", "pytorch_model.bin", "x.txt"}
    copied = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()} - left
    assert {name for name in manifest.files if (source / name).is_file()} == copied
    on_disk = {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()}
    assert on_disk == set(manifest.files) | {"trainer/manifest.json"}
    assert (target / "tokenizer.json").stat().st_mode & 0o200


def test_numbers_that_are_infinite_in_fp16_are_told_by_the_name_of_their_tensor(
    make_model: MakeModel, tmp_path: Path
) -> None:
    store = trained_store(make_model())
    name = "model.layers.0.mlp.up_proj.weight"
    weight = master_of(store, name)
    weight[0, 0], weight[1, 1] = 70000.0, -1e6
    store.write_master(name, weight)
    told: list[str] = []
    save = partial(save_checkpoint, store, source=make_model(), trainer_state=STATE, on_overflow=told.append)
    save(tmp_path / "bf16", dtype="bf16")
    assert told == []
    save(tmp_path / "fp16", dtype="fp16")
    assert told == [name]


def test_the_manifest_tells_the_truth(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert {name: record_file(saved / name) for name in manifest.files} == dict(manifest.files)
    assert set(manifest.versions) == {"horizon", "torch", "python"}


FILES = [
    "config.json",
    "model.safetensors",
    "trainer/lo.safetensors",
    "trainer/rounding.safetensors",
    "trainer/exp_avg.safetensors",
    "trainer/exp_avg_sq.safetensors",
    "trainer/trainer_state.json",
]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_found_and_the_file_named(saved: Path, name: str) -> None:
    store = HostStore.allocate(open_model_folder(saved).layout, num_threads=1)
    raw = bytearray((saved / name).read_bytes())
    raw[-3] ^= 1
    (saved / name).write_bytes(raw)
    with pytest.raises(InvalidModel, match="does not match its checksum") as refused:
        load_checkpoint(store, saved)
    assert refused.value.with_names({saved: ""}).message.startswith(f"{name} does not match")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "shorter"])
def test_a_torn_folder_is_never_complete(saved: Path, name: str, damage: str) -> None:
    layout = open_model_folder(saved).layout
    file = saved / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    assert not is_complete(saved)
    with pytest.raises(InvalidModel) as refused:
        load_checkpoint(HostStore.allocate(layout, num_threads=1), saved)
    assert name in refused.value.with_names({saved: ""}).message


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"format_version": 1}', '{"format_version": 2, "files": {}, "versions": {}, "base": null}']
)
def test_a_broken_manifest_makes_no_checkpoint(saved: Path, text: str) -> None:
    (saved / "trainer" / "manifest.json").write_text(text)
    assert not is_complete(saved)
    with pytest.raises(InvalidModel, match=r"manifest\.json"):
        read_manifest(saved)


def test_a_manifest_cannot_point_outside(saved: Path) -> None:
    file = saved / "trainer" / "manifest.json"
    document = json.loads(file.read_text())
    document["files"]["../../etc/passwd"] = {"size_bytes": 1, "sha256": ""}
    file.write_text(json.dumps(document))
    with pytest.raises(InvalidModel, match="outside the checkpoint"):
        read_manifest(saved)


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(
    saved: Path, make_model: MakeModel
) -> None:
    store = HostStore.allocate(open_model_folder(make_model(tied=False)).layout, num_threads=1)
    with pytest.raises(InvalidModel, match=r"another model: lm_head\.weight"):
        load_checkpoint(store, saved)
    assert int(store.plane("hi").count_nonzero()) == 0


def test_an_existing_target_is_left_alone(saved: Path, make_model: MakeModel) -> None:
    before = record_file(saved / "model.safetensors")
    with pytest.raises(AlreadyExists):
        save_checkpoint(trained_store(make_model()), saved, source=make_model(), trainer_state={})
    assert record_file(saved / "model.safetensors") == before and is_complete(saved)


@contextmanager
def file_size_limit(limit_bytes: int) -> Iterator[None]:
    """The kernel itself refuses to write beyond the limit, as it does when a quota is used up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_when_the_space_runs_out_nothing_is_left_behind(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model()
    store = trained_store(folder)
    with file_size_limit(40_000), pytest.raises(DiskFull, match=r"^step-1 is not complete, because its disk ran full"):
        save_checkpoint(store, tmp_path / "step-1", source=folder, trainer_state={})
    assert list(tmp_path.iterdir()) == []
    save_checkpoint(store, tmp_path / "step-1", source=folder, trainer_state={})
    assert is_complete(tmp_path / "step-1")


def test_too_little_space_is_seen_before_writing(tmp_path: Path) -> None:
    with (
        pytest.raises(DiskFull, match=r"needs \d+ bytes, but .* free"),
        durable_folder(tmp_path / "c", needed_bytes=1 << 60),
    ):
        raise AssertionError("never entered")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, PermissionError])
def test_any_error_leaves_no_trace(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), durable_folder(tmp_path / "c", needed_bytes=1) as folder:
        (folder / "half").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_no_checkpoint_and_is_replaced(make_model: MakeModel, tmp_path: Path) -> None:
    left = tmp_path / ".c.partial"
    (left / "trainer").mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    assert not is_complete(left)
    save_checkpoint(trained_store(make_model()), tmp_path / "c", source=make_model(), trainer_state={})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_what_killed_writers_left_can_be_removed(saved: Path) -> None:
    (saved.parent / ".step-18.partial" / "trainer").mkdir(parents=True)
    assert remove_unfinished(saved.parent) == [".step-18.partial"]
    assert list(saved.parent.iterdir()) == [saved] and is_complete(saved)
