"""The same rows in every container, and containers that are damaged or mislabelled."""

from __future__ import annotations

import gzip
import io
import json
import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.unit.datasets.written_files import CONTAINERS, ROWS, inspect, lines, parquet, put, zstd_frame

from horizon_formats.files import Container, container_of
from horizon_formats.formats import DatasetFormat
from horizon_formats.rows import read_rows, read_text
from horizon_server.errors import InvalidData


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    file = put(tmp_path, name, CONTAINERS[name]())
    report = inspect(file)
    assert (report.format, report.num_rows, report.num_violations) == (DatasetFormat.PROMPT_COMPLETION, 500, 0)
    assert [dict(row.columns) for row in read_rows(file)] == ROWS
    assert [row.number for row in read_rows(file)] == list(range(1, 501))


def test_text_in_gzip_and_zstd(tmp_path: Path) -> None:
    text = "one\r\ntwo \u00e9\n" * 1000
    for name, content in {"t.txt.gz": gzip.compress(text.encode()), "t.txt.zst": zstd_frame(text.encode())}.items():
        file = put(tmp_path, name, content)
        assert "".join(piece.text for piece in read_text(file)) == text
        report = inspect(file)
        assert (report.format, report.num_rows, report.num_violations) == (DatasetFormat.TEXT, 2000, 0)


def test_nested_columns_of_a_table_are_messages(tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": str(n), "weight": n % 2}]}
        for n in range(3000)
    ]
    file = put(tmp_path, "chats.parquet", parquet(chats))
    report = inspect(file)
    assert (report.format, report.num_rows, report.num_violations) == (DatasetFormat.MESSAGES, 3000, 1500)
    assert report.violations[0].field == "chats.parquet:row 1:messages"
    assert "has nothing to learn" in report.violations[0].description
    assert report.violations[1].field == "chats.parquet:row 3:messages"


def test_weights_of_a_table_may_be_fractions_and_no_nan(tmp_path: Path) -> None:
    chats = [
        {
            "messages": [
                {"role": "user", "content": "hi", "weight": None},
                {"role": "assistant", "content": "x", "weight": w},
            ]
        }
        for w in (0.5, 1.0, math.nan, math.inf, 100.0)
    ]
    report = inspect(put(tmp_path, "chats.parquet", parquet(chats)))
    assert [violation.description for violation in report.violations] == [
        f"chats.parquet:row {row}: messages[1].weight is {shown}; it must be 0, or a number from 0.001 to 100"
        for row, shown in ((3, "nan"), (4, "inf"))
    ]


def test_tables_with_other_types_are_refused_row_by_row(tmp_path: Path) -> None:
    table = pa.table({"prompt": pa.array([b"a", b"b"]), "completion": pa.array(["x", None]), "when": pa.array([1, 2])})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    report = inspect(put(tmp_path, "t.parquet", sink.getvalue()))
    assert [violation.description for violation in report.violations] == [
        "t.parquet:row 1: prompt is of type bytes; it must be a string",
        "t.parquet:row 2: prompt is of type bytes; it must be a string",
        "t.parquet:row 2: completion is missing or null; it must be a string",
    ]
    with pytest.raises(InvalidData, match=r"t\.parquet has no column 'messages' for the field messages of format mess"):
        inspect(put(tmp_path, "t.parquet", sink.getvalue()), "messages")
    with pytest.raises(
        InvalidData,
        match=r"t\.parquet: there is no column 'gone' for --map text=gone; the columns are comp",
    ):
        inspect(put(tmp_path, "t.parquet", sink.getvalue()), text="gone")


def test_a_string_of_a_table_that_is_not_utf8_is_found_in_its_row(tmp_path: Path) -> None:
    good = parquet([{"text": "a" * 9}, {"text": "MARKER-99"}, {"text": "c"}], compression="none", use_dictionary=False)
    file = put(tmp_path, "t.parquet", good.replace(b"MARKER-99", b"MARKER\xff99"))
    report = inspect(file)
    assert [violation.description for violation in report.violations] == [
        "t.parquet:row 2 holds a string that is not UTF-8"
    ]
    assert report.num_rows == 3


