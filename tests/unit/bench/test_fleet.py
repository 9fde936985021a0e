"""Where the jobs of a fleet are sent: what the replay counts, and that the predicted ends are worth asking for."""

from __future__ import annotations

import statistics
from dataclasses import replace
from random import Random

import pytest
from bench.fleet import EQUAL, FIRST_END, LARGE_BOX, MIXED, ROUND_ROBIN, Box, Case, Queue, submissions, times_s
from tests.sharing_parts import NOW

ASKED = 0.8
"""Of round robin's mean time from submission to end."""
SMALL = Case(boxes=MIXED, num_jobs=60)


@pytest.mark.parametrize("boxes", [LARGE_BOX, MIXED], ids=["large box", "mixed"])
def test_on_unequal_boxes_jobs_end_sooner_than_with_round_robin(boxes: tuple[Box, ...]) -> None:
    # Few jobs: of many, round robin sends the slow box more than it can compute, and any other way looks good.
    case = Case(boxes=boxes, load=0.3, num_jobs=60)
    found = [times_s(case, seed, (ROUND_ROBIN, FIRST_END)) for seed in range(3)]
    assert statistics.mean(one[FIRST_END] / one[ROUND_ROBIN] for one in found) <= ASKED


def test_queues_count_not_speed_alone() -> None:
    found = times_s(replace(SMALL, load=0.8), 0, ("fastest", FIRST_END))
    assert found[FIRST_END] < ASKED * found["fastest"]


def test_the_same_jobs_are_sent_in_each_way_and_at_each_call() -> None:
    case = replace(SMALL, num_jobs=20)
    assert submissions(case, Random(1)) == submissions(case, Random(1))
    assert times_s(case, 1) == times_s(case, 1)


def test_an_idle_box_offers_loading_computing_and_copying_but_to_the_head() -> None:
    case = replace(SMALL, num_jobs=1)
    (one,) = submissions(case, Random(1))
    for box in EQUAL[:2]:
        one = replace(one, at_s=NOW, predicted_s={box.name: 1000.0}, needed_s={box.name: 1100.0})
        queue = Queue(box, is_head=box is EQUAL[0], knows_coming=False)
        copy_s = 0.0 if box is EQUAL[0] else one.copy_s
        assert queue.offer(one).estimated_end_s == pytest.approx(NOW + copy_s + one.load_s + 1000.0, abs=1e-2)


def test_an_offer_changes_nothing_on_the_box_and_a_job_on_its_way_counts_only_where_it_is_known() -> None:
    first, second = (
        replace(one, at_s=NOW, host_gib=16, copy_s=100.0, predicted_s={"slow": 1000.0})
        for one in submissions(replace(SMALL, num_jobs=2), Random(1))
    )
    ends_s = []
    for knows_coming in (False, True):
        queue = Queue(MIXED[-1], is_head=False, knows_coming=knows_coming)
        before = queue.offer(second)
        assert queue.offer(second) == before
        queue.send(first, 0)
        assert queue.num_present == 1
        ends_s.append((before.end_s, queue.offer(second).estimated_end_s))
    (alone_s, unseen_s), (again_s, known_s) = ends_s
    assert alone_s == unseen_s == again_s
    assert known_s is not None
    assert alone_s is not None
    assert known_s > alone_s + 500.0


def test_a_job_larger_than_a_box_is_not_offered_there() -> None:
    (one,) = submissions(replace(SMALL, num_jobs=1), Random(1))
    offer = Queue(MIXED[-1], is_head=False, knows_coming=False).offer(replace(one, host_gib=224))
    assert offer.estimated_end_s is None
    assert offer.why_not == "it needs 224 GiB of host memory and the box has 128"
