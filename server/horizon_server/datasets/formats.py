"""The dataset formats: their wire names, the fields each needs, and how `auto` tells them apart.

Owns names and fields. Must not open a file: it judges column names that others have read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from horizon_server.datasets.values import listed
from horizon_server.errors import FieldViolation, InvalidData, InvalidSpec


class DatasetFormat(StrEnum):
    """How the rows of a file are written; the values are the names users type and the wire carries."""

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


_FIELDS = {
    DatasetFormat.MESSAGES: _Fields(required=("messages",), optional=("tools",)),
    DatasetFormat.PROMPT_COMPLETION: _Fields(required=("prompt", "completion")),
    DatasetFormat.ALPACA: _Fields(required=("instruction", "output"), optional=("input", "system", "history")),
    DatasetFormat.SHAREGPT: _Fields(required=("conversations",), optional=("system", "tools")),
    DatasetFormat.TEXT: _Fields(required=("text",)),
    DatasetFormat.TOKENS: _Fields(required=("input_ids",), optional=("labels", "attention_mask")),
}


def parse_format(name: str) -> DatasetFormat:
    """Return the format of that wire name.

    Raises: InvalidSpec for an unknown name.
    """
    try:
        return DatasetFormat(name)
    except ValueError:
        allowed = ", ".join(DatasetFormat)
        sentence = f"format is {name!r}; it must be one of {allowed}"
        raise InvalidSpec.of("format", sentence) from None


def check_field_map(dataset_format: DatasetFormat, field_map: Mapping[str, str]) -> None:
    """Refuse a mapping of fields to the file's columns that names unknown fields, or one column twice.

    Raises: InvalidSpec with one violation for each wrong entry.
    """
    known = _known_fields(dataset_format)
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
        raise InvalidSpec(violations[0].description, violations=violations)


def detect_format(columns: Collection[str], field_map: Mapping[str, str]) -> DatasetFormat:
    """Return the one format that a row with these columns fits.

    Raises: InvalidData when no format or more than one fits.
    """
    fitting = [name for name, fields in _FIELDS.items() if _fits(fields, columns, field_map)]
    if len(fitting) == 1:
        return fitting[0]
    shown = listed(columns, none="none")
    if fitting:
        raise InvalidData(
            f"the columns ({shown}) fit the formats {' and '.join(fitting)}; say which one with --format {fitting[0]}"
        )
    needs = "; ".join(f"{name} needs {' and '.join(fields.required)}" for name, fields in _FIELDS.items())
    raise InvalidData(
        f"the columns ({shown}) fit no known format: {needs}; rename columns with --map, as in --map prompt=question"
    )


def require_columns(
    dataset_format: DatasetFormat, columns: Collection[str], field_map: Mapping[str, str], name: str
) -> None:
    """Refuse a table that lacks a column, once for all its rows.

    Raises: InvalidData.
    """
    for field in _FIELDS[dataset_format].names:
        column = field_map.get(field, field)
        if column not in columns and (field in _FIELDS[dataset_format].required or field in field_map):
            shown = listed(columns, none="none")
            raise InvalidData(
                f"{name} has no column {column!r:.40} for the field {field} of format {dataset_format}; its columns are {shown}; "
                "name another column with --map"
            )


def columns_of(dataset_format: DatasetFormat, field_map: Mapping[str, str]) -> frozenset[str]:
    """Return the columns that rows of this format are made of, under the names that the file gives them."""
    return frozenset(field_map.get(field, field) for field in _FIELDS[dataset_format].names)


def _fits(fields: _Fields, columns: Collection[str], field_map: Mapping[str, str]) -> bool:
    mapped_here = all(field in fields.names for field in field_map)
    return mapped_here and all(field_map.get(field, field) in columns for field in fields.required)


def _known_fields(dataset_format: DatasetFormat) -> tuple[str, ...]:
    if dataset_format is not DatasetFormat.AUTO:
        return _FIELDS[dataset_format].names
    return tuple(dict.fromkeys(name for fields in _FIELDS.values() for name in fields.names))