def test_only_the_columns_of_the_format_are_read_from_a_table(tmp_path: Path) -> None:
    file = put(tmp_path, "t.parquet", parquet([{"text": "x", "picture": b"\x00" * 100, "q": "y"}]))
    assert [dict(row.columns) for row in read_rows(file, {"text", "gone"})] == [{"text": "x"}]
    assert inspect(file).num_rows == 1


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl.gz", b'{"text": "x"}\n', "a.jsonl.gz is not gzip-compressed, as its name says"),
        ("a.jsonl.zst", gzip.compress(b"x"), "a.jsonl.zst is not zstd-compressed"),
        ("a.jsonl.gz", gzip.compress(lines(ROWS))[:-9], "is damaged: its gzip data cannot be expanded"),
        ("a.jsonl.gz", gzip.compress(lines(ROWS)) + b"trailing", "is damaged: its gzip data"),
        ("a.jsonl.gz", gzip.compress(lines(ROWS))[:-8] + b"\0" * 8, "is damaged: its gzip data"),
        ("a.jsonl.zst", zstd_frame(lines(ROWS))[:-9], "is damaged: its zstd data cannot be expanded"),
        ("a.jsonl.zst", zstd_frame(lines(ROWS)) + b"trailing", "is damaged: its zstd data"),
        ("a.jsonl.gz", gzip.compress(gzip.compress(b"x")), "is compressed twice"),
        ("a.parquet.gz", gzip.compress(parquet(ROWS)), "is a gzip-compressed Parquet file"),
        ("a.parquet", lines(ROWS), "is not a Parquet file, as its name says"),
        ("a.parquet", parquet(ROWS)[:-20], "cannot be read as Parquet"),
        ("a.parquet", b"PAR1 and more", "cannot be read as Parquet"),
        ("a.csv", b"a,b\n1,2\n", "is a .csv table, which is not supported; write it as Parquet or as JSON lines"),
        ("a.zip", b"PK\x03\x04....", "is a zip file; send JSON lines"),
        ("a.json", b"[]", "a.json holds no rows"),
        ("a.jsonl.gz", gzip.compress(b""), "a.jsonl.gz is empty"),
        ("a.parquet", b"", "a.parquet is empty"),
        ("a.parquet", parquet([]), "fit no known format"),
        (
            "a.parquet",
            parquet([{"text": "x"}], store_schema=False).replace(b"text", b"te\xfft"),
            "cannot be read as Parq",
        ),
    ],
    # Never the content: gzip writes the time into it, and processes that run the tests together must find the same
    # names.
    ids=lambda value: "content" if isinstance(value, bytes) else None,
)
def test_damaged_and_mislabelled_files(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    with pytest.raises(InvalidData) as caught:
        inspect(put(tmp_path, name, content))
    assert words in caught.value.message


def test_containers_by_bytes_first_and_by_name_where_bytes_leave_it_open(tmp_path: Path) -> None:
    found = {
        name: container_of(put(tmp_path, name, content))
        for name, content in {
            "blob": b' {"a": 1}',
            "song.txt": b"[Verse 1]",
            "song": b"[Verse 1]",
            "rows.jsonl": b" [",
            "rows.ndjson": b"x",
            "notes.md": b"{}",
            "table": parquet([{"a": 1}]),
        }.items()
    }
    assert found == {
        "blob": Container.JSON_LINES,
        "song.txt": Container.PLAIN_TEXT,
        "song": Container.PLAIN_TEXT,
        "rows.jsonl": Container.JSON_ARRAY,
        "rows.ndjson": Container.JSON_LINES,
        "notes.md": Container.PLAIN_TEXT,
        "table": Container.PARQUET,
    }


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('[{"text": "a"} {"text": "b"}]', [None, "a.json:row 2 must follow a comma, but found '{' (line 1)"]),
        ('[{"text": "a"},\n{"text": }, {"text": "c"}]', [None, "a.json:row 2 is not JSON: Expecting value (line 2)"]),
        ('[{"text": "a"},', [None, "a.json:row 2 is not JSON: Expecting value (line 1)"]),
        ('[{"text": "a"}', [None, "a.json:row 2 must follow a comma, but found the end of the file (line 1)"]),
        ('[{"text": "a', ["a.json:row 1 is not JSON: Unterminated string starting at (line 1)"]),
        ('[{"text": "a"}]\n[]', [None, "a.json:row 2 follows the end of the array (line 2); a file holds one array"]),
        (
            '[12, [{}], {"text": "a"}]',
            ["a.json:row 1 is a JSON number", "a.json:row 2 is a JSON array; each element", None],
        ),
        ('[{"text": "a", "text": "b"}]', ["a.json:row 1 holds the key 'text' twice in one object; only one"]),
        ('[{"text": "a", "n": NaN}, {"text": "b"}]', ["a.json:row 1 holds NaN, which is not JSON", None]),
    ],
)
def test_a_broken_array_is_refused_with_its_row(tmp_path: Path, content: str, expected: list[str | None]) -> None:
    rows = list(read_rows(put(tmp_path, "a.json", content.encode())))
    assert len(rows) == len(expected)
    for row, words in zip(rows, expected, strict=True):
        if words is None:
            assert row.violation is None
        else:
            assert row.violation is not None
            assert row.violation.description.startswith(words)


