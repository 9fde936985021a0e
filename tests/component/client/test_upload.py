"""Uploads: resumed at the committed offset, deduplicated, refused early when a file is bad."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.unit.client.recorder import Recorder

from horizon_client import BadFile, Client, DiskFull, InvalidRequest, Progress, Unauthenticated
from horizon_client.upload import CHUNK_BYTES, SMALL_BYTES

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

SIZE = 3 * CHUNK_BYTES + 1234


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    """About one and a half MiB of distinct rows."""
    path = tmp_path / "train.jsonl"
    rows: list[str] = []
    size = 0
    while size < SIZE:
        rows.append(json.dumps({"text": f"row {len(rows)} " + "x" * 1000}) + "\n")
        size += len(rows[-1])
    path.write_text("".join(rows))
    return path


def test_second_push_sends_no_data(client: Client, daemon: Daemon, jsonl: Path) -> None:
    first = client.datasets.push([jsonl], name="notes")
    second = client.datasets.push([jsonl], name="notes-again")

    assert first.sent_bytes == jsonl.stat().st_size == daemon.line.sent_bytes
    assert second.sent_bytes == 0
    assert first.dataset.state == second.dataset.state == "READY"
    assert max(daemon.line.chunk_sizes) <= 2**20


@pytest.mark.parametrize("cuts", [[0], [1], [CHUNK_BYTES], [CHUNK_BYTES + 17, 3], [2 * CHUNK_BYTES, CHUNK_BYTES, 5]])
def test_cut_upload_sends_only_the_rest(client: Client, daemon: Daemon, jsonl: Path, cuts: list[int]) -> None:
    daemon.line.cuts["WriteBlob"] = list(cuts)
    notices: list[str] = []

    result = client.datasets.push([jsonl], name="notes", reporter=Recorder(on_notice=notices.append))

    assert daemon.stored(jsonl.read_bytes())
    assert daemon.line.sent_bytes == jsonl.stat().st_size  # not one byte twice
    assert result.dataset.state == "READY"
    assert len(notices) == len(cuts)
    assert "train.jsonl was cut" in notices[0]


def test_an_upload_continues_after_an_interrupted_run(client: Client, daemon: Daemon, jsonl: Path) -> None:
    content = jsonl.read_bytes()
    daemon.upload_start(content, content[:100_000])

    result = client.datasets.push([jsonl], name="notes")

    assert result.sent_bytes == len(content) - 100_000


def test_damaged_leftover_is_replaced_from_the_start(client: Client, daemon: Daemon, jsonl: Path) -> None:
    content = jsonl.read_bytes()
    daemon.upload_start(content, b"?" * 100)

    client.datasets.push([jsonl], name="notes")

    assert daemon.stored(content)


def test_a_refusal_in_the_middle_of_a_stream_keeps_its_reason(client: Client, daemon: Daemon, jsonl: Path) -> None:
    daemon.line.refuse("WriteBlob", "RESOURCE_EXHAUSTED", "the disk is full", reason="DISK_FULL", times=1000)

    with pytest.raises(DiskFull, match="the disk is full") as caught:
        client.datasets.push([jsonl], name="notes")

    assert caught.value.reason == "DISK_FULL"


def test_upload_survives_a_restart_of_the_daemon(client: Client, daemon: Daemon, jsonl: Path) -> None:
    seen: list[Progress] = []

    def restart_once(progress: Progress) -> None:
        if progress.phase == "upload" and not seen:
            seen.append(progress)
            daemon.restart()

    result = client.datasets.push([jsonl], name="notes", reporter=Recorder(restart_once))

    assert seen
    assert result.dataset.state == "READY"


def test_equal_files_are_sent_once(client: Client, daemon: Daemon, tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "same"}\n')

    result = client.datasets.push([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], name="twins")

    assert [f.path for f in result.dataset.files] == ["a.jsonl", "b.jsonl"]
    assert result.sent_bytes == daemon.line.sent_bytes == len('{"text": "same"}\n')


def test_same_names_in_two_folders_keep_their_folders(client: Client, tmp_path: Path) -> None:
    for folder in ("en", "de"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "part.jsonl").write_text(json.dumps({"text": folder}) + "\n")

    result = client.datasets.push([tmp_path / "en" / "part.jsonl", tmp_path / "de" / "part.jsonl"], name="both")

    assert [f.path for f in result.dataset.files] == ["en/part.jsonl", "de/part.jsonl"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', r"bad\.jsonl:2 is not JSON"),
        ("bad.jsonl", b'{"text": "a"}\n\n[1]\n', r"bad\.jsonl:3 is a JSON array; each line must be one JSON object"),
        ("bad.jsonl", b'{"a": "\xff"}\n', r"bad\.jsonl:1 is not UTF-8"),
        ("bad.json", b'[{"text": "a"}]\n{"text": "b"}\n', "a file holds one array, or one object per line"),
        ("bad.txt", b"fine\nfine\n\xff\xfe", r"bad\.txt:3 is not UTF-8"),
        ("bad.jsonl.gz", b"no gzip", "is not gzip-compressed, as its name says"),
        ("empty.jsonl", b"", "is empty"),
    ],
)
def test_bad_data_is_refused_before_a_byte_is_sent(
    client: Client, daemon: Daemon, tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(BadFile, match=expected) as caught:
        client.datasets.push([tmp_path / name], name="bad")

    assert str(tmp_path / name) in caught.value.message
    assert daemon.calls == []


def test_wrong_format_names_the_choices(client: Client, jsonl: Path) -> None:
    with pytest.raises(InvalidRequest, match="prompt-completion") as caught:
        client.datasets.push([jsonl], name="x", format="csv")
    assert caught.value.violations[0].field == "format"


def test_wrong_token_is_not_retried(daemon: Daemon, jsonl: Path) -> None:
    with Client(daemon.address, token="wrong") as client, pytest.raises(Unauthenticated) as caught:
        client.datasets.push([jsonl], name="x")
    assert caught.value.reason == "UNAUTHENTICATED"
    assert daemon.calls == ["CreateDataset"]


def test_file_that_changes_meanwhile_is_refused(client: Client, jsonl: Path) -> None:
    def change(progress: Progress) -> None:
        if progress.phase == "upload" and progress.done_bytes <= CHUNK_BYTES:
            with jsonl.open("a") as file:
                file.write("{}\n")

    with pytest.raises(BadFile, match="was changed while it was being pushed"):
        client.datasets.push([jsonl], name="x", reporter=Recorder(change))


@pytest.fixture
def small_files(tmp_path: Path) -> Path:
    """A folder of 500 files of 21 bytes."""
    folder = tmp_path / "small"
    folder.mkdir()
    for i in range(500):
        (folder / f"{i:03d}.jsonl").write_text(json.dumps({"text": f"row {i:06d}"}) + "\n")
    return folder


def test_many_small_files_take_few_calls(client: Client, daemon: Daemon, small_files: Path, jsonl: Path) -> None:
    seen: list[Progress] = []

    result = client.datasets.push([small_files, jsonl], name="small", reporter=Recorder(seen.append))

    assert result.dataset.state == "READY"
    assert result.sent_bytes == daemon.line.sent_bytes == result.dataset.size_bytes
    assert daemon.calls.count("WriteBlobs") == 1
    assert len(daemon.calls) <= 6  # Create, two questions, the batch, the large one and Finalize
    uploads = [progress for progress in seen if progress.phase == "upload"]
    assert uploads[-1].done_bytes == uploads[-1].total_bytes == result.sent_bytes


def test_batches_hold_what_one_message_may_hold(client: Client, daemon: Daemon, tmp_path: Path) -> None:
    for i in range(130):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps({"text": f"{i:08d} " + "x" * (SMALL_BYTES - 22)}) + "\n")
    assert (tmp_path / "0.jsonl").stat().st_size == SMALL_BYTES

    client.datasets.push(sorted(tmp_path.glob("*.jsonl")), name="medium")

    batches = [request for name, request in daemon.line.requests if name == "WriteBlobs"]
    assert [len(batch.blobs) for batch in batches] == [64, 64, 2]


def test_a_batch_that_was_cut_is_sent_again(client: Client, daemon: Daemon, small_files: Path) -> None:
    daemon.line.cuts["WriteBlobs"] = [0]
    daemon.line.refuse("WriteBlobs", "UNAVAILABLE", "the connection was cut")

    result = client.datasets.push([small_files], name="small")

    assert result.dataset.state == "READY"
    assert daemon.calls.count("WriteBlobs") == 3


def test_small_files_that_are_there_are_not_sent_again(client: Client, daemon: Daemon, small_files: Path) -> None:
    contents = [path.read_bytes() for path in sorted(small_files.iterdir())]
    daemon.upload_start(contents[0], contents[0])
    daemon.upload_start(contents[1], contents[1][:7])

    result = client.datasets.push([small_files], name="small")

    (batch,) = [request for name, request in daemon.line.requests if name == "WriteBlobs"]
    assert len(batch.blobs) == 498
    assert result.sent_bytes == sum(map(len, contents[1:])) - 7


def test_a_small_file_that_changes_meanwhile_is_refused(client: Client, daemon: Daemon, small_files: Path) -> None:
    path = small_files / "007.jsonl"
    status = path.stat()

    def change(progress: Progress) -> None:
        if progress.phase == "hash" and progress.done_bytes == progress.total_bytes:
            path.write_bytes(path.read_bytes().replace(b"row", b"raw"))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    with pytest.raises(BadFile, match=r"007\.jsonl was changed while it was being pushed"):
        client.datasets.push([small_files], name="small", reporter=Recorder(change))
    assert "WriteBlobs" not in daemon.calls
