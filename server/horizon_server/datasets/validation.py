"""Every row of a dataset checked before any job may use it.

Owns the reports and the sentences in which bad files are refused. Must not know models or tokens. Streams: memory is bounded by the
longest row, whatever the size of the files. Blocking; the daemon has a child process do it, see `datasets.checking`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from horizon_server.datasets.containers import Container
from horizon_server.datasets.data_file import DataFile, Row
from horizon_server.datasets.formats import DatasetFormat, check_field_map, columns_of
from horizon_server.datasets.row_checks import check_row
from horizon_server.datasets.rows import read_rows, read_text, resolve_format
from horizon_server.datasets.violations import ViolationTally
from horizon_server.errors import FieldViolation, InvalidData


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """What a file holds. `violations` are the first 100 of `num_violations`.

    `num_rows` counts rows, or the non-blank lines of a plain text. `num_blank_lines` are those passed over between rows of JSON lines.
    """

    num_rows: int
    num_bytes: int
    violations: tuple[FieldViolation, ...]
    num_violations: int
    format: DatasetFormat
    num_blank_lines: int = 0


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """What the files of one dataset hold together: not one bad row."""

    format: DatasetFormat
    num_rows: int
    num_blank_lines: int


def validate_dataset(
    files: Sequence[DataFile], *, name: str, dataset_format: DatasetFormat, field_map: Mapping[str, str]
) -> DatasetReport:
    """Read every file of a dataset whole; their formats must agree.

    Raises: InvalidData with the first problem, their number and the first 100 as violations; else as `inspect_file`.
    """
    tally = ViolationTally()
    num_rows = num_blank_lines = 0
    formats: dict[DatasetFormat, str] = {}
    for file in files:
        report = inspect_file(file, dataset_format=dataset_format, field_map=field_map)
        num_rows += report.num_rows
        num_blank_lines += report.num_blank_lines
        formats.setdefault(report.format, file.name)
        tally.add(_named(report.violations, file.name, alone=len(files) == 1))
        tally.total += report.num_violations - len(report.violations)
    tally.refuse(name)
    if len(formats) > 1:
        found = ", ".join(f"{path} is {kind}" for kind, path in formats.items())
        raise InvalidData(f"the files of one dataset must have one format, but {found}; push them as separate datasets")
    return DatasetReport(format=next(iter(formats)), num_rows=num_rows, num_blank_lines=num_blank_lines)


def inspect_file(file: DataFile, *, dataset_format: DatasetFormat, field_map: Mapping[str, str]) -> ValidationReport:
    """Read the whole file and report every bad row.

    Raises: InvalidData where it cannot be read as rows at all (empty, damaged, no format fits), InvalidSpec for a wrong mapping.
    """
    check_field_map(dataset_format, field_map)
    resolved, container = resolve_format(file, dataset_format, field_map)
    check_field_map(resolved, field_map)
    tally = ViolationTally()
    if container is Container.PLAIN_TEXT:
        num_rows, blank = _check_text(file, tally), 0
    else:
        rows = read_rows(file, columns_of(resolved, field_map))
        num_rows, blank = _check_rows(rows, resolved, field_map, tally)
    if num_rows == 0:
        raise InvalidData(f"{file.name} holds no rows; it must hold at least one")
    return ValidationReport(
        num_rows=num_rows,
        num_bytes=file.path.stat().st_size,
        violations=tuple(tally.kept),
        num_violations=tally.total,
        format=resolved,
        num_blank_lines=blank,
    )


def validate_file(file: DataFile, *, dataset_format: DatasetFormat, field_map: Mapping[str, str]) -> ValidationReport:
    """Return the report of a file without a single bad row.

    Raises: InvalidData with the first problem, their number and the first 100 as violations; else as `inspect_file`.
    """
    report = inspect_file(file, dataset_format=dataset_format, field_map=field_map)
    tally = ViolationTally()
    tally.add(report.violations)
    tally.total = report.num_violations
    tally.refuse(file.name)
    return report


def _check_rows(
    rows: Iterator[Row], dataset_format: DatasetFormat, field_map: Mapping[str, str], tally: ViolationTally
) -> tuple[int, int]:
    num_rows = last = 0
    for row in rows:
        num_rows += 1
        last = row.number
        if violations := check_row(row, dataset_format, field_map):
            tally.add(violations)
    return num_rows, last - num_rows


def _check_text(file: DataFile, tally: ViolationTally) -> int:
    """Count the lines that are not blank; one that cannot be read is counted too."""
    num_rows = 0
    open_line = False  # whether the line that the next piece goes on with was counted
    for piece in read_text(file):
        if piece.violation is not None:
            tally.add([piece.violation])
            num_rows += 1
            continue
        first, *others = piece.text.split("\n")
        starts_one = bool(first) and not first.isspace() and not open_line
        num_rows += starts_one + sum(1 for line in others if line and not line.isspace())
        open_line = bool(others[-1].strip()) if others else open_line or starts_one
    return num_rows


def _named(violations: Sequence[FieldViolation], path: str, *, alone: bool) -> Sequence[FieldViolation]:
    """Say in which file a violation is, where there are several."""
    if alone:
        return violations
    return [FieldViolation(field=f"{path}:{v.field}", description=f"{path}: {v.description}") for v in violations]
