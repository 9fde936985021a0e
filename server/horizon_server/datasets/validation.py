"""Every row of a data file checked before any job may use it.

Owns the report and the one sentence in which a bad file is refused. Must not know models or tokens. Streams: memory is
bounded by the longest line, whatever the size of the file. Thread: blocking; the daemon runs it in an executor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from horizon_server.datasets.formats import DatasetFormat, check_field_map
from horizon_server.datasets.row_checks import check_row
from horizon_server.datasets.rows import Container, DataFile, read_rows, read_text, resolve_format
from horizon_server.datasets.violations import ViolationTally
from horizon_server.errors import FieldViolation, InvalidData


@dataclass(frozen=True, kw_only=True)
class ValidationReport:
    """What a file holds. `violations` are the first 100 of `num_violations`.

    `num_rows` counts rows, or the non-blank lines of a plain text.
    """

    num_rows: int
    num_bytes: int
    violations: tuple[FieldViolation, ...]
    num_violations: int
    format: DatasetFormat


def inspect_file(file: DataFile, *, dataset_format: DatasetFormat, field_map: Mapping[str, str]) -> ValidationReport:
    """Read the whole file and report every bad row.

    Raises: InvalidData where it cannot be read as rows at all (empty, no format fits), InvalidSpec for a wrong mapping,
    NotAvailableYet for formats of later versions.
    """
    report, _ = _inspect(file, dataset_format, field_map)
    return report


def validate_file(file: DataFile, *, dataset_format: DatasetFormat, field_map: Mapping[str, str]) -> ValidationReport:
    """Return the report of a file without a single bad row.

    Raises: InvalidData with the first problem, their number and the first 100 as violations; else as `inspect_file`.
    """
    report, tally = _inspect(file, dataset_format, field_map)
    tally.refuse(file.name)
    return report


def _inspect(
    file: DataFile, dataset_format: DatasetFormat, field_map: Mapping[str, str]
) -> tuple[ValidationReport, ViolationTally]:
    check_field_map(dataset_format, field_map)
    resolved, container = resolve_format(file, dataset_format, field_map)
    tally = ViolationTally()
    num_rows = 0
    rows = _text_rows(file) if container is Container.PLAIN_TEXT else _json_rows(file, resolved, field_map)
    for violations in rows:
        num_rows += 1
        tally.add(violations)
    if num_rows == 0:
        raise InvalidData(f"{file.name} holds no rows; it must hold at least one")
    report = ValidationReport(
        num_rows=num_rows,
        num_bytes=file.path.stat().st_size,
        violations=tuple(tally.kept),
        num_violations=tally.total,
        format=resolved,
    )
    return report, tally


def _json_rows(
    file: DataFile, dataset_format: DatasetFormat, field_map: Mapping[str, str]
) -> Iterator[list[FieldViolation]]:
    for row in read_rows(file):
        yield check_row(row, dataset_format, field_map)


def _text_rows(file: DataFile) -> Iterator[list[FieldViolation]]:
    counted = 0
    for piece in read_text(file):
        if piece.violation is not None:
            yield [piece.violation]
        elif piece.number != counted and piece.text.strip():
            yield []
        else:
            continue
        counted = piece.number
