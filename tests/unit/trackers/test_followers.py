"""A watch with trackers: what a slow one, a dead one and an interrupted watch cost."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.unit.trackers.events import step_event

from horizon_client import InvalidRequest, TrackerFailed, tracking
from horizon_client.resources import Job, JobState, MessageEvent, StateEvent
from horizon_client.tracking import Followers
from horizon_formats.trackers import Ending, Point, Target, TrackedJob
from horizon_formats.trackers import TrackerFailed as Refused

LONG_S = 240.0


class _Tracker:
    """A tracker that refuses as often as it is told."""

    where = "nowhere"
    refusals = 0
    made: list[_Tracker]

    def __init__(self, tracker: str, job: TrackedJob, target: Target) -> None:
        self.tracker, self.job = tracker, job
        self.steps: list[int] = []
        self.ending: Any = "open"
        self.may_write = threading.Event()
        self.may_write.set()
        self.has_written = threading.Event()
        self.made.append(self)

    def write(self, points: Sequence[Point]) -> None:
        assert self.may_write.wait(LONG_S)
        if type(self).refusals:
            type(self).refusals -= 1
            raise Refused(f"{self.tracker}: no answer")
        self.steps += [point.step for point in points]
        self.has_written.set()

    def close(self, ending: Ending | None) -> None:
        self.ending = ending


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[_Tracker]:
    _Tracker.refusals, _Tracker.made = 0, []
    monkeypatch.setattr(tracking, "Follower", _Tracker)
    monkeypatch.setattr(tracking, "_PAUSES_S", (0.0, 0.0))
    return _Tracker.made


JOB = object.__new__(Job)
for name, value in {"job_id": "job_1", "owner": "ada", "spec": {"name": "first"}}.items():
    object.__setattr__(JOB, name, value)


def _step(number: int) -> Any:
    event = step_event(number)
    event.kind, event.time = "step", None
    return event


def _state(state: JobState) -> StateEvent:
    return StateEvent(sequence=1, time=None, state=state, reason="", message="", attempt=1)


def test_every_tracker_gets_the_figures_and_the_end(made: list[_Tracker], tmp_path: Path) -> None:
    notices: list[str] = []
    followers = Followers(JOB, ["mlflow", "wandb", "mlflow"], folder=tmp_path, notice=notices.append)
    followers.send(MessageEvent(sequence=1, time=None, level="info", text="hello"))
    for number in range(1, 2001):
        followers.send(_step(number))
    followers.send(_state("SUCCEEDED"))
    followers.close()
    assert [(tracker.tracker, tracker.job.name, tracker.ending) for tracker in made] == [
        ("mlflow", "first", Ending.FINISHED),
        ("wandb", "first", Ending.FINISHED),
    ]
    assert all(tracker.steps == list(range(1, 2001)) for tracker in made)
    assert notices == ["mlflow: nowhere", "wandb: nowhere"]


def test_an_interrupted_watch_leaves_the_run_open(made: list[_Tracker], tmp_path: Path) -> None:
    followers = Followers(JOB, ["mlflow"], folder=tmp_path)
    followers.send(_state("RUNNING"))
    followers.close()
    assert made[0].ending is None


def test_a_resumed_job_is_not_ended_by_its_earlier_failure(made: list[_Tracker], tmp_path: Path) -> None:
    followers = Followers(JOB, ["mlflow"], folder=tmp_path)
    for state in ("FAILED", "QUEUED", "RUNNING"):
        followers.send(_state(state))
    followers.close()
    assert made[0].ending is None


def test_a_refusal_is_tried_again(made: list[_Tracker], tmp_path: Path) -> None:
    notices: list[str] = []
    followers = Followers(JOB, ["mlflow"], folder=tmp_path, notice=notices.append)
    _Tracker.refusals = 1
    followers.send(_step(1))
    assert made[0].has_written.wait(LONG_S)
    followers.close()
    assert made[0].steps == [1]
    assert notices[1] == "mlflow: no answer; trying again in 0 s, and the job continues meanwhile"


def test_a_dead_tracker_holds_up_neither_the_watch_nor_the_others(
    made: list[_Tracker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dead(_Tracker):
        def write(self, points: Sequence[Point]) -> None:
            raise Refused("mlflow: no answer")

    monkeypatch.setattr(tracking, "Follower", lambda name, *args: (Dead if name == "mlflow" else _Tracker)(name, *args))
    followers = Followers(JOB, ["mlflow", "wandb"], folder=tmp_path)
    for number in range(1, 3001):  # three times what waits
        followers.send(_step(number))
    followers.send(_state("SUCCEEDED"))
    with pytest.raises(TrackerFailed, match=r"^mlflow: no answer; the run is not complete: follow the job again"):
        followers.close()
    assert (made[1].steps, made[1].ending) == (list(range(1, 3001)), Ending.FINISHED)
    assert made[0].ending is None  # so that following again continues it


def test_a_slow_tracker_makes_the_watch_wait_and_loses_nothing(made: list[_Tracker], tmp_path: Path) -> None:
    followers = Followers(JOB, ["mlflow"], folder=tmp_path)
    made[0].may_write.clear()
    sent = 0
    while not followers.is_full:
        followers.send(_step(sent := sent + 1))
    assert sent <= tracking._WAITING_POINTS + tracking._BATCH
    made[0].may_write.set()
    followers.send(_step(sent := sent + 1))
    followers.close()
    assert made[0].steps == list(range(1, sent + 1))


def test_unknown_trackers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"to is 'comet'; the trackers are tensorboard, mlflow, wandb, trackio"):
        Followers(JOB, ["comet"], folder=tmp_path)
