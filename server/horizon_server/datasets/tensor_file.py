"""A safetensors file written from streams of bytes: no tensor library, no second copy in memory.

Owns the file's layout. Must not know what the tensors mean.

Source: https://huggingface.co/docs/safetensors, format: 8 bytes of little-endian header length, JSON, data.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_DTYPE_BYTES = {"I64": 8, "I32": 4, "BF16": 2, "U8": 1}


@dataclass(frozen=True, kw_only=True)
class TensorSource:
    """One tensor to write: `chunks` are its little-endian elements in order; `dtype` is a name of the format, as I64."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Iterable[bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * _DTYPE_BYTES[self.dtype]


def write_tensor_file(path: Path, tensors: Sequence[TensorSource]) -> None:
    """Write the tensors to `path`, wide elements first so that each stays aligned, and sync it to disk."""
    ordered = sorted(tensors, key=lambda tensor: -_DTYPE_BYTES[tensor.dtype])
    with path.open("wb") as stream:
        stream.write(_header(ordered))
        for tensor in ordered:
            start = stream.tell()
            for chunk in tensor.chunks:
                stream.write(chunk)
            written = stream.tell() - start
            assert written == tensor.num_bytes, f"{tensor.name}: {written} bytes written, {tensor.num_bytes} announced"
        stream.flush()
        os.fsync(stream.fileno())


def _header(tensors: Sequence[TensorSource]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = json.dumps(entries, separators=(",", ":")).encode("ascii")
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
