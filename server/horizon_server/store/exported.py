"""A model folder as it is written: one writer for checkpoints, and for models that adapters are merged into."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from horizon_formats.model_files import companion_files
from horizon_server.store.generation_config import GENERATION_CONFIG_FILE
from horizon_server.store.manifest import FileRecord, record_file
from horizon_server.store.model_files import CONFIG_FILE, read_config
from horizon_server.store.safetensors_files import DTYPE_BYTES, TensorBytes, write_sharded, write_text

ExportDtype = Literal["source", "bf16", "fp16", "fp32"]
DTYPE_OF_EXPORT: Mapping[ExportDtype, str] = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}
CONFIG_DTYPES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""What a config calls the formats of weights."""

MODEL_STEM = "model"

# A header's entry, and config, state, manifest and index together.
_ENTRY_BYTES = 200
_SMALL_FILES_BYTES = 1 << 20


def folder_bytes(source: Path, tensors: Iterable[tuple[str, int]]) -> int:
    """Return the disk space that tensors of these names and sizes take at most, with the companions of `source`."""
    sizes = sum(size_bytes + _ENTRY_BYTES + len(name) for name, size_bytes in tensors)
    return sizes + _SMALL_FILES_BYTES + sum((source / name).stat().st_size for name in companion_files(source))


def write_model_folder(
    folder: Path,
    tensors: Sequence[TensorBytes],
    *,
    source: Path,
    shard_bytes: int,
    generation_config: str | None = None,
) -> dict[str, FileRecord]:
    """Write tensors, and config and companions of the model folder `source`; returns the files.

    The config names the format that most of the weights have. `generation_config` takes the place of the source's own.
    """
    sizes = Counter[str]()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.size_bytes // DTYPE_BYTES[tensor.dtype]
    # torch_dtype is the older name of dtype; both in one file could contradict each other.
    config: dict[str, Any] = {key: value for key, value in read_config(source).items() if key != "torch_dtype"}
    if (most := sizes.most_common(1)[0][0]) in CONFIG_DTYPES:
        config["dtype"] = CONFIG_DTYPES[most]
    return {
        **write_sharded(folder, MODEL_STEM, tensors, shard_bytes=shard_bytes),
        CONFIG_FILE: write_text(folder / CONFIG_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n"),
        **copy_companions(source, folder, generation_config=generation_config),
    }


def copy_companions(source: Path, target: Path, *, generation_config: str | None = None) -> dict[str, FileRecord]:
    """Copy what belongs next to a model's weights; returns the files. `generation_config` takes the place of the
    source's own."""
    files: dict[str, FileRecord] = {}
    for name in companion_files(source):
        (target / name).parent.mkdir(exist_ok=True)
        # Contents only: a read-only source must not make the copy undeletable.
        shutil.copyfile(source / name, target / name)
        files[name] = record_file(target / name)
    if generation_config is not None:
        files[GENERATION_CONFIG_FILE] = write_text(target / GENERATION_CONFIG_FILE, generation_config)
    return files
