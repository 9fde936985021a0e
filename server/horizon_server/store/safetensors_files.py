"""Safetensors files, single or sharded: headers read in plain Python with every check, and files written from memory
piece by piece.

Torch-free: the daemon plans from a folder without loading torch.

Source: https://huggingface.co/docs/safetensors, format: 8 bytes of little-endian header length, JSON, data.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server import progress
from horizon_server.errors import InvalidModel
from horizon_server.store.manifest import FileRecord

# What users push is read here, so everything that a header can make large is bounded.
# Of all files of a folder together; the index is bounded by it too.
MAX_HEADER_BYTES = 64 << 20
# Of a folder. The largest published models, of several hundred experts in 60 layers, have 140,000.
MAX_TENSORS = 200_000
MAX_NAME_CHARS = 512
# Numbered parts of a name (layers.3.experts.7 has two): each of them may begin a list of layers.
MAX_NAME_NUMBERS = 4
MAX_DIMENSIONS = 8
# Torch and the kernel count elements in signed 64 bits.
_MAX_ELEMENTS = 1 << 63
# A valid entry has at most 11; the rest is room for metadata.
_COMMAS_PER_TENSOR = 20
_MAX_FILE_NAME_BYTES = 255

_LENGTH_BYTES = 8
# Tensors are written and restored in pieces of this size: never one as a whole.
PIECE_BYTES = 16 << 20
DEFAULT_SHARD_BYTES = 4 << 30
_COPY_AGAIN = "the file is damaged: copy or download it again"

# Bytes per element of every dtype that is read, by its safetensors name.
DTYPE_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}

# Never opened, because a pickle runs code: named in the refusal only.
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "model.pth", "consolidated.00.pth")


@dataclass(frozen=True, kw_only=True)
class TensorHeader:
    """Where one tensor is: bytes `start` to `end` of `file`, counted from the file's first byte."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    start: int
    end: int


def read_safetensors_headers(folder: Path, *, stem: str = "model") -> dict[str, TensorHeader]:
    """All tensors by name, in the order of the files: of `<stem>.safetensors`, or of the shards its index names.

    Raises:
        InvalidModel: no safetensors weights in the folder, a shard is missing, or a file is truncated; the message
            names it.
    """
    if not folder.is_dir():
        raise InvalidModel("is not a folder; give a folder written by save_pretrained", file=folder)
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return _read_file(single, MAX_HEADER_BYTES)[0]
    if index.is_file():
        return _read_sharded(folder, index)
    if found := [name for name in _PICKLES if (folder / name).exists()]:
        raise InvalidModel(
            f"holds {found[0]}, a pickle: opening one can run code, so none is ever read; "
            f"save the model as safetensors with save_pretrained",
            file=folder,
        )
    if (folder / "adapter_model.safetensors").exists():
        problem = "holds an adapter, not a model; merge it into its base model and give the merged folder"
    else:
        problem = f"holds neither {stem}.safetensors nor its index; give a folder written by save_pretrained"
    raise InvalidModel(f"{problem}", file=folder)


def list_number(part: str) -> int | None:
    """The number that a part of a tensor's name is (the 3 of model.layers.3.weight), or None where it is a word."""
    # str.isdigit accepts characters such as a superscript two, which int() does not; and int() refuses very long ones.
    return int(part) if part.isascii() and part.isdecimal() and len(part) <= 9 else None


