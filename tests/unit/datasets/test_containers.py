"""The same rows in every container, and containers that are damaged, mislabelled or made to hurt."""

from __future__ import annotations

import gzip
import io
import json
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from horizon_server.datasets.containers import Container, container_of
from horizon_server.datasets.data_file import MAX_ROW_BYTES, DataFile
from horizon_server.datasets.expansion import MAX_EXPANSION
from horizon_server.datasets.formats import DatasetFormat
from horizon_server.datasets.rows import read_rows, read_text
from horizon_server.datasets.validation import ValidationReport, inspect_file
from horizon_server.errors import InvalidData

ROWS = [{"prompt": f"{n} + {n}? \u00e9\U0001f600", "completion": str(n + n)} for n in range(500)]


def zstd_frame(content: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(content, asbytes=True))


def lines(rows: list[dict[str, Any]], end: str = "\n") -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + end for row in rows).encode()


def parquet(rows: list[dict[str, Any]], **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue()


def put(folder: Path, name: str, content: bytes) -> DataFile:
    path = folder / name.replace("/", "_")
    path.write_bytes(content)
    return DataFile.at(path)


def inspect(file: DataFile, fmt: str = "auto", **field_map: str) -> ValidationReport:
    return inspect_file(file, dataset_format=DatasetFormat(fmt), field_map=field_map)


CONTAINERS: dict[str, Callable[[], bytes]] = {
    "a.jsonl": lambda: lines(ROWS),
    "crlf.jsonl": lambda: lines(ROWS, "\r\n"),
    "bom.jsonl": lambda: b"\xef\xbb\xbf" + lines(ROWS),
    "array.json": lambda: json.dumps(ROWS).encode(),
    "pretty.json": lambda: b"\xef\xbb\xbf\n" + json.dumps(ROWS, indent=2, ensure_ascii=False).encode(),
    "a.jsonl.gz": lambda: gzip.compress(lines(ROWS)),
    "members.jsonl.gz": lambda: gzip.compress(lines(ROWS[:7])) + gzip.compress(lines(ROWS[7:])),
    "unnamed": lambda: gzip.compress(lines(ROWS)),
    "bom.json.gz": lambda: gzip.compress(b"\xef\xbb\xbf" + json.dumps(ROWS).encode()),
    "a.jsonl.zst": lambda: zstd_frame(lines(ROWS)),
    "frames.jsonl.zst": lambda: zstd_frame(lines(ROWS[:7])) + zstd_frame(lines(ROWS[7:])),
    "array.json.zst": lambda: zstd_frame(json.dumps(ROWS).encode()),
    "a.parquet": lambda: parquet(ROWS),
    "groups.parquet": lambda: parquet(ROWS, row_group_size=7, compression="zstd"),
}


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
    assert report.violations[0].field == "row[1].messages"
    assert "has nothing to learn" in report.violations[0].description
    assert report.violations[1].field == "row[3].messages"


def test_tables_with_other_types_are_refused_row_by_row(tmp_path: Path) -> None:
    table = pa.table({"prompt": pa.array([b"a", b"b"]), "completion": pa.array(["x", None]), "when": pa.array([1, 2])})
    sink = io.BytesIO()
    pq.write_table(table, sink)
    report = inspect(put(tmp_path, "t.parquet", sink.getvalue()))
    assert [violation.description for violation in report.violations] == [
        "row[1].prompt is of type bytes; it must be a string",
        "row[2].prompt is of type bytes; it must be a string",
        "row[2].completion is missing or null; it must be a string",
    ]
    with pytest.raises(InvalidData, match=r"t\.parquet has no column 'messages' for the field messages of format mess"):
        inspect(put(tmp_path, "t.parquet", sink.getvalue()), "messages")
    with pytest.raises(InvalidData, match=r"t\.parquet: the columns \(completion, prompt, when\) fit no known format"):
        inspect(put(tmp_path, "t.parquet", sink.getvalue()), text="gone")


def test_a_string_of_a_table_that_is_not_utf8_is_found_in_its_row(tmp_path: Path) -> None:
    good = parquet([{"text": "a" * 9}, {"text": "MARKER-99"}, {"text": "c"}], compression="none", use_dictionary=False)
    file = put(tmp_path, "t.parquet", good.replace(b"MARKER-99", b"MARKER\xff99"))
    report = inspect(file)
    assert [violation.description for violation in report.violations] == ["row[2] holds a string that is not UTF-8"]
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
        ("a.csv", b"a,b\n1,2\n", "is a .csv table, which is not read; write it as Parquet or as JSON lines"),
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
        ('[{"text": "a"} {"text": "b"}]', [None, "row[2] must follow a comma, but '{' stands there (line 1)"]),
        ('[{"text": "a"},\n{"text": }, {"text": "c"}]', [None, "row[2] is not JSON: Expecting value (line 2)"]),
        ('[{"text": "a"},', [None, "row[2] is not JSON: Expecting value (line 1)"]),
        ('[{"text": "a"}', [None, "row[2] must follow a comma, but the end of the file stands there (line 1)"]),
        ('[{"text": "a', ["row[1] is not JSON: Unterminated string starting at (line 1)"]),
        ('[{"text": "a"}]\n[]', [None, "row[2] stands behind the end of the array (line 2); a file holds one array"]),
        ('[12, [{}], {"text": "a"}]', ["row[1] is a JSON number", "row[2] is a JSON array; each element", None]),
        ('[{"text": "a", "text": "b"}]', ["row[1] holds the key 'text' twice in one object; only one"]),
        ('[{"text": "a", "n": NaN}, {"text": "b"}]', ["row[1] holds NaN, which is not JSON", None]),
    ],
)
def test_a_broken_array_is_told_with_its_row(tmp_path: Path, content: str, expected: list[str | None]) -> None:
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
    assert f"row[501] is not UTF-8: byte 0xe9 at byte offset {content.index(0xE9)}" in rows[-1].violation.description


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
        "line[1]": "holds the key 'text' twice",
        "line[2]": "holds the key 'k' twice",
        "line[3]": "holds NaN, which is not JSON; write null or a number",
        "line[4]": "holds -Infinity, which is not JSON",
        "line[5].text": "holds a NUL character at character 1",
        "line[6]": "is not JSON: Invalid control character at",
        "line[7].text": "half a surrogate pair at character 0",
        "line[10]": "begins with a byte order mark, which only the first line may",
        "line[12]": "is not JSON: Extra data at column 15",
        "line[14]": "is not JSON that can be read: Exceeds the limit",
        "line[15]": "is not JSON that can be read",
        "line[16]": "is not JSON",
        "line[17]": "is not JSON",
    }
    assert list(found) == list(expected)
    for field, words in expected.items():
        assert words in found[field]


