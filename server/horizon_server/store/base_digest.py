"""Digests that name weights by their content, wherever they are: of a model's config and weights, every byte. Torch-free.

That of the frozen model of an adapter, and that of the weights that reference log-probabilities are of.

A folder is read once; what was found is kept in a small file with the sizes and times of the files that it is about.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from horizon_server import progress
from horizon_server.durable import replace_file
from horizon_server.errors import InvalidModel
from horizon_server.store.model_files import CONFIG_FILE
from horizon_server.store.safetensors_files import PIECE_BYTES, read_safetensors_headers

# Hashing releases the interpreter's lock; more threads than this wait for the disk.
_NUM_THREADS = 4


def model_digest(folder: Path, *, kept: Path | None = None) -> str:
    """The sha256 of a model folder: of the names and sha256 of config.json and of the files with its weights, in the order of names.

    `kept` is a file that remembers the result as long as no file of the folder changes.

    Raises:
        InvalidModel: the folder has no config or no safetensors weights.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise InvalidModel(f"{folder} holds no {CONFIG_FILE}; give a folder written by save_pretrained")
    weights = {header.file.name for header in read_safetensors_headers(folder).values()}
    names = sorted({CONFIG_FILE, *weights})
    # A hard link to the same content has another folder, but the same inode, size and time.
    seen = [[name, (stat := (folder / name).stat()).st_ino, stat.st_size, stat.st_mtime_ns] for name in names]
    if kept is not None and (found := _remembered(kept, seen)):
        return found
    digest = files_digest(folder, names)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace_file(kept, json.dumps({"files": seen, "sha256": digest}) + "\n")
    return digest


def files_digest(folder: Path, names: Sequence[str]) -> str:
    """The sha256 of the names and sha256 of these files of a folder, in this order. Raises OSError where one cannot be read."""
    with ThreadPoolExecutor(max_workers=_NUM_THREADS) as pool:
        sums = list(pool.map(lambda name: _sha256(folder / name), names))
    digest = hashlib.sha256()
    for name, sha256 in zip(names, sums, strict=True):
        digest.update(f"{name}\0{sha256}\n".encode())
    return digest.hexdigest()


def _remembered(kept: Path, seen: list[list[object]]) -> str:
    try:
        known = json.loads(kept.read_bytes())
        return str(known["sha256"]) if known["files"] == seen else ""
    except (OSError, ValueError, KeyError, TypeError):
        # It is made again.
        return ""


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        while piece := stream.read(PIECE_BYTES):
            digest.update(piece)
            progress.advance()
    return digest.hexdigest()
