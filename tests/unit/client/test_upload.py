"""Uploads: resumed at the committed offset, deduplicated, refused early when a file is bad."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.unit.client.recorder import Recorder

from horizon_client import BadFile, Client, DiskFull, InvalidRequest, Progress, Unauthenticated
from horizon_client.upload import CHUNK_BYTES

if TYPE_CHECKING:
    from tests.unit.client.conftest import Daemon

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
