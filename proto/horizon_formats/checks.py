"""The check of a dataset: every row of every file, with the first hundred problems and their number.

The client runs it before it sends a byte, the server before a job may use the data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from horizon_formats.files import Container, DataFile, Row, container_of
from horizon_formats.formats import (
    FUNCTION_CALL,
    OPENAI,
    SPEAKERS,
    DatasetFormat,
    Spelling,
    check_field_map,
    columns_of,
    detect_format,
    is_call,
    parse_calls,
    require_columns,
    sharegpt_spelling,
    text_of,
)
from horizon_formats.problems import (
    FieldViolation,
    InvalidFile,
    Problem,
    ViolationTally,
    check_learnable,
    check_string,
    listed,
    shown,
    unwritable,
)
from horizon_formats.rows import read_rows, read_text

# The label of a token that is not trained: the one that PyTorch's cross entropy ignores.
UNTRAINED = -100

# Prepared tokens are kept in 4 bytes each.
_MAX_TOKEN_ID = 2**31 - 1
# Progress is reported, and a client may stop, after this much of a file.
_STEP_BYTES = 4 * 2**20

Columns = Mapping[str, Any]
FieldMap = Mapping[str, str]
Check = Callable[[str, object], list[Problem]]


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """What the files of one dataset hold together: not one bad row.

    `num_rows` counts rows, or the non-blank lines of a plain text. `num_blank_lines` are those passed over between rows of JSON lines.
    """

    format: DatasetFormat
    num_rows: int
    num_blank_lines: int


class DatasetCheck:
    """Reads the files of one dataset, one after the other, and judges every row. Memory is bounded by the longest row."""

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
        """Read one file to its end, yielding the number of bytes now and then so that the caller can show progress or stop.

        Raises: InvalidFile where it cannot be read as rows at all (empty, damaged, no format fits), InvalidOption for a wrong map,
        ServerOnly where only the server can read it. Bad rows are counted in `violations`.
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

        Raises: InvalidFile when a row is bad, with the first problem, their number and the first 100 as violations; when the files have
        different formats.
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


def _check_fields(checks: Mapping[str, tuple[Check, bool]], columns: Columns, field_map: FieldMap) -> list[Problem]:
    """Check these fields of a row, each with its check and whether the row must have it."""
    problems: list[Problem] = []
    for field, (check, required) in checks.items():
        column = field_map.get(field, field)
        value = columns.get(column)
        # Null is absent: tables write it where other rows have a value. A column that the map names must be there all the same.
        if value is not None or (required and column in columns):
            problems += check(column, value)
        elif column not in columns and (required or field in field_map):
            problems.append(_missing(column, columns))
    return problems


def _missing(column: str, columns: Columns) -> Problem:
    present = listed(columns, none="no columns")
    return column, f"is missing (the row has {present}); add it or name another column with --map"


def _check_chat_row(columns: Columns, field_map: FieldMap, *, sharegpt: bool) -> list[Problem]:
    field = "conversations" if sharegpt else "messages"
    column = field_map.get(field, field)
    if column not in columns:
        return [_missing(column, columns)]
    problems = _check_messages(column, columns[column], sharegpt=sharegpt)
    if sharegpt:
        problems += _check_fields(_SYSTEM, columns, field_map)
        system = field_map.get("system", "system")
        if not problems and columns.get(system):
            first = columns[column][0]
            if first[sharegpt_spelling(first).speaker] == "system":
                problems.append((system, f"is given, and {column}[0] is a system message too; keep one of them"))
    return problems + _check_fields(_TOOLS, columns, field_map)


