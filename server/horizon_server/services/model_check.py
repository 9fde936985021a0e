"""What a model folder must be before a job may use it: a decoder with safetensors weights that belong to its config,
and no code.

Checks names alone when a folder is announced, the config where the announcement carries it, so that nothing is sent in
vain, and headers when the folder has arrived. Never opens a pickle and never runs what it finds. Blocking.

Run as a module it is the child that checks a folder: configs and headers are other people's bytes, and what makes their
parsers take time or memory ends that process and no other.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from horizon_formats.model_files import is_adapter, refusal
from horizon_server.children.entry import EventWriter, serve
from horizon_server.errors import FieldViolation, InvalidModel, naming
from horizon_server.planning.model_folder import open_model_folder, require_decoder_only
from horizon_server.records.blob import BlobFile
from horizon_server.store.adapter_files import ADAPTER_FILE, PEFT_LORA, read_adapter_folder, read_base_sha256
from horizon_server.store.base_digest import DigestBook
from horizon_server.store.layout import parameter_shapes
from horizon_server.store.model_files import CONFIG_FILE, read_config
from horizon_server.store.safetensors_files import TensorHeader, read_safetensors_headers

_MAX_TOKENIZER_CONFIG_BYTES = 64 * 2**20
_DECODER_CLASSES = ("ForCausalLM", "LMHeadModel")
_BASE_CLASS = "Model"
"""A base model is saved without an output projection of its own: where the embedding is tied to it, nothing is
missing."""
_ENCODER_TYPES = frozenset(
    (
        "albert",
        "bert",
        "big_bird",
        "camembert",
        "convbert",
        "data2vec-text",
        "deberta",
        "deberta-v2",
        "distilbert",
        "electra",
        "ernie",
        "esm",
        "eurobert",
        "flaubert",
        "funnel",
        "ibert",
        "layoutlm",
        "longformer",
        "luke",
        "megatron-bert",
        "mobilebert",
        "modernbert",
        "mpnet",
        "mra",
        "nezha",
        "nomic_bert",
        "nystromformer",
        "rembert",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "splinter",
        "squeezebert",
        "xlm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
        "yoso",
    )
)
"""Architectures whose base class reads text in both directions, unless their config says is_decoder."""


class ModelFacts(TypedDict):
    """What a checked folder says of itself. `architecture` is the model_type of its config, or that it is an
    adapter."""

    architecture: str
    num_parameters: int


def check_names(files: Sequence[BlobFile]) -> None:
    """Refuse a folder by the names of its files. Raises InvalidModel for pickles, code, and a lack of config or
    weights."""
    problems = [
        FieldViolation(field=f"files[{i}].path", description=f"{file.path} {problem}")
        for i, file in enumerate(files)
        if (problem := refusal(file.path))
    ]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InvalidModel(f"{problems[0].description}{more}", violations=problems)
    names = {file.path for file in files}
    if is_adapter(names):
        if ADAPTER_FILE not in names:
            raise InvalidModel(
                f"the adapter has no {ADAPTER_FILE}; save it with PEFT's save_pretrained, as safetensors"
            )
        return
    if CONFIG_FILE not in names:
        raise InvalidModel(f"the folder has no {CONFIG_FILE} at its top; push a folder written by save_pretrained")
    if not any(name.endswith(".safetensors") and "/" not in name for name in names):
        raise InvalidModel("the folder has no .safetensors weights at its top; save the model with save_pretrained")


def check_config(config: Mapping[str, Any]) -> str:
    """Refuse what config.json alone rules out; returns its model_type. Raises InvalidModel with the field and what is
    wrong with it."""
    model_type, architectures = config.get("model_type"), config.get("architectures")
    if not isinstance(model_type, str) or not model_type:
        raise InvalidModel(f"{CONFIG_FILE} has no model_type; push a folder written by save_pretrained")
    _refuse_code(CONFIG_FILE, config)
    require_decoder_only(config)
    if config.get("quantization_config"):
        raise InvalidModel(
            f"{CONFIG_FILE} has a quantization_config; quantised weights cannot be trained: push the model in bf16 or "
            "fp32"
        )
    named = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    is_encoder = model_type in _ENCODER_TYPES and not config.get("is_decoder")
    known = _DECODER_CLASSES if is_encoder else (*_DECODER_CLASSES, _BASE_CLASS)
    if named and not any(name.endswith(known) for name in named):
        raise InvalidModel(
            f"{CONFIG_FILE} names {named[0]!r:.80}; only decoder-only language models (...ForCausalLM) can be trained "
            "here"
        )
    return model_type


def check_folder(folder: Path) -> ModelFacts:
    """Return what the folder says, having read config and weight headers as a job's plan does. Raises InvalidModel."""
    # Where the folder is on the node is not the caller's concern.
    with naming({folder: ""}):
        if is_adapter(path.name for path in folder.iterdir()):
            # Its base need not be on the node yet: it is compared when a job starts.
            read_base_sha256(folder)
            return ModelFacts(architecture=PEFT_LORA, num_parameters=read_adapter_folder(folder).num_parameters)
        model_type = check_config(read_config(folder))
        file = folder / "tokenizer_config.json"
        if file.is_file():
            if file.stat().st_size > _MAX_TOKENIZER_CONFIG_BYTES:
                raise InvalidModel(
                    f"{file.name} is larger than {_MAX_TOKENIZER_CONFIG_BYTES} bytes, which no tokenizer needs"
                )
            try:
                document = json.loads(file.read_bytes())
            except (ValueError, RecursionError) as error:
                raise InvalidModel(f"{file.name} is not JSON: {error}") from error
            if not isinstance(document, dict):
                raise InvalidModel(f"{file.name} is JSON, but not an object")
            _refuse_code(file.name, document)
        try:
            found = open_model_folder(folder)
        except InvalidModel:
            # Weights of other number formats do not count, so that others seem to be missing: the format is the reason.
            _refuse_quantised(read_safetensors_headers(folder))
            raise
        _refuse_quantised(found.headers)
        return ModelFacts(architecture=model_type, num_parameters=found.layout.num_parameters)


def _refuse_code(name: str, document: Mapping[str, Any]) -> None:
    if document.get("auto_map"):
        raise InvalidModel(
            f"{name} names custom code (auto_map), which is never run here; use an architecture and a tokenizer that "
            "transformers has built in, and remove auto_map"
        )


def _refuse_quantised(headers: Mapping[str, TensorHeader]) -> None:
    shapes = parameter_shapes(headers)
    odd = next((name for name in headers if name not in shapes and name.endswith(".weight")), None)
    if odd is not None:
        raise InvalidModel(
            f"{odd} has dtype {headers[odd].dtype}; only BF16, F16 and F32 weights can be trained: push the model "
            "unquantised"
        )


def work(request: Any, _: EventWriter) -> ModelFacts | str:
    """Return what a folder says, with the digest of its weights put into the book; or with `digest_only` that
    digest."""
    folder, book = Path(request["folder"]), DigestBook(Path(request["digests"]))
    if request["digest_only"]:
        return book.digest(folder)
    facts = check_folder(folder)
    if facts["architecture"] != PEFT_LORA:
        book.digest(folder)
    return facts


if __name__ == "__main__":
    sys.exit(serve(work, who="the model check"))
