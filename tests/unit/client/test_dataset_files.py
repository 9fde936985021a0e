"""Which files a push takes, and the check of their rows before a byte is sent."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from horizon_client import BadFile
from horizon_client.dataset_files import check_dataset_files, dataset_sources
from horizon_client.errors import InvalidRequest
from horizon_client.progress import Progress, ignore_progress

ROW = '{"text": "a"}\n'


def lay(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(ROW)
    return folder


def paths(*sources: Path) -> list[str]:
    return [file.path for file in dataset_sources(sources)]


def test_a_folder_stands_for_the_data_below_it(tmp_path: Path) -> None:
    lay(tmp_path, "b.jsonl", "a.txt", "en/part.jsonl.gz", "de/deep/part.parquet", ".git/x.jsonl", "en/.hidden.jsonl")
    assert paths(tmp_path) == ["a.txt", "b.jsonl", "de/deep/part.parquet", "en/part.jsonl.gz"]


def test_what_is_skipped_in_a_folder_is_reported(tmp_path: Path) -> None:
    lay(tmp_path, "a.jsonl", "table.csv", "img/1.png")
    (tmp_path / "circle").symlink_to(tmp_path)
    notices: list[str] = []
    assert [file.path for file in dataset_sources([tmp_path], notices.append)] == ["a.jsonl"]
    assert notices == [f"skipped in {tmp_path} (not data files): circle, table.csv, img/1.png (3 in all)"]
    lay(tmp_path, *(f"more/{i}.csv" for i in range(9)))
    dataset_sources([tmp_path], notices.append)
    assert notices[1].endswith("more/0.csv, more/1.csv, ... (12 in all)")


def test_equal_names_of_two_folders_keep_their_folders(tmp_path: Path) -> None:
    lay(tmp_path, "en/a.jsonl", "de/a.jsonl", "de/b.jsonl")
    assert paths(tmp_path / "en", tmp_path / "de") == ["en/a.jsonl", "de/a.jsonl", "de/b.jsonl"]
    assert paths(tmp_path / "en", tmp_path / "de" / "b.jsonl") == ["a.jsonl", "b.jsonl"]


def test_what_cannot_be_pushed_is_refused_by_name(tmp_path: Path) -> None:
    lay(tmp_path, "en/a.jsonl", "img/1.png")
    for sources, problem in (
        ([], "no file was given"),
        ([tmp_path / "img"], "holds no data file; looked for"),
        ([tmp_path / "nowhere.jsonl"], "cannot read"),
        ([tmp_path / "en", tmp_path / "en" / "a.jsonl"], "was given twice"),
    ):
        with pytest.raises(BadFile, match=problem):
            dataset_sources(sources)


def check(*files: Path, fmt: str = "auto", **field_map: str) -> None:
    asyncio.run(check_dataset_files(dataset_sources(files), ignore_progress, format=fmt, field_map=field_map))


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
