"""The dataset formats: the names that users write, the fields each needs, and how `auto` tells them apart."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from horizon_formats.problems import FieldViolation, InvalidFile, InvalidOption, listed


class DatasetFormat(StrEnum):
    """How the rows of a file are written; the values are the names that users write and the wire carries."""

    AUTO = "auto"
    MESSAGES = "messages"
    PROMPT_COMPLETION = "prompt-completion"
    ALPACA = "alpaca"
    SHAREGPT = "sharegpt"
    TEXT = "text"
    TOKENS = "tokens"


@dataclass(frozen=True, kw_only=True)
class _Fields:
    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return self.required + self.optional

    def fit(self, columns: Collection[str], field_map: Mapping[str, str]) -> bool:
        """Whether every required field is there and every mapped one belongs to this format."""
        known = all(field in self.names for field in field_map)
        return known and all(field_map.get(field, field) in columns for field in self.required)


_FIELDS = {
    DatasetFormat.MESSAGES: _Fields(required=("messages",), optional=("tools",)),
    DatasetFormat.PROMPT_COMPLETION: _Fields(required=("prompt", "completion")),
    DatasetFormat.ALPACA: _Fields(required=("instruction", "output"), optional=("input", "system", "history")),
    DatasetFormat.SHAREGPT: _Fields(required=("conversations",), optional=("system", "tools")),
    DatasetFormat.TEXT: _Fields(required=("text",)),
    DatasetFormat.TOKENS: _Fields(required=("input_ids",), optional=("labels", "attention_mask")),
}
_ALL_FIELDS = tuple(dict.fromkeys(name for fields in _FIELDS.values() for name in fields.names))


def parse_format(name: str) -> DatasetFormat:
    """Return the format of that name.

    Raises: InvalidOption for an unknown name.
    """
    try:
        return DatasetFormat(name)
    except ValueError:
        problem = f"format is {name!r}; it must be one of {', '.join(DatasetFormat)}"
        raise InvalidOption(problem, violations=[FieldViolation(field="format", description=problem)]) from None


def check_field_map(dataset_format: DatasetFormat, field_map: Mapping[str, str]) -> None:
    """Refuse a map of fields to columns that names unknown fields, or one column twice.

    Raises: InvalidOption with one violation for each wrong entry.
    """
    known = _ALL_FIELDS if dataset_format is DatasetFormat.AUTO else _FIELDS[dataset_format].names
    violations = []
    columns: dict[str, str] = {}
    for field, column in field_map.items():
        path = f"field_map.{field}"
        if field not in known:
            problem = f"{path} is not a field of format {dataset_format}; its fields are {', '.join(known)}"
        elif not column:
            problem = f"{path} is empty; it must name a column of the file, as in --map {field}=COLUMN"
        elif column in columns:
            problem = (
                f"{path} and field_map.{columns[column]} both name column {column!r}; give each field its own column"
            )
        else:
            columns[column] = field
            continue
        violations.append(FieldViolation(field=path, description=problem))
    if violations:
        raise InvalidOption(violations[0].description, violations=violations)


def detect_format(columns: Collection[str], field_map: Mapping[str, str]) -> DatasetFormat:
    """Return the one format that a row with these columns fits.

    Raises: InvalidFile when a mapped column is missing, and when no format or more than one fits.
    """
    present = listed(columns, none="none")
    for field, column in field_map.items():
        if column not in columns:
            raise InvalidFile(
                f"there is no column {column!r:.40} for --map {field}={column:.40}; the columns are {present}"
            )
    fitting = [name for name, fields in _FIELDS.items() if fields.fit(columns, field_map)]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise InvalidFile(
            f"the columns ({present}) fit the formats {' and '.join(fitting)}; choose one with --format {fitting[0]}"
        )
    needs = "; ".join(f"{name} needs {' and '.join(fields.required)}" for name, fields in _FIELDS.items())
    raise InvalidFile(
        f"the columns ({present}) fit no known format: {needs}; rename columns with --map, as in --map prompt=question"
    )


def require_columns(
    dataset_format: DatasetFormat, columns: Collection[str], field_map: Mapping[str, str], name: str
) -> None:
    """Refuse a table that lacks a column, once for all its rows.

    Raises: InvalidFile.
    """
    for field in _FIELDS[dataset_format].names:
        column = field_map.get(field, field)
        if column not in columns and (field in _FIELDS[dataset_format].required or field in field_map):
            raise InvalidFile(
                f"{name} has no column {column!r:.40} for the field {field} of format {dataset_format}; its columns are "
                f"{listed(columns, none='none')}; name another column with --map"
            )


def columns_of(dataset_format: DatasetFormat, field_map: Mapping[str, str]) -> frozenset[str]:
    """Return the columns that rows of this format are made of, under the names that the file gives them."""
    return frozenset(field_map.get(field, field) for field in _FIELDS[dataset_format].names)
