"""Rows of a Parquet table, read in batches of a few MiB.

Must not know what a row of a format must hold. Imports Arrow only when a table is read: most datasets are JSON lines. What a crafted file
makes Arrow allocate inside one batch is bounded by the process that reads it, see `datasets.checking`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

from horizon_server.datasets.data_file import MAX_ROW_BYTES, DataFile, Row
from horizon_server.datasets.expansion import Allowance
from horizon_server.errors import InvalidData

_BATCH_BYTES = 4 * 1024 * 1024
_MAX_BATCH_ROWS = 64
_BUFFER_BYTES = 1024 * 1024

ResultT = TypeVar("ResultT")


def parquet_columns(file: DataFile) -> list[str]:
    """Return the names of the table's columns.

    Raises: InvalidData when it cannot be read.
    """
    return _names(file, _open(file))


def read_parquet(file: DataFile, columns: Collection[str] | None) -> Iterator[Row]:
    """Yield every row, with these columns (those that the table has) or with all.

    Raises: InvalidData, also while reading, when the file is damaged or expands beyond its allowance.
    """
    table = _open(file)
    names = _names(file, table)
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidData(f"{file.name} has two columns {twice!r:.40}; rename one")
    wanted = None if columns is None else [name for name in names if name in columns]
    allowance = Allowance(file)
    number = 0
    for group in range(table.num_row_groups):
        for encoded in _batches(file, table, group, wanted):
            batch = _without_dictionaries(file, encoded)
            allowance.take(batch.nbytes)
            padded = [field.name for field in batch.schema if _struct_depth(field.type) > 1]
            for columns_of_row, num_bytes in _rows(batch):
                number += 1
                yield _row(number, columns_of_row, num_bytes, padded)


def _names(file: DataFile, table: Any) -> list[str]:
    return _telling(file, lambda: [str(name) for name in table.schema_arrow.names])


def _row(number: int, columns: dict[str, Any] | str, num_bytes: int, padded: Sequence[str]) -> Row:
    if isinstance(columns, str):
        return Row.refused(number, columns, unit="row")
    for name in padded:
        columns[name] = _without_nulls(columns[name])
    return Row(number=number, columns=columns, num_bytes=num_bytes, unit="row")


def _struct_depth(kind: Any) -> int:
    from pyarrow import types

    inner = [_struct_depth(kind.field(i).type) for i in range(kind.num_fields)] if types.is_nested(kind) else []
    return max(inner, default=0) + bool(types.is_struct(kind))


def _without_nulls(value: Any) -> Any:
    """Leave out the keys that a struct has only because another row needs them: a table writes null into all of them.

    One level down that changes nothing, as formats take null for absent. Deeper it would: the arguments of one tool call would
    show up, as nulls, in those of every other.
    """
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _open(file: DataFile) -> Any:
    from pyarrow.parquet import ParquetFile

    # Pages are read as they are needed: a whole row group can be gigabytes.
    return _telling(file, lambda: ParquetFile(file.path, buffer_size=_BUFFER_BYTES, pre_buffer=False))


def _batches(file: DataFile, table: Any, group: int, columns: list[str] | None) -> Iterator[Any]:
    described = table.metadata.row_group(group)
    row_bytes = max(1, described.total_byte_size // max(1, described.num_rows))
    batch_rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // row_bytes))

    def open_group() -> Iterator[Any]:
        batches: Iterator[Any] = table.iter_batches(
            batch_size=batch_rows, row_groups=[group], columns=columns, use_threads=False
        )
        return batches

    batches = _telling(file, open_group)
    while (batch := _telling(file, lambda: next(batches, None))) is not None:
        yield batch


def _without_dictionaries(file: DataFile, batch: Any) -> Any:
    """Spell out columns of categories, so that the size of the batch is that of its values."""
    from pyarrow import types

    for index, column in enumerate(batch.schema):
        if types.is_dictionary(column.type):
            spelt_out = _telling(file, batch.column(index).dictionary_decode)
            batch = batch.set_column(index, column.name, spelt_out)
        elif _holds_dictionary(column.type):
            raise InvalidData(
                f"{file.name} holds categories inside the lists or structs of column {column.name!r:.40}; write them as plain values"
            )
    return batch


def _holds_dictionary(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return True
    return types.is_nested(kind) and any(_holds_dictionary(kind.field(i).type) for i in range(kind.num_fields))


def _rows(batch: Any) -> Iterator[tuple[dict[str, Any] | str, int]]:
    """Yield for each row its columns, or what is wrong with it, and its size."""
    if batch.nbytes <= MAX_ROW_BYTES:
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError):
            pass  # one of them cannot be told in Python; one by one it will be found
        else:
            size = batch.nbytes // max(1, len(rows))
            for row in rows:
                yield row, size
            return
    for index in range(batch.num_rows):
        yield _single_row(batch.slice(index, 1))


def _single_row(row: Any) -> tuple[dict[str, Any] | str, int]:
    if row.nbytes > MAX_ROW_BYTES:
        return f"is longer than {MAX_ROW_BYTES // 2**20} MiB; split the row", row.nbytes
    try:
        return row.to_pylist()[0], row.nbytes
    except UnicodeDecodeError:
        return "holds a string that is not UTF-8", row.nbytes
    except (ValueError, OverflowError) as error:
        return f"holds a value that cannot be read: {error}", row.nbytes


def _telling(file: DataFile, call: Callable[[], ResultT]) -> ResultT:
    """Call Arrow; its errors are about the file."""
    import pyarrow

    try:
        return call()
    except MemoryError as error:
        raise InvalidData(
            f"{file.name} holds rows that take more memory than there is ({error}); write smaller ones"
        ) from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InvalidData(f"{file.name} cannot be read as Parquet: {error!s:.300}; write it again") from error
