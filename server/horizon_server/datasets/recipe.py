"""How a dataset is prepared for a model: the options, the request to the child, its report, and where the result is kept.

Free of torch, transformers and tokenizers: the daemon looks for a prepared dataset and starts the child with this alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizon_formats.formats import DatasetFormat
from horizon_formats.model_files import files_that_decide_tokens, has_vocabulary
from horizon_server.datasets.reading import StoredFile
from horizon_server.errors import InvalidModel, InvalidSpec
from horizon_server.store import prepared

PREPARATION_VERSION = 2
"""Raised whenever the same request would give other tokens or masks, so that no old result is found again."""

METHODS = ("sft", "pretrain")
TRAIN_ON = ("assistant", "last-assistant", "all")


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """How rows become tokens. With method `pretrain` every token is trained, whatever `train_on` says."""

    format: DatasetFormat = DatasetFormat.AUTO
    field_map: Mapping[str, str] = field(default_factory=dict)
    method: str = "sft"
    sequence_length: int = 1024
    train_on: str = "assistant"
    eval_fraction: float = 0.0

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data, with the names that the request carries."""
        return {
            "format": self.format.value,
            "map": dict(sorted(self.field_map.items())),
            "method": self.method,
            "sequence_length": self.sequence_length,
            "train_on": self.train_on,
            "eval_fraction": self.eval_fraction,
        }


@dataclass(frozen=True, kw_only=True)
class PrepareRequest:
    """One call of the preparation child. `num_rows` is the number of rows where it is known: the total of the progress."""

    dataset_files: tuple[StoredFile, ...]
    model_dir: Path
    output_dir: Path
    options: PrepareOptions
    num_rows: int = 0

    def to_mapping(self) -> dict[str, Any]:
        """Return the request as the child reads it."""
        files = [{"path": str(file.path), "name": file.name} for file in self.dataset_files]
        plain = {"dataset_files": files, "model_dir": str(self.model_dir), "output_dir": str(self.output_dir)}
        return plain | self.options.to_mapping() | {"num_rows": self.num_rows}

    @classmethod
    def from_mapping(cls, request: Mapping[str, Any]) -> PrepareRequest:
        """Return the request in plain data; a data file may be a bare path.

        Raises: InvalidSpec when it is not a request.
        """
        try:
            plain = dict(request)
            options = PrepareOptions(
                format=DatasetFormat(plain.pop("format", "auto")),
                field_map=dict(plain.pop("map", None) or {}),
                method=_choice("method", plain.pop("method", "sft"), METHODS),
                sequence_length=int(plain.pop("sequence_length")),
                train_on=_choice("train_on", plain.pop("train_on", "assistant"), TRAIN_ON),
                eval_fraction=float(plain.pop("eval_fraction", 0.0)),
            )
            return cls(
                dataset_files=tuple(_data_file(entry) for entry in plain.pop("dataset_files")),
                model_dir=Path(plain.pop("model_dir")),
                output_dir=Path(plain.pop("output_dir")),
                num_rows=int(plain.pop("num_rows", 0)),
                options=options,
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidSpec(f"the preparation request is malformed: {error!r}") from error


@dataclass(frozen=True, kw_only=True)
class PrepareReport:
    """What came out. A long text is split into several documents; every other row is one.

    `documents`, `tokens` and `trained_tokens` are those to train on; `eval_*` are those held out. Trained tokens are targets: the first
    token of a document is never one. `error_rows` were left out, as nothing of them is trained within the sequence length;
    `errors` says so of the first hundred.
    """

    rows: int
    documents: int
    tokens: int
    trained_tokens: int
    truncated_rows: int
    truncated_tokens: int
    error_rows: int
    eval_rows: int
    eval_documents: int
    eval_tokens: int
    eval_trained_tokens: int
    longest_document: int
    sequence_length: int
    errors: tuple[str, ...] = ()

    def to_mapping(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)

    def counts(self) -> dict[str, int]:
        """Return the numbers alone."""
        return {name: value for name, value in self.to_mapping().items() if isinstance(value, int)}


def prepared_folder(root: Path, dataset_digest: str, tokenizer: str, options: PrepareOptions) -> Path:
    """Return where the result is kept below `root`: equal for equal data, tokenizer files and options, else different.

    All that was prepared from one dataset is in one folder, so that `remove_prepared` can find it.
    """
    assert dataset_digest, "a dataset that is ready has a digest"
    parts = {
        "version": PREPARATION_VERSION,
        "dataset": dataset_digest,
        "tokenizer": tokenizer,
        "options": options.to_mapping(),
    }
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return root / dataset_digest / key


def remove_prepared(root: Path, dataset_digest: str) -> None:
    """Remove everything that was prepared from the dataset of this digest.

    No job that uses it may be running, and no other dataset may have the same digest: equal content shares its prepared tokens.
    """
    assert dataset_digest, "an empty digest would name the whole root"
    shutil.rmtree(root / dataset_digest, ignore_errors=True)


def evaluation_folder(folder: Path, options: PrepareOptions) -> Path | None:
    """Return where the rows held out are in a prepared folder, or None where none are."""
    return folder / prepared.EVALUATION_FOLDER if options.eval_fraction else None


def is_prepared(folder: Path, options: PrepareOptions) -> bool:
    """Whether the folder is there with all its files."""
    return prepared.is_prepared(folder, with_evaluation=options.eval_fraction > 0)


def tokenizer_digest(model_dir: Path) -> str:
    """Return the sha256 over the names and contents of the files that decide how this model reads text.

    Raises: InvalidModel when the folder holds no tokenizer.
    """
    digest = hashlib.sha256()
    for name in require_tokenizer(model_dir):
        path = model_dir / name
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def require_tokenizer(model_dir: Path) -> list[str]:
    """Return the files that decide how this model reads text, by their paths in the folder.

    Raises: InvalidModel when there is no tokenizer among them: transformers would make an empty one of the config alone.
    """
    names = files_that_decide_tokens(model_dir)
    if not has_vocabulary(names):
        raise InvalidModel(f"{model_dir} holds no tokenizer; add tokenizer.json and tokenizer_config.json to the model")
    return names


def _choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}")
    return str(value)


def _data_file(entry: str | Mapping[str, str]) -> StoredFile:
    if isinstance(entry, str):
        return StoredFile.at(Path(entry))
    return StoredFile.at(Path(entry["path"]), name=entry.get("name"))
