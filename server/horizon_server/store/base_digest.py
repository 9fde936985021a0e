"""Digests that name weights by their content, wherever they are: of a model's config and every byte of its weights.
Torch-free.

That of the frozen model of an adapter, and that of the weights that reference log-probabilities are of. How the tensors
are divided into files does not matter, nor where they are in them, so that a model which was saved again in other files
has the same digest.

A folder is read once: the daemon's book of digests knows files by their inode, size and times.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from horizon_server import progress
from horizon_server.durable import replace_file
from horizon_server.errors import InvalidModel
from horizon_server.store.model_files import CONFIG_FILE, read_config
from horizon_server.store.safetensors_files import PIECE_BYTES, TensorHeader, read_safetensors_headers

# Hashing releases the interpreter's lock; more threads than this wait for the disk.
_NUM_THREADS = 4
# What a program writes about itself when it saves a config, which says nothing about the model.
_NOT_OF_THE_MODEL = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype"})
# Of some hundred bytes each. The oldest make room.
MAX_KNOWN = 10_000


class DigestBook:
    """Remembers the digests of model folders, in one small file each below `folder`. Thread: any; processes may share
    one book."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def known(self, model: Path) -> str:
        """The digest of a model folder whose files are as they were when it was made, or nothing. Reads no weights."""
        try:
            return self._read(files_identity(model))
        except (InvalidModel, OSError):
            return ""

    def digest(self, model: Path) -> str:
        """The digest of a model folder, remembered or made. Blocking. Raises InvalidModel as `model_digest` does."""
        headers = read_safetensors_headers(model)
        identity = _identity(model, headers)
        if found := self._read(identity):
            return found
        digest = _digest(model, headers)
        self._write(identity, digest)
        return digest

    def of_file(self, file: Path) -> str:
        """The sha256 of one file, remembered or made. Blocking. Raises OSError where it cannot be read."""
        identity = _named([file])
        if found := self._read(identity):
            return found
        digest = file_digest(file)
        self._write(identity, digest)
        return digest

    def _write(self, identity: str, digest: str) -> None:
        with contextlib.suppress(OSError):  # a full disk costs another reading, and no job
            self._folder.mkdir(parents=True, exist_ok=True)
            self._make_room()
            replace_file(self._folder / identity, digest + "\n")

    def _read(self, identity: str) -> str:
        try:
            text = (self._folder / identity).read_text("ascii").strip()
        except (OSError, ValueError):
            return ""
        # Anything else was cut short; it is made again.
        return text if len(text) == hashlib.sha256().digest_size * 2 else ""

    def _make_room(self) -> None:
        files = [path for path in self._folder.iterdir() if path.is_file()]
        if len(files) < MAX_KNOWN:
            return
        with contextlib.suppress(FileNotFoundError):  # another process makes room at the same time
            files.sort(key=lambda path: path.stat().st_mtime_ns)
            for path in files[: len(files) - MAX_KNOWN + 1]:
                path.unlink(missing_ok=True)


def model_digest(folder: Path) -> str:
    """The sha256 of a model folder: of the names, dtypes, shapes and bytes of its tensors in the order of names, and of
    its config.

    Of config.json, the values count and not how they are written; what a program says there about itself does not.

    Raises:
        InvalidModel: the folder has no config or no safetensors weights.
    """
    return _digest(folder, read_safetensors_headers(folder))


def files_identity(model: Path) -> str:
    """What names the files of a model folder as they are now: by inode, size and times, without reading weights.

    Raises:
        InvalidModel: the folder has no config or no safetensors weights.
    """
    return _identity(model, read_safetensors_headers(model))


INIT_ADAPTER = "the adapter of init_from"
"""How `check_base` names the adapter that a job starts with."""


def check_base(adapter: str, wanted: str, found: str, *, model: str = "") -> None:
    """Refuse a model as the base of an adapter: `wanted` is the digest of what it was trained on, `found` that of the
    model.

    `adapter` and `model` are their names in the message.

    Raises:
        InvalidModel: the digests differ.
    """
    if found != wanted:
        named = f"the model {model}" if model else "the model"
        raise InvalidModel(
            f"{named} is not the one that {adapter} was trained on: its digest is {found[:12]}, not {wanted[:12]}; "
            "restore the model's "
            "files, or give the model that it was trained on; next to that one it can be merged (horizon checkpoint "
            "merge), and the merged model used"
        )


def files_digest(folder: Path, names: Sequence[str]) -> str:
    """The sha256 of the names and sha256 of these files of a folder, in this order. Raises OSError where one cannot be
    read."""
    with ThreadPoolExecutor(max_workers=_NUM_THREADS) as pool:
        sums = list(pool.map(lambda name: file_digest(folder / name), names))
    digest = hashlib.sha256()
    for name, sha256 in zip(names, sums, strict=True):
        digest.update(f"{name}\0{sha256}\n".encode())
    return digest.hexdigest()


def _digest(folder: Path, headers: Mapping[str, TensorHeader]) -> str:
    config = {name: value for name, value in read_config(folder).items() if name not in _NOT_OF_THE_MODEL}
    names = sorted(headers)
    sums: dict[str, str] = {}
    with contextlib.ExitStack() as files:
        opened = {file: files.enter_context(file.open("rb", buffering=0)) for file in _files(headers)}

        def add(first: int) -> None:
            # A share of the tensors, and not a call for each: a folder may have 200,000.
            for name in names[first::_NUM_THREADS]:
                sums[name] = _sha256_of(headers[name], opened[headers[name].file].fileno())

        with ThreadPoolExecutor(max_workers=_NUM_THREADS) as pool:
            list(pool.map(add, range(_NUM_THREADS)))
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name in names:
        digest.update(json.dumps([name, headers[name].dtype, headers[name].shape, sums[name]]).encode())
    return digest.hexdigest()


def _files(headers: Mapping[str, TensorHeader]) -> set[Path]:
    return {header.file for header in headers.values()}


def _identity(model: Path, headers: Mapping[str, TensorHeader]) -> str:
    """What names the files of a folder as they are now. A hard link has another folder, but the same inode, size and
    times."""
    if not (model / CONFIG_FILE).is_file():
        raise InvalidModel(f"holds no {CONFIG_FILE}; give a folder written by save_pretrained", file=model)
    names = sorted({CONFIG_FILE, *(file.name for file in _files(headers))})
    return _named([model / name for name in names])


def _named(files: Sequence[Path]) -> str:
    seen = []
    for file in files:
        stat = file.stat()
        # Programs that copy onto a file may set the time of its content back, but not that of its last change (ctime).
        # Each new link sets that too: a file with several links is a pushed content, which nobody writes, and is linked
        # to by models and backups.
        changed_ns = stat.st_ctime_ns if stat.st_nlink == 1 else 0
        seen.append([file.name, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, changed_ns])
    return hashlib.sha256(json.dumps(seen).encode()).hexdigest()


def _sha256_of(header: TensorHeader, descriptor: int) -> str:
    digest, position = hashlib.sha256(), header.start
    while position < header.end:
        piece = os.pread(descriptor, min(PIECE_BYTES, header.end - position), position)
        if not piece:
            raise InvalidModel(f"is truncated in {header.name}; copy or download it again", file=header.file)
        digest.update(piece)
        position += len(piece)
        progress.advance()
    return digest.hexdigest()


def file_digest(file: Path) -> str:
    """The sha256 of a file. Raises OSError where it cannot be read."""
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(PIECE_BYTES):
            digest.update(piece)
            progress.advance()
    return digest.hexdigest()
