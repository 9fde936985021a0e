"""docs/data.md: each example is what the page says it is, for the server, for the client and for --format auto."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from tests.unit.datasets.written_files import checked

from horizon_client.local_files import check_dataset_files, dataset_sources
from horizon_client.reporter import SILENT
from horizon_formats.file_check import read_rows, resolve_format
from horizon_formats.files import MAX_EXPANDED_BYTES, MAX_EXPANSION, MAX_ROW_BYTES, Container
from horizon_formats.formats import DatasetFormat
from horizon_server.datasets.reading import StoredFile

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text("utf-8")
EXAMPLES = re.findall(r"```json (\S+)\n(.*?)```", PAGE, re.DOTALL)


def test_every_format_has_an_example() -> None:
    assert {name for name, _ in EXAMPLES} == {kind.value for kind in DatasetFormat} - {"auto"}


@pytest.mark.parametrize(("name", "content"), EXAMPLES)
def test_an_example_is_of_its_format(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    report = checked(StoredFile.at(path))
    assert (report.format.value, report.num_rows) == (name, len(content.splitlines()))
    asyncio.run(check_dataset_files(dataset_sources([str(path)]), SILENT.progress))
    array = tmp_path / "rows.json"
    array.write_text(json.dumps([json.loads(line) for line in content.splitlines()]))
    assert resolve_format(StoredFile.at(array), DatasetFormat.AUTO, {}) == (DatasetFormat(name), Container.JSON_ARRAY)
    assert [row.columns for row in read_rows(StoredFile.at(array))] == [
        json.loads(line) for line in content.splitlines()
    ]


def test_the_limits_are_those_of_the_code() -> None:
    row = f"{MAX_ROW_BYTES // 2**20} MiB"
    assert f"| a row | {row}" in PAGE
    expansion = f"{MAX_EXPANSION} times the bytes of the file ({row} are always allowed)"
    assert f"{expansion}, {MAX_EXPANDED_BYTES // 2**30} GiB at most" in PAGE
