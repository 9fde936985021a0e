"""Rows that are passed over: the rest is as if all had been read, whatever blank lines, line ends and long lines there
are."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.datasets.written_files import CONTAINERS, put

from horizon_formats.files import MAX_ROW_BYTES, DataFile, Skip
from horizon_formats.rows import read_rows, split_json_lines

pieces = st.sampled_from([b'{"text": "a"}', b"x", b" ", b"\t", b"\r", b"\x0c", b"", b" y", b"z" * 3000])
ends = st.sampled_from([b"\n", b"\r\n", b"\n\n", b"\n \n"])


@given(
    head=st.sampled_from([b"", b"\xef\xbb\xbf", b"\n", b" "]),
    lines=st.lists(st.tuples(pieces, ends), max_size=12),
    tail=pieces,
    repeat=st.sampled_from([1, 1, 700]),
    skipped=st.integers(0, 30) | st.integers(0, 9000),
    packed=st.booleans(),
)
def test_lines_are_the_same_as_without_the_skip(
    tmp_path_factory: pytest.TempPathFactory,
    head: bytes,
    lines: list[tuple[bytes, bytes]],
    tail: bytes,
    repeat: int,
    skipped: int,
    packed: bool,
) -> None:
    content = head + b"".join(piece + end for piece, end in lines) * repeat + tail
    path = tmp_path_factory.getbasetemp() / "skipped.jsonl"
    path.write_bytes(gzip.compress(content, 1) if packed else content)
    file = DataFile.at(path, name="skipped")
    every = list(split_json_lines(file))
    skip = Skip(left=skipped)
    assert list(split_json_lines(file, skip)) == every[skipped:]
    assert skip.left == max(0, skipped - len(every))


def test_a_line_over_the_limit_is_passed_as_one_row(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"x" * (MAX_ROW_BYTES + 2**20) + b'\n{"text": "a"}\n')
    assert [line.number for line in split_json_lines(DataFile.at(path), Skip(left=1))] == [2]


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("skipped", [0, 3, 7, 8, 499, 500, 600])
def test_every_container_passes_over_rows(tmp_path: Path, name: str, skipped: int) -> None:
    file = put(tmp_path, name, CONTAINERS[name]())
    skip = Skip(left=skipped)
    assert [row.number for row in read_rows(file, skip=skip)] == list(range(skipped + 1, 501))
    assert skip.left == max(0, skipped - 500)
