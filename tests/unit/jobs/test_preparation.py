"""The preparation as jobs run it, with its real child: cancelled ones and deleted datasets leave nothing on the
disk."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
from pathlib import Path

import pytest

from horizon_server.blobs.space import Space
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import remove_prepared
from horizon_server.demo.recipe import write_demo_model
from horizon_server.errors import DiskFull, InvalidData, Stalled
from horizon_server.events import Message, PrepareProgress
from horizon_server.jobs import preparation
from horizon_server.jobs.preparation import DatasetFiles, Preparation, PreparedData
from horizon_server.records.blob import DatasetRecord
from horizon_server.settings import child_environment
from horizon_server.spec import parse_job_spec

CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]}) + "\n"


async def run(preparation: Preparation, data: Path) -> PreparedData | None:
    """Prepare one file, of a dataset with the digest `digest`, for the model next to it."""

    async def publish(event: PrepareProgress | Message) -> None:
        pass

    # A format that is decided, as that of a ready dataset is: else the child looks into the file before it makes its
    # folder.
    found = "text" if data.suffix == ".txt" else "messages"
    record = DatasetRecord(
        dataset_id="d", owner="ada", name="d", format=found, field_map={}, files=(), digest="digest", ready=True
    )
    folder = data.parent
    spec = parse_job_spec({"name": "j", "model": "m", "dataset": "d"})
    return await preparation.run(
        spec,
        folder / "model",
        DatasetFiles(record=record, files=(StoredFile.at(data),)),
        log=folder / "log",
        environment=child_environment(),
        publish=publish,
    )


async def test_a_cancelled_preparation_leaves_nothing(tmp_path: Path) -> None:
    write_demo_model(tmp_path / "model")
    os.mkfifo(tmp_path / "endless.txt")
    preparation = Preparation(tmp_path / "prepared", asyncio.Lock())
    task = asyncio.create_task(run(preparation, tmp_path / "endless.txt"))
    # A pipe opens when both sides are there; by then the child has made its partial folder.
    with await asyncio.to_thread((tmp_path / "endless.txt").open, "wb"):
        assert list((tmp_path / "prepared" / "digest").iterdir()) != []
        preparation.stop()
        assert await task is None
    assert list((tmp_path / "prepared" / "digest").iterdir()) == []


async def test_one_that_is_cancelled_while_its_child_starts_ends_at_once(tmp_path: Path) -> None:
    write_demo_model(tmp_path / "model")
    os.mkfifo(tmp_path / "endless.txt")
    preparation = Preparation(tmp_path / "prepared", asyncio.Lock())
    task = asyncio.create_task(run(preparation, tmp_path / "endless.txt"))
    async with asyncio.timeout(240):
        # The request is written first; then the loop runs on, several times, until the process is there.
        while not (tmp_path / "preparation.json").exists():  # noqa: ASYNC110  # the moment is the point
            await asyncio.sleep(0)
        preparation.stop()
        assert await task is None


async def test_a_preparation_on_a_full_disk_is_refused_before_it_starts(tmp_path: Path) -> None:
    write_demo_model(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(CHAT)
    preparation = Preparation(tmp_path / "prepared", asyncio.Lock(), Space(tmp_path, min_free_bytes=2**60))
    with pytest.raises(DiskFull, match="preparing dataset d needs"):
        await run(preparation, tmp_path / "a.jsonl")
    assert not (tmp_path / "prepared").exists()


async def test_one_that_fills_the_disk_is_ended_and_leaves_nothing(tmp_path: Path) -> None:
    class Filling(Space):
        num_calls = 0

        def require(self, needed_bytes: int, what: str) -> None:
            self.num_calls += 1
            if self.num_calls > 1:
                raise DiskFull("full")

    write_demo_model(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(CHAT)
    with pytest.raises(DiskFull):
        await run(Preparation(tmp_path / "prepared", asyncio.Lock(), Filling(tmp_path)), tmp_path / "a.jsonl")
    assert list((tmp_path / "prepared").glob("*/*.tmp-*")) == []


async def test_a_template_that_takes_too_much_memory_ends_the_preparation(tmp_path: Path) -> None:
    write_demo_model(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ 'x' * 2**32 }}")
    (tmp_path / "a.jsonl").write_text(CHAT)
    with pytest.raises(InvalidData, match="takes more than 4 GiB of memory to render"):
        await asyncio.wait_for(run(Preparation(tmp_path / "prepared", asyncio.Lock()), tmp_path / "a.jsonl"), 300)
    assert list((tmp_path / "prepared" / "digest").iterdir()) == []


async def test_a_preparation_that_reports_nothing_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_demo_model(tmp_path / "model")
    os.mkfifo(tmp_path / "endless.txt")
    monkeypatch.setattr(preparation, "_LIMITS", dataclasses.replace(preparation._LIMITS, silence_s=1.0))
    prepared = Preparation(tmp_path / "prepared", asyncio.Lock())
    with pytest.raises(Stalled, match="the data preparation reported nothing for 1 s"):
        await asyncio.wait_for(run(prepared, tmp_path / "endless.txt"), 240)
    assert list((tmp_path / "prepared").glob("*/*")) == []


async def test_what_was_prepared_from_a_dataset_goes_with_it(tmp_path: Path) -> None:
    write_demo_model(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(CHAT)
    prepared = await run(Preparation(tmp_path / "prepared", asyncio.Lock()), tmp_path / "a.jsonl")
    assert prepared is not None
    assert prepared.folder.parent == tmp_path / "prepared" / "digest"
    other = tmp_path / "prepared" / "other"
    other.mkdir()
    remove_prepared(tmp_path / "prepared", "digest")
    assert list((tmp_path / "prepared").iterdir()) == [other]
    remove_prepared(tmp_path / "prepared", "digest")
