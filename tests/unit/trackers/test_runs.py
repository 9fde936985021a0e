"""A job's run in each tracker, read back with the tracker's own reader: figures under known names, and one run with
each step once, however often the follower or the job was interrupted."""

from __future__ import annotations

import json
import math
import struct
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.trackers.events import JOB, eval_event, points, step_event, steps
from tests.unit.trackers.following import follow, follow_apart

from horizon_formats.trackers import (
    Ending,
    Follower,
    Target,
    TrackedJob,
    TrackerFailed,
    TrackerMissing,
    known,
    point_of,
)

# Of the trackers' own packages
pytestmark = pytest.mark.filterwarnings("ignore")

Read = Callable[[str], list[tuple[int, float]]]
"""Returns the steps and values of a series, as the tracker's reader gives them."""


@pytest.fixture
def job() -> TrackedJob:
    return JOB


@pytest.fixture(autouse=True)
def _no_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "wandb-data"))
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "wandb-cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def _target(tmp_path: Path) -> Target:
    return Target(folder=tmp_path, uri=f"sqlite:///{tmp_path}/mlflow.db")


def _tensorboard(tmp_path: Path, job: TrackedJob) -> Read:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read(name: str) -> list[tuple[int, float]]:
        # The folder that `tensorboard --logdir` shows as one run
        found = event_accumulator.EventAccumulator(str(tmp_path / "runs" / "nlp" / f"gsm8k-{job.job_id}"))
        found.Reload()
        return [(scalar.step, scalar.value) for scalar in found.Scalars(name)]

    return read


def _mlflow_runs(tmp_path: Path) -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=_target(tmp_path).uri)
    experiment = client.get_experiment_by_name("nlp")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def _mlflow(tmp_path: Path, job: TrackedJob) -> Read:
    tracking = pytest.importorskip("mlflow.tracking")

    def read(name: str) -> list[tuple[int, float]]:
        client = tracking.MlflowClient(tracking_uri=_target(tmp_path).uri)
        (run,) = _mlflow_runs(tmp_path)
        return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]

    return read


def _wandb_records(tmp_path: Path, job: TrackedJob) -> list[Any]:
    """Return what `wandb sync` reads and sends: the records of the run's files, which are logs as LevelDB's."""
    from wandb.proto import wandb_internal_pb2

    records = []
    for file in sorted((tmp_path / "wandb").glob(f"offline-run-*/run-{job.job_id}.wandb")):
        data, at, piece = file.read_bytes(), 7, b""
        while at + 7 <= len(data):
            if (left := 32768 - at % 32768) < 7:
                at += left
                continue
            _, size, kind = struct.unpack_from("<IHB", data, at)
            piece += data[at + 7 : at + 7 + size]
            at += 7 + size
            if kind in (1, 4):  # whole, or the last part
                records.append(wandb_internal_pb2.Record.FromString(piece))
                piece = b""
    return records


def _wandb(tmp_path: Path, job: TrackedJob) -> Read:
    pytest.importorskip("wandb")

    def read(name: str) -> list[tuple[int, float]]:
        rows = []
        for record in _wandb_records(tmp_path, job):
            row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if name in row:
                rows.append((json.loads(row["train/global_step"]), json.loads(row[name])))
        return rows

    return read


def _trackio(tmp_path: Path, job: TrackedJob) -> Read:
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    def read(name: str) -> list[tuple[int, float]]:
        logs = SQLiteStorage.get_logs("nlp", f"gsm8k-{job.job_id}")
        return [(row["step"], row[name]) for row in logs if name in row]

    return read


def _in_the_next_second() -> None:
    """W&B names the folders of offline runs by the second: no two processes of a person begin in one."""
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.02)


READERS = {"tensorboard": _tensorboard, "mlflow": _mlflow, "wandb": _wandb, "trackio": _trackio}


@pytest.fixture(params=list(READERS))
def tracker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = str(request.param)
    if name == "trackio":
        # It reads its folder when it is imported.
        storage = pytest.importorskip("trackio.sqlite_storage", reason="trackio is not installed: see [trackio]")
        for module in [storage, *(m for n, m in list(sys.modules.items()) if n.startswith("trackio"))]:
            if hasattr(module, "TRACKIO_DIR"):
                monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio-data")
    yield name


def test_a_resume_of_job_and_follower_is_one_run_with_each_step_once(
    tracker: str, tmp_path: Path, job: TrackedJob
) -> None:
    read = READERS[tracker](tmp_path, job)
    # W&B's own process belongs to the one that it was started from, and does not survive all that tests do with that.
    run = follow_apart if tracker == "wandb" else follow
    first = [[*points(eval_event(0)), *steps([1, 2, 3])], [*points(eval_event(3, 2.5)), *steps([4])]]
    run(tracker, job, _target(tmp_path), first, None)  # the laptop sleeps, or the daemon restarts
    if tracker == "wandb":
        _in_the_next_second()
    # The job goes on from its checkpoint of step 2, and the stream is read from its beginning.
    again = [*points(eval_event(0)), *steps([1, 2, 3, 4]), *steps([3, 4, 5]), *points(eval_event(5, 2.0))]
    run(tracker, job, _target(tmp_path), [again], Ending.FINISHED)

    assert read("train/loss") == [(1, 3.0), (2, 4.0), (3, 5.0), (4, 6.0), (5, 7.0)]
    assert read("eval/loss") == [(0, 3.0), (3, 2.5), (5, 2.0)]
    assert read("eval/hard/exact_match") == [(0, 0.75), (3, 0.75), (5, 0.75)]
    assert read("train/rewards/margins")[-1] == (5, 0.25)
    assert read("memory/host_bytes")[0] == (1, 300.0)


