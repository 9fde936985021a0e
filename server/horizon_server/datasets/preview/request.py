"""Some rows of a dataset as a model would see them: the options, the request to the rendering child, its answer, and how much is shown.

Free of torch, transformers and tokenizers, as the daemon imports it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_formats.formats import DatasetFormat
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import METHODS, TRAIN_ON, PrepareOptions
from horizon_server.errors import FieldViolation, InvalidSpec, WorkerFailed

MAX_ROWS = 100
MAX_ROW_CHARACTERS = 16 * 1024
"""Maximum text of one row that is shown; all its tokens are counted."""
MAX_CHARACTERS = 512 * 1024
"""Maximum text of all rows together."""
MAX_SPANS = 1000
MAX_PROBLEMS = 5
_SEQUENCE_LENGTHS = (8, 1_048_576)


@dataclass(frozen=True, kw_only=True)
class PreviewOptions:
    """Which rows, and how a job would train on them. `offset` rows are passed over, counted over all files."""

    num_rows: int = 3
    offset: int = 0
    method: str = "sft"
    train_on: str = "assistant"
    sequence_length: int = 1024

    def check(self) -> None:
        """Refuse what cannot be shown.

        Raises: InvalidSpec with one violation per field.
        """
        low, high = _SEQUENCE_LENGTHS
        wrong = {
            "num_rows": f"1 to {MAX_ROWS}" if not 1 <= self.num_rows <= MAX_ROWS else "",
            "offset": "0 or more" if self.offset < 0 else "",
            "method": f"one of {', '.join(METHODS)}" if self.method not in METHODS else "",
            "train_on": f"one of {', '.join(TRAIN_ON)}" if self.train_on not in TRAIN_ON else "",
            "sequence_length": f"{low} to {high}" if not low <= self.sequence_length <= high else "",
        }
        violations = [
            FieldViolation(field=name, description=f"{name} is {getattr(self, name)!r}; it must be {allowed}")
            for name, allowed in wrong.items()
            if allowed
        ]
        if violations:
            raise InvalidSpec(violations[0].description, violations=violations)


@dataclass(frozen=True, kw_only=True)
class PreviewSpan:
    """A piece of a rendered row, and whether it is trained."""

    text: str
    trained: bool


@dataclass(frozen=True, kw_only=True)
class PreviewRow:
    """One row: where it is, what the model reads of it, and how many tokens that is.

    `unit` says what `number` counts: lines of a file, elements of an array, pieces of a plain text. `clipped` says that `spans` end before
    the row does, to keep the answer small; `problems` say why nothing of the row, or not the row, is trained.
    """

    file: str
    unit: str
    number: int
    spans: tuple[PreviewSpan, ...] = ()
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_cut_tokens: int = 0
    num_documents: int = 0
    clipped: bool = False
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DatasetPreview:
    """Some rows of a dataset of `num_rows`, and the options they were rendered with."""

    rows: tuple[PreviewRow, ...]
    num_rows: int
    format: str
    options: PreviewOptions


@dataclass(frozen=True, kw_only=True)
class PreviewRequest:
    """One call of the rendering child; the answer goes to `answer_file`."""

    dataset_files: tuple[StoredFile, ...]
    model_dir: Path
    answer_file: Path
    format: str
    field_map: dict[str, str]
    options: PreviewOptions

    @property
    def prepare_options(self) -> PrepareOptions:
        """The same options as the preparation of a job has them."""
        return PrepareOptions(
            format=DatasetFormat(self.format),
            field_map=self.field_map,
            method=self.options.method,
            sequence_length=self.options.sequence_length,
            train_on=self.options.train_on,
        )

    def to_json(self) -> str:
        """Return the request as the child reads it."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str | bytes) -> PreviewRequest:
        """Return the request in `text`, which `to_json` has written."""
        plain = json.loads(text)
        files = tuple(StoredFile.at(Path(file["path"]), name=file["name"]) for file in plain.pop("dataset_files"))
        return cls(
            dataset_files=files,
            model_dir=Path(plain.pop("model_dir")),
            answer_file=Path(plain.pop("answer_file")),
            options=PreviewOptions(**plain.pop("options")),
            **plain,
        )


def rows_to_json(rows: tuple[PreviewRow, ...]) -> str:
    """Return rows as the child writes them."""
    return json.dumps([dataclasses.asdict(row) for row in rows])


def rows_from_json(text: str | bytes) -> tuple[PreviewRow, ...]:
    """Return the rows that the child wrote.

    Raises: WorkerFailed when it wrote something else, as the child runs a template that came with a model.
    """
    try:
        return tuple(_row(plain) for plain in json.loads(text))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WorkerFailed("the rendering child did not write any rows") from error


def _row(plain: dict[str, Any]) -> PreviewRow:
    spans = [PreviewSpan(text=str(span["text"]), trained=bool(span["trained"])) for span in plain.pop("spans")]
    problems = [str(problem) for problem in plain.pop("problems")]
    return PreviewRow(**plain, spans=tuple(spans), problems=tuple(problems))
