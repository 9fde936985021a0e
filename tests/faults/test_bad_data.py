"""Data that cannot be trained on: every problem with its place, on the laptop where that is cheap, else on the node."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import grpc
import pyarrow
import pyarrow.parquet as pq
import pytest
from tests.faults.raw_calls import RawCalls
from tests.support.node import Node, Shell

GOOD = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}\n'


def raw_refusal(node: Node, name: str, path: str, content: bytes) -> str:
    """Push past the client's checks, and return the sentence of the refusal."""
    calls = RawCalls(node.daemon.endpoints["grpc"], node.token)
    try:
        dataset_id = calls.create_dataset(name, path, content)
        calls.write(content)
        with pytest.raises(grpc.RpcError) as caught:
            calls.finalize_dataset(dataset_id)
    finally:
        calls.close()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


def test_a_text_that_is_not_utf8_names_line_and_offset(node: Node, shell: Shell) -> None:
    content = "first\nsecond \u00e9".encode() + b"\xff\n"
    (shell.home / "notes.txt").write_bytes(content)
    sentence = shell.fails(2, "dataset", "push", "notes.txt", "--name", "latin")
    assert "notes.txt:2 is not UTF-8: byte 0xff at byte offset 15 of the file" in sentence
    refusal = raw_refusal(node, "latin", "notes.txt", content)
    assert "notes.txt:2 is not UTF-8: byte 0xff at byte offset 15 of the file; save the file as UTF-8" in refusal


def test_bad_lines_come_with_number_field_and_total(node: Node, shell: Shell) -> None:
    lines = [
        GOOD,
        '{"messages": [{"role": "wizard", "content": "hi"}]}\n',
        GOOD,
        '{"messages": [3]}\n',
        '{"messages": [{"role": "user", "content": "hi"}]}\n',
    ]
    (shell.home / "rows.jsonl").write_text("".join(lines))
    sentence = shell.fails(2, "dataset", "push", "rows.jsonl", "--name", "rows")
    assert "of 3 problems" in sentence or "of 4 problems" in sentence
    assert "rows.jsonl:2: messages[0].role" in sentence
    assert "rows.jsonl:4: messages[0]" in sentence
    assert "rows.jsonl:5: messages" in sentence
    assert "'rows' does not exist" in shell.fails(4, "dataset", "get", "rows"), "nothing was sent"
    # A client that does not check is refused by the server, in the same words; the dataset cannot be used.
    assert "rows.jsonl:2: messages[0].role is 'wizard'" in raw_refusal(
        node, "rows", "rows.jsonl", "".join(lines).encode()
    )
    (shell.home / "job.yaml").write_text("name: job\nmodel: demo-model\ndataset: rows\n")
    assert "dataset rows is not ready" in shell.fails(4, "job", "submit", "job.yaml")


def test_lines_that_are_not_json_are_refused_before_the_upload(node: Node, shell: Shell) -> None:
    content = f"{GOOD}not json\n{GOOD}[1]\n"
    (shell.home / "rows.jsonl").write_text(content)
    sentence = shell.fails(2, "dataset", "push", "rows.jsonl", "--name", "broken")
    assert "rows.jsonl:2 is not JSON" in sentence
    assert "(the first of 2 problems)" in sentence
    assert "rows.jsonl:4 is a JSON array; each line must be one JSON object" in sentence
    refusal = raw_refusal(node, "broken", "rows.jsonl", content.encode())
    assert "rows.jsonl:2 is not JSON" in refusal
    assert "2 problems" in refusal


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.jsonl", b"", "empty.jsonl is empty"),
        ("blank.jsonl", b"\n\n", "holds no rows"),
        ("columns.jsonl", b'{"a": 1}\n', "columns.jsonl:1"),
        ("rows.parquet", b"PAR1 and more", "cannot be read as Parquet"),
    ],
)
def test_files_without_rows(shell: Shell, name: str, content: bytes, words: str) -> None:
    (shell.home / name).write_bytes(content)
    assert words in shell.fails(2, "dataset", "push", name, "--name", "none")


def test_a_bomb_and_a_table_that_eats_memory_leave_the_daemon_well(shell: Shell) -> None:
    bomb = pyarrow.Codec("zstd").compress(b" " * 2**28, asbytes=True)
    (shell.home / "rows.jsonl.zst").write_bytes(bomb)
    assert "expands to more than" in shell.fails(2, "dataset", "push", "rows.jsonl.zst", "--name", "bomb")
    once = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 3_000_000, pyarrow.int32()), ["x" * 2**20])
    lists = pyarrow.ListArray.from_arrays([0, len(once)], once)
    pq.write_table(pyarrow.table({"input_ids": lists}), shell.home / "rows.parquet", store_schema=False)
    assert "more memory than there is" in shell.fails(2, "dataset", "push", "rows.parquet", "--name", "table")
    assert "rows.parquet" in shell.works("dataset", "get", "table")


def test_packed_rows_are_named_by_their_number_inside(shell: Shell) -> None:
    rows = [{"instruction": "a", "output": "b"}, {"instruction": "a", "output": " "}]
    pq.write_table(pyarrow.Table.from_pylist(rows), shell.home / "rows.parquet")
    sentence = shell.fails(2, "dataset", "push", "rows.parquet", "--name", "packed")
    assert (
        "rows.parquet:row 2: output is empty; there is nothing to learn in this row (the only problem found)"
        in sentence
    )
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (shell.home / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert "rows.jsonl.gz:2: output is empty" in shell.fails(2, "dataset", "push", "rows.jsonl.gz", "--name", "packed")
    pq.write_table(pyarrow.Table.from_pylist(rows[:1] * 3), shell.home / "rows.parquet")
    shell.works("dataset", "push", "rows.parquet", "--name", "packed")
    ready = json.loads(shell.works("dataset", "get", "packed", "-o", "json"))
    assert (ready["state"], ready["format"], ready["num_rows"]) == ("READY", "alpaca", 3)


def test_a_row_without_anything_to_learn_is_refused_with_its_line(shell: Shell) -> None:
    untrained = (
        '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes", "weight": 0}]}\n'
    )
    (shell.home / "rows.jsonl").write_text(GOOD + untrained)
    sentence = shell.fails(2, "dataset", "push", "rows.jsonl", "--name", "untrained")
    assert "rows.jsonl:2: messages has nothing to learn: no assistant message with text" in sentence


def test_a_file_that_is_not_there(shell: Shell, tmp_path: Path) -> None:
    assert "nothing.jsonl" in shell.fails(2, "dataset", "push", str(tmp_path / "nothing.jsonl"), "--name", "x")
