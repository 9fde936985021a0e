"""The checking child: the same answers as in this process, and files that would take it down take only the child."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from horizon_formats.checks import DatasetReport, check_files
from horizon_formats.files import MAX_ROW_BYTES
from horizon_formats.formats import DatasetFormat
from horizon_server.datasets.checking import check_dataset
from horizon_server.datasets.reading import StoredFile, server_errors
from horizon_server.errors import HorizonError, InvalidData, InvalidSpec, IoFailed, WorkerDied

GOOD = '{"text": "a"}\n\n{"text": "b"}\n'


async def check(*paths: Path, fmt: str = "auto", **field_map: str) -> DatasetReport:
    files = [StoredFile.at(path) for path in paths]
    return await check_dataset(files, name="notes", dataset_format=DatasetFormat(fmt), field_map=field_map)


def put(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


async def test_the_report_of_files_that_agree(tmp_path: Path) -> None:
    found = await check(put(tmp_path / "a.jsonl", GOOD), put(tmp_path / "b.txt", "one\ntwo\n"))
    assert found == DatasetReport(format=DatasetFormat.TEXT, num_rows=4, num_blank_lines=1)


@pytest.mark.parametrize(
    ("contents", "fmt", "field_map"),
    [
        ({"a.jsonl": '{"text": 1}\n' * 150}, "auto", {}),
        ({"a.jsonl": GOOD, "b.jsonl": '{"text": 3}\n[1]\n'}, "auto", {}),
        ({"a.jsonl": GOOD, "b.jsonl": '{"prompt": "a", "completion": "b"}\n'}, "auto", {}),
        ({"a.parquet": "PAR1"}, "text", {}),
        ({"a.jsonl": GOOD}, "text", {"question": "x"}),
        ({"a.jsonl": '{"\\ud800": 1}\n'}, "auto", {}),
    ],
)
async def test_a_refusal_arrives_as_it_was_raised(
    tmp_path: Path, contents: dict[str, str], fmt: str, field_map: dict[str, str]
) -> None:
    paths = [put(tmp_path / name, content) for name, content in contents.items()]
    files = [StoredFile.at(path) for path in paths]
    with pytest.raises(HorizonError) as expected, server_errors():
        check_files(files, name="notes", dataset_format=DatasetFormat(fmt), field_map=field_map)
    with pytest.raises(HorizonError) as caught:
        await check(*paths, fmt=fmt, **field_map)
    assert type(caught.value) is type(expected.value)
    assert type(caught.value) in (InvalidData, InvalidSpec)
    assert (caught.value.message, caught.value.violations) == (expected.value.message, expected.value.violations)


async def test_a_table_that_asks_for_all_memory_is_refused(tmp_path: Path) -> None:
    # One row whose list names the same large value again and again: kilobytes in the file, terabytes in memory.
    value = "x" * 2**20
    indices = pa.array([0] * 3_000_000, pa.int32())
    texts = pa.DictionaryArray.from_arrays(indices, pa.array([value]))
    lists = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
    sink = io.BytesIO()
    pq.write_table(pa.table({"input_ids": lists}), sink, store_schema=False)
    assert len(sink.getvalue()) < 2**20
    with pytest.raises(InvalidData, match=r"a\.parquet holds rows that need more memory than there is"):
        await check(put(tmp_path / "a.parquet", sink.getvalue()))


async def test_the_row_that_takes_most_memory_is_read(tmp_path: Path) -> None:
    row = b'{"text": "a", "x": [' + b",".join([b'{"":0}'] * (2 * 2**20)) + b"]}\n"
    assert 14 * 2**20 < len(row) < MAX_ROW_BYTES
    assert (await check(put(tmp_path / "a.jsonl", row * 2))).num_rows == 2


def checkers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "horizon_server.datasets.checking" in child.cmdline()]


async def test_a_check_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    task = asyncio.create_task(check(tmp_path / "a.jsonl"))
    # A pipe opens when both sides are there: the child has begun to read, and gets nothing.
    with await asyncio.to_thread((tmp_path / "a.jsonl").open, "wb"):
        [checker] = checkers()
        assert Path(f"/proc/{checker.pid}/oom_score_adj").read_text() == "1000\n"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert checkers() == []


async def test_a_check_that_is_killed_says_so(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    task = asyncio.create_task(check(tmp_path / "a.jsonl"))
    with await asyncio.to_thread((tmp_path / "a.jsonl").open, "wb"):
        checkers()[0].kill()
        with pytest.raises(WorkerDied, match="the check of notes was killed by SIGKILL") as caught:
            await task
    assert (caught.value.status.grpc, caught.value.retry_after_s) == ("UNAVAILABLE", 1.0), "clients may repeat it"


async def test_a_file_that_is_gone_is_no_fault_of_the_data(tmp_path: Path) -> None:
    with pytest.raises(
        IoFailed, match=r"the data check could not read or write a file: No such file .* \(gone\.jsonl\)"
    ):
        await check(tmp_path / "gone.jsonl")


def test_the_daemon_loads_no_arrow() -> None:
    code = "import sys, horizon_server.main; print([m for m in sys.modules if m.startswith('pyarrow')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert json.loads(done.stdout.replace("'", '"')) == []
