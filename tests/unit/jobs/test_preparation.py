"""The preparation as jobs run it, with its real child: cancelled ones and deleted datasets leave nothing on the disk."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

from horizon_formats.formats import DatasetFormat
from horizon_server.datasets.reading import StoredFile
from horizon_server.datasets.recipe import (
    PrepareOptions,
    PrepareRequest,
    evaluation_folder,
    is_prepared,
    prepared_folder,
    remove_prepared,
    tokenizer_digest,
)
from horizon_server.demo.recipe import write_demo_model
from horizon_server.events import Message, PrepareProgress
from horizon_server.jobs.preparation import DatasetFiles, Preparation, PreparationCall
from horizon_server.settings import child_environment
from horizon_server.spec import JobSpec

CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]}) + "\n"


class Recipe:
    """Prepares one file for the demo model."""

    def __init__(self, root: Path, model: Path, data: Path) -> None:
        self.options = PrepareOptions(format=DatasetFormat.AUTO)
        self.target = prepared_folder(root, "digest", tokenizer_digest(model), self.options)
        self._request = PrepareRequest(
            dataset_files=(StoredFile.at(data),), model_dir=model, output_dir=self.target, options=self.options
        )

    def __call__(self, spec: JobSpec, dataset: DatasetFiles, model: Path) -> PreparationCall:
        return PreparationCall(
            target=self.target,
            evaluation=evaluation_folder(self.target, self.options),
            is_whole=is_prepared(self.target, self.options),
            request=self._request.to_mapping(),
        )


async def run(preparation: Preparation, folder: Path) -> object:
    async def tell(event: PrepareProgress | Message) -> None:
        pass

    spec: JobSpec = None  # type: ignore[assignment]  # the recipe of this test looks at none of the three
    dataset: DatasetFiles = None  # type: ignore[assignment]
    return await preparation.run(
        spec, dataset, folder, log=folder / "log", environment=child_environment(), publish=tell
    )


async def test_a_cancelled_preparation_leaves_nothing(tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "model")
    os.mkfifo(tmp_path / "endless.txt")
    recipe = Recipe(tmp_path / "prepared", model, tmp_path / "endless.txt")
    preparation = Preparation(recipe)
    task = asyncio.create_task(run(preparation, tmp_path))
    # A pipe opens when both sides are there; by then the child has made its partial folder.
    with await asyncio.to_thread((tmp_path / "endless.txt").open, "wb"):
        assert list((tmp_path / "prepared" / "digest").iterdir()) != []
        preparation.stop()
        assert await task is None
    assert list((tmp_path / "prepared" / "digest").iterdir()) == []


async def test_what_was_prepared_from_a_dataset_goes_with_it(tmp_path: Path) -> None:
    model = write_demo_model(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text(CHAT)
    recipe = Recipe(tmp_path / "prepared", model, tmp_path / "a.jsonl")
    assert await run(Preparation(recipe), tmp_path) is not None
    other = tmp_path / "prepared" / "other"
    other.mkdir()
    assert is_prepared(recipe.target, recipe.options)
    remove_prepared(tmp_path / "prepared", "digest")
    assert list((tmp_path / "prepared").iterdir()) == [other]
    remove_prepared(tmp_path / "prepared", "digest")
