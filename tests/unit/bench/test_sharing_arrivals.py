"""The replay in virtual time: what it counts, and that it looks at nothing that has not happened."""

from __future__ import annotations

import dataclasses
from random import Random

import pytest
from bench.sharing_arrivals import Case, Replay, best_of, hits, replay
from bench.sharing_replay import Replayed
from tests.sharing_life import Life
from tests.sharing_parts import NODE, NOW, job, shares

from horizon_server.scheduling.state import Rules

SMALL = Case(num_resident=2, arrival_s=1.0, load_s=0.1, num_jobs=8)


def test_the_best_time_has_the_smallest_mean_relative_error() -> None:
    times_s = [1.5, 2.0, 3.0, 10.0, 40.0]

    def error(guess_s: float) -> float:
        return sum(abs(guess_s / time_s - 1) for time_s in times_s)

    assert best_of(times_s) == min(times_s, key=error) == 2.0
    assert best_of([]) == 0.0


def test_only_starts_of_jobs_that_waited_count() -> None:
    at_once = Replayed(estimated_start_s=9.0, estimated_end_s=1.2, start_s=0.0, end_s=1.0)
    waited = Replayed(estimated_start_s=2.0, estimated_end_s=9.0, start_s=2.5, end_s=1.0)
    assert hits([at_once, waited]) == (1.0, 0.5)


def test_the_same_case_gives_the_same_figures_in_which_every_job_is_estimated_in_each_way() -> None:
    found = replay(SMALL)
    assert found == replay(SMALL)
    assert {name: len(jobs) for name, jobs in found.items()} == {"today": 8, "learned": 8, "oracle": 8}
    unseen = replay(dataclasses.replace(SMALL, num_unseen=5))
    assert unseen["today"] == found["today"][5:]


def test_a_job_alone_ends_after_loading_and_its_steps() -> None:
    alone = Replay(case=dataclasses.replace(SMALL, num_jobs=1, load_sigma=0.0), drawn=Random(3))
    (one,) = alone.run()["today"]
    assert (one.estimated_start_s, one.start_s) == (0.0, 0.0)
    assert one.estimated_end_s == pytest.approx(0.1 + alone.seen[0].device_s, abs=1e-4)
    assert one.end_s == pytest.approx(one.estimated_end_s, rel=0.4)


def test_a_loading_job_has_no_turn_and_what_a_fork_plays_changes_nothing_in_its_origin() -> None:
    life = Life(NODE, Rules(), shares())
    life.submit(job("a", remaining_s=50.0, load_s=30.0), 50.0)
    life.advance(NOW + 40)
    assert life.turn_s("a") == pytest.approx(10.0)
    fork = life.fork()
    fork.submit(job("b", "bob", remaining_s=50.0), 50.0)
    fork.advance(NOW + 500)
    assert fork.ended == {"a": "succeeded", "b": "succeeded"}
    assert (life.now_s, life.ended, set(life.residents)) == (NOW + 40, {}, {"a"})
    life.advance(NOW + 500)
    assert life.ended_s == {"a": NOW + 80}