def _check_tokens_row(columns: Columns, field_map: FieldMap) -> list[Problem]:
    problems = _check_fields({"input_ids": (_check_ids, True)}, columns, field_map)
    if problems:
        return problems
    ids: list[int] = columns[field_map.get("input_ids", "input_ids")]

    def check_labels(path: str, labels: object) -> list[Problem]:
        if labels == ids:
            return []
        if not isinstance(labels, list) or len(labels) != len(ids):
            size = f"{len(labels)} labels" if isinstance(labels, list) else shown(labels)
            return [(path, f"is {size}; it must be a list as long as input_ids, which has {len(ids)} tokens")]
        for index, (label, token) in enumerate(zip(labels, ids, strict=True)):
            if label != UNTRAINED and (label != token or type(label) is not int):
                # Labels that were shifted already look like data and would train the wrong thing.
                problem = (
                    f"is {shown(label)} where input_ids holds {token}; a label is its own token, or {UNTRAINED} for one that is not "
                    "trained: training shifts labels to the next token itself"
                )
                return [(f"{path}[{index}]", problem)]
        if all(label == UNTRAINED for label in labels[1:]):
            return [(path, f"has nothing to learn: after the first token every label is {UNTRAINED}")]
        return []

    def check_attention(path: str, mask: object) -> list[Problem]:
        if isinstance(mask, list) and len(mask) == len(ids) and all(value == 1 for value in mask):
            return []
        return [(path, "must be 1 for each token: padding is not data; leave padding tokens out")]

    optional = {"labels": (check_labels, False), "attention_mask": (check_attention, False)}
    return _check_fields(optional, columns, field_map)


def _check_ids(path: str, ids: object) -> list[Problem]:
    if not isinstance(ids, list) or not ids:
        return [(path, f"is {shown(ids)}; it must be a non-empty list of token ids")]
    # Long lists are common, and these three run in C; the bad element is searched for only where there is one.
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) > _MAX_TOKEN_ID:
        index = next(i for i, value in enumerate(ids) if type(value) is not int or not 0 <= value <= _MAX_TOKEN_ID)
        return [(f"{path}[{index}]", f"is {shown(ids[index])}; a token id is a whole number from 0 to {_MAX_TOKEN_ID}")]
    if len(ids) == 1:
        return [(path, "holds one token; nothing precedes the first token, so there is nothing to learn in this row")]
    return []


def _check_history(path: str, history: object) -> list[Problem]:
    if not isinstance(history, list):
        return [(path, f"is {shown(history)}; it must be a list of [instruction, output] pairs")]
    problems: list[Problem] = []
    for index, turn in enumerate(history):
        if not isinstance(turn, list) or len(turn) != 2:
            problems.append((f"{path}[{index}]", f"is {shown(turn)}; it must be a pair [instruction, output]"))
            continue
        problems += check_string(f"{path}[{index}][0]", turn[0])
        problems += check_string(f"{path}[{index}][1]", turn[1])
    return problems


