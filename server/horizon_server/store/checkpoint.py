"""Checkpoints: the store on disk, as a Hugging Face model folder plus what training needs to go on.

Owns the folder's content: config, tokenizer and safetensors written from `hi`; under trainer/ the `lo` halves, the
moments, the trainer's state and the manifest. `hi` + `lo` is the master, so nothing is stored twice and a resume is
bit-exact. Everything streams between planes and files without a second copy. Must not know what the trainer's state
means, nor who lists checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from horizon_server.errors import InvalidModel
from horizon_server.store.durable import durable_folder
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import TensorHeader
from horizon_server.store.manifest import (
    TRAINER_FOLDER,
    FileRecord,
    Manifest,
    is_complete,
    read_manifest,
    record_file,
    write_manifest,
)
from horizon_server.store.model_files import COMPANION_FILES, CONFIG_FILE, read_config
from horizon_server.store.model_load import LoadReport, load_model
from horizon_server.store.safetensors_header import read_safetensors_headers
from horizon_server.store.safetensors_writer import DEFAULT_SHARD_BYTES, TensorBytes, write_sharded, write_text
from horizon_server.version import VERSION

__all__ = [
    "LoadReport",
    "Progress",
    "export_model",
    "is_complete",
    "load_checkpoint",
    "load_model",
    "read_manifest",
    "save_checkpoint",
]

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""

STATE_FILE = f"{TRAINER_FOLDER}/trainer_state.json"

_STEM_OF_PLANE = {"hi": "model", "lo": "lo", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_DTYPE_OF_PLANE = {"hi": "BF16", "lo": "I16", "exp_avg": "F32", "exp_avg_sq": "F32"}
_READ_BYTES = 16 << 20
_ENTRY_BYTES = 200
_SMALL_FILES_BYTES = 1 << 20


def save_checkpoint(
    store: HostStore,
    target: Path,
    *,
    source: Path,
    trainer_state: Mapping[str, Any],
    on_progress: Progress | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Manifest:
    """Write the folder `target`: whole, checksummed and on disk when this returns, or not there at all.

    Config and tokenizer come from the model folder `source`. Nothing may update the store meanwhile.

    Raises:
        AlreadyExists: `target` is there already.
        DiskFull: there is not enough space; nothing is left behind.
        InvalidModel: `source` has no readable config.json.
    """
    config, companions = _config(source), _companions(source)
    planes = {plane: _tensor_bytes(store, plane) for plane in _STEM_OF_PLANE}
    progress = _Counter(planes.values(), on_progress)
    with durable_folder(target, needed_bytes=_needed_bytes(planes.values(), companions)) as folder:
        (folder / TRAINER_FOLDER).mkdir()
        files = _write_model_files(folder, config, companions)
        with ThreadPoolExecutor(max_workers=len(planes)) as pool:
            for written in pool.map(lambda p: _write_plane(folder, p, planes[p], shard_bytes, progress), planes):
                files |= written
        files[STATE_FILE] = write_text(folder / STATE_FILE, json.dumps(trainer_state, indent=2) + "\n")
        manifest = Manifest(files=dict(sorted(files.items())), versions=_versions())
        write_manifest(folder, manifest)
    return manifest


def export_model(
    store: HostStore,
    target: Path,
    *,
    source: Path,
    on_progress: Progress | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> dict[str, FileRecord]:
    """Write only the Hugging Face model folder, in bf16; otherwise as `save_checkpoint`. Returns its files."""
    config, companions = _config(source), _companions(source)
    tensors = _tensor_bytes(store, "hi")
    with durable_folder(target, needed_bytes=_needed_bytes([tensors], companions)) as folder:
        files = _write_model_files(folder, config, companions)
        files |= _write_plane(folder, "hi", tensors, shard_bytes, _Counter([tensors], on_progress))
    return files


def load_checkpoint(store: HostStore, folder: Path) -> dict[str, Any]:
    """Restore every plane bit by bit, checking every file against the manifest on the way; returns the trainer's state.

    Names, shapes and sizes are checked before anything is written. When a checksum fails later on, the store's
    contents are undefined and must not be trained on.

    Raises:
        InvalidModel: the folder is no checkpoint, is torn, belongs to another model, or a file's checksum fails; it
        is named.
    """
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        _check_size(folder / name, record)
    places = _plan_reads(store, folder, manifest)
    with ThreadPoolExecutor(max_workers=len(_STEM_OF_PLANE)) as pool:
        list(pool.map(lambda name: _restore_file(store, folder, name, manifest.files[name], places), manifest.files))
    state = json.loads((folder / STATE_FILE).read_bytes())
    assert isinstance(state, dict), "the trainer's state was written as an object"
    return state


class _Counter:
    """Adds up progress from several writing threads."""

    def __init__(self, groups: Iterable[Sequence[TensorBytes]], on_progress: Progress | None) -> None:
        self._total = sum(tensor.size_bytes for group in groups for tensor in group)
        self._on_progress = on_progress
        self._done = 0
        self._lock = threading.Lock()

    def __call__(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            if self._on_progress is not None:
                self._on_progress(self._done, self._total)


def _config(source: Path) -> dict[str, Any]:
    config = {key: value for key, value in read_config(source).items() if key != "torch_dtype"}
    return config | {"dtype": "bfloat16"}


def _companions(source: Path) -> list[Path]:
    return [source / name for name in COMPANION_FILES if (source / name).is_file()]


def _needed_bytes(groups: Iterable[Sequence[TensorBytes]], companions: Sequence[Path]) -> int:
    tensors = [tensor for group in groups for tensor in group]
    copied = sum(file.stat().st_size for file in companions)
    return sum(t.size_bytes + _ENTRY_BYTES + len(t.name) for t in tensors) + copied + _SMALL_FILES_BYTES


def _tensor_bytes(store: HostStore, plane: str) -> list[TensorBytes]:
    element_bytes = store.plane(plane).element_size()
    return [
        TensorBytes(
            name=place.name,
            dtype=_DTYPE_OF_PLANE[plane],
            shape=place.shape,
            size_bytes=place.num_elements * element_bytes,
            load=partial(_memory_of, store, place.name, plane),
        )
        for _, place in store.layout.tensors()
    ]


def _memory_of(store: HostStore, name: str, plane: str) -> memoryview:
    flat = store.tensor(name, plane).view(-1).view(torch.uint8)
    return flat.numpy().data


def _write_model_files(folder: Path, config: Mapping[str, Any], companions: Sequence[Path]) -> dict[str, FileRecord]:
    files = {CONFIG_FILE: write_text(folder / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")}
    for file in companions:
        # Contents only: a read-only source must not make the checkpoint undeletable.
        shutil.copyfile(file, folder / file.name)
        files[file.name] = record_file(folder / file.name)
    return files


def _write_plane(
    folder: Path, plane: str, tensors: Sequence[TensorBytes], shard_bytes: int, progress: _Counter
) -> dict[str, FileRecord]:
    prefix = _prefix_of(plane)
    files = write_sharded(folder / prefix, _STEM_OF_PLANE[plane], tensors, shard_bytes=shard_bytes, on_bytes=progress)
    return {f"{prefix}{name}": record for name, record in files.items()}


def _prefix_of(plane: str) -> str:
    return "" if plane == "hi" else f"{TRAINER_FOLDER}/"


def _versions() -> dict[str, str]:
    return {"horizon": VERSION, "torch": torch.__version__, "python": platform.python_version()}


def _check_size(file: Path, record: FileRecord) -> None:
    if not file.is_file():
        raise InvalidModel(f"{file} is missing from the checkpoint; use another checkpoint")
    if (size_bytes := file.stat().st_size) != record.size_bytes:
        raise InvalidModel(
            f"{file} has {size_bytes} bytes, its manifest says {record.size_bytes}; it is torn, use another checkpoint"
        )


_Places = Mapping[str, tuple[str, list[TensorHeader]]]


def _plan_reads(store: HostStore, folder: Path, manifest: Manifest) -> _Places:
    """For every safetensors file: the plane it fills and its tensors in file order."""
    places: dict[str, tuple[str, list[TensorHeader]]] = {}
    for plane, stem in _STEM_OF_PLANE.items():
        headers = read_safetensors_headers(folder / _prefix_of(plane), stem=stem)
        _check_tensors(store, plane, headers, folder)
        for header in headers.values():
            name = header.file.relative_to(folder).as_posix()
            if name not in manifest.files:
                raise InvalidModel(f"{header.file} is not in the checkpoint's manifest; use another checkpoint")
            places.setdefault(name, (plane, []))[1].append(header)
    return places


def _check_tensors(store: HostStore, plane: str, headers: Mapping[str, TensorHeader], folder: Path) -> None:
    wanted = {place.name: place.shape for _, place in store.layout.tensors()}
    if differing := sorted(set(wanted) ^ set(headers)):
        raise InvalidModel(f"{folder} is a checkpoint of another model: {differing[0]} is in only one of the two")
    for name, shape in wanted.items():
        found = headers[name]
        if found.shape != shape or found.dtype != _DTYPE_OF_PLANE[plane]:
            raise InvalidModel(
                f"{found.file}: {name} is {found.dtype} {list(found.shape)}, "
                f"the store holds {_DTYPE_OF_PLANE[plane]} {list(shape)}; the checkpoint is of another model"
            )


def _restore_file(store: HostStore, folder: Path, name: str, record: FileRecord, places: _Places) -> None:
    if name not in places:
        digest = record_file(folder / name).sha256
    else:
        plane, headers = places[name]
        digest = _fill_plane(store, folder / name, plane, headers)
    if digest != record.sha256:
        raise InvalidModel(f"{folder / name} does not match its checksum: the file is corrupt; use another checkpoint")


def _fill_plane(store: HostStore, file: Path, plane: str, headers: Sequence[TensorHeader]) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        header = memoryview(bytearray(headers[0].start))
        _read_into(stream, header)
        digest.update(header)
        for tensor in headers:
            memory = _memory_of(store, tensor.name, plane)
            for start in range(0, len(memory), _READ_BYTES):
                piece = memory[start : start + _READ_BYTES]
                _read_into(stream, piece)
                digest.update(piece)
    return digest.hexdigest()


def _read_into(stream: FileIO, piece: memoryview) -> None:
    done = 0
    while done < len(piece):
        count = stream.readinto(piece[done:])
        if not count:
            raise InvalidModel(f"{stream.name} became shorter while it was read; use another checkpoint")
        done += count
