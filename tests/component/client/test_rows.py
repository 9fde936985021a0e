"""Rows in memory are pushed as files are, by themselves and with a job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from horizon_client import BadFile, Client, InvalidRequest
from horizon_client.job_spec_types import JobSpec

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

ROWS = [{"question": f"How many is {i}?", "answer": str(i)} for i in range(20)]
MAP = {"prompt": "question", "completion": "answer"}


def test_rows_are_a_dataset(client: Client) -> None:
    pushed = client.datasets.push(ROWS, name="rows", field_map=MAP)
    assert (pushed.dataset.name, pushed.dataset.state, pushed.dataset.num_rows) == ("rows", "READY", 20)
    assert client.datasets.push(iter(ROWS), name="rows", field_map=MAP).sent_bytes == 0, "the same content"


def test_rows_of_a_job_are_pushed_under_its_name(client: Client, daemon: Daemon) -> None:
    spec: JobSpec = {
        "name": "first",
        "model": "tiny-base",
        "dataset": ROWS,
        "eval": {"sets": {"held": ROWS[:4]}},
        "map": MAP,
    }
    job = client.jobs.submit(spec)
    assert (job.dataset, job.spec["eval"]["sets"]) == ("first", {"held": "first-held"})
    assert {dataset.name for dataset in client.datasets.list()} == {"gsm8k", "first", "first-held"}
    assert spec["dataset"] is ROWS, "the caller's spec stays as it is"
    again = client.jobs.submit({**spec, "dataset": ROWS[1:]})
    assert again.dataset.startswith("first-"), "other rows get a name of their own"


def test_bad_rows_are_refused_before_anything_is_sent(client: Client, daemon: Daemon) -> None:
    bad: list[Any] = [{"text": "a"}, 1]
    with pytest.raises(InvalidRequest, match=r"rows\[1\] is int"):
        client.jobs.submit({"name": "n", "model": "tiny-base", "dataset": bad})
    bad = [{"text": "a"}, {"text": 5}]
    with pytest.raises(BadFile, match=r"rows.jsonl:2: text is 5; it must be a string"):
        client.datasets.push(bad, name="rows")
    assert "CreateDataset" not in daemon.calls