def _read_file(file: Path, max_header_bytes: int) -> tuple[dict[str, TensorHeader], int]:
    header, data_start, file_bytes = _read_header(file, max_header_bytes)
    tensors = [_tensor(file, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    # The format forbids holes and overlaps, so that no file is of two formats at once.
    position = data_start
    for tensor in tensors:
        if tensor.start != position:
            problem = "overlaps the tensor before it" if tensor.start < position else "leaves a hole before it"
            raise InvalidModel(f": {tensor.name} {problem}; {_COPY_AGAIN}", file=file)
        position = tensor.end
    if position != file_bytes:
        state = "truncated" if file_bytes < position else "followed by bytes that belong to no tensor"
        raise InvalidModel(f"is {state}: {file_bytes} bytes on disk, {position} announced; {_COPY_AGAIN}", file=file)
    return {tensor.name: tensor for tensor in tensors}, data_start


def _read_sharded(folder: Path, index: Path) -> dict[str, TensorHeader]:
    shard_of = _read_weight_map(index)
    tensors: dict[str, TensorHeader] = {}
    bytes_left = MAX_HEADER_BYTES
    for shard in dict.fromkeys(shard_of.values()):
        if not (folder / shard).is_file():
            raise InvalidModel(
                f"lacks the shard {shard} that {index.name} names; copy or download it again", file=folder
            )
        found, header_bytes = _read_file(folder / shard, bytes_left)
        bytes_left -= header_bytes
        _check_count(folder, len(tensors) + len(found))
        for name, tensor in found.items():
            if name in tensors:
                raise InvalidModel(
                    f": {name} is in both {tensors[name].file.name} and {shard}; keep one of them", file=folder
                )
            tensors[name] = tensor
    for name, shard in shard_of.items():
        if name not in tensors or tensors[name].file.name != shard:
            raise InvalidModel(f"{index} says that {name} is in {shard}, but it is not; {_COPY_AGAIN}")
    return tensors


def _read_weight_map(index: Path) -> dict[str, str]:
    if index.stat().st_size > MAX_HEADER_BYTES:
        raise InvalidModel(f"{index} is larger than {MAX_HEADER_BYTES} bytes, the most that is read")
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        entries = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidModel(f"{index} is not a shard index ({type(error).__name__}); {_COPY_AGAIN}") from error
    if not entries:
        raise InvalidModel(f"{index} names no tensor; {_COPY_AGAIN}")
    _check_count(index, len(entries))
    for name, shard in entries:
        _check_name(index, name)
        # A name that leaves the folder would let the index read any file of the machine.
        is_name = isinstance(shard, str) and shard.isprintable() and len(shard.encode()) <= _MAX_FILE_NAME_BYTES
        if not is_name or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise InvalidModel(
                f"{index}: {name} must be in a .safetensors file of the same folder, not in {_short(shard)}"
            )
    return dict(entries)


def _read_header(file: Path, max_bytes: int) -> tuple[dict[str, Any], int, int]:
    with file.open("rb") as stream:
        file_bytes = file.stat().st_size
        header_bytes = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if file_bytes < _LENGTH_BYTES + 2:
            raise InvalidModel(
                f"is truncated: its {file_bytes} bytes hold no safetensors header; {_COPY_AGAIN}", file=file
            )
        if header_bytes > max_bytes:
            raise InvalidModel(
                f"is not a safetensors file, or has too many tensors: its header takes {header_bytes} bytes; "
                f"all headers of a model together may take {MAX_HEADER_BYTES}",
                file=file,
            )
        if _LENGTH_BYTES + header_bytes > file_bytes:
            raise InvalidModel(f"is truncated within its header, or not a safetensors file; {_COPY_AGAIN}", file=file)
        raw = stream.read(header_bytes)
    # Counted before the JSON is parsed, because parsing a long list holds the interpreter's lock.
    _check_count(file, raw.count(b'"data_offsets"'))
    if raw.count(b",") > MAX_TENSORS * _COMMAS_PER_TENSOR:
        raise InvalidModel(
            f"is not a safetensors file: its header has more values than {MAX_TENSORS} tensors need", file=file
        )
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"is not a safetensors file: its header is not JSON ({error})", file=file) from error
    if not isinstance(header, dict):
        raise InvalidModel("is not a safetensors file: its header is not a JSON object", file=file)
    return header, _LENGTH_BYTES + header_bytes, file_bytes


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Which of two entries of one name counts would depend on the reader.
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _check_count(place: Path, num_tensors: int) -> None:
    if num_tensors > MAX_TENSORS:
        raise InvalidModel(
            f"has more than {num_tensors - 1} tensors; a model may have at most {MAX_TENSORS}", file=place
        )


def _check_name(file: Path, name: str) -> None:
    num_numbers = sum(part.isdigit() for part in name.split(".", MAX_NAME_CHARS))
    if len(name) > MAX_NAME_CHARS or num_numbers > MAX_NAME_NUMBERS:
        raise InvalidModel(
            f": the tensor name {_short(name)} has {len(name)} characters and {num_numbers} numbers in it; "
            f"a name may have at most {MAX_NAME_CHARS} characters and {MAX_NAME_NUMBERS} numbers",
            file=file,
        )
    if not name.isprintable() or not all(part.isascii() for part in name.split(".") if part.isdigit()):
        raise InvalidModel(f": the tensor name {_short(name)} has characters that a name cannot have", file=file)


def _short(value: object) -> str:
    """A value of a file for a message; ASCII, because some characters cannot be sent on."""
    shown = ascii(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def _tensor(file: Path, name: str, entry: object, data_start: int) -> TensorHeader:
    _check_name(file, name)
    if not isinstance(entry, dict):
        raise InvalidModel(f": the header entry of {name} is not an object; {_COPY_AGAIN}", file=file)
    dtype, shape, offsets = entry.get("dtype"), _sizes(entry.get("shape")), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise InvalidModel(
            f": {name} has dtype {_short(dtype)}, which is not read; save it as bfloat16 or float32", file=file
        )
    span: list[Any] = offsets if isinstance(offsets, list) else []
    if shape is None or len(span) != 2 or not all(type(at) is int and 0 <= at < _MAX_ELEMENTS for at in span):
        raise InvalidModel(
            f": the shape or the offsets of {name} are malformed (at most {MAX_DIMENSIONS} dimensions); {_COPY_AGAIN}",
            file=file,
        )
    start, end = span
    if end - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise InvalidModel(f": {name} is {dtype} {list(shape)}, but {end - start} bytes long; {_COPY_AGAIN}", file=file)
    return TensorHeader(name=name, shape=shape, dtype=dtype, file=file, start=data_start + start, end=data_start + end)


def _sizes(values: object) -> tuple[int, ...] | None:
    """Up to eight numbers whose product, zeros left out, has 63 bits; None where it is anything else."""
    if not isinstance(values, list) or len(values) > MAX_DIMENSIONS:
        return None
    # Multiplied step by step, because the product of numbers from a file may itself be too long to compute.
    product = 1
    for value in values:
        if type(value) is not int or value < 0:  # isinstance takes True for a number
            return None
        product *= max(1, value)
        if product >= _MAX_ELEMENTS:
            return None
    return tuple(values)


@dataclass(frozen=True, kw_only=True)
class TensorBytes:
    """One tensor to write: `pieces` gives its little-endian bytes as flat views, one after the other, when their turn
    comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    pieces: Callable[[], Iterable[memoryview]]


def write_sharded(
    folder: Path, stem: str, tensors: Sequence[TensorBytes], *, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> dict[str, FileRecord]:
    """Write `<stem>.safetensors`, or shards of about `shard_bytes` with an index; returns the files by name."""
    shards: list[list[TensorBytes]] = [[]]
    filled_bytes = 0
    for tensor in tensors:
        if shards[-1] and filled_bytes + tensor.size_bytes > shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(tensor)
        filled_bytes += tensor.size_bytes
    if len(shards) == 1:
        name = f"{stem}.safetensors"
        return {name: _write_file(folder / name, shards[0])}
    files: dict[str, FileRecord] = {}
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        files[name] = _write_file(folder / name, shard)
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
    """Return what a file begins with, for tensors given as (name, dtype, shape, size in bytes); their bytes follow in
    this order."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, size_bytes in tensors:
        end = offset + size_bytes
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    # Padded with spaces to 8 bytes, so that the data that follows is aligned in a mapped file.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def write_outline(file: Path, tensors: Iterable[tuple[str, str, Sequence[int]]]) -> None:
    """Write a file that has tensors, given as (name, dtype, shape), in its header, and takes no space for their bytes,
    which are all zero: from it a job is planned, as from the weights themselves.

    Raises:
        InvalidModel: a dtype is not one that is read.
    """
    described = []
    for name, dtype, shape in tensors:
        if dtype not in DTYPE_BYTES:
            raise InvalidModel(f": {name} has dtype {dtype}; known are {', '.join(DTYPE_BYTES)}", file=file)
        described.append((name, dtype, tuple(shape), math.prod(shape) * DTYPE_BYTES[dtype]))
    header = file_header(described)
    with file.open("wb") as stream:
        stream.write(header)
        stream.truncate(len(header) + sum(size_bytes for *_, size_bytes in described))


def _write_file(file: Path, tensors: Sequence[TensorBytes]) -> FileRecord:
    header = file_header([(tensor.name, tensor.dtype, tensor.shape, tensor.size_bytes) for tensor in tensors])
    digest = hashlib.sha256(header)
    size_bytes = len(header)
    with file.open("wb") as stream:
        stream.write(header)
        for tensor in tensors:
            written = 0
            for view in tensor.pieces():
                for start in range(0, view.nbytes, PIECE_BYTES):
                    progress.advance()
                    piece = view[start : start + PIECE_BYTES]
                    stream.write(piece)
                    digest.update(piece)
                written += view.nbytes
            assert written == tensor.size_bytes, f"{tensor.name}: {written} bytes, {tensor.size_bytes} announced"
            size_bytes += written
    return FileRecord(size_bytes=size_bytes, sha256=digest.hexdigest())
