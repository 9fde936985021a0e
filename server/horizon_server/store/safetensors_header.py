"""Reads the headers of safetensors files, single or sharded, in plain Python.

Owns the checks that make a model folder trustworthy before a byte of it is mapped: bounded header, offsets against
the file's size, no holes or overlaps, every shard present. Knows neither torch nor numpy, so the daemon plans from a
folder without loading either. Never opens a pickle.

Source: https://huggingface.co/docs/safetensors, format: 8 bytes of little-endian header length, JSON, data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_server.errors import InvalidModel

MODEL_STEM = "model"
MAX_HEADER_BYTES = 64 << 20
"""Of all files of a folder together; the index is bounded by it too."""

LENGTH_BYTES = 8

MAX_TENSORS = 200_000
"""Of a folder. The largest published models, of several hundred experts in 60 layers, have 140,000."""

MAX_NAME_CHARS = 512
MAX_NAME_NUMBERS = 4
"""Numbered parts of a name (layers.3.experts.7 has two): each of them may begin a list of layers."""

MAX_DIMENSIONS = 8
_MAX_ELEMENTS = 1 << 63
_COMMAS_PER_TENSOR = 20
_MAX_FILE_NAME_BYTES = 255
_COPY_AGAIN = "the file is damaged: copy or download it again"

DTYPE_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
"""Bytes per element of every dtype the reader understands, by its safetensors name."""

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

    @property
    def num_elements(self) -> int:
        """Elements of the tensor; a scalar has one."""
        return math.prod(self.shape)


def read_safetensors_headers(folder: Path, *, stem: str = MODEL_STEM) -> dict[str, TensorHeader]:
    """All tensors by name, in the order of the files: of `<stem>.safetensors`, or of the shards its index names.

    Raises:
        InvalidModel: no safetensors weights in the folder, a shard is missing, or a file is torn; the message names
        it.
    """
    if not folder.is_dir():
        raise InvalidModel(f"{folder} is not a folder; give a folder written by save_pretrained")
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if single.is_file():
        return read_safetensors_file(single)
    if index.is_file():
        return _read_sharded(folder, index)
    if found := [name for name in _PICKLES if (folder / name).exists()]:
        raise InvalidModel(
            f"{folder} holds {found[0]}, a pickle: opening one can run code, so none is ever read; "
            f"save the model as safetensors with save_pretrained"
        )
    if (folder / "adapter_model.safetensors").exists():
        problem = "holds an adapter, not a model; merge it into its base model and give the merged folder"
    else:
        problem = f"holds neither {stem}.safetensors nor its index; give a folder written by save_pretrained"
    raise InvalidModel(f"{folder} {problem}")


def read_safetensors_file(file: Path) -> dict[str, TensorHeader]:
    """The tensors of one safetensors file, checked against the file's size.

    Raises:
        InvalidModel: the file is missing, truncated, torn or not safetensors.
    """
    return _read_file(file, MAX_HEADER_BYTES)[0]


def list_number(part: str) -> int | None:
    """The number that a part of a tensor's name is (the 3 of model.layers.3.weight), or None where it is a word."""
    # str.isdigit accepts characters such as a superscript two, which int() does not.
    return int(part) if part.isascii() and part.isdecimal() and len(part) <= 9 else None


