"""Some rows of a dataset as a model would see them: the options, the request to the rendering child, its answer, and
how much is shown.

Free of torch, transformers and tokenizers, as the daemon imports it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from horizon_server.codec import from_plain
from horizon_server.datasets.reading import StoredFile
from horizon_server.errors import FieldViolation, InvalidSpec, WorkerFailed

MAX_ROWS = 100
# Maximum text of one row that is shown, and of all rows together; all their tokens are counted.
MAX_ROW_CHARACTERS = 16 * 1024
MAX_CHARACTERS = 512 * 1024
MAX_SPANS = 1000
MAX_PROBLEMS = 5


@dataclass(frozen=True, kw_only=True)
class PreviewOptions:
    """Which rows, and how a job would train on them. `offset` rows are passed over, counted over all files."""

    num_rows: int = 3
    offset: int = 0
    method: str = "sft"
    train_on: str = "assistant"
    sequence_length: int = 1024

    def check(self) -> None:
        """Refuse what cannot be shown. Raises: InvalidSpec with one violation per field."""
        # Here, as the child reads this module too: it starts 0.1 s sooner without the spec.
        from horizon_server.spec import Method, TrainOn, TrainSpec

        length = TrainSpec.model_json_schema()["properties"]["sequence_length"]
        low, high = length["minimum"], length["maximum"]
        methods, train_on = get_args(Method), get_args(TrainOn)
        wrong = {
            "num_rows": f"1 to {MAX_ROWS}" if not 1 <= self.num_rows <= MAX_ROWS else "",
            "offset": "0 or more" if self.offset < 0 else "",
            "method": f"one of {', '.join(methods)}" if self.method not in methods else "",
            "train_on": f"one of {', '.join(train_on)}" if self.train_on not in train_on else "",
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
    """A piece of a rendered row, whether it is trained, and how much its loss counts where that is not 1."""

    text: str
    trained: bool
    weight: float | None = None


@dataclass(frozen=True, kw_only=True)
class PreviewRow:
    """One row: where it is, what the model reads of it, and how many tokens that is.

    `unit` says what `number` counts: lines of a file, elements of an array, pieces of a plain text. `clipped` says that
    `spans` end before the row does, to keep the answer small; `problems` say why nothing of the row, or not the row, is
    trained. A row of a `preference` is shown as two, one after the other, which `part` calls chosen and rejected; of
    `kto` and `samples` it says what the row is worth.
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
    part: str = ""


@dataclass(frozen=True, kw_only=True)
class DatasetPreview:
    """Some rows of a dataset of `num_rows`, and the options they were rendered with."""

    rows: tuple[PreviewRow, ...]
    num_rows: int
    format: str
    options: PreviewOptions


@dataclass(frozen=True, kw_only=True)
class PreviewRequest:
    """One call of the rendering child."""

    dataset_files: tuple[StoredFile, ...]
    model_dir: Path
    format: str
    field_map: dict[str, str]
    options: PreviewOptions


def rows_from_answer(answer: Any) -> tuple[PreviewRow, ...]:
    """Return the rows that the child answered with. Raises: WorkerFailed when it answered something else."""
    try:
        return from_plain(tuple[PreviewRow, ...], answer)
    except ValueError as error:
        # The child runs a template that came with a model, so its answer is not trusted.
        raise WorkerFailed("the preview answered with something that is not rows") from error
