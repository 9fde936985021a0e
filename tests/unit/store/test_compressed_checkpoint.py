"""Checkpoints of compressed optimizer states: bit-exact there and back, and from one form to the other where that is
asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.support.drives import drive_folders, on_drives, store_on_drives

from horizon_server.errors import InvalidModel
from horizon_server.planning.model_folder import open_model_folder
from horizon_server.store.adamw import AdamWStep, update_unit
from horizon_server.store.checkpoint import load_checkpoint, save_checkpoint
from horizon_server.store.exported import ExportDtype
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import PLANE_BYTES, StoreLayout, weights_only, with_compressed_states
from horizon_server.store.model_load import load_model

MakeModel = Callable[..., Path]
STATE = {"step": 17}
DTYPES = ("source", "bf16", "fp16", "fp32")


def layout_of(folder: Path, *, compressed: bool) -> StoreLayout:
    layout = open_model_folder(folder).layout
    return with_compressed_states(layout, smallest=1000) if compressed else layout


def trained_store(folder: Path, *, compressed: bool = True) -> HostStore:
    """A store after some steps."""
    store = HostStore.allocate(layout_of(folder, compressed=compressed), num_threads=1)
    load_model(store, folder)
    generator = torch.Generator().manual_seed(5)
    for step in range(1, 5):
        for unit in store.layout.units:
            grad = torch.zeros(unit.trained_elements)
            for place in unit.tensors:
                grad[place.offset : place.offset + place.num_elements].normal_(generator=generator)
            hyper = AdamWStep(step=step, learning_rate=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
            update_unit(store, unit.index, hyper, num_threads=1, grad=grad)
    # Some weights half way between two bfloat16 numbers.
    for _, place in store.layout.tensors():
        bits = masters_of(store)[place.name].view(torch.int32)
        bits[::3] = (bits[::3] & ~0xFFFF) | 0x8000
        store.write_master(place.name, bits.view(torch.float32).view(place.shape))
    return store


def masters_of(store: HostStore) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for unit in store.layout.units:
        master = torch.empty(unit.num_elements)
        store.merge_master(unit.index, master)
        found |= {t.name: master[t.offset : t.offset + t.num_elements].clone() for t in unit.tensors}
    return found


def assert_same_planes(left: HostStore, right: HostStore) -> None:
    for plane in PLANE_BYTES:
        if plane in left.fds:
            assert torch.equal(left.plane(plane).view(torch.uint8), right.plane(plane).view(torch.uint8)), plane


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_every_bit_comes_back(make_model: MakeModel, tmp_path: Path, dtype: ExportDtype, shard_bytes: int) -> None:
    folder = make_model(tied=False)
    store = trained_store(folder)
    assert store.layout.is_compressed
    save_checkpoint(store, tmp_path / "saved", source=folder, trainer_state=STATE, dtype=dtype, shard_bytes=shard_bytes)
    loaded = HostStore.allocate(store.layout, num_threads=1)
    assert load_checkpoint(loaded, tmp_path / "saved") == STATE
    assert_same_planes(store, loaded)


def test_the_files_are_as_small_as_the_states(make_model: MakeModel, tmp_path: Path) -> None:
    folder = make_model(tied=True)
    store = trained_store(folder)
    save_checkpoint(store, tmp_path / "saved", source=folder, trainer_state=STATE, dtype="bf16")
    compressed = {place.name: place for _, place in store.layout.tensors() if place.compressed}
    files = {
        stem: load_file(tmp_path / f"saved/trainer/{stem}.safetensors")
        for stem in ("lo8", "exp_avg8", "root8", "scales")
    }
    assert all(set(file) == set(compressed) for file in files.values())
    assert not set(load_file(tmp_path / "saved/trainer/exp_avg.safetensors")) & set(compressed)
    sizes = {name: sum(file[name].nbytes for file in files.values()) for name in compressed}
    assert all(sizes[name] == place.num_elements * 3.125 for name, place in compressed.items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_compressed_states_from_an_exact_checkpoint(make_model: MakeModel, tmp_path: Path, dtype: ExportDtype) -> None:
    folder = make_model(tied=False)
    exact = trained_store(folder, compressed=False)
    save_checkpoint(exact, tmp_path / "saved", source=folder, trainer_state=STATE, dtype=dtype)
    store = HostStore.allocate(layout_of(folder, compressed=True), num_threads=1)
    with pytest.raises(InvalidModel, match="has exact optimizer states, and this job keeps compressed ones"):
        load_checkpoint(store, tmp_path / "saved")
    said: list[str] = []
    assert load_checkpoint(store, tmp_path / "saved", on_conversion=said.append) == STATE
    assert len(said) == 1 and "rounded to 8 bits" in said[0]

    again = HostStore.allocate(exact.layout, num_threads=1)
    save_checkpoint(store, tmp_path / "compressed", source=folder, trainer_state=STATE, dtype=dtype)
    said.clear()
    load_checkpoint(again, tmp_path / "compressed", on_conversion=said.append)
    assert len(said) == 1 and "changes no number" in said[0]
    before, rounded, widened = (masters_of(each) for each in (exact, store, again))
    for _, place in store.layout.tensors():
        name, is_compressed = place.name, place.compressed
        wanted = ((before[name].view(torch.int32) + 128) & ~255).view(torch.float32) if is_compressed else before[name]
        assert torch.equal(rounded[name], wanted) and torch.equal(widened[name], wanted)
        for plane in ("exp_avg", "exp_avg_sq"):
            one, other = (each.flat(name, plane) for each in (exact, again))
            if not is_compressed:
                assert torch.equal(one, other)
                continue
            # Within a code of the largest of a group: roots evenly, first moments finer towards 0.
            one, other = (x.sqrt() if plane == "exp_avg_sq" else x for x in (one, other))
            pad = torch.nn.functional.pad((one - other).abs(), (0, -len(one) % 32)).view(-1, 32).amax(1)
            most = torch.nn.functional.pad(one.abs(), (0, -len(one) % 32)).view(-1, 32).amax(1)
            # A root above 0 has at least the first code.
            assert (pad <= most * (0.0045 if plane == "exp_avg_sq" else 0.0085)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("saved_compressed", [False, True])
@pytest.mark.parametrize("kept_compressed", [False, True])
def test_states_of_any_form_go_to_drives_and_come_back(
    make_model: MakeModel, tmp_path: Path, dtype: ExportDtype, saved_compressed: bool, kept_compressed: bool
) -> None:
    folder = make_model(tied=False)
    saved = trained_store(folder, compressed=saved_compressed)
    save_checkpoint(saved, tmp_path / "saved", source=folder, trainer_state=STATE, dtype=dtype)
    layout = layout_of(folder, compressed=kept_compressed)
    in_memory = HostStore.allocate(layout, num_threads=1)
    units = [unit.index for unit in layout.units]
    on = on_drives(layout, drive_folders(tmp_path), with_lo=True, units=units, span=96, slots=1)
    with store_on_drives(layout, on) as driven:
        for store, name in ((in_memory, "from memory"), (driven, "from drives")):
            load_checkpoint(store, tmp_path / "saved", on_conversion=lambda _: None)
            store.flush()
            save_checkpoint(store, tmp_path / name, source=folder, trainer_state=STATE, dtype=dtype)
    files = sorted(
        file.relative_to(tmp_path / "from memory") for file in (tmp_path / "from memory").rglob("*.safetens*")
    )
    assert len(files) >= 3
    for file in files:
        assert (tmp_path / "from memory" / file).read_bytes() == (tmp_path / "from drives" / file).read_bytes(), file


def test_widened_states_are_what_the_compressed_ones_mean(make_model: MakeModel, tmp_path: Path) -> None:
    """So the next update from either is the same but for rounding."""
    folder = make_model(tied=True)
    store = trained_store(folder)
    save_checkpoint(store, tmp_path / "saved", source=folder, trainer_state=STATE)
    exact = HostStore.allocate(layout_of(folder, compressed=False), num_threads=1)
    with pytest.raises(InvalidModel, match="has compressed optimizer states, and this job keeps exact ones"):
        load_checkpoint(exact, tmp_path / "saved")
    load_checkpoint(exact, tmp_path / "saved", on_conversion=lambda _: None)
    hyper = AdamWStep(step=5, learning_rate=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
    for each in (store, exact):
        for unit in each.layout.units:
            grad = torch.empty(unit.trained_elements)
            for place in unit.tensors:
                seed = torch.Generator().manual_seed(len(place.name))
                part = slice(place.offset, place.offset + place.num_elements)
                grad[part] = torch.randn(place.num_elements, generator=seed)
            update_unit(each, unit.index, hyper, num_threads=1, grad=grad)
    one, other = masters_of(store), masters_of(exact)
    for name in one:
        # Up to half of the last of 24 bits, but where rounded moments were more than gradients can make them.
        error = (one[name] - other[name]).abs()
        assert (error <= other[name].abs() * 2**-16 + 1e-9).double().mean() > 0.99 and error.max() < 1e-4, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_only_read_take_compressed_checkpoints(
    make_model: MakeModel, tmp_path: Path, dtype: ExportDtype
) -> None:
    folder = make_model(tied=True)
    store = trained_store(folder)
    save_checkpoint(store, tmp_path / "saved", source=folder, trainer_state=STATE, dtype=dtype)
    layout = weights_only(store.layout, is_bfloat16=lambda _: False)
    assert not layout.is_compressed
    loaded = HostStore.allocate(layout, grad_dtype=None, num_threads=1)
    load_checkpoint(loaded, tmp_path / "saved", on_conversion=lambda _: None)
    one, other = masters_of(store), masters_of(loaded)
    assert all(torch.equal(one[name], other[name]) for name in one)