def test_every_sentence_can_be_sent(tmp_path: Path) -> None:
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


def test_a_nul_in_a_text_is_told_once_a_line(tmp_path: Path) -> None:
    report = inspect(put(tmp_path, "a.txt", b"one\nt\0w\0o\nthree\n"))
    assert [v.description for v in report.violations] == [
        "line[2] holds a NUL at byte offset 5 of the file; a text has none, so remove it"
    ]
    utf16 = inspect(put(tmp_path, "b.txt", "hello".encode("utf-16")))
    assert "(it looks like UTF-16)" in utf16.violations[0].description


@pytest.mark.parametrize("compress", [gzip.compress, zstd_frame], ids=["gzip", "zstd"])
@pytest.mark.parametrize("name", ["bomb.jsonl", "bomb.json", "bomb.txt"])
def test_a_bomb_is_refused_before_it_has_grown(tmp_path: Path, compress: Callable[[bytes], bytes], name: str) -> None:
    part = b" " * (64 * 2**20) if name != "bomb.txt" else (b"spam" * 20 + b"\n") * (12 * 2**16)
    member = compress((b"[" if name == "bomb.json" else b"") + part)
    bomb = member + compress(part) * 8
    file = put(tmp_path, f"{name}{'.gz' if compress is gzip.compress else '.zst'}", bomb)
    assert max(MAX_ROW_BYTES, len(bomb) * MAX_EXPANSION) < 9 * 59 * 2**20
    tracemalloc.start()
    began = time.perf_counter()
    try:
        with pytest.raises(InvalidData, match=r"expands to more than \d+ bytes, .* push it uncompressed or in parts"):
            inspect(file, "text")
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 * MAX_ROW_BYTES
    assert time.perf_counter() - began < 60


