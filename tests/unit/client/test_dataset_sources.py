"""Which files a push takes: those named, those below folders, each under a name of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from horizon_client import BadFile
from horizon_client.dataset_files import dataset_sources

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


def test_what_is_left_out_of_a_folder_is_told(tmp_path: Path) -> None:
    lay(tmp_path, "a.jsonl", "table.csv", "img/1.png")
    (tmp_path / "circle").symlink_to(tmp_path)
    told: list[str] = []
    assert [file.path for file in dataset_sources([tmp_path], told.append)] == ["a.jsonl"]
    assert told == [
        f"left out of {tmp_path}, as their names are no data files': circle, table.csv, img/1.png (3 in all)"
    ]
    lay(tmp_path, *(f"more/{i}.csv" for i in range(9)))
    dataset_sources([tmp_path], told.append)
    assert told[1].endswith("more/0.csv, more/1.csv, ... (12 in all)")


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
