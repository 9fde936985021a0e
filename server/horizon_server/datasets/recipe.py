"""How a dataset is prepared for a model: the options, the request to the child, its report, and where the result is
kept.

Free of torch, transformers and tokenizers: the daemon looks for a prepared dataset and starts the child with this
alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from horizon_formats.formats import DataKind, DatasetFormat, kind_of
from horizon_formats.model_files import files_that_decide_tokens, has_vocabulary
from horizon_server.datasets.reading import StoredFile
from horizon_server.errors import InvalidModel
from horizon_server.store import prepared

# Raised whenever the same request would give other tokens, masks or counts, so that no old result is found again.
PREPARATION_VERSION = 4


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """How rows become tokens. With method `pretrain` every token is trained, whatever `train_on` says.

    The kind of data that comes out is that of the format (`kind`). Of `preference` and `kto` the completions are
    supervised, of `samples` what their mask says: there `method` and `train_on` change nothing.
    """

    format: DatasetFormat = DatasetFormat.AUTO
    field_map: Mapping[str, str] = field(default_factory=dict)
    method: str = "sft"
    sequence_length: int = 1024
    train_on: str = "assistant"
    eval_fraction: float = 0.0

    @property
    def trains_everything(self) -> bool:
        """Whether every token of a text or a chat is trained."""
        return self.method == "pretrain" or self.train_on == "all"

    @property
    def kind(self) -> DataKind:
        """What the documents are: it follows from the format, which must be decided for all but `text`."""
        return DataKind.TEXT if self.format is DatasetFormat.AUTO else kind_of(self.format)


@dataclass(frozen=True, kw_only=True)
class PrepareRequest:
    """One call of the preparation child. `num_rows` is the number of rows where it is known: the total of the
    progress."""

    dataset_files: tuple[StoredFile, ...]
    model_dir: Path
    output_dir: Path
    options: PrepareOptions
    num_rows: int = 0


@dataclass(frozen=True, kw_only=True)
class PrepareReport:
    """What came out. A long text is split into several documents; every other row is one.

    `documents`, `tokens` and `trained_tokens` are those to train on; `eval_*` are those held out. Trained tokens are
    targets: the first token of a document is never one. `error_rows` were left out, as nothing of them is trained
    within the sequence length; `errors` says so of the first hundred. `longest_document` is of both sides.
    `answer_ends` are the tokens that end trained answers (`AnswerEnds`), with their ids.
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
    kind: str = DataKind.TEXT
    answer_ends: Mapping[str, int] = field(default_factory=dict)


def prepared_folder(root: Path, dataset_digest: str, tokenizer: str, options: PrepareOptions) -> Path:
    """Return where the result is kept below `root`: equal for equal data, tokenizer files and options, else
    different."""
    assert dataset_digest, "a dataset that is ready has a digest"
    plain = dataclasses.asdict(options)
    plain["map"] = plain.pop("field_map")  # as keys have it that are on disk already
    if options.kind is not DataKind.TEXT:
        # All methods that compare answers read the same tokens, and use the same reference log-probabilities in the
        # folder.
        del plain["method"], plain["train_on"]
    parts = {"version": PREPARATION_VERSION, "dataset": dataset_digest, "tokenizer": tokenizer, "options": plain}
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    # All that was prepared from one dataset is in one folder, so that `remove_prepared` can find it.
    return root / dataset_digest / key


def remove_prepared(root: Path, dataset_digest: str) -> None:
    """Remove everything that was prepared from the dataset of this digest.

    No job that uses it may be running, and no other dataset may have the same digest: equal content shares its prepared
    tokens.
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
        # With sizes, so that no content can be moved over the border of two files.
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def require_tokenizer(model_dir: Path) -> list[str]:
    """Return the files that decide how this model reads text, by their paths in the folder.

    Raises: InvalidModel when there is no tokenizer among them.
    """
    names = files_that_decide_tokens(model_dir)
    # transformers would make an empty tokenizer of the config alone, with which every text is unknown.
    if not has_vocabulary(names):
        raise InvalidModel(
            "holds no tokenizer; add tokenizer.json and tokenizer_config.json to the model", file=model_dir
        )
    return names
