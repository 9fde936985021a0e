"""The client's look through files, against the server's judgement: it never refuses what the server would take."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from horizon_client.dataset_files import check_dataset_files, dataset_sources
from horizon_client.errors import BadFile
from horizon_client.transfer.reporter import SILENT
from horizon_server.datasets.data_file import DataFile
from horizon_server.datasets.formats import DatasetFormat
from horizon_server.datasets.validation import validate_dataset
from horizon_server.errors import HorizonError

TURN = {"role": "assistant", "content": "yes"}
SAID = {"from": "gpt", "value": "yes"}
GOOD_ROWS: list[tuple[str, dict[str, Any], dict[str, str]]] = [
    ("messages", {"messages": [TURN], "tools": []}, {}),
    ("messages", {"chat": [TURN]}, {"messages": "chat"}),
    ("prompt-completion", {"prompt": "", "completion": "x", "id": 1}, {}),
    ("prompt-completion", {"q": "a", "completion": "x"}, {"prompt": "q"}),
    ("alpaca", {"instruction": "x", "output": "y", "input": None}, {}),
    ("sharegpt", {"conversations": [SAID], "system": "s"}, {}),
    ("text", {"text": "\u00e9\U0001f600\u2028"}, {}),
    ("text", {"text": "x", "body": "y"}, {"text": "body"}),
    ("tokens", {"input_ids": [1, 2], "labels": [1, 2]}, {}),
]
odd_values: st.SearchStrategy[Any] = st.sampled_from(
    [None, "", " ", "x", 0, 1.5, True, [], ["x"], {}, [TURN], [SAID], [1, 2], float("nan")]
)
keys = st.sampled_from(["messages", "prompt", "completion", "text", "input_ids", "labels", "conversations", "other"])
names = st.sampled_from(["d.jsonl", "d.json", "d.ndjson", "d", "d.txt", "d.md", "d.jsonl.gz", "d.gz", "d.zst", "d.csv"])
packings = st.sampled_from(["as named", "plain", "gzip", "zstd"])


def server_takes(paths: list[Path], fmt: str, field_map: dict[str, str]) -> bool:
    files = [DataFile.at(path) for path in paths]
    try:
        validate_dataset(files, name="d", dataset_format=DatasetFormat(fmt), field_map=field_map)
    except HorizonError:
        return False
    return True


def client_check(paths: list[Path], fmt: str, field_map: dict[str, str]) -> None:
    sources = dataset_sources([str(path) for path in paths])
    asyncio.run(check_dataset_files(sources, SILENT.progress, format=fmt, field_map=field_map))


def packed(content: bytes, name: str, packing: str) -> bytes:
    if packing == "as named":
        packing = {".gz": "gzip", ".zst": "zstd"}.get(Path(name).suffix, "plain")
    if packing == "gzip":
        return gzip.compress(content)
    return bytes(pyarrow.Codec("zstd").compress(content, asbytes=True)) if packing == "zstd" else content


@st.composite
def files(draw: st.DrawFn) -> tuple[str, bytes, str, dict[str, str]]:
    """A file that is mostly good, with the format and map to read it by."""
    fmt, good, field_map = draw(st.sampled_from(GOOD_ROWS))
    rows = [good] * draw(st.integers(1, 3))
    if draw(st.integers(0, 3)) == 0:
        odd = dict(good) | draw(st.dictionaries(keys, odd_values, max_size=2))
        odd.pop(draw(st.sampled_from([*good, "none"])), None)
        rows.insert(draw(st.integers(0, len(rows))), odd)
    if draw(st.booleans()):
        text = json.dumps(rows, indent=draw(st.sampled_from([None, 1])))
    else:
        end = draw(st.sampled_from(["\n", "\r\n", "\n\n", " \n"]))
        text = end.join(json.dumps(row, ensure_ascii=draw(st.booleans())) for row in rows) + draw(
            st.sampled_from(["", end])
        )
    noise = draw(
        st.sampled_from([b"", b"", b"", b"\xef\xbb\xbf", b"\n", b"\xff", b"\0", b"{", b"[", b"\x0b\n", b"\x1c"])
    )
    content = noise + text.encode() if draw(st.booleans()) else text.encode() + noise
    name = draw(names)
    asked = draw(st.sampled_from([fmt, fmt, "auto", "text", "messages"]))
    given_map = draw(st.sampled_from([field_map, field_map, {}]))
    return name, packed(content, name, draw(packings)), asked, given_map


@settings(max_examples=300)
@given(files())
def test_what_the_server_takes_the_client_lets_through(
    tmp_path_factory: pytest.TempPathFactory, file: tuple[str, bytes, str, dict[str, str]]
) -> None:
    name, content, fmt, field_map = file
    path = tmp_path_factory.getbasetemp() / name
    path.write_bytes(content)
    taken = server_takes([path], fmt, field_map)
    event(f"the server takes it: {taken}")
    if taken:
        client_check([path], fmt, field_map)


@pytest.mark.parametrize(("fmt", "row", "field_map"), GOOD_ROWS)
@pytest.mark.parametrize("asked", ["auto", "said"])
def test_good_rows_pass_both(
    tmp_path: Path, fmt: str, row: dict[str, Any], field_map: dict[str, str], asked: str
) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(f"{json.dumps(row)}\n")
    used = "auto" if asked == "auto" else fmt
    assert server_takes([path], used, field_map)
    client_check([path], used, field_map)


@pytest.mark.parametrize(
    ("name", "content", "fmt", "words"),
    [
        (
            "d.jsonl",
            b'{"prompt": "a", "completion": "b"}\n{"prompt": "a"}\n',
            "auto",
            "line 2: completion is missing (the row",
        ),
        ("d.jsonl", b'{"question": "a"}\n', "auto", "line 1: the columns (question) fit no known format"),
        ("d.jsonl", b'{"text": "a", "messages": []}\n', "auto", "fit the formats messages and text; say which one"),
        ("d.jsonl", b'{"text": 3}\n', "text", "line 1: text is a number; it must be a string"),
        ("d.jsonl", b'{"text": null}\n', "text", "line 1: text is null; it must be a string"),
        ("d.jsonl", b'{"input_ids": []}\n', "tokens", "input_ids is an empty list; it must be a list with something"),
        ("d.jsonl.gz", gzip.compress(b'{"text": "a"}\n{"text": 1}'), "auto", "line 2: text is a number"),
        (
            "d.json",
            b'[{"text": "a"}, 3, {"texts": "a"}]',
            "auto",
            "row 2: each element of the array must be one JSON object",
        ),
        (
            "d.json.gz",
            gzip.compress(b'[{"text": "a"}, {"texts": "a"}]'),
            "auto",
            "row 2: text is missing (the row has texts)",
        ),
        ("d.jsonl", b" \n", "auto", "holds no rows"),
        ("d.jsonl", b'{"text": "' + b"x" * 2**24 + b'"}\n{"text": "a"}\n', "auto", "line 1: is longer than 16 MiB"),
        ("d.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 999)[:-20], "auto", "is a damaged gzip file"),
        ("d.jsonl.zst", b"not zstd", "auto", "is not a zstd file, as its name says"),
        ("d.parquet", b"not Parquet", "auto", "is not a Parquet file, as its name says"),
        ("d.csv", b"a,b\n", "auto", "is a .csv table, which is not read"),
        ("d.txt", b"one\ntwo\0", "auto", "line 2: holds a NUL at byte offset 7"),
        ("d.txt", b"one", "messages", "is plain text, but format messages needs rows"),
        ("d.gz", gzip.compress(b""), "auto", "is empty; it must hold at least one row"),
    ],
)
def test_what_is_refused_before_a_byte_is_sent(tmp_path: Path, name: str, content: bytes, fmt: str, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(BadFile) as caught:
        client_check([path], fmt, {})
    assert words in caught.value.message
    assert not server_takes([path], fmt, {})


def test_files_of_two_formats_are_refused_by_both(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "c.txt").write_text("a text\n")
    both = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    with pytest.raises(BadFile, match=r"must have one format, but .*a\.jsonl is text, .*b\.jsonl is prompt-completion"):
        client_check(both, "auto", {})
    assert not server_takes(both, "auto", {})
    same = [tmp_path / "a.jsonl", tmp_path / "c.txt"]
    assert server_takes(same, "auto", {})
    client_check(same, "auto", {})


def test_what_only_the_server_reads_is_let_through(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd and nothing more")
    client_check([tmp_path / "a.parquet", tmp_path / "a.jsonl.zst"], "messages", {})
