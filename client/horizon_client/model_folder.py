"""Which files of a local model folder are pushed, and the fast checks before anything is sent: config, tokenizer, safetensors headers.

Only what a model needs is pushed. Pickle files never are, whatever their name.
"""

from __future__ import annotations

import json
import math
import os
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from horizon_client.errors import BadFile
from horizon_client.transfer.files import SourceFile, reading
from horizon_formats.model_files import is_pickle, pushed_files

_NOT_CHECKED = ("*.model", "LICENSE*", "NOTICE*", "README.md")
"""Binary files, and texts that no program reads."""

_MAX_HEADER_BYTES = 64 * 2**20
_MAX_TEXT_BYTES = 256 * 2**20
_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}
_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I8": 8, "U8": 8, "BOOL": 8}


def model_files(folder: str | os.PathLike[str]) -> list[SourceFile]:
    """Return the files of a model folder that are pushed, checked.

    Raises:
        BadFile: naming the file, when the folder is not a complete model in safetensors.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise BadFile(
            f"{root} is not a folder; a model is a folder with config.json, tokenizer files and *.safetensors"
        )
    chosen = pushed_files(root)
    if "config.json" not in chosen:
        raise BadFile(f"{root} contains no config.json, so it is not a model folder")
    if not any(name.endswith(".safetensors") for name in chosen):
        pickles = sorted(entry.name for entry in root.iterdir() if entry.is_file() and is_pickle(entry.name))
        if not pickles:
            raise BadFile(f"{root} contains no *.safetensors file, so there are no weights to push")
        raise BadFile(
            f"{root} contains its weights as pickle only ({pickles[0]}), which can run code when it is loaded and is never pushed; "
            f"convert it once where you trust it: AutoModelForCausalLM.from_pretrained({str(root)!r}).save_pretrained('converted'), "
            "then push that folder"
        )
    files = [SourceFile.of(root / name, name) for name in chosen]
    for file in files:
        _check(file, set(chosen))
    return files


def _check(file: SourceFile, names: set[str]) -> None:
    if file.path.endswith(".safetensors"):
        _check_safetensors(file)
    elif file.path.endswith(".json"):
        try:
            content = json.loads(_text(file))
        except json.JSONDecodeError as error:
            raise BadFile(f"{file.source}, line {error.lineno}: not JSON: {error.msg}") from error
        except RecursionError as error:
            raise BadFile(f"{file.source} is nested too deeply") from error
        if file.path == "config.json" and not isinstance(content, dict):
            raise BadFile(f"{file.source} must hold a JSON object")
        if file.path.endswith(".safetensors.index.json"):
            _check_index(file, content, names)
    elif not any(fnmatchcase(file.path, pattern) for pattern in _NOT_CHECKED):
        _text(file)


def _text(file: SourceFile) -> str:
    if file.size_bytes > _MAX_TEXT_BYTES:
        raise BadFile(f"{file.source} is larger than 256 MiB; it is not what its name says")
    try:
        with reading(file.source):
            return file.source.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadFile(f"{file.source} is not UTF-8 text at byte {error.start + 1}") from error


def _check_index(file: SourceFile, content: Any, names: set[str]) -> None:
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise BadFile(f"{file.source} contains no weight_map from tensors to files")
    missing = sorted(set(weight_map.values()) - names)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise BadFile(
            f"{file.source} names {missing[0]}{more}, which is not in the folder; the download of the model is incomplete"
        )


def _check_safetensors(file: SourceFile) -> None:
    """Read the header only: tensors must fill the file from the header's end to its last byte, without gaps."""
    try:
        with reading(file.source), file.source.open("rb") as stream:
            num_header_bytes = int.from_bytes(stream.read(8), "little")
            if file.size_bytes < 8 or num_header_bytes > min(_MAX_HEADER_BYTES, file.size_bytes - 8):
                raise BadFile(
                    f"{file.source} is not a safetensors file, or is truncated: it is smaller than its header"
                )
            header = json.loads(stream.read(num_header_bytes).decode("utf-8"))
    except BadFile:  # is a ValueError too
        raise
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{file.source} is not a safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise BadFile(f"{file.source} is not a safetensors file: its header is not a JSON object")
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    spans = sorted(_span(file, name, entry) for name, entry in tensors.items())
    at = 0
    for begin, end in spans:
        if begin != at:
            raise BadFile(f"{file.source}: its tensors overlap or leave a gap at data byte {at}")
        at = end
    num_data_bytes = file.size_bytes - 8 - num_header_bytes
    if at != num_data_bytes:
        raise BadFile(
            f"{file.source} is damaged: its header describes {at} bytes of tensors, but it contains {num_data_bytes}"
        )


def _span(file: SourceFile, name: str, entry: object) -> tuple[int, int]:
    fields = entry if isinstance(entry, dict) else {}
    offsets, shape = _whole_numbers(fields.get("data_offsets")), _whole_numbers(fields.get("shape"))
    if offsets is None or shape is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise BadFile(f"{file.source}: the header's entry of tensor {name!r:.80} is malformed")
    bits = _BITS.get(str(fields.get("dtype")))
    if bits is not None and offsets[1] - offsets[0] != math.prod(shape) * bits // 8:
        raise BadFile(f"{file.source}: tensor {name!r:.80} has another size than its shape {shape} and dtype need")
    return offsets[0], offsets[1]


def _whole_numbers(value: object) -> list[int] | None:
    if not isinstance(value, list) or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value):
        return None
    return value
