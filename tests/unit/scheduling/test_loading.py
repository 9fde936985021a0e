from __future__ import annotations

import pytest

from horizon_server.scheduling.loading import MOST_SEEN, LoadTimes

GIB = 2**30


def learned(*seen: tuple[int, float]) -> LoadTimes:
    times = LoadTimes()
    for num_bytes, duration_s in seen:
        times.add(num_bytes, duration_s)
    return times


def test_nothing_is_expected_before_a_job_was_loaded() -> None:
    assert LoadTimes().expected_s(GIB) == 0


def test_jobs_of_one_size_say_nothing_of_others() -> None:
    assert learned((GIB, 4.0), (GIB, 5.0), (GIB, 9.0)).expected_s(100 * GIB) == 5.0


def test_a_fixed_part_and_one_that_grows_with_the_bytes() -> None:
    times = learned(*((size * GIB, 5.0 + 2.0 * size) for size in (1, 2, 10, 40)))
    assert times.expected_s(0) == pytest.approx(5.0)
    assert times.expected_s(100 * GIB) == pytest.approx(205.0)


def test_a_job_with_much_data_to_prepare_does_not_bend_it() -> None:
    times = learned(*((size * GIB, 5.0 + 2.0 * size) for size in range(1, 10)), (3 * GIB, 3600.0))
    assert times.expected_s(20 * GIB) == pytest.approx(45.0, rel=0.02)


def test_small_jobs_that_took_longer_than_large_ones_give_no_negative_time() -> None:
    assert learned((GIB, 30.0), (10 * GIB, 3.0)).expected_s(100 * GIB) == pytest.approx(16.5)


def test_old_jobs_are_forgotten() -> None:
    assert learned((GIB, 600.0), *[(GIB, 6.0)] * MOST_SEEN).expected_s(GIB) == 6.0
