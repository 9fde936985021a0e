from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from tests.sharing_parts import HOUR, NOW, RULES, job, shares

from horizon_server.records.sharing import Allowance
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Job, Rules
from horizon_server.scheduling.turns import MAX_TURN_WAIT_SLICES, next_turn, steady_shares


def take_turns(
    jobs: list[Job], use: Shares, num_turns: int, rules: Rules = RULES
) -> tuple[Counter[str], dict[str, float]]:
    """Turns of one slice each: how many each job had, and the longest wait of each."""
    now_s, turns, longest = NOW, Counter[str](), dict.fromkeys((one.job_id for one in jobs), 0.0)
    for _ in range(num_turns):
        chosen = next_turn(jobs, use, now_s, rules=rules)
        assert chosen is not None
        longest[chosen.job_id] = max(longest[chosen.job_id], now_s - chosen.since_s)
        turns[chosen.job_id] += 1
        now_s += rules.time_slice_s
        use.charge(chosen.project, chosen.user, rules.time_slice_s, now_s)
        jobs = [dataclasses.replace(one, since_s=now_s) if one is chosen else one for one in jobs]
    return turns, longest


def test_no_turn_where_no_job_waits() -> None:
    assert next_turn([], shares(), NOW, rules=RULES) is None


def test_the_project_with_the_lowest_use_by_weight_is_next() -> None:
    use = shares({"ann": 2.9, "bob": 1.0}, weights={"ann": 3.0})

    assert next_turn([job("a", "ann"), job("b", "bob")], use, NOW, rules=RULES) == job("a", "ann")


def test_inside_a_project_the_user_with_the_lowest_use_is_next() -> None:
    use = Shares(HOUR)
    use.charge("lab", "ann", 10.0, NOW)
    use.charge("lab", "bob", 5.0, NOW)
    jobs = [job("a", "ann", project="lab", priority=100), job("b", "bob", project="lab")]

    assert next_turn(jobs, use, NOW, rules=RULES) is jobs[1]


def test_inside_a_share_priority_comes_before_the_wait() -> None:
    jobs = [job("old", since_s=NOW - 100), job("older", priority=1, since_s=NOW - 50), job("new", priority=1)]

    assert next_turn(jobs, shares(), NOW, rules=RULES) is jobs[1]


def test_of_users_with_the_same_use_the_one_who_has_waited_longest_is_next_whatever_the_priority() -> None:
    jobs = [job("a", "ann", priority=100), job("b", "bob", priority=-100, since_s=NOW - 1)]

    assert next_turn(jobs, shares(), NOW, rules=RULES) is jobs[1]


def test_an_urgent_job_is_above_all_shares() -> None:
    jobs = [job("a", "ann"), job("b", "bob", priority=101), job("c", "bob", priority=100)]

    assert next_turn(jobs, shares({"bob": 100.0}), NOW, rules=RULES) is jobs[1]


@pytest.mark.parametrize(("weights", "part"), [({}, 0.5), ({"ann": 3.0}, 0.75)])
def test_turns_are_divided_by_weight(weights: dict[str, float], part: float) -> None:
    turns, _ = take_turns([job("a", "ann"), job("b", "bob")], shares(weights=weights), 400)

    assert turns["a"] / 400 == pytest.approx(part, abs=0.01)


def test_two_jobs_of_one_user_have_together_what_one_of_another_has() -> None:
    turns, _ = take_turns([job("a1", "ann"), job("a2", "ann"), job("b", "bob")], shares(), 400)

    assert turns["b"] == pytest.approx(200, abs=2)
    assert turns["a1"] == pytest.approx(100, abs=2)


@pytest.mark.parametrize("others", [{"priority": 100}, {"priority": 1000}])
def test_a_job_waits_no_longer_than_the_stated_bound_whatever_the_others_are(others: dict[str, int]) -> None:
    jobs = [job("low", "ann", priority=-100)] + [job(f"high{i}", "ann", **others) for i in range(3)]
    turns, longest = take_turns(jobs, shares({"ann": 50.0}), 2000)

    bound_s = (MAX_TURN_WAIT_SLICES + 1) * len(jobs) * RULES.time_slice_s
    assert turns["low"] > 0
    assert max(longest.values()) <= bound_s
    assert longest["low"] > MAX_TURN_WAIT_SLICES * len(jobs) * RULES.time_slice_s


def test_a_user_far_above_the_share_gets_a_turn_within_the_bound() -> None:
    _, longest = take_turns([job("a", "ann"), job("b", "bob")], shares({"ann": 1000.0}), 500)

    assert longest["a"] <= (MAX_TURN_WAIT_SLICES + 1) * 2 * RULES.time_slice_s


def test_steady_shares_divide_by_project_user_and_job() -> None:
    use = Shares(
        HOUR,
        allowances=[
            Allowance(holder="project", name="lab", weight=2.0),
            Allowance(holder="user", name="ann", weight=3.0),
        ],
    )
    jobs = [
        job("a1", "ann", project="lab"),
        job("a2", "ann", project="lab"),
        job("a3", "ann", project="lab", priority=-1),
        job("b", "bob", project="lab"),
        job("e", "eve"),
    ]
    assert steady_shares(jobs, use) == pytest.approx({"a1": 0.25, "a2": 0.25, "a3": 0, "b": 1 / 6, "e": 1 / 3})


def test_an_urgent_job_has_the_whole_device() -> None:
    assert steady_shares([job("a", "ann"), job("b", "bob", priority=200)], shares()) == {"a": 0.0, "b": 1.0}
