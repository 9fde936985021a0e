"""Data files judged before any job may use them: what fits, what is refused, and in which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.datasets.written_files import checked, inspect

from horizon_formats.files import MAX_ROW_BYTES
from horizon_formats.formats import DatasetFormat, check_field_map, parse_format
from horizon_formats.problems import InvalidOption
from horizon_formats.rows import read_text
from horizon_server.datasets.reading import StoredFile
from horizon_server.errors import InvalidData

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}
PAIR = {"prompt": "hi", "completion": "hello"}


def write(folder: Path, *rows: object, name: str = "data.jsonl") -> StoredFile:
    path = folder / name
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return StoredFile.at(path)


def chat(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (CHAT, DatasetFormat.MESSAGES),
        (PAIR, DatasetFormat.PROMPT_COMPLETION),
        ({"text": "a b"}, DatasetFormat.TEXT),
        ({"instruction": "add", "output": "2"}, DatasetFormat.ALPACA),
        ({"conversations": CHAT["messages"]}, DatasetFormat.SHAREGPT),
        ({"input_ids": [1, 2], "attention_mask": [1, 1]}, DatasetFormat.TOKENS),
    ],
)
def test_auto_tells_formats_by_their_columns(tmp_path: Path, row: object, expected: DatasetFormat) -> None:
    file = write(tmp_path, row, "\n", row)
    report = checked(file)
    assert (report.format, report.num_rows, report.num_blank_lines) == (expected, 2, 1)


def test_a_mapping_names_the_users_columns(tmp_path: Path) -> None:
    file = write(tmp_path, {"question": "1+1?", "answer": "2"}, {"question": "2+2?"})
    report = inspect(file, prompt="question", completion="answer")
    assert report.format is DatasetFormat.PROMPT_COMPLETION
    assert [violation.field for violation in report.violations] == ["data.jsonl:2:answer"]
    assert "is missing (the row has question)" in report.violations[0].description


def test_a_file_that_fits_two_formats_or_none_is_refused_naming_them(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match=r"data\.jsonl:1: .*fit the formats messages and prompt-completion; choose"):
        inspect(write(tmp_path, CHAT | PAIR))
    with pytest.raises(InvalidData, match=r"fit no known format: messages needs messages; .*--map prompt=question"):
        inspect(write(tmp_path, {"question": "1+1?"}))
    assert inspect(write(tmp_path, CHAT | PAIR), "messages").num_violations == 0


def test_unknown_format_names_and_mappings_say_what_is_allowed() -> None:
    with pytest.raises(InvalidOption, match="format is 'csv'; it must be one of auto, messages"):
        parse_format("csv")
    with pytest.raises(
        InvalidOption, match=r"field_map\.question is not a field of format prompt-completion"
    ) as caught:
        check_field_map(DatasetFormat.PROMPT_COMPLETION, {"question": "prompt", "prompt": "q", "completion": "q"})
    assert [violation.field for violation in caught.value.violations] == ["field_map.question", "field_map.completion"]


def test_every_bad_field_is_named_with_its_line(tmp_path: Path) -> None:
    user, reply = CHAT["messages"]
    file = write(
        tmp_path,
        CHAT,
        chat(user, {"role": "robot", "content": "x"}),
        chat(user, {"role": "assistant", "content": None}),
        chat(user, reply | {"weight": 200}),
        chat(user, reply | {"weight": 0}),
        chat(),
        chat(user, "hello", reply),
        {"messages": [user, reply | {"train": 1}]},
        {"prompt": "x"},
        "not json\n",
        "[1]\n",
        '{"messages": [{"role": "assistant", "content": "\\ud800"}]}\n',
    )
    report = inspect(file)
    described = {v.field: v.description for v in report.violations}
    assert list(described) == [
        "data.jsonl:2:messages[1].role",
        "data.jsonl:3:messages[1].content",
        "data.jsonl:4:messages[1].weight",
        "data.jsonl:5:messages",
        "data.jsonl:6:messages",
        "data.jsonl:7:messages[1]",
        "data.jsonl:8:messages[1].train",
        "data.jsonl:9:messages",
        "data.jsonl:10",
        "data.jsonl:11",
        "data.jsonl:12:messages[0].content",
    ]
    assert described["data.jsonl:2:messages[1].role"] == (
        "data.jsonl:2: messages[1].role is 'robot'; it must be one of system, user, assistant, tool"
    )
    assert "has nothing to learn" in described["data.jsonl:5:messages"]
    assert "is not JSON: Expecting value at column 1" in described["data.jsonl:10"]
    assert report.num_rows == 12


def test_the_refusal_holds_the_first_problem_and_the_total(tmp_path: Path) -> None:
    file = write(tmp_path, PAIR, *[{"prompt": "x", "completion": index} for index in range(250)])
    with pytest.raises(InvalidData) as caught:
        checked(file)
    assert caught.value.message == ("data.jsonl:2: completion is 0; it must be a string (the first of 250 problems)")
    assert len(caught.value.violations) == 100


def test_empty_and_blank_files_are_refused(tmp_path: Path) -> None:
    for name in ("data.jsonl", "data.txt"):
        with pytest.raises(InvalidData, match=f"{name} is empty"):
            inspect(write(tmp_path, name=name))
        with pytest.raises(InvalidData, match=f"{name} holds no rows"):
            inspect(write(tmp_path, "\n \n", name=name))


def test_plain_text_is_text_and_nothing_else(tmp_path: Path) -> None:
    file = write(tmp_path, "one\n\ntwo\nthree", name="play.txt")
    report = inspect(file)
    assert (report.format, report.num_rows) == (DatasetFormat.TEXT, 3)
    with pytest.raises(InvalidData, match=r"play\.txt is plain text, but format messages needs"):
        inspect(file, "messages")
    blob = tmp_path / "00c0ffee"
    blob.write_bytes(b"{} is how this text begins\n")
    assert inspect(StoredFile.at(blob, name="play.txt")).format is DatasetFormat.TEXT


@pytest.mark.parametrize("name", ["data.jsonl", "data.txt"])
def test_bytes_that_are_not_utf8_are_found_by_line_and_offset(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    first = json.dumps({"text": "one"}).encode() + b"\n"
    path.write_bytes(b"\xef\xbb\xbf" + first + b'{"text": "caf\xe9"}\n' + first)
    report = inspect(StoredFile.at(path))
    assert report.num_violations == 1
    assert report.violations[0].field == f"{name}:2"
    offset = 3 + len(first) + len(b'{"text": "caf')
    assert f"byte 0xe9 at byte offset {offset} of the file" in report.violations[0].description
    assert report.num_rows == 3


def test_a_utf16_file_is_refused_with_the_number_of_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes((json.dumps(PAIR) + "\n").encode("utf-16"))
    with pytest.raises(
        InvalidData, match=r"data\.jsonl:1 is not UTF-8: byte 0xff at byte offset 0 .*first of 2 problems"
    ):
        inspect(StoredFile.at(path))


def test_a_byte_order_mark_is_not_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + json.dumps(PAIR).encode())
    assert inspect(StoredFile.at(tmp_path / "a.jsonl")).num_violations == 0
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfabc")
    assert "".join(piece.text for piece in read_text(StoredFile.at(tmp_path / "a.txt"))) == "abc"


def test_a_line_over_the_limit_is_reported_and_the_next_one_is_read(tmp_path: Path) -> None:
    long_row = json.dumps({"prompt": "x" * (MAX_ROW_BYTES + 3_000_000), "completion": "y"})
    report = inspect(write(tmp_path, PAIR, long_row + "\n", {"prompt": 1, "completion": "y"}))
    assert [violation.field for violation in report.violations] == ["data.jsonl:2", "data.jsonl:3:prompt"]
    assert "is longer than 16 MiB" in report.violations[0].description


def test_text_pieces_never_split_a_character(tmp_path: Path) -> None:
    text = "a" + "\u00e9\u65e5" * 700_000
    (tmp_path / "long.txt").write_text(text, encoding="utf-8")
    pieces = list(read_text(StoredFile.at(tmp_path / "long.txt")))
    assert len(pieces) > 3
    assert "".join(piece.text for piece in pieces) == text
    assert not any(piece.violation for piece in pieces)
    (tmp_path / "cut.txt").write_bytes(b"abc \xe6\x97")
    assert "byte offset 4" in inspect(StoredFile.at(tmp_path / "cut.txt")).violations[0].description
