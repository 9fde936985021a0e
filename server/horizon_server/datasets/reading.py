"""The data files of the server: those that `horizon_formats` reads, and with Arrow also Parquet and zstd.

Imports Arrow only when such a file is read: most datasets are JSON lines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from horizon_formats.files import MAX_ROW_BYTES, TOO_LONG, Allowance, DataFile, Row, Skip
from horizon_formats.problems import InvalidFile, InvalidOption
from horizon_server.errors import InvalidData, InvalidSpec

# A batch is a few rows, as Arrow makes all of it at once. What a crafted file makes it allocate inside one batch is
# bounded by the memory limit of the process that reads it.
_BATCH_BYTES = 4 * 1024 * 1024
_MAX_BATCH_ROWS = 64
_BUFFER_BYTES = 1024 * 1024


@contextmanager
def server_errors() -> Iterator[None]:
    """Raise what `horizon_formats` raises as the server's own errors: InvalidData for files, InvalidSpec for
    options."""
    try:
        yield
    except InvalidFile as error:
        raise InvalidData(error.message, violations=error.violations) from error
    except InvalidOption as error:
        raise InvalidSpec(error.message, violations=error.violations) from error


@dataclass(frozen=True, kw_only=True)
class StoredFile(DataFile):
    """A data file in the blob store, or any other file on the node."""

    def open_zstd(self) -> Any:
        """Return the expanded bytes of a zstd file, as a stream. Arrow's decoder refuses windows above 128 MiB."""
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.OSFile(str(self.path)), "zstd")

    def table_columns(self) -> list[str]:
        """Return the names of a Parquet table's columns. Raises: InvalidFile when it cannot be read."""
        return _open(self)[1]

    def table_rows(self, columns: Collection[str] | None, skip: Skip) -> Iterator[Row]:
        """Yield every row, with these columns (those that the table has) or with all.

        Raises: InvalidFile, also while reading, when the file is damaged or expands beyond its allowance.
        """
        table, names = _open(self)
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
            for batch in _batches(self, table, group, wanted):
                allowance.take(batch.nbytes)
                padded = [field.name for field in batch.schema if _struct_depth(field.type) > 1]
                for row, num_bytes in _rows(batch):
                    number += 1
                    if skip.left:
                        skip.left -= 1
                    elif isinstance(row, str):
                        yield Row.refused(self.name, number, row, unit="row")
                    else:
                        for name in padded:
                            row[name] = _without_nulls(row[name])
                        yield Row(file=self.name, number=number, columns=row, num_bytes=num_bytes, unit="row")


@contextmanager
def _arrow_errors(file: DataFile) -> Iterator[None]:
    """Raise what Arrow raises as errors about the file."""
    import pyarrow

    try:
        yield
    except MemoryError as error:
        raise InvalidFile(
            f"{file.name} holds rows that need more memory than there is ({error}); write smaller ones"
        ) from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        # An OSError with a number is the disk's; Arrow raises its own without one.
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InvalidFile(f"{file.name} cannot be read as Parquet: {error!s:.300}; write it again") from error


def _open(file: DataFile) -> tuple[Any, list[str]]:
    """Return a Parquet table and the names of its columns."""
    from pyarrow.parquet import ParquetFile

    with _arrow_errors(file):
        # Pages are read as they are needed: a whole row group can be gigabytes.
        table = ParquetFile(file.path, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        return table, [str(name) for name in table.schema_arrow.names]


def _batches(file: DataFile, table: Any, group: int, columns: list[str] | None) -> Iterator[Any]:
    """Yield a row group in batches, columns of categories spelled out: the size of a batch is then that of its
    values."""
    from pyarrow import types

    described = table.metadata.row_group(group)
    row_bytes = max(1, described.total_byte_size // max(1, described.num_rows))
    batch_rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // row_bytes))
    with _arrow_errors(file):
        batches = table.iter_batches(batch_size=batch_rows, row_groups=[group], columns=columns, use_threads=False)
    while True:
        with _arrow_errors(file):
            batch = next(batches, None)
            if batch is None:
                return
            for index, column in enumerate(batch.schema):
                if types.is_dictionary(column.type):
                    batch = batch.set_column(index, column.name, batch.column(index).dictionary_decode())
                elif _holds_dictionary(column.type):
                    place = f"inside the lists or structs of column {column.name!r:.40}"
                    raise InvalidFile(f"{file.name} holds categories {place}; write them as plain values")
        yield batch


def _rows(batch: Any) -> Iterator[tuple[dict[str, Any] | str, int]]:
    """Yield for each row its columns, or what is wrong with it, and its size."""
    if batch.nbytes <= MAX_ROW_BYTES:
        try:
            rows = batch.to_pylist()
        except (ValueError, OverflowError):
            pass  # one of them has no Python value; reading them one by one finds it
        else:
            size = batch.nbytes // max(1, len(rows))
            yield from ((row, size) for row in rows)
            return
    for index in range(batch.num_rows):
        row = batch.slice(index, 1)
        try:
            content = TOO_LONG if row.nbytes > MAX_ROW_BYTES else row.to_pylist()[0]
        except UnicodeDecodeError:
            content = "holds a string that is not UTF-8"
        except (ValueError, OverflowError) as error:
            # A date beyond the year 9999, for one.
            content = f"holds a value that cannot be read: {error}"
        yield content, row.nbytes


def _struct_depth(kind: Any) -> int:
    from pyarrow import types

    inner = [_struct_depth(kind.field(i).type) for i in range(kind.num_fields)] if types.is_nested(kind) else []
    return max(inner, default=0) + bool(types.is_struct(kind))


def _holds_dictionary(kind: Any) -> bool:
    from pyarrow import types

    if types.is_dictionary(kind):
        return True
    return types.is_nested(kind) and any(_holds_dictionary(kind.field(i).type) for i in range(kind.num_fields))


def _without_nulls(value: Any) -> Any:
    """Leave out the keys that a struct has only because another row needs them: a table writes null into all of
    them."""
    # One level down that changes nothing, as formats take null for absent. Deeper it would: the arguments of one tool
    # call would show up, as nulls, in those of every other.
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
