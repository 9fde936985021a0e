"""The check of a dataset: every row of every file, with the first hundred problems and their number.

The client runs it before it sends a byte, the server before a job may use the data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial

from horizon_formats.answer_checks import (
    check_kto_row,
    check_openai_preference_row,
    check_preference_row,
    check_samples_row,
)
from horizon_formats.files import Container, DataFile, Row, container_of
from horizon_formats.formats import DatasetFormat, check_field_map, columns_of, detect_format, require_columns
from horizon_formats.problems import FieldViolation, InvalidFile, Problem, ViolationTally, check_learnable
from horizon_formats.row_checks import (
    ALPACA,
    PAIR,
    Columns,
    FieldMap,
    check_answer_row,
    check_chat_row,
    check_fields,
    check_tokens_row,
)
from horizon_formats.row_checks import UNTRAINED as UNTRAINED
from horizon_formats.rows import read_rows, read_text

# Progress is reported, and a client may stop, after this much of a file.
_STEP_BYTES = 4 * 2**20


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """What the files of one dataset hold together: not one bad row.

    `num_rows` counts rows, or the non-blank lines of a plain text. `num_blank_lines` are those passed over between rows
    of JSON lines.
    """

    format: DatasetFormat
    num_rows: int
    num_blank_lines: int


class DatasetCheck:
    """Reads the files of one dataset, one after the other, and judges every row. Memory is bounded by the longest
    row."""

    def __init__(self, dataset_format: DatasetFormat, field_map: FieldMap) -> None:
        """Raises: InvalidOption for a wrong map."""
        check_field_map(dataset_format, field_map)
        self._format = dataset_format
        self._field_map = field_map
        self._formats: dict[DatasetFormat, str] = {}
        self.violations = ViolationTally()
        self.num_rows = 0
        self.num_blank_lines = 0

    def read(self, file: DataFile) -> Iterator[int]:
        """Read one file to its end, yielding the number of bytes now and then so that the caller can show progress or
        stop.

        Raises: InvalidFile where it cannot be read as rows at all (empty, damaged, no format fits), InvalidOption for a
        wrong map, ServerOnly where only the server can read it. Bad rows are counted in `violations`.
        """
        dataset_format, container = resolve_format(file, self._format, self._field_map)
        # Again, as `auto` allows the fields of every format.
        check_field_map(dataset_format, self._field_map)
        before = self.num_rows
        if container is Container.PLAIN_TEXT:
            yield from self._read_text(file)
        else:
            yield from self._read_rows(file, dataset_format)
        if self.num_rows == before:
            raise InvalidFile(f"{file.name} holds no rows; it must hold at least one")
        self._formats.setdefault(dataset_format, file.name)

    def report(self, name: str = "") -> DatasetReport:
        """Return what the files hold; `name` is what messages call the dataset.

        Raises: InvalidFile when a row is bad, with the first problem, their number and the first 100 as violations;
        when the files have different formats.
        """
        self.violations.refuse(name)
        if len(self._formats) > 1:
            found = ", ".join(f"{path} is {kind}" for kind, path in self._formats.items())
            raise InvalidFile(
                f"the files of one dataset must have one format, but {found}; push them as separate datasets"
            )
        dataset_format = next(iter(self._formats), self._format)
        return DatasetReport(format=dataset_format, num_rows=self.num_rows, num_blank_lines=self.num_blank_lines)

    def _read_rows(self, file: DataFile, dataset_format: DatasetFormat) -> Iterator[int]:
        num_rows = last = since_yield = 0
        for row in read_rows(file, columns_of(dataset_format, self._field_map)):
            num_rows += 1
            last = row.number
            if violations := check_row(row, dataset_format, self._field_map):
                self.violations.add(violations)
            since_yield += row.num_bytes
            if since_yield >= _STEP_BYTES:
                yield since_yield
                since_yield = 0
        self.num_rows += num_rows
        # Only lines can be blank: the numbers of other rows have no gaps.
        self.num_blank_lines += last - num_rows
        yield since_yield

    def _read_text(self, file: DataFile) -> Iterator[int]:
        """Count the lines that are not blank; one that cannot be read is counted too."""
        open_line = False  # whether the line that the next piece continues was counted
        for piece in read_text(file):
            if piece.violation is not None:
                self.violations.add([piece.violation])
                self.num_rows += 1
                continue
            first, *others = piece.text.split("\n")
            starts_one = bool(first) and not first.isspace() and not open_line
            self.num_rows += starts_one + sum(1 for line in others if line and not line.isspace())
            open_line = bool(others[-1].strip()) if others else open_line or starts_one
            yield len(piece.text)


def check_files(
    files: Collection[DataFile], *, name: str, dataset_format: DatasetFormat, field_map: FieldMap
) -> DatasetReport:
    """Read every file of a dataset whole and return what they hold; their formats must agree.

    Raises: InvalidFile, InvalidOption as `DatasetCheck`.
    """
    check = DatasetCheck(dataset_format, field_map)
    for file in files:
        for _ in check.read(file):
            pass
    return check.report(name)


def resolve_format(
    file: DataFile, dataset_format: DatasetFormat, field_map: FieldMap
) -> tuple[DatasetFormat, Container]:
    """Return what the file is, deciding `auto` by the columns of a table, or of the first row that can be read.

    Raises: InvalidFile when it fits no format, several, or not the one asked for.
    """
    container = container_of(file)
    if container is Container.PLAIN_TEXT:
        if dataset_format not in (DatasetFormat.AUTO, DatasetFormat.TEXT):
            raise InvalidFile(f"{file.name} is plain text, but format {dataset_format} needs one JSON object per line")
        if field_map:
            raise InvalidFile(f"{file.name} is plain text and has no columns to map; leave --map out")
        return DatasetFormat.TEXT, container
    if container is Container.PARQUET:
        columns = file.table_columns()
        if dataset_format is DatasetFormat.AUTO:
            return detect_format(columns, field_map, file.name), container
        # Once for the table: else each of its rows would report the same missing column.
        require_columns(dataset_format, columns, field_map, file.name)
        return dataset_format, container
    if dataset_format is not DatasetFormat.AUTO:
        return dataset_format, container
    # Where no row can be read, the reasons are the answer: that no format fits would say nothing.
    unreadable = ViolationTally()
    for row in read_rows(file):
        if row.violation is None:
            return detect_format(row.columns.keys(), field_map, row.place), container
        unreadable.add([row.violation])
    unreadable.refuse()
    raise InvalidFile(f"{file.name} holds no rows; it must hold at least one")


def check_row(row: Row, dataset_format: DatasetFormat, field_map: FieldMap) -> list[FieldViolation]:
    """Return everything that is wrong with the row for this format; empty when it is fine."""
    if row.violation is not None:
        return [row.violation]
    problems = _CHECKS[dataset_format](row.columns, field_map)
    return [row.refusal(problem, field=field) for field, problem in problems] if problems else []


# A table, as looking up a member of an enum costs as much as checking a short row (Python 3.11).
_CHECKS: dict[DatasetFormat, Callable[[Columns, FieldMap], list[Problem]]] = {
    DatasetFormat.MESSAGES: partial(check_chat_row, sharegpt=False),
    DatasetFormat.SHAREGPT: partial(check_chat_row, sharegpt=True),
    DatasetFormat.PROMPT_COMPLETION: partial(check_answer_row, PAIR),
    DatasetFormat.ALPACA: partial(check_answer_row, ALPACA),
    DatasetFormat.TEXT: partial(check_fields, {"text": (check_learnable, True)}),
    DatasetFormat.TOKENS: check_tokens_row,
    DatasetFormat.PREFERENCE: check_preference_row,
    DatasetFormat.OPENAI_PREFERENCE: check_openai_preference_row,
    DatasetFormat.KTO: check_kto_row,
    DatasetFormat.SAMPLES: check_samples_row,
}