def _read_file(file: Path, max_header_bytes: int) -> tuple[dict[str, TensorHeader], int]:
    """The tensors of one file and the bytes of its header."""
    header, data_start, file_bytes = _read_header(file, max_header_bytes)
    tensors = [_tensor(file, name, entry, data_start) for name, entry in header.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    position = data_start
    for tensor in tensors:
        if tensor.start != position:
            problem = "overlaps the tensor before it" if tensor.start < position else "leaves a hole before it"
            raise InvalidModel(f"{file}: {tensor.name} {problem}; {_COPY_AGAIN}")
        position = tensor.end
    if position != file_bytes:
        state = "truncated" if file_bytes < position else "followed by bytes that belong to no tensor"
        raise InvalidModel(f"{file} is {state}: {file_bytes} bytes on disk, {position} announced; {_COPY_AGAIN}")
    return {tensor.name: tensor for tensor in tensors}, data_start


def _read_sharded(folder: Path, index: Path) -> dict[str, TensorHeader]:
    shard_of = _read_weight_map(index)
    tensors: dict[str, TensorHeader] = {}
    bytes_left = MAX_HEADER_BYTES
    for shard in dict.fromkeys(shard_of.values()):
        if not (folder / shard).is_file():
            raise InvalidModel(f"{folder} lacks the shard {shard} that {index.name} names; copy or download it again")
        found, header_bytes = _read_file(folder / shard, bytes_left)
        bytes_left -= header_bytes
        _check_count(folder, len(tensors) + len(found))
        for name, tensor in found.items():
            if name in tensors:
                raise InvalidModel(
                    f"{folder}: {name} is in both {tensors[name].file.name} and {shard}; keep one of them"
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
    if not file.is_file():
        raise InvalidModel(f"{file} does not exist")
    with file.open("rb") as stream:
        file_bytes = file.stat().st_size
        header_bytes = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if file_bytes < LENGTH_BYTES + 2:
            raise InvalidModel(f"{file} is truncated: its {file_bytes} bytes hold no safetensors header; {_COPY_AGAIN}")
        if header_bytes > max_bytes:
            raise InvalidModel(
                f"{file} is not a safetensors file, or has too many tensors: its header takes {header_bytes} bytes; "
                f"all headers of a model together may take {MAX_HEADER_BYTES}"
            )
        if LENGTH_BYTES + header_bytes > file_bytes:
            raise InvalidModel(f"{file} is truncated within its header, or not a safetensors file; {_COPY_AGAIN}")
        raw = stream.read(header_bytes)
    # Counted before the JSON is parsed, because parsing a long list holds the interpreter's lock.
    _check_count(file, raw.count(b'"data_offsets"'))
    if raw.count(b",") > MAX_TENSORS * _COMMAS_PER_TENSOR:
        raise InvalidModel(
            f"{file} is not a safetensors file: its header has more values than {MAX_TENSORS} tensors need"
        )
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{file} is not a safetensors file: its header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise InvalidModel(f"{file} is not a safetensors file: its header is not a JSON object")
    return header, LENGTH_BYTES + header_bytes, file_bytes


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name occurs twice")
    return entries


def _check_count(place: Path, num_tensors: int) -> None:
    if num_tensors > MAX_TENSORS:
        raise InvalidModel(f"{place} has more than {num_tensors - 1} tensors; a model may have at most {MAX_TENSORS}")


def _check_name(file: Path, name: str) -> None:
    num_numbers = sum(part.isdigit() for part in name.split(".", MAX_NAME_CHARS))
    if len(name) > MAX_NAME_CHARS or num_numbers > MAX_NAME_NUMBERS:
        raise InvalidModel(
            f"{file}: the tensor name {_short(name)} has {len(name)} characters and {num_numbers} numbers in it; "
            f"a name may have at most {MAX_NAME_CHARS} characters and {MAX_NAME_NUMBERS} numbers"
        )
    if not name.isprintable() or not all(part.isascii() for part in name.split(".") if part.isdigit()):
        raise InvalidModel(f"{file}: the tensor name {_short(name)} has characters that a name cannot have")


def _short(value: object) -> str:
    """A value of a file for a message; ASCII, because some characters cannot be sent on."""
    shown = ascii(value)
    return shown if len(shown) <= 80 else f"{shown[:80]}..."


def _tensor(file: Path, name: str, entry: object, data_start: int) -> TensorHeader:
    _check_name(file, name)
    if not isinstance(entry, dict):
        raise InvalidModel(f"{file}: the header entry of {name} is not an object; {_COPY_AGAIN}")
    dtype, shape, offsets = entry.get("dtype"), _sizes(entry.get("shape")), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise InvalidModel(
            f"{file}: {name} has dtype {_short(dtype)}, which is not read; save it as bfloat16 or float32"
        )
    span: list[Any] = offsets if isinstance(offsets, list) else []
    if shape is None or len(span) != 2 or not all(type(at) is int and 0 <= at < _MAX_ELEMENTS for at in span):
        raise InvalidModel(
            f"{file}: the shape or the offsets of {name} are malformed (at most {MAX_DIMENSIONS} dimensions); {_COPY_AGAIN}"
        )
    start, end = span
    if end - start != math.prod(shape) * DTYPE_BYTES[dtype]:
        raise InvalidModel(f"{file}: {name} is {dtype} {list(shape)}, but {end - start} bytes long; {_COPY_AGAIN}")
    return TensorHeader(name=name, shape=shape, dtype=dtype, file=file, start=data_start + start, end=data_start + end)


def _sizes(values: object) -> tuple[int, ...] | None:
    """Up to eight numbers whose product, zeros left out, has 63 bits; None where it is anything else."""
    if not isinstance(values, list) or len(values) > MAX_DIMENSIONS:
        return None
    product = 1
    for value in values:
        if type(value) is not int or value < 0:
            return None
        product *= max(1, value)
        if product >= _MAX_ELEMENTS:
            return None
    return tuple(values)
