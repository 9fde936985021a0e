"""gsm8k and shakespeare as people have them, counted by other means than ours."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path

import pyarrow.json
import pyarrow.parquet
import pytest
from tests.unit.datasets.written_files import checked

from horizon_formats.formats import DatasetFormat
from horizon_formats.rows import read_rows, read_text
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.tokens.rendering import Pair, normalise

DATA = Path(__file__).parents[4] / "shared" / "data"
MAP = {"prompt": "question", "completion": "answer"}


@pytest.fixture
def gsm8k() -> Path:
    return _file("gsm8k_train.jsonl")


@pytest.fixture
def shakespeare() -> Path:
    return _file("shakespeare.txt")


def _file(name: str) -> Path:
    if not (DATA / name).is_file():
        pytest.skip(f"needs {DATA / name}, which is not part of the repository")
    return DATA / name


def test_gsm8k_in_every_container(gsm8k: Path, tmp_path: Path) -> None:
    table = pyarrow.json.read_json(gsm8k)  # another parser than ours
    pyarrow.parquet.write_table(table, tmp_path / "g.parquet")
    (tmp_path / "g.jsonl.gz").write_bytes(gzip.compress(gsm8k.read_bytes()))
    (tmp_path / "g.json").write_bytes(b"[" + b",\n".join(gsm8k.read_bytes().splitlines()) + b"]")
    expected = [Pair(prompt=row["question"], completion=row["answer"]) for row in table.to_pylist()]
    assert len(expected) == int(
        subprocess.run(["wc", "-l", gsm8k], capture_output=True, check=True, timeout=240).stdout.split()[0]
    )
    for path in (gsm8k, tmp_path / "g.parquet", tmp_path / "g.jsonl.gz", tmp_path / "g.json"):
        file = StoredFile.at(path)
        report = checked(file, field_map=MAP)
        assert (report.format, report.num_rows) == (DatasetFormat.PROMPT_COMPLETION, len(expected))
        assert [normalise(row.columns, report.format, MAP) for row in read_rows(file)] == expected


def test_shakespeare(shakespeare: Path) -> None:
    file = StoredFile.at(shakespeare)
    report = checked(file)
    filled = subprocess.run(
        ["grep", "-c", "[^[:space:]]", shakespeare], capture_output=True, check=True, timeout=240
    ).stdout
    assert (report.format, report.num_rows) == (DatasetFormat.TEXT, int(filled))
    assert "".join(piece.text for piece in read_text(file)) == shakespeare.read_bytes().decode()
