"""Data files as rows or text, whatever contains them, and the format that all their rows have.

Free of torch and transformers: uploads are checked with it and the preparation child reads with it, so both see the same rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from horizon_server.datasets.containers import Container, container_of
from horizon_server.datasets.data_file import DataFile, Row
from horizon_server.datasets.formats import DatasetFormat, detect_format, require_columns
from horizon_server.datasets.json_rows import parse_json_lines, read_json_array, split_json_lines
from horizon_server.datasets.parquet_rows import parquet_columns, read_parquet
from horizon_server.datasets.plain_text import read_text
from horizon_server.datasets.violations import ViolationTally
from horizon_server.errors import InvalidData

__all__ = ["read_rows", "read_text", "resolve_format"]


def resolve_format(
    file: DataFile, dataset_format: DatasetFormat, field_map: Mapping[str, str]
) -> tuple[DatasetFormat, Container]:
    """Return what the file is, deciding `auto` by the columns of a table, or of the first row that can be read.

    Raises: InvalidData when it fits no format, several, or not the one asked for.
    """
    container = container_of(file)
    if container is Container.PLAIN_TEXT:
        if dataset_format not in (DatasetFormat.AUTO, DatasetFormat.TEXT):
            raise InvalidData(f"{file.name} is plain text, but format {dataset_format} needs one JSON object per line")
        if field_map:
            raise InvalidData(f"{file.name} is plain text and has no columns to map; leave --map out")
        return DatasetFormat.TEXT, container
    if container is Container.PARQUET:
        columns = parquet_columns(file)
        if dataset_format is DatasetFormat.AUTO:
            return _detect(columns, field_map, file.name), container
        require_columns(dataset_format, columns, field_map, file.name)
        return dataset_format, container
    if dataset_format is not DatasetFormat.AUTO:
        return dataset_format, container
    tally = ViolationTally()
    for row in read_rows(file):
        if row.violation is None:
            return _detect(row.columns.keys(), field_map, f"{file.name}, {row.unit} {row.number}"), container
        tally.add([row.violation])
    tally.refuse(file.name)
    raise InvalidData(f"{file.name} holds no rows; it must hold at least one")


def read_rows(file: DataFile, columns: Collection[str] | None = None) -> Iterator[Row]:
    """Yield the rows of a file that is not plain text, each read or with the reason why it could not be.

    Blank lines are no rows. Of a table only `columns` are read, where they are given.
    """
    container = container_of(file)
    if container is Container.PARQUET:
        return read_parquet(file, columns)
    return read_json_array(file) if container is Container.JSON_ARRAY else parse_json_lines(split_json_lines(file))


def _detect(columns: Collection[str], field_map: Mapping[str, str], place: str) -> DatasetFormat:
    try:
        return detect_format(columns, field_map)
    except InvalidData as error:
        raise InvalidData(f"{place}: {error.message}") from None
