"""Data that a program holds in memory, as a dataset: rows, and tables of pandas, polars, datasets or pyarrow.

None of these libraries is imported: a table is known by its methods. It is written row by row to a temporary file of
JSON lines, which is then pushed as any other file, so memory does not grow with it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date, time
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from horizon_client.errors import BadFile, InvalidRequest
from horizon_client.local_files import valid_name

_ROWS_AT_ONCE = 1000


class Frame(Protocol):
    """A table with named columns: a DataFrame of pandas or polars."""

    @property
    def columns(self) -> Any:
        """The names of the columns."""
        ...

    def __len__(self) -> int: ...


LocalPath: TypeAlias = str | os.PathLike[str]
Rows: TypeAlias = Iterable[Mapping[str, Any]] | Frame
"""Rows in memory: dicts, a `datasets.Dataset`, a DataFrame of pandas or polars, a pyarrow.Table."""
DataLike: TypeAlias = LocalPath | Sequence[LocalPath] | Rows
"""What can be pushed as a dataset: local files and folders, or rows in memory. In a job spec also the name of a pushed
dataset."""


def is_in_memory(value: object) -> bool:
    """Whether `value` holds rows itself, and does not name files or a dataset."""
    if value is None or isinstance(value, str | bytes | os.PathLike):
        return False
    if isinstance(value, Sequence):
        return any(not isinstance(item, str | os.PathLike) for item in value)
    return isinstance(value, Iterable) or hasattr(value, "to_batches")


@contextlib.contextmanager
def as_file(rows: Any, name: str) -> Iterator[Path]:
    """Give the path of a file `name`.jsonl with these rows as JSON lines, until the end of the block.

    Raises:
        InvalidRequest: naming the first row that is not a mapping, or that JSON cannot write.
        BadFile: when there is no room for the file, or there are no rows.
    """
    if isinstance(rows, Mapping):  # such as a DatasetDict, of its splits
        keys = ", ".join(map(str, rows))
        raise InvalidRequest.of(
            "rows", f"the rows are a mapping with the keys {keys:.200}; give one of its parts, or a list of rows"
        )
    with tempfile.TemporaryDirectory(prefix="horizon-") as folder:
        path = Path(folder) / f"{valid_name(Path(name))}.jsonl"
        try:
            with path.open("w", encoding="utf-8") as file:
                number = -1
                for number, row in enumerate(_rows(rows)):
                    file.write(_line(number, row))
                    file.write("\n")
        except OSError as error:
            raise BadFile(
                f"cannot write the rows to {folder}: {error.strerror}; TMPDIR names another folder for it"
            ) from error
        if number < 0:
            raise BadFile("there are no rows to push")
        yield path


def _rows(table: Any) -> Iterator[Any]:
    """Yield the rows of a table, or of what is iterable, as mappings."""
    if hasattr(table, "iter_rows"):  # polars
        yield from table.iter_rows(named=True)
    elif hasattr(table, "to_batches"):  # pyarrow
        for batch in table.to_batches(max_chunksize=_ROWS_AT_ONCE):
            yield from batch.to_pylist()
    elif hasattr(table, "iloc"):  # pandas: a part at a time, as its rows are copies
        for start in range(0, len(table), _ROWS_AT_ONCE):
            yield from table.iloc[start : start + _ROWS_AT_ONCE].to_dict(orient="records")
    else:
        yield from table


def _line(number: int, row: object) -> str:
    if not isinstance(row, Mapping):
        raise InvalidRequest.of(
            f"rows[{number}]",
            f"rows[{number}] is {type(row).__name__}; each row must be a mapping such as "
            '{"prompt": "...", "completion": "..."}, or give files as paths',
        )
    try:
        return json.dumps(_plain(row), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest.of(f"rows[{number}]", f"rows[{number}] cannot be written as JSON: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: what is missing in a table as null, numbers and lists of NumPy as Python's."""
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if type(value).__name__ in ("NAType", "NaTType"):  # pandas' marks of what is missing
        return None
    if isinstance(value, date | time):
        return value.isoformat()
    if hasattr(value, "tolist"):  # a number or an array of NumPy
        return _plain(value.tolist())
    raise TypeError(f"a value is of type {type(value).__name__}; texts, numbers, lists and mappings can be written")
