"""The data files of the server: those that `horizon_formats` reads, and with Arrow also Parquet and zstd.

Imports Arrow only when such a file is read: most datasets are JSON lines. What a crafted file makes Arrow allocate inside one batch is
bounded by the process that reads it, see `datasets.checking`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from horizon_formats.files import MAX_ROW_BYTES, TOO_LONG, Allowance, ByteSource, DataFile, Row, Skip
from horizon_formats.problems import InvalidFile, InvalidOption
from horizon_server.errors import InvalidData, InvalidSpec

_BATCH_BYTES = 4 * 1024 * 1024
_MAX_BATCH_ROWS = 64
_BUFFER_BYTES = 1024 * 1024

ResultT = TypeVar("ResultT")


@contextmanager
def server_errors() -> Iterator[None]:
    """Raise what `horizon_formats` raises as the server's own errors: InvalidData for files, InvalidSpec for options."""
    try:
        yield
    except InvalidFile as error:
        raise InvalidData(error.message, violations=error.violations) from error
    except InvalidOption as error:
        raise InvalidSpec(error.message, violations=error.violations) from error


@dataclass(frozen=True, kw_only=True)
class StoredFile(DataFile):
    """A data file in the blob store, or any other file on the node."""

    def open_zstd(self) -> ByteSource:
        """Return the expanded bytes of a zstd file. Arrow's decoder refuses windows above 128 MiB."""
        import pyarrow

        stream: ByteSource = pyarrow.CompressedInputStream(pyarrow.OSFile(str(self.path)), "zstd")
        return stream

    def table_columns(self) -> list[str]:
        """Return the names of a Parquet table's columns.

        Raises: InvalidFile when it cannot be read.
        """
        return _names(self, _open(self))

    def table_rows(self, columns: Collection[str] | None, skip: Skip) -> Iterator[Row]:
        """Yield every row, with these columns (those that the table has) or with all.

        Raises: InvalidFile, also while reading, when the file is damaged or expands beyond its allowance.
        """
        table = _open(self)
        names = _names(self, table)
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidFile(f"{self.name} has two columns {twice!r:.40}; rename one")
        wanted = None if columns is None else [name for name in names if name in columns]
        allowance = Allowance(self)
        number = 0
        for group in range(table.num_row_groups):
            num_rows = table.metadata.row_group(group).num_rows
            if num_rows <= skip.left:
                skip.left -= num_rows
                number += num_rows
                continue
            for encoded in _batches(self, table, group, wanted):
                batch = _without_dictionaries(self, encoded)
                allowance.take(batch.nbytes)
                padded = [field.name for field in batch.schema if _struct_depth(field.type) > 1]
                for row_columns, num_bytes in _rows(batch):
                    number += 1
                    if skip.left:
                        skip.left -= 1
                    else:
                        yield _row(self, number, row_columns, num_bytes, padded)


def _names(file: DataFile, table: Any) -> list[str]:
    return _arrow(file, lambda: [str(name) for name in table.schema_arrow.names])


def _row(file: DataFile, number: int, columns: dict[str, Any] | str, num_bytes: int, padded: Sequence[str]) -> Row:
    if isinstance(columns, str):
        return Row.refused(file.name, number, columns, unit="row")
    for name in padded:
        columns[name] = _without_nulls(columns[name])
    return Row(file=file.name, number=number, columns=columns, num_bytes=num_bytes, unit="row")


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
    return _arrow(file, lambda: ParquetFile(file.path, buffer_size=_BUFFER_BYTES, pre_buffer=False))


def _batches(file: DataFile, table: Any, group: int, columns: list[str] | None) -> Iterator[Any]:
    described = table.metadata.row_group(group)
    row_bytes = max(1, described.total_byte_size // max(1, described.num_rows))
    batch_rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // row_bytes))
    batches: Iterator[Any] = _arrow(
        file,
        lambda: table.iter_batches(batch_size=batch_rows, row_groups=[group], columns=columns, use_threads=False),
    )
    while (batch := _arrow(file, lambda: next(batches, None))) is not None:
        yield batch


def _without_dictionaries(file: DataFile, batch: Any) -> Any:
    """Spell out columns of categories, so that the size of the batch is that of its values."""
    from pyarrow import types

    for index, column in enumerate(batch.schema):
        if types.is_dictionary(column.type):
            spelled_out = _arrow(file, batch.column(index).dictionary_decode)
            batch = batch.set_column(index, column.name, spelled_out)
        elif _holds_dictionary(column.type):
            raise InvalidFile(
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
            pass  # one of them has no Python value; reading them one by one finds it
        else:
            size = batch.nbytes // max(1, len(rows))
            for row in rows:
                yield row, size
            return
    for index in range(batch.num_rows):
        yield _single_row(batch.slice(index, 1))


def _single_row(row: Any) -> tuple[dict[str, Any] | str, int]:
    if row.nbytes > MAX_ROW_BYTES:
        return TOO_LONG, row.nbytes
    try:
        return row.to_pylist()[0], row.nbytes
    except UnicodeDecodeError:
        return "holds a string that is not UTF-8", row.nbytes
    except (ValueError, OverflowError) as error:
        return f"holds a value that cannot be read: {error}", row.nbytes


def _arrow(file: DataFile, call: Callable[[], ResultT]) -> ResultT:
    """Call Arrow; its errors are about the file."""
    import pyarrow

    try:
        return call()
    except MemoryError as error:
        raise InvalidFile(
            f"{file.name} holds rows that need more memory than there is ({error}); write smaller ones"
        ) from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InvalidFile(f"{file.name} cannot be read as Parquet: {error!s:.300}; write it again") from error
