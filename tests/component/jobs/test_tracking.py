"""`report_to`: the node writes a job's figures to trackers, in real child processes, whatever happens to the daemon or
to the tracker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.component.jobs.conftest import ADA
from tests.conftest import MakeDaemon
from tests.daemon_parts import WAIT_S, DaemonParts, Script

from horizon_formats.trackers import TRACKERS
from horizon_server.errors import BadSetting, InvalidSpec
from horizon_server.events import Message
from horizon_server.jobs.tracking import NodeTrackers
from horizon_server.records.job import JobState
from horizon_server.settings import Settings, load_settings
from horizon_server.spec import job_schema, parse_job_spec

# Of the trackers' own packages
pytestmark = pytest.mark.filterwarnings("ignore")


async def _until(is_so: Callable[[], bool]) -> None:
    """Wait for what only files show."""
    async with asyncio.timeout(WAIT_S):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def _all_written(daemon: DaemonParts) -> None:
    await _until(lambda: not list((daemon.state_dir / "trackers" / "open").glob("*.json")))


def _scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = event_accumulator.EventAccumulator(str(folder))
    found.Reload()
    return [(scalar.step, scalar.value) for scalar in found.Scalars(name)]


async def test_a_job_over_two_daemons_is_one_tensorboard_run(
    make_daemon: MakeDaemon, state_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard")
    place = {"tracker_dir": tmp_path / "seen"}
    script = Script(num_steps=6, hold_at=4, eval_at=(2, 6))
    async with make_daemon(state_dir, **place) as daemon:
        job = await daemon.submit(ADA, "seen", script, report_to="tensorboard", eval_fraction=0.5)
        await daemon.until(job.job_id, JobState.RUNNING, step=3)
        folder = tmp_path / "seen" / "runs" / "ada" / f"seen-{job.job_id}"
        await _until(lambda: bool(list(folder.glob(".horizon-*.json"))))  # while it trains
        await daemon.vanish()
        daemon.release("seen")
    async with make_daemon(state_dir, **place) as daemon:
        await daemon.until(job.job_id, JobState.SUCCEEDED)
        await _all_written(daemon)
    assert [step for step, _ in _scalars(folder, "train/loss")] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in _scalars(folder, "eval/loss")] == [2, 6]


async def test_a_tracker_that_is_away_costs_nothing_and_gets_everything_later(
    make_daemon: MakeDaemon, state_dir: Path, tmp_path: Path
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    away, there = "http://127.0.0.1:9", f"sqlite:///{tmp_path}/mlflow.db"
    async with make_daemon(state_dir, trackers=("mlflow",), mlflow_tracking_uri=away) as daemon:
        daemon.services.jobs.tracking.first_retry_s = 0.1
        job = await daemon.submit(ADA, "away", Script(num_steps=5), report_to=["mlflow"])
        await daemon.until(job.job_id, JobState.SUCCEEDED)
        texts = await _warnings(daemon, job.job_id)
    assert len(texts) == 1
    assert texts[0].startswith("mlflow: ")
    assert texts[0].endswith("Training continues, and the figures are written once mlflow takes them.")
    async with make_daemon(state_dir, trackers=("mlflow",), mlflow_tracking_uri=there) as daemon:
        await daemon.parts.services.jobs.tracking.recover()
        await _all_written(daemon)
    client = tracking.MlflowClient(tracking_uri=there)
    experiment = client.get_experiment_by_name("ada")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("away", "FINISHED")
    assert (run.data.params["train.max_steps"], run.data.tags["horizon.owner"]) == ("3", "ada")
    assert [m.step for m in client.get_metric_history(run.info.run_id, "train/loss")] == [1, 2, 3, 4, 5]


async def test_a_follower_that_takes_too_long_is_ended_and_tried_again(daemon: DaemonParts) -> None:
    pytest.importorskip("tensorboard")
    tracking = daemon.services.jobs.tracking
    tracking.limits, tracking.first_retry_s = replace(tracking.limits, wall_s=0.01), 0.1
    job = await daemon.submit(ADA, "slow", Script(num_steps=2), report_to=["tensorboard"])
    await daemon.until(job.job_id, JobState.SUCCEEDED)
    assert (
        "the follower for tensorboard took longer than 0.01 s (report_to)" in (await _warnings(daemon, job.job_id))[0]
    )


async def _warnings(daemon: DaemonParts, job_id: str) -> list[str]:
    """Return them, once there is one."""
    async with asyncio.timeout(WAIT_S):
        while True:
            payloads = [event.payload for event in await daemon.parts.journal.store.events_after(job_id, 0, 1000)]
            if found := [p.text for p in payloads if isinstance(p, Message) and p.level == "warning"]:
                return found
            await asyncio.sleep(0.05)


def _node(tmp_path: Path, **settings: Any) -> NodeTrackers:
    return NodeTrackers(settings=Settings(state_dir=tmp_path, **settings))


def _refused(node: NodeTrackers, *names: str) -> str:
    spec = parse_job_spec({"name": "j", "model": "m", "dataset": "d", "report_to": list(names)})
    with pytest.raises(InvalidSpec) as caught:
        node.check(spec, owner="ada", project="nlp")
    assert [violation.field for violation in caught.value.violations] == ["report_to"]
    return caught.value.message


def test_what_the_node_does_not_write_to_is_refused_with_the_way_from_the_laptop(tmp_path: Path) -> None:
    message = _refused(_node(tmp_path), "mlflow")
    assert message == (
        "report_to names mlflow: an admin has not allowed it on this node (setting trackers: tensorboard); or follow "
        "it from your machine: horizon job watch JOB --to mlflow"
    )


async def test_a_plan_refuses_it_as_a_submission_does(daemon: DaemonParts) -> None:
    for ask in (
        daemon.services.jobs.plan(ADA, daemon.spec(report_to=["wandb"])),
        daemon.submit(ADA, report_to=["wandb"]),
    ):
        with pytest.raises(InvalidSpec, match="report_to names wandb"):
            await ask


def test_wandb_needs_a_key_that_only_the_daemon_can_read(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    keys = tmp_path / "keys"
    keys.mkdir()
    node = _node(tmp_path, trackers=("wandb",), tracker_keys_dir=keys)
    assert "the node has no key of user ada or project nlp; an admin puts WANDB_API_KEY there" in _refused(
        node, "wandb"
    )
    (keys / "project-nlp.env").write_text("# of the group\nWANDB_API_KEY = 'theirs'\nWANDB_ENTITY=nlp\n")
    with pytest.raises(BadSetting, match="chmod 600"):
        node.keys("ada", "nlp")
    (keys / "project-nlp.env").chmod(0o600)
    node.check(
        parse_job_spec({"name": "j", "model": "m", "dataset": "d", "report_to": "wandb"}), owner="a", project="nlp"
    )
    (keys / "user-ada.env").write_text("WANDB_API_KEY=hers\n")
    (keys / "user-ada.env").chmod(0o600)
    assert node.keys("ada", "nlp") == {"WANDB_API_KEY": "hers", "WANDB_ENTITY": "nlp"}
    (keys / "user-ada.env").write_text("LD_PRELOAD=x.so\n")
    with pytest.raises(BadSetting, match=r"user-ada.env, line 1: write NAME=value, with one of MLFLOW_"):
        node.keys("ada", "nlp")


def test_mlflow_without_an_address_is_refused_when_the_daemon_starts(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="setting mlflow_tracking_uri: trackers has mlflow"):
        load_settings(state_dir=tmp_path, trackers="mlflow")
    with pytest.raises(BadSetting, match=r"setting trackers\.0: "):
        load_settings(state_dir=tmp_path, trackers="comet")


def test_the_spec_and_the_trackers_have_the_same_names() -> None:
    assert job_schema()["properties"]["report_to"]["items"]["enum"] == list(TRACKERS)
