"""`horizon job watch --to` and `client.jobs.follow`: a job's events from the daemon to trackers on this machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from horizon_client import Client, InvalidRequest
from horizon_server.records.job import JobRecord

# Of the trackers' own packages
pytestmark = pytest.mark.filterwarnings("ignore")

Run = Callable[..., Result]


def _scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = event_accumulator.EventAccumulator(str(folder))
    found.Reload()
    return [(scalar.step, scalar.value) for scalar in found.Scalars(name)]


def test_a_watch_to_a_tracker_that_is_repeated_is_one_run(run: Run, finished_job: JobRecord, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    for _ in range(2):
        result = run("job", "watch", "first", "--to", "tensorboard", "--tracker-dir", str(tmp_path), "-o", "json")
        assert result.exit_code == 0
        assert f"tensorboard: tensorboard --logdir {tmp_path / 'runs'}" in result.stderr
        assert result.stdout.startswith("{")
    (folder,) = (tmp_path / "runs").glob("*/*")
    assert folder.name == f"first-{finished_job.job_id}"
    losses = _scalars(folder, "train/loss")
    assert [step for step, _ in losses] == list(range(1, len(losses) + 1))
    assert losses[0] == (1, 1.0)


def test_follow_returns_the_ended_job(client: Client, finished_job: JobRecord, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    job = client.jobs.follow("first", to=["tensorboard"], tracker_project="mine", tracker_folder=tmp_path)
    assert (job.job_id, job.state) == (finished_job.job_id, "SUCCEEDED")
    assert (tmp_path / "runs" / "mine" / f"first-{finished_job.job_id}").is_dir()


def test_what_is_missing_is_said_before_anything_is_watched(
    run: Run, client: Client, finished_job: JobRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    result = run("job", "watch", "first", "--to", "wandb")
    assert (result.exit_code, result.stdout) == (2, "")
    words = "wandb needs a package that is not installed: pip install 'horizon-train[wandb]'"
    assert result.stderr == f"Error: {words}\n"
    with pytest.raises(InvalidRequest, match="that is not installed"):
        client.jobs.follow("first", to=["wandb"])
    assert run("job", "submit", "x.yaml", "--to", "wandb").exit_code == 2