def _check_tools(path: str, tools: object) -> list[Problem]:
    """Return what is wrong with the tools a chat may call: a list of JSON objects, or that list as JSON text."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            return [(path, f"is a string that is not JSON ({error}); it must be a list of tool descriptions")]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return [(path, f"is {shown(tools)}; it must be a list of tool descriptions, each a JSON object")]
    problem = unwritable(tools)
    return [(path, problem)] if problem else []


def _check_messages(path: str, messages: object, *, sharegpt: bool) -> list[Problem]:
    """Return everything that is wrong with the messages at `path`; empty when there is something to learn in them."""
    if not isinstance(messages, list) or not messages:
        return [(path, f"is {shown(messages)}; it must be a non-empty list of messages")]
    problems: list[Problem] = []
    learnable = False
    for index, message in enumerate(messages):
        spelling = sharegpt_spelling(message) if sharegpt else OPENAI
        if found := _check_message(message, spelling):
            problems += [(f"{path}[{index}]{key}", problem) for key, problem in found]
        elif not learnable and spelling.roles[message[spelling.speaker]] == "assistant" and message.get("weight") != 0:
            text = text_of(message.get(spelling.text)) or ""
            learnable = bool(message.get("tool_calls")) or bool(text.strip())
    if not problems and not learnable:
        problems.append((path, "has nothing to learn: no assistant message with text and a weight other than 0"))
    return problems


def _check_message(message: object, spelling: Spelling) -> list[Problem]:
    if not isinstance(message, dict):
        return [("", f"is {shown(message)}; it must be an object with {spelling.speaker} and {spelling.text}")]
    speaker, content = message.get(spelling.speaker), message.get(spelling.text)
    problems: list[Problem] = []
    if not isinstance(speaker, str) or speaker not in spelling.roles:
        allowed = ", ".join(spelling.roles)
        problems.append((f".{spelling.speaker}", f"is {shown(speaker)}; it must be one of {allowed}"))
    text = content if type(content) is str else text_of(content)
    # Null is a text only where the message calls tools instead: elsewhere the text was lost.
    if text is not None and (content is not None or message.get("tool_calls")):
        problems += check_string(f".{spelling.text}", text)
    else:
        problems.append((f".{spelling.text}", f"is {shown(content)}; it must be a string or a list of text parts"))
    # Most messages hold a speaker and a text alone; the rest is looked at only where there is some.
    if len(message) > 2 or content is None:
        problems += _check_extras(message, spelling)
    if speaker == FUNCTION_CALL and isinstance(content, str) and parse_calls(content) is None:
        problems.append(
            (f".{spelling.text}", 'is not a tool call; it must be JSON such as {"name": ..., "arguments": ...}')
        )
    return problems


def _check_extras(message: Mapping[str, Any], spelling: Spelling) -> Iterator[Problem]:
    """Yield what is wrong apart from speaker and text. Null is absent: tables write it where other rows have a value."""
    for key, value in message.items():
        if value is None or key == spelling.speaker or key == spelling.text:
            continue
        if key not in spelling.keys:
            held = ", ".join(sorted(spelling.keys))
            yield f".{key:.40}", f"is not understood by this version; a message holds {held}"
        elif key == "weight":
            # True and False are 1 and 0 in Python.
            if isinstance(value, bool) or value not in (0, 1):
                yield ".weight", f"is {shown(value)}; it must be 0 or 1"
        elif key == "tool_calls":
            yield from _check_calls(value, message.get(spelling.speaker))
        else:
            yield from check_string(f".{key}", value)


def _check_calls(calls: object, speaker: object) -> Iterator[Problem]:
    if not isinstance(calls, list):
        yield ".tool_calls", f"is {shown(calls)}; it must be a list of calls"
        return
    if calls and SPEAKERS.get(str(speaker)) != "assistant":
        yield ".tool_calls", "is given, but only an assistant calls tools"
    for index, call in enumerate(calls):
        path = f".tool_calls[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            yield path, 'must be an object such as {"function": {"name": ..., "arguments": ...}}'
        elif problem := unwritable(call):
            yield path, problem
        elif not is_call(function):
            yield f"{path}.function.arguments", "must be a JSON object, or a string that holds one"


_SYSTEM: dict[str, tuple[Check, bool]] = {"system": (check_string, False)}
_TOOLS: dict[str, tuple[Check, bool]] = {"tools": (_check_tools, False)}
# Of a prompt, an instruction or an input nothing is trained, so it may be blank.
_PAIR: dict[str, tuple[Check, bool]] = {"prompt": (check_string, True), "completion": (check_learnable, True)}
_ALPACA: dict[str, tuple[Check, bool]] = {
    "instruction": (check_string, True),
    "output": (check_learnable, True),
    "input": (check_string, False),
    **_SYSTEM,
    "history": (_check_history, False),
}
# A table, as looking up a member of an enum costs as much as checking a short row (Python 3.11).
_CHECKS: dict[DatasetFormat, Callable[[Columns, FieldMap], list[Problem]]] = {
    DatasetFormat.MESSAGES: partial(_check_chat_row, sharegpt=False),
    DatasetFormat.SHAREGPT: partial(_check_chat_row, sharegpt=True),
    DatasetFormat.PROMPT_COMPLETION: partial(_check_fields, _PAIR),
    DatasetFormat.ALPACA: partial(_check_fields, _ALPACA),
    DatasetFormat.TEXT: partial(_check_fields, {"text": (check_learnable, True)}),
    DatasetFormat.TOKENS: _check_tokens_row,
}
