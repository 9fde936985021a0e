"""Pushed resources in the database: their contents are found by an index."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from horizon_server.db.database import Database
from horizon_server.db.pushed import BlobReferences, DatasetStore, ModelStore
from horizon_server.errors import AlreadyExists
from horizon_server.records.blob import BlobFile, DatasetRecord, ModelRecord


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(tmp_path / "horizon.db")
    yield opened
    await opened.close()


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def files(*names: str) -> tuple[BlobFile, ...]:
    return tuple(BlobFile(path=name, sha256=sha(name), size_bytes=1) for name in names)


def dataset(name: str, *names: str, owner: str = "ada") -> DatasetRecord:
    return DatasetRecord(
        dataset_id=f"dataset_{owner}_{name}",
        owner=owner,
        name=name,
        format="text",
        field_map={"text": "t"},
        files=files(*names),
        digest="d",
        created_s=1.0,
    )


async def test_a_record_comes_back_equal(database: Database) -> None:
    datasets, models = DatasetStore(database), ModelStore(database)
    stored, replaced = await datasets.create(dataset("a", "x", "y"), request_id=str(uuid.uuid4()))
    assert (stored, replaced) == (dataset("a", "x", "y"), None)
    assert await datasets.find("a") == [stored]
    model = ModelRecord(model_id="model_1", owner="ada", name="m", files=files("x"), created_s=2.0)
    await models.create(model, request_id=str(uuid.uuid4()))
    ready = await models.make_ready("model_1", architecture="qwen3", num_parameters=7)
    assert (ready.ready, ready.architecture, ready.num_parameters, ready.files) == (True, "qwen3", 7, files("x"))


async def test_contents_are_referenced_while_something_is_made_of_them(database: Database) -> None:
    datasets, references = DatasetStore(database), BlobReferences(database)
    await datasets.create(dataset("a", "x", "y"), request_id=str(uuid.uuid4()))
    await datasets.create(dataset("b", "y", "z", owner="bob"), request_id=str(uuid.uuid4()))
    every = [sha(name) for name in "xyz"]
    assert await references.of_all() == await references.of_any(every) == frozenset(every)
    assert await references.of_ready("ada", every) == frozenset()
    await datasets.make_ready("dataset_ada_a")
    assert await references.of_ready("ada", every) == {sha("x"), sha("y")}
    assert await references.of_ready("bob", every) == frozenset()
    assert await references.of_any([sha("x"), sha("none")]) == {sha("x")}
    await datasets.delete("dataset_ada_a")
    assert await references.of_any(every) == {sha("y"), sha("z")}


async def test_an_announcement_that_is_replaced_lets_its_contents_go(database: Database) -> None:
    datasets, references = DatasetStore(database), BlobReferences(database)
    first, second = dataset("a", "x"), dataset("a", "y")
    await datasets.create(first, request_id=str(uuid.uuid4()))
    _, replaced = await datasets.create(second, request_id=str(uuid.uuid4()))
    assert replaced == first
    assert await references.of_all() == {sha("y")}
    await datasets.make_ready(second.id)
    with pytest.raises(AlreadyExists, match="exists with other content"):
        await datasets.create(first, request_id=str(uuid.uuid4()))


async def test_references_are_found_among_200_000_without_reading_them_all(database: Database, tmp_path: Path) -> None:
    documents = [
        [{"path": f"{i}-{k}", "sha256": sha(f"{i}-{k}"), "size_bytes": 1} for k in range(4096)] for i in range(50)
    ]
    with sqlite3.connect(tmp_path / "horizon.db") as connection:
        connection.executemany(
            "INSERT INTO datasets VALUES (?, 'ada', ?, 'text', '{}', ?, 1, 1, 'd', 1.0)",
            [(f"dataset_{i}", f"n{i}", json.dumps(document)) for i, document in enumerate(documents)],
        )
        rows = [(file["sha256"], f"dataset_{i}") for i, document in enumerate(documents) for file in document]
        connection.executemany("INSERT INTO blob_references VALUES (?, ?)", rows)
    references = BlobReferences(database)
    started_s = time.process_time()
    for i in range(20):
        assert await references.of_ready("ada", [sha(f"{i}-7")]) == {sha(f"{i}-7")}
        assert await references.of_any([sha(f"{i}-7"), sha("none")]) == {sha(f"{i}-7")}
    assert (time.process_time() - started_s) / 40 < 0.05, "it was 276 ms of JSON for each"
