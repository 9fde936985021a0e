"""The bounds of a preview, with real children: time, and turns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from horizon_server.datasets.preview import PreviewOptions
from horizon_server.datasets.reading import StoredFile
from horizon_server.demo.recipe import write_demo_model
from horizon_server.errors import InvalidModel, InvalidSpec, Stalled
from horizon_server.jobs.preparation import DatasetFiles
from horizon_server.records.account import Principal
from horizon_server.records.blob import DatasetRecord
from horizon_server.services.inputs import Inputs
from horizon_server.services.previews import Previews
from horizon_server.settings import child_environment

ADA, BOB = (Principal(name=name, role="user", project="lab") for name in ("ada", "bob"))
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# A million tuples in each other: the hash of the outer one takes more stack than a thread has, which Python does not
# notice.
CRASHING = (
    "{% set n = namespace(x=()) %}{% for a in range(20) %}{% for b in range(50000) %}{% set n.x = (n.x,) %}{% endfor %}"
    "{% endfor %}{{ {n.x: 1} }}"
)


class OneOfEach(Inputs):
    """A dataset of one chat, and three models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]
        (folder / "a.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
        for name, template in {"fine": "", "endless": ENDLESS, "crashing": CRASHING}.items():
            write_demo_model(folder / name)
            if template:
                (folder / name / "chat_template.jinja").write_text(template, encoding="ascii")

    async def dataset(self, principal: Principal, name: str) -> DatasetFiles:
        record = DatasetRecord(
            dataset_id="d", owner="ada", name=name, format="messages", field_map={}, files=(), num_rows=1
        )
        return DatasetFiles(record=record, files=(StoredFile.at(self.folder / "a.jsonl"),))

    async def model(self, principal: Principal, name: str) -> tuple[str, Path]:
        return name, self.folder / name

    @contextmanager
    def reading(self, dataset_id: str, model_id: str) -> Iterator[None]:
        yield


@pytest.fixture
def make(tmp_path: Path) -> Any:
    resources = OneOfEach(tmp_path)

    def previews(limit_s: float) -> Previews:
        return Previews(resources, environment=child_environment(), limit_s=limit_s)

    return previews


async def test_an_endless_template_is_ended_in_time(make: Any) -> None:
    with pytest.raises(Stalled, match="not rendered within 1 s; ask for fewer rows"):
        await make(1.0).preview(ADA, "chats", "endless", PreviewOptions())


async def test_a_template_that_crashes_its_process_is_refused(make: Any) -> None:
    with pytest.raises(InvalidModel, match="rendering these rows crashes; is the chat template right"):
        await make(60.0).preview(ADA, "chats", "crashing", PreviewOptions())


async def test_endless_templates_of_one_user_keep_no_other_waiting(make: Any) -> None:
    previews = make(600.0)
    endless = [asyncio.create_task(previews.preview(ADA, "chats", "endless", PreviewOptions())) for _ in range(5)]
    async with asyncio.timeout(300):
        shown = await previews.preview(BOB, "chats", "fine", PreviewOptions())
    assert [span.text for span in shown.rows[0].spans if span.trained] == ["there<|im_end|>"]
    assert not any(task.done() for task in endless)
    for task in endless:
        task.cancel()
    await asyncio.gather(*endless, return_exceptions=True)


async def test_a_model_must_be_named(make: Any) -> None:
    with pytest.raises(InvalidSpec, match="model is empty"):
        await make(1.0).preview(ADA, "chats", "", PreviewOptions())