def test_bytes_of_an_array_that_are_not_utf8_end_it(tmp_path: Path) -> None:
    content = json.dumps(ROWS).encode()[:-1] + b', {"prompt": "caf\xe9"}]'
    rows = list(read_rows(put(tmp_path, "a.json", content)))
    assert len(rows) == 501
    assert rows[-1].violation is not None
    assert (
        f"a.json:row 501 is not UTF-8: byte 0xe9 at byte offset {content.index(0xE9)}" in rows[-1].violation.description
    )


def test_what_json_leaves_open_is_decided(tmp_path: Path) -> None:
    content = b"\n".join(
        [
            b'{"text": "a", "text": "b"}',
            b'{"text": "a", "x": {"k": 1, "k": 1}}',
            b'{"text": "a", "x": NaN}',
            b'{"text": "a", "x": -Infinity}',
            b'{"text": "a\\u0000"}',
            b'{"text": "a\x00"}',
            b'{"text": "\\ud83d"}',
            b'{"text": "\\ud83d\\ude00"}',
            b'{"text": "a", "id": "\\ud83d"}',
            b'\xef\xbb\xbf{"text": "a"}',
            b"   ",
            b'{"text": "a"} {"text": "b"}',
            b'{"text": "a", "n": 1e999}',
            b'{"text": "a", "n": ' + b"9" * 5000 + b"}",
            b"[" * 100_000,
            b'{"text": "a",}',
            b"{'text': 'a'}",
        ]
    )
    report = inspect(put(tmp_path, "a.jsonl", content), "text")
    found = {violation.field: violation.description for violation in report.violations}
    assert report.num_rows == 16
    assert report.num_blank_lines == 1
    expected = {
        "a.jsonl:1": "holds the key 'text' twice",
        "a.jsonl:2": "holds the key 'k' twice",
        "a.jsonl:3": "holds NaN, which is not JSON; write null or a number",
        "a.jsonl:4": "holds -Infinity, which is not JSON",
        "a.jsonl:5:text": "holds a NUL character at character 1",
        "a.jsonl:6": "is not JSON: Invalid control character at",
        "a.jsonl:7:text": "half a surrogate pair at character 0",
        "a.jsonl:10": "begins with a byte order mark, which only the first line may",
        "a.jsonl:12": "is not JSON: Extra data at column 15",
        "a.jsonl:14": "is not readable JSON: Exceeds the limit",
        "a.jsonl:15": "is not readable JSON",
        "a.jsonl:16": "is not JSON",
        "a.jsonl:17": "is not JSON",
    }
    assert list(found) == list(expected)
    for field, words in expected.items():
        assert words in found[field]


def test_every_message_can_be_sent(tmp_path: Path) -> None:
    rows = b'{"\\ud800": 1, "text": 2}\n{"\\udfff\\n": 1}\n'
    report = inspect(put(tmp_path, "a.jsonl", rows), "text")
    chat = inspect(put(tmp_path, "b.jsonl", b'{"messages": [{"role": "\\ud800", "\\ud800": 1}]}'), "messages")
    with pytest.raises(InvalidData) as caught:
        inspect(put(tmp_path, "c.jsonl", b'{"\\ud800": 1}\n'))
    caught.value.message.encode()
    for violation in (*report.violations, *chat.violations):
        f"{violation.field} {violation.description}".encode()
    assert len(report.violations) == 2
    assert len(chat.violations) == 3


def test_a_nul_in_a_text_is_reported_once_a_line(tmp_path: Path) -> None:
    report = inspect(put(tmp_path, "a.txt", b"one\nt\0w\0o\nthree\n"))
    assert [v.description for v in report.violations] == ["a.txt:2 holds a NUL at byte offset 5 of the file; remove it"]
    utf16 = inspect(put(tmp_path, "b.txt", "hello".encode("utf-16")))
    assert "(it looks like UTF-16)" in utf16.violations[0].description