def test_the_names_of_figures(job: TrackedJob) -> None:
    (step,) = points(step_event(7, noise_scale_tokens=5.0, device_memory_bytes={"arena": 8}))
    assert sorted(step.figures) == [
        "memory/device/arena_bytes",
        "memory/device_bytes",
        "memory/host/moments_bytes",
        "memory/host/weights_bytes",
        "memory/host_bytes",
        "train/epoch",
        "train/grad_norm",
        "train/learning_rate",
        "train/loss",
        "train/noise_scale_tokens",
        "train/num_input_tokens_seen",
        "train/overlap_ratio",
        "train/rewards/margins",
        "train/tokens_per_second",
    ]
    (evaluation,) = points(eval_event(7))
    assert sorted(evaluation.figures) == [
        "eval/accuracy",
        "eval/hard/exact_match",
        "eval/hard/loss",
        "eval/loss",
        "eval/perplexity",
    ]
    assert point_of("message", object(), 0.0) is None


def test_mlflow_shows_spec_state_and_tags(tmp_path: Path, job: TrackedJob) -> None:
    pytest.importorskip("mlflow")
    ends = {"FINISHED": Ending.FINISHED, "FAILED": Ending.FAILED, "KILLED": Ending.KILLED, "RUNNING": None}
    for name, ending in ends.items():
        follower = Follower("mlflow", replace(job, job_id=f"job_{name}", name=name), _target(tmp_path))
        follower.write(points(step_event(1, math.nan)))
        follower.close(ending)
    runs = {run.info.run_name: run for run in _mlflow_runs(tmp_path)}
    assert {name: run.info.status for name, run in runs.items()} == {name: name for name in ends}
    data = runs["FAILED"].data
    assert data.params["train.learning_rate"] == "1e-05"
    assert (data.tags["method"], data.tags["horizon.job_id"]) == ("dpo", "job_FAILED")
    assert math.isnan(data.metrics["train/loss"])


def test_wandb_has_the_config_and_whether_the_job_goes_on(tmp_path: Path, job: TrackedJob) -> None:
    pytest.importorskip("wandb")
    for ending in (None, Ending.KILLED):
        follow_apart("wandb", job, _target(tmp_path), [steps([1])], ending)
        _in_the_next_second()
    records = _wandb_records(tmp_path, job)
    runs = [record.run for record in records if record.HasField("run")]
    assert {(run.run_id, run.display_name, run.project) for run in runs} == {(job.job_id, "gsm8k", "nlp")}
    config = {update.key: json.loads(update.value_json) for update in runs[0].config.update}
    assert config["train"]["learning_rate"] == 1e-5
    assert list(runs[0].tags) == ["dpo", "tiny", "sums"]
    assert [record.exit.exit_code for record in records if record.HasField("exit")] == [1, 255]
    assert any(record.HasField("preempting") for record in records)


def test_points_that_an_mlflow_server_took_before_a_cut_are_not_there_twice(
    tmp_path: Path, job: TrackedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    follower, real = Follower("mlflow", job, _target(tmp_path)), tracking.MlflowClient.log_batch
    calls = []

    def cut(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        calls.append(kwargs)
        if len(calls) == 2:
            raise OSError("the answer\nwas lost")

    monkeypatch.setattr(tracking.MlflowClient, "log_batch", cut)
    given = steps(list(range(1, 51)))  # three calls
    with pytest.raises(TrackerFailed, match=r"^mlflow: the answer was lost$"):
        follower.write(given)
    follower.write(given)
    assert [step for step, _ in _mlflow(tmp_path, job)("train/loss")] == list(range(1, 51))


def test_tensorboard_readers_drop_what_a_killed_follower_had_not_recorded(tmp_path: Path, job: TrackedJob) -> None:
    read = _tensorboard(tmp_path, job)
    killed = Follower("tensorboard", job, _target(tmp_path))
    killed.write(steps([1, 2]))
    (record,) = (tmp_path / "runs" / "nlp" / f"gsm8k-{job.job_id}").glob(".horizon-*.json")
    before = record.read_text()
    killed.write(steps([3, 4]))
    record.write_text(before)  # killed after the events were flushed and before this was
    killed.close(None)
    Follower("tensorboard", job, _target(tmp_path)).write(steps([3, 4, 5], loss=1.0))
    assert read("train/loss") == [(1, 3.0), (2, 4.0), (3, 4.0), (4, 5.0), (5, 6.0)]


def test_a_missing_package_is_named_with_its_command(
    tmp_path: Path, job: TrackedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(TrackerMissing, match=r"^trackio needs .* pip install 'horizon-train\[trackio\]'$"):
        Follower("trackio", job, _target(tmp_path))


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "horizon_no_tracker").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(known.TRACKERS, "wandb", "horizon_no_tracker")
    assert not known.is_installed("wandb")