def test_a_table_that_repeats_one_large_value_is_refused(tmp_path: Path) -> None:
    value = "x" * (1024 * 1024)
    table = pa.table({"text": pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array([value]))})
    sink = io.BytesIO()
    pq.write_table(table.slice(0, 1000), sink)  # a gigabyte of text in a few kilobytes
    assert len(sink.getvalue()) < 2**20
    with pytest.raises(InvalidData, match="expands to more than"):
        inspect(put(tmp_path, "t.parquet", sink.getvalue()))


@pytest.mark.parametrize("name", ["line.jsonl", "line.json", "line.txt"])
def test_one_line_of_a_gigabyte_takes_bounded_memory(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with path.open("wb") as stream:
        stream.write({"line.jsonl": b'{"text": "', "line.json": b'[{"text": "', "line.txt": b"x"}[name])
        stream.truncate(2**30)  # a hole: reads as zeros, takes no disk
    tracemalloc.start()
    report = inspect(DataFile.at(path), "text")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.num_violations == 1
    assert peak < 10 * MAX_ROW_BYTES
    words = {"line.jsonl": "line[1] is longer than 16 MiB", "line.json": "row[1] ", "line.txt": "line[1] holds a NUL"}
    assert report.violations[0].description.startswith(words[name])


def test_an_array_element_over_the_limit_is_one_bad_row_or_ends_the_array(tmp_path: Path) -> None:
    rows = [{"text": "a"}, {"text": "x" * MAX_ROW_BYTES}, {"text": "b"}]
    report = inspect(put(tmp_path, "a.json", json.dumps(rows).encode()))
    assert [v.description for v in report.violations] == ["row[2] is longer than 16 MiB; split the row"]
    assert report.num_rows == 3
    rows[1]["text"] *= 3
    report = inspect(put(tmp_path, "a.json", json.dumps(rows).encode()))
    assert [v.description for v in report.violations] == [
        "row[2] is longer than 16 MiB; split the row; nothing behind it was read"
    ]


def test_a_table_cell_over_the_limit_is_one_bad_row(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(MAX_ROW_BYTES // 2).hex()
    report = inspect(put(tmp_path, "a.parquet", parquet([{"text": "a"}, {"text": noise + "x"}, {"text": "b"}])))
    assert [v.description for v in report.violations] == ["row[2] is longer than 16 MiB; split the row"]
    assert report.num_rows == 3


names = st.sampled_from(["a.jsonl", "a.json", "a.txt", "a", "a.parquet", "a.jsonl.gz", "a.json.zst"])
heads = st.sampled_from(
    [b"", b"[", b"{", b"PAR1", b"\x1f\x8b\x08", b"\x28\xb5\x2f\xfd", b"\xef\xbb\xbf", b'[{"text":"a"},']
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner), max_leaves=5
)


@given(name=names, head=heads, tail=st.binary(max_size=200), fmt=st.sampled_from(["auto", "messages", "tokens"]))
def test_no_bytes_break_the_reader(
    tmp_path_factory: pytest.TempPathFactory, name: str, head: bytes, tail: bytes, fmt: str
) -> None:
    file = put(tmp_path_factory.getbasetemp(), f"fuzz-{name}", head + tail)
    try:
        report = inspect(file, fmt)
    except InvalidData as error:
        assert error.message.isprintable()
    else:
        assert report.num_rows > 0


@given(data=st.data(), name=st.sampled_from(["a.parquet", "a.jsonl.gz", "a.jsonl.zst", "array.json"]))
def test_no_flipped_byte_breaks_the_reader(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str
) -> None:
    content = bytearray(CONTAINERS[name]())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    file = put(tmp_path_factory.getbasetemp(), f"flip-{name}", bytes(content))
    try:
        inspect(file)
    except InvalidData as error:
        assert file.name in error.message


@given(
    rows=st.lists(st.dictionaries(st.text(max_size=8), values, max_size=4), min_size=1, max_size=5),
    indent=st.sampled_from([None, 0, 3]),
    ascii_only=st.booleans(),
)
def test_an_array_is_what_the_library_reads(
    tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], indent: int | None, ascii_only: bool
) -> None:
    text = json.dumps(rows, indent=indent, ensure_ascii=ascii_only)
    file = put(tmp_path_factory.getbasetemp(), "same.json", text.encode("utf-8", "surrogatepass"))
    for row, expected in zip(read_rows(file), rows, strict=False):
        if row.violation is None:
            assert json.dumps(row.columns) == json.dumps(expected)
        else:
            assert any(reason in row.violation.description for reason in ("NaN", "Infinity", "UTF-8"))
