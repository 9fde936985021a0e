"""Checkpoints: the store on disk, as a Hugging Face model folder plus what training needs to continue.

Owns the folder's content: config, tokenizer and weights in the format that was asked for; under trainer/ what these weights lack of the
masters (`weight_formats`), the moments, the trainer's state and the manifest. So a resume is bit-exact whatever the format. Everything
streams between planes and files in pieces.
"""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any

import torch

from horizon_formats.model_files import companion_files
from horizon_server.durable import durable_folder
from horizon_server.errors import InvalidModel
from horizon_server.store.host_store import HostStore
from horizon_server.store.layout import TensorLayout
from horizon_server.store.manifest import (
    PIECE_BYTES,
    TRAINER_FOLDER,
    FileRecord,
    Manifest,
    is_complete,
    read_manifest,
    record_file,
    write_manifest,
)
from horizon_server.store.model_files import CONFIG_FILE, read_config
from horizon_server.store.model_load import LoadReport, load_model
from horizon_server.store.safetensors_header import DTYPE_BYTES, TensorHeader, read_safetensors_headers
from horizon_server.store.safetensors_writer import DEFAULT_SHARD_BYTES, TensorBytes, write_sharded, write_text
from horizon_server.store.weight_formats import (
    CONFIG_NAMES,
    ExportDtype,
    apply_master,
    apply_rounding,
    export_dtypes,
    exported,
    rounding,
    rounding_bytes,
)
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

_MODEL, _ROUNDING = "model", "rounding"
_DTYPE_OF_PLANE = {"hi": "BF16", "lo": "I16", "exp_avg": "F32", "exp_avg_sq": "F32"}
_STEMS = (_MODEL, _ROUNDING, *_DTYPE_OF_PLANE)
"""Of the safetensors files: the model's own, and under trainer/ what else training needs."""

_ENTRY_BYTES = 200
_SMALL_FILES_BYTES = 1 << 20


