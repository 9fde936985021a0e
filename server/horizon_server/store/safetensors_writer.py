"""Writes safetensors files from memory, piece by piece: header, then each tensor's bytes.

Owns the file format on the way out, sharding and the shard index. Never holds a whole tensor, and knows neither torch nor what the
tensors mean.

Source: https://huggingface.co/docs/safetensors, format.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from horizon_server.store.manifest import PIECE_BYTES, FileRecord

DEFAULT_SHARD_BYTES = 4 << 30


@dataclass(frozen=True, kw_only=True)
class TensorBytes:
    """One tensor to write: `pieces` gives its little-endian bytes as flat views, one after the other, when their turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    pieces: Callable[[], Iterable[memoryview]]


def write_sharded(
    folder: Path,
    stem: str,
    tensors: Sequence[TensorBytes],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    on_bytes: Callable[[int], None],
) -> dict[str, FileRecord]:
    """Write `<stem>.safetensors`, or shards of about `shard_bytes` with an index; returns the files by name."""
    shards: list[list[TensorBytes]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.size_bytes for t in shards[-1]) + tensor.size_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        name = f"{stem}.safetensors"
        return {name: _write_file(folder / name, shards[0], on_bytes)}
    files: dict[str, FileRecord] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        files[name] = _write_file(folder / name, shard, on_bytes)
        weight_map |= {tensor.name: name for tensor in shard}
    index = {"metadata": {"total_size": sum(t.size_bytes for t in tensors)}, "weight_map": weight_map}
    name = f"{stem}.safetensors.index.json"
    files[name] = write_text(folder / name, json.dumps(index, indent=2) + "\n")
    return files


def write_text(file: Path, text: str) -> FileRecord:
    """Write a small text file; returns its record."""
    raw = text.encode("utf-8")
    file.write_bytes(raw)
    return FileRecord(size_bytes=len(raw), sha256=hashlib.sha256(raw).hexdigest())


def file_header(tensors: Sequence[tuple[str, str, tuple[int, ...], int]]) -> bytes:
    """Return what a file begins with, for tensors given as (name, dtype, shape, size in bytes); their bytes follow in this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, size_bytes in tensors:
        end = offset + size_bytes
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    # Padded with spaces to 8 bytes, so that the data that follows is aligned in a mapped file.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_file(file: Path, tensors: Sequence[TensorBytes], on_bytes: Callable[[int], None]) -> FileRecord:
    header = file_header([(tensor.name, tensor.dtype, tensor.shape, tensor.size_bytes) for tensor in tensors])
    digest = hashlib.sha256(header)
    size_bytes = len(header)
    with file.open("wb") as stream:
        stream.write(header)
        for tensor in tensors:
            written = 0
            for view in tensor.pieces():
                for start in range(0, view.nbytes, PIECE_BYTES):
                    piece = view[start : start + PIECE_BYTES]
                    stream.write(piece)
                    digest.update(piece)
                    on_bytes(piece.nbytes)
                written += view.nbytes
            assert written == tensor.size_bytes, f"{tensor.name}: {written} bytes, {tensor.size_bytes} announced"
            size_bytes += written
    return FileRecord(size_bytes=size_bytes, sha256=digest.hexdigest())
