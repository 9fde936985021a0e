"""The arithmetic of the benches of sharing: hand-overs from traces, rates from steps, errors of estimates."""

from __future__ import annotations

import math

import pytest
from bench.sharing import handover_gaps, step_gaps, tokens_per_second
from bench.sharing_replay import Replayed, median_errors

from horizon_server.events import StepDone

FIRST = [(0.0, 1.0, "forward 0"), (1.0, 2.0, "backward 0"), (2.25, 3.0, "forward 0"), (6.0, 7.0, "forward 0")]
SECOND = [(3.5, 4.0, "forward 0"), (4.0, 5.5, "backward 0")]


def step(num_tokens: int) -> StepDone:
    return StepDone(
        step=1,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=0.1,
        num_tokens=num_tokens,
        num_steps=9,
        epoch=0.0,
        num_input_tokens_seen=0,
        tokens_per_second=0.0,
        duration_s=1.0,
    )


def test_a_hand_over_is_from_the_last_kernel_of_one_job_to_the_first_of_the_other() -> None:
    assert handover_gaps(FIRST, SECOND) == [0.5, 0.5]
    assert handover_gaps(SECOND, FIRST) == [0.5, 0.5]


def test_jobs_that_compute_at_the_same_time_show_as_a_gap_below_zero() -> None:
    assert min(handover_gaps([(0.0, 2.0, "")], [(1.5, 3.0, "")])) == -0.5


def test_between_steps_of_one_job_only_those_count_that_no_other_job_came_in() -> None:
    assert step_gaps(FIRST[:3], others=SECOND) == [0.25]
    assert step_gaps([*FIRST[1:2], *FIRST[3:]], others=SECOND) == []


def test_a_rate_counts_the_tokens_after_the_first_step_of_the_window() -> None:
    steps = [(3.0, step(300)), (1.0, step(100)), (2.0, step(200)), (9.0, step(900))]
    assert tokens_per_second(steps, start_s=1.0, end_s=3.0) == pytest.approx(250)


def test_errors_are_relative_and_starts_without_a_wait_do_not_count() -> None:
    waited = Replayed(estimated_start_s=11.0, estimated_end_s=30.0, start_s=10.0, end_s=20.0)
    at_once = Replayed(estimated_start_s=0.0, estimated_end_s=5.0, start_s=0.5, end_s=5.0)
    start, end = median_errors([waited, at_once])
    assert start == pytest.approx(0.1)
    assert end == pytest.approx(0.25)
    assert math.isnan(median_errors([at_once])[0])