def save_checkpoint(
    store: HostStore,
    target: Path,
    *,
    source: Path,
    trainer_state: Mapping[str, Any],
    dtype: ExportDtype = "source",
    on_progress: Progress | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Manifest:
    """Write the folder `target`: whole, checksummed and on disk when this returns, or not there at all.

    Config and tokenizer come from the model folder `source`, and with dtype "source" each tensor's format. Nothing may update the
    store meanwhile.

    Raises:
        AlreadyExists: `target` is there already.
        DiskFull: there is not enough space; nothing is left behind.
        InvalidModel: `source` has no readable config.json or weights.
    """
    dtypes = export_dtypes(store, read_safetensors_headers(source), dtype)
    config, companions = _config(source, store, dtypes), companion_files(source)
    groups = {stem: tensors for stem in _STEMS if (tensors := _tensor_bytes(store, stem, dtypes))}
    progress = _Counter(groups.values(), on_progress)
    with durable_folder(target, needed_bytes=_needed_bytes(groups.values(), source, companions)) as folder:
        (folder / TRAINER_FOLDER).mkdir()
        files = _write_model_files(folder, config, source, companions)
        with ThreadPoolExecutor(max_workers=len(groups)) as pool:
            for written in pool.map(lambda s: _write_group(folder, s, groups[s], shard_bytes, progress), groups):
                files |= written
        files[STATE_FILE] = write_text(folder / STATE_FILE, json.dumps(trainer_state, indent=2) + "\n")
        versions = {"horizon": VERSION, "torch": torch.__version__, "python": platform.python_version()}
        manifest = Manifest(files=dict(sorted(files.items())), versions=versions)
        write_manifest(folder, manifest)
    return manifest


def export_model(
    store: HostStore,
    target: Path,
    *,
    source: Path,
    dtype: ExportDtype = "source",
    on_progress: Progress | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> dict[str, FileRecord]:
    """Write only the Hugging Face model folder; otherwise as `save_checkpoint`. Returns its files."""
    dtypes = export_dtypes(store, read_safetensors_headers(source), dtype)
    config, companions = _config(source, store, dtypes), companion_files(source)
    tensors = _tensor_bytes(store, _MODEL, dtypes)
    with durable_folder(target, needed_bytes=_needed_bytes([tensors], source, companions)) as folder:
        files = _write_model_files(folder, config, source, companions)
        files |= _write_group(folder, _MODEL, tensors, shard_bytes, _Counter([tensors], on_progress))
    return files


def load_checkpoint(store: HostStore, folder: Path) -> dict[str, Any]:
    """Restore every plane bit by bit, checking every file against the manifest on the way; returns the trainer's state.

    Names, shapes and sizes are checked before anything is written. When a checksum fails later on, the store's
    contents are undefined and must not be trained on.

    Raises:
        InvalidModel: the folder is not a checkpoint, is torn, belongs to another model, or a file's checksum fails; it
        is named.
    """
    manifest = read_manifest(folder)
    for name, record in manifest.files.items():
        if not (folder / name).is_file():
            raise InvalidModel(f"{folder / name} is missing from the checkpoint; use another checkpoint")
        if (size_bytes := (folder / name).stat().st_size) != record.size_bytes:
            raise InvalidModel(
                f"{folder / name} has {size_bytes} bytes, its manifest says {record.size_bytes}; it is torn, use another checkpoint"
            )
    contents = _plan_reads(store, folder, manifest)
    # The rounding bits change what the model's own files have put in place.
    is_late = {name: name in contents and contents[name][0] == _ROUNDING for name in manifest.files}
    for late in (False, True):
        names = [name for name in manifest.files if is_late[name] == late]
        with ThreadPoolExecutor(max_workers=len(_STEMS)) as pool:
            list(pool.map(lambda n: _restore(store, folder / n, manifest.files[n], contents.get(n)), names))
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


def _config(source: Path, store: HostStore, dtypes: Mapping[str, str]) -> dict[str, Any]:
    """The source's config, with the format that most of the exported weights have."""
    config = {key: value for key, value in read_config(source).items() if key != "torch_dtype"}
    sizes: Counter[str] = Counter()
    for _, place in store.layout.tensors():
        sizes[dtypes[place.name]] += place.num_elements
    return config | {"dtype": CONFIG_NAMES[sizes.most_common(1)[0][0]]}


def _needed_bytes(groups: Iterable[Sequence[TensorBytes]], source: Path, companions: Sequence[str]) -> int:
    tensors = [tensor for group in groups for tensor in group]
    copied = sum((source / name).stat().st_size for name in companions)
    return sum(t.size_bytes + _ENTRY_BYTES + len(t.name) for t in tensors) + copied + _SMALL_FILES_BYTES


def _tensor_bytes(store: HostStore, stem: str, dtypes: Mapping[str, str]) -> list[TensorBytes]:
    """The tensors of the files of a stem, which may be none."""
    return [
        TensorBytes(
            name=place.name,
            dtype=form[0],
            shape=form[1],
            size_bytes=math.prod(form[1]) * DTYPE_BYTES[form[0]],
            pieces=partial(_pieces, store, place.name, stem, form[0]),
        )
        for _, place in store.layout.tensors()
        if (form := _form(stem, place, dtypes[place.name])) is not None
    ]


def _form(stem: str, place: TensorLayout, exported_as: str) -> tuple[str, tuple[int, ...]] | None:
    """Dtype and shape of a tensor in the files of a stem; None where they do not hold it."""
    if stem == _MODEL:
        return exported_as, place.shape
    if stem == _ROUNDING:
        return ("U8", (rounding_bytes(place.num_elements),)) if exported_as == "BF16" else None
    is_exact = (stem == "lo" and exported_as == "F32") or (stem == "hi" and exported_as != "F16")
    return None if is_exact else (_DTYPE_OF_PLANE[stem], place.shape)


def _pieces(store: HostStore, name: str, stem: str, dtype: str) -> Iterable[memoryview]:
    if stem == _MODEL:
        return exported(store, name, dtype)
    return rounding(store, name) if stem == _ROUNDING else [_memory_of(store, name, stem)]


def _memory_of(store: HostStore, name: str, plane: str) -> memoryview:
    flat = store.tensor(name, plane).view(-1).view(torch.uint8)
    return flat.numpy().data


def _write_model_files(
    folder: Path, config: Mapping[str, Any], source: Path, companions: Sequence[str]
) -> dict[str, FileRecord]:
    files = {CONFIG_FILE: write_text(folder / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")}
    for name in companions:
        (folder / name).parent.mkdir(exist_ok=True)
        # Contents only: a read-only source must not make the checkpoint undeletable.
        shutil.copyfile(source / name, folder / name)
        files[name] = record_file(folder / name)
    return files


def _write_group(
    folder: Path, stem: str, tensors: Sequence[TensorBytes], shard_bytes: int, progress: _Counter
) -> dict[str, FileRecord]:
    prefix = _prefix_of(stem)
    files = write_sharded(folder / prefix, stem, tensors, shard_bytes=shard_bytes, on_bytes=progress)
    return {f"{prefix}{name}": record for name, record in files.items()}


def _prefix_of(stem: str) -> str:
    return "" if stem == _MODEL else f"{TRAINER_FOLDER}/"


def _plan_reads(store: HostStore, folder: Path, manifest: Manifest) -> dict[str, tuple[str, list[TensorHeader]]]:
    """For every safetensors file: its stem and its tensors in file order."""
    contents: dict[str, tuple[str, list[TensorHeader]]] = {}
    dtypes: dict[str, str] = {}
    for stem in _STEMS:
        prefix = _prefix_of(stem)
        is_there = any(name.startswith(f"{prefix}{stem}") and name.endswith(".safetensors") for name in manifest.files)
        if stem == _ROUNDING and not is_there:
            continue  # Format 1 exported `hi` itself.
        wanted = {t.name: form for _, t in store.layout.tensors() if (form := _form(stem, t, dtypes.get(t.name, "")))}
        if not wanted:
            continue
        headers = read_safetensors_headers(folder / prefix, stem=stem)
        if differing := sorted(set(wanted) ^ set(headers)):
            raise InvalidModel(f"{folder} is a checkpoint of another model: {differing[0]} is in only one of the two")
        for name, (dtype, shape) in wanted.items():
            found = headers[name]
            # The model's own weights may have any dtype that is exported.
            is_read = found.dtype in CONFIG_NAMES if stem == _MODEL else found.dtype == dtype
            if found.shape != shape or not is_read:
                raise InvalidModel(
                    f"{found.file}: {name} is {found.dtype} {list(found.shape)}, "
                    f"the store holds {dtype or 'BF16'} {list(shape)}; the checkpoint is of another model"
                )
        if stem == _MODEL:
            dtypes = {name: header.dtype for name, header in headers.items()}
        for header in headers.values():
            name = header.file.relative_to(folder).as_posix()
            if name not in manifest.files:
                raise InvalidModel(f"{header.file} is not in the checkpoint's manifest; use another checkpoint")
            contents.setdefault(name, (stem, []))[1].append(header)
    return contents


def _restore(store: HostStore, file: Path, record: FileRecord, content: tuple[str, list[TensorHeader]] | None) -> None:
    """Read a file, put its tensors into the store where it has any, and compare its checksum."""
    sha256 = record_file(file).sha256 if content is None else _restore_tensors(store, file, *content)
    if sha256 != record.sha256:
        raise InvalidModel(f"{file} does not match its checksum: the file is corrupt; use another checkpoint")


def _restore_tensors(store: HostStore, file: Path, stem: str, headers: Sequence[TensorHeader]) -> str:
    digest = hashlib.sha256()
    staging = memoryview(bytearray(PIECE_BYTES))
    with file.open("rb", buffering=0) as stream:
        header = memoryview(bytearray(headers[0].start))
        _read_into(stream, header)
        digest.update(header)
        for tensor in headers:
            # BF16 is `hi` but for its rounding; these bytes go to the plane as they are, all others through staging.
            plane = "hi" if stem == _MODEL and tensor.dtype == "BF16" else stem
            in_place = _memory_of(store, tensor.name, plane) if plane in _DTYPE_OF_PLANE else None
            for start in range(0, tensor.end - tensor.start, PIECE_BYTES):
                size = min(PIECE_BYTES, tensor.end - tensor.start - start)
                piece = staging[:size] if in_place is None else in_place[start : start + size]
                _read_into(stream, piece)
                digest.update(piece)
                if stem == _ROUNDING:
                    apply_rounding(store, tensor.name, start, piece)
                elif stem == _MODEL and tensor.dtype == "F32":
                    apply_master(store, tensor.name, start, piece)
    return digest.hexdigest()


def _read_into(stream: FileIO, piece: memoryview) -> None:
    done = 0
    while done < len(piece):
        count = stream.readinto(piece[done:])
        if not count:
            raise InvalidModel(f"{stream.name} became shorter while it was read; use another checkpoint")
        done += count
