"""Which files a push takes, each under a name of its own, and the check of their rows before a byte is sent."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.client.recorder import Recorder

from horizon_client import BadFile
from horizon_client.cli.root import horizon
from horizon_client.errors import InvalidRequest
from horizon_client.local_files import check_dataset_files, dataset_sources
from horizon_client.reporter import SILENT, Progress

ROW = '{"text": "a"}\n'


def lay(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(ROW)
    return folder


def paths(*sources: Path) -> list[str]:
    return [file.path for file in dataset_sources(sources)]


def test_a_folder_means_the_data_in_it(tmp_path: Path) -> None:
    lay(tmp_path, "b.jsonl", "a.txt", "en/part.jsonl.gz", "de/deep/part.parquet", ".git/x.jsonl", "en/.hidden.jsonl")
    assert paths(tmp_path) == ["a.txt", "b.jsonl", "de/deep/part.parquet", "en/part.jsonl.gz"]


def test_what_is_skipped_in_a_folder_is_reported(tmp_path: Path) -> None:
    lay(tmp_path, "a.jsonl", "table.csv", "img/1.png")
    (tmp_path / "circle").symlink_to(tmp_path)
    recorder = Recorder()
    assert [file.path for file in dataset_sources([tmp_path], recorder)] == ["a.jsonl"]
    assert recorder.notices == [f"skipped in {tmp_path} (not data files): circle, table.csv, img/1.png (3 in all)"]
    lay(tmp_path, *(f"more/{i}.csv" for i in range(9)))
    dataset_sources([tmp_path], recorder)
    assert recorder.notices[1].endswith("more/0.csv, more/1.csv, ... (12 in all)")


def test_equal_names_of_two_folders_keep_their_folders(tmp_path: Path) -> None:
    lay(tmp_path, "en/a.jsonl", "de/a.jsonl", "de/b.jsonl")
    assert paths(tmp_path / "en", tmp_path / "de") == ["en/a.jsonl", "de/a.jsonl", "de/b.jsonl"]
    assert paths(tmp_path / "en", tmp_path / "de" / "b.jsonl") == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    # In a thread of its own: an open pipe without a writer would wait for ever
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(BadFile, match=rf"data\.jsonl is a {kind}, not a regular file; write its data"),
    ):
        pool.submit(dataset_sources, path).result(timeout=240)


def test_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    bad = os.fsencode(tmp_path) + b"/\xff.jsonl"
    Path(os.fsdecode(bad)).write_text(ROW)
    for source in (tmp_path, Path(os.fsdecode(bad))):
        with pytest.raises(BadFile, match=r"the name of the file .*/\\udcff\.jsonl is not UTF-8; rename it") as caught:
            dataset_sources(source)
        caught.value.message.encode()
    result = CliRunner().invoke(horizon, ["dataset", "push", str(tmp_path), "--name", "x", "--server", "127.0.0.1:1"])
    assert result.exit_code == 2 and "is not UTF-8; rename it" in result.stderr
    Path(os.fsdecode(bad)).rename(tmp_path / os.fsdecode(b"\xff.csv"))
    lay(tmp_path, "a.jsonl")
    recorder = Recorder()
    assert [file.path for file in dataset_sources(tmp_path, recorder)] == ["a.jsonl"]
    recorder.notices[0].encode()


def test_what_cannot_be_pushed_is_refused_by_name(tmp_path: Path) -> None:
    lay(tmp_path, "en/a.jsonl", "img/1.png")
    for sources, problem in (
        ([], "no file was given"),
        ([tmp_path / "img"], "contains no data file; a data file ends in .jsonl"),
        ([tmp_path / "nowhere.jsonl"], "cannot read"),
        ([tmp_path / "en", tmp_path / "en" / "a.jsonl"], "was given twice"),
    ):
        with pytest.raises(BadFile, match=problem):
            dataset_sources(sources)


def test_a_single_path_is_one_source_and_not_its_letters(tmp_path: Path) -> None:
    lay(tmp_path, "a.jsonl")
    for one in (tmp_path / "a.jsonl", str(tmp_path / "a.jsonl"), str(tmp_path)):
        assert [file.source for file in dataset_sources(one)] == [tmp_path / "a.jsonl"]
    with pytest.raises(BadFile, match=r"cannot read nowhere\.jsonl"):
        dataset_sources("nowhere.jsonl")


def test_a_link_that_cannot_be_followed_is_named(tmp_path: Path) -> None:
    lay(tmp_path / "data", "a.jsonl")
    (tmp_path / "data" / "b.jsonl").symlink_to("b.jsonl")  # a circle
    notices = Recorder()
    assert [file.path for file in dataset_sources([tmp_path / "data"], notices)] == ["a.jsonl"]
    assert notices.notices == [f"skipped in {tmp_path / 'data'} (not data files): b.jsonl (1 in all)"]


@pytest.mark.parametrize("closed", ["is_file", "walk"])
def test_what_may_not_be_read_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str) -> None:
    lay(tmp_path, "a.jsonl", "b.jsonl")
    refusal = PermissionError(13, "Permission denied", str(tmp_path / "b.jsonl"))

    def refuse(path: Path) -> bool:
        if path.name == "b.jsonl":
            raise refusal
        return True

    def walk(folder: Path, onerror: Callable[[OSError], None]) -> Iterator[tuple[str, list[str], list[str]]]:
        onerror(refusal)
        yield from ()

    if closed == "walk":
        monkeypatch.setattr("os.walk", walk)  # a test that runs as root can read everything
    else:
        monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(BadFile, match=r"cannot read .*b\.jsonl: Permission denied"):
        dataset_sources([tmp_path])


def test_links_to_files_outside_the_folder_are_not_followed(tmp_path: Path) -> None:
    lay(tmp_path, "secret.jsonl", "data/a.jsonl", "data/deep/b.jsonl")
    (tmp_path / "data" / "leak.jsonl").symlink_to("../secret.jsonl")
    (tmp_path / "data" / "same.jsonl").symlink_to("deep/b.jsonl")
    recorder = Recorder()
    sent = [file.path for file in dataset_sources([tmp_path / "data"], recorder)]
    assert sent == ["a.jsonl", "same.jsonl", "deep/b.jsonl"]
    assert recorder.notices == [f"skipped in {tmp_path / 'data'} (links to files outside it): leak.jsonl (1 in all)"]
    assert [file.path for file in dataset_sources([tmp_path / "data" / "leak.jsonl"])] == ["leak.jsonl"], "when named"


def test_a_folder_of_links_only_says_so(tmp_path: Path) -> None:
    lay(tmp_path, "blob.jsonl", "snapshot/x.csv")
    (tmp_path / "snapshot" / "a.jsonl").symlink_to("../blob.jsonl")
    with pytest.raises(BadFile, match="to push the files that its links lead to, name them one by one"):
        dataset_sources(tmp_path / "snapshot")


def check(*files: Path, fmt: str = "auto", **field_map: str) -> None:
    asyncio.run(check_dataset_files(dataset_sources(files), SILENT.progress, format=fmt, field_map=field_map))


def test_the_rows_are_judged_as_the_server_judges_them(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a"}, {"prompt": "a", "completion": " "}]
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.raises(BadFile, match=r"bad\.jsonl:2: completion is missing \(the row has prompt\); add it") as caught:
        check(path)
    assert caught.value.message.endswith("(the first of 2 problems)")
    assert [(v.field, v.description) for v in caught.value.violations][1] == (
        f"{path}:3:completion",
        f"{path}:3: completion is empty; there is nothing to learn in this row",
    )


def test_a_mapped_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    path = tmp_path / "qa.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n')
    with pytest.raises(
        BadFile,
        match=r"qa\.jsonl:1: there is no column 'quest' for --map prompt=quest; the columns are answer, question$",
    ):
        check(path, prompt="quest", completion="answer")
    check(path, prompt="question", completion="answer")


def test_a_wrong_map_is_no_fault_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n')
    with pytest.raises(InvalidRequest, match=r"field_map\.question is not a field of format text") as caught:
        check(path, fmt="text", question="text")
    assert not isinstance(caught.value, BadFile)
    assert [violation.field for violation in caught.value.violations] == ["field_map.question"]


def test_files_of_two_formats_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    (tmp_path / "c.txt").write_text("a text\n")
    with pytest.raises(BadFile, match=r"must have one format, but .*a\.jsonl is text, .*b\.jsonl is prompt-completion"):
        check(tmp_path / "a.jsonl", tmp_path / "b.jsonl")
    check(tmp_path / "a.jsonl", tmp_path / "c.txt")


def test_what_only_the_server_reads_is_let_through(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing more")
    (tmp_path / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd and nothing more")
    check(tmp_path / "a.parquet", tmp_path / "a.jsonl.zst", fmt="messages")
    (tmp_path / "a.parquet").write_bytes(b"no table")
    with pytest.raises(BadFile, match=r"a\.parquet is not a Parquet file, as its name says"):
        check(tmp_path / "a.parquet")


def test_the_check_is_interruptible_and_reports_its_progress(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "' + "x" * 10_000 + '"}\n')
    path.write_bytes(path.read_bytes() * 2000)
    seen: list[Progress] = []
    asyncio.run(check_dataset_files(dataset_sources([path]), seen.append))
    assert len(seen) > 3
    assert [progress.done_bytes for progress in seen] == sorted(progress.done_bytes for progress in seen)
    assert seen[-1].done_bytes == seen[-1].total_bytes == path.stat().st_size
