"""What a model folder must be before a job may use it: a decoder with safetensors weights that belong to its config, and no code.

Works on names alone when a folder is announced, so that nothing is sent in vain, and on headers when it has arrived. Never opens a
pickle and never runs what it finds. Blocking.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from horizon_server.errors import FieldViolation, InvalidModel
from horizon_server.planning.model_folder import check_edges, is_tied, stored_shapes
from horizon_server.records.blob import BlobFile
from horizon_server.store.layout import (
    build_layout,
    is_output_projection,
    parameter_shapes,
    read_safetensors_headers,
)

CONFIG_FILE = "config.json"

_MAX_JSON_BYTES = 64 * 2**20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
_CODE = (".py", ".pyc", ".so", ".sh")
_DECODER_CLASSES = ("ForCausalLM", "LMHeadModel")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What a checked folder says of itself. `architecture` is the model_type of its config."""

    architecture: str
    num_parameters: int


def check_names(files: Sequence[BlobFile]) -> None:
    """Refuse a folder by the names of its files.

    Raises:
        InvalidModel: with one violation per pickle or code file, or when config or weights are missing.
    """
    problems = [
        FieldViolation(field=f"files[{i}].path", description=f"{file.path} {problem}")
        for i, file in enumerate(files)
        if (problem := _name_problem(file.path))
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InvalidModel(f"{problems[0].description}{more}", violations=problems)
    names = {file.path for file in files}
    if CONFIG_FILE not in names:
        raise InvalidModel(f"the folder has no {CONFIG_FILE} at its top; push a folder written by save_pretrained")
    if not any(name.endswith(".safetensors") and "/" not in name for name in names):
        raise InvalidModel("the folder has no .safetensors weights at its top; save the model with save_pretrained")


def check_folder(folder: Path) -> ModelFacts:
    """Return what the folder holds, having read its config and every weight header.

    Raises:
        InvalidModel: with the file and what is wrong with it.
    """
    config = _read_config(folder)
    _refuse_code(folder, config)
    _refuse_other_architectures(config)
    try:
        headers = read_safetensors_headers(folder)
        shapes = parameter_shapes(headers)
        odd = next((name for name in headers if name not in shapes and name.endswith(".weight")), None)
        if odd is not None:
            raise InvalidModel(
                f"{odd} has dtype {headers[odd].dtype}; only BF16, F16 and F32 weights can be trained: push the model unquantised"
            )
        return ModelFacts(
            architecture=config["model_type"], num_parameters=_count_parameters(config, stored_shapes(config, headers))
        )
    except InvalidModel as error:
        raise InvalidModel(_without_place(error.message, folder), violations=error.violations) from error


def _name_problem(path: str) -> str | None:
    suffix = PurePosixPath(path).suffix.lower()
    if suffix in _PICKLES:
        return (
            "may be a pickle, which can run code when it is opened and is never taken; leave it out, and have the weights as "
            "safetensors (save_pretrained writes them)"
        )
    if suffix in _CODE:
        return "is code, which is never taken or run here; leave it out, and use an architecture that transformers has built in"
    return None


def _read_config(folder: Path) -> dict[str, Any]:
    config = _read_json(folder / CONFIG_FILE)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise InvalidModel(f"{CONFIG_FILE} has no model_type; push a folder written by save_pretrained")
    return config


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InvalidModel(f"the folder has no {path.name} at its top; push a folder written by save_pretrained")
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise InvalidModel(f"{path.name} is larger than {_MAX_JSON_BYTES} bytes, which is no configuration")
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"{path.name} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidModel(f"{path.name} is JSON, but not an object")
    return document


def _refuse_code(folder: Path, config: Mapping[str, Any]) -> None:
    for name, document in ((CONFIG_FILE, config), ("tokenizer_config.json", None)):
        if document is None:
            if not (folder / name).is_file():
                continue
            document = _read_json(folder / name)
        if document.get("auto_map"):
            raise InvalidModel(
                f"{name} names code of its own (auto_map), which is never run here; use an architecture and a tokenizer that "
                "transformers has built in, and remove auto_map"
            )


def _refuse_other_architectures(config: Mapping[str, Any]) -> None:
    if config.get("is_encoder_decoder"):
        raise InvalidModel(
            f"{CONFIG_FILE} says is_encoder_decoder; only decoder-only language models can be trained here"
        )
    if config.get("quantization_config"):
        raise InvalidModel(
            f"{CONFIG_FILE} has a quantization_config; quantised weights cannot be trained: push the model in bf16 or fp32"
        )
    architectures = config.get("architectures")
    named = architectures if isinstance(architectures, list) else []
    if named and not any(isinstance(name, str) and name.endswith(_DECODER_CLASSES) for name in named):
        raise InvalidModel(
            f"{CONFIG_FILE} names {named[0]!r}; only decoder-only language models (...ForCausalLM) can be trained here"
        )


def _count_parameters(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> int:
    projections = [name for name in shapes if is_output_projection(name)]
    tied = is_tied(config, shapes)
    check_edges(config, shapes, tied=tied)
    num_layers = config.get("num_hidden_layers")
    if isinstance(num_layers, int) and not isinstance(num_layers, bool) and num_layers > 0:
        return build_layout(shapes, num_layers=num_layers, tied=tied).num_parameters
    shared = projections if tied else []
    return sum(math.prod(shape) for name, shape in shapes.items() if name not in shared)


def _without_place(sentence: str, folder: Path) -> str:
    """Where the folder lies on the node is no business of the caller."""
    return sentence.replace(f"{folder}/", "").replace(str(folder), "the model folder")
