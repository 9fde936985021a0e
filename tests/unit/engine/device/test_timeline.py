from __future__ import annotations

import pytest

from horizon_server.engine.device.timeline import Busy, Timeline, Wait, overlap_s, summarise


def timeline(*entries: Busy | Wait) -> Timeline:
    log = Timeline()
    for entry in entries:
        log.add(entry)
    return log


def test_overlap_counts_common_time_only() -> None:
    assert overlap_s([(0, 2), (5, 9)], [(1, 6), (8, 20)]) == pytest.approx(1 + 1 + 1)
    assert overlap_s([(0, 1)], [(1, 2)]) == 0
    assert overlap_s([], [(0, 1)]) == 0


def test_compute_waiting_for_a_copy_exposes_the_copy() -> None:
    use = summarise(
        h2d=timeline(Busy(0, 3, 100), Busy(4, 5, 10)),
        compute=timeline(Wait(0, 3.5, "h2d"), Busy(3.5, 10, 0), Wait(10, 10.25, "d2h")),
        d2h=timeline(Wait(0, 9, "compute"), Busy(9, 10.25, 7)),
        host_queues=[],
    )

    assert (use.h2d.bytes, use.h2d.busy_s, use.h2d.exposed_s) == (110, 4, 3.5)
    assert (use.d2h.bytes, use.d2h.busy_s, use.d2h.exposed_s) == (7, 1.25, 0.25)
    assert use.compute_s == 6.5
    assert use.optimizer_exposed_s == 0


def test_a_copy_that_waits_for_the_optimizer_exposes_the_optimizer() -> None:
    use = summarise(
        h2d=timeline(Wait(0, 2, "optimizer"), Busy(2, 3, 1), Wait(3, 4, "compute")),
        compute=timeline(Wait(0.5, 3, "h2d"), Busy(3, 4, 0)),
        d2h=timeline(),
        host_queues=[timeline(Busy(0, 2, 0), Busy(2, 2.5, 0))],
    )

    assert use.optimizer_s == 2.5
    assert use.optimizer_exposed_s == 1.5
    assert use.h2d.exposed_s == 1.0


def test_a_gradient_that_waits_for_the_optimizer_exposes_the_optimizer_too() -> None:
    # In backward: compute wants a gradient slot, d2h wants the host slot that the update still reads.
    use = summarise(
        h2d=timeline(),
        compute=timeline(Busy(0, 1, 0), Wait(1, 5, "d2h"), Busy(5, 6, 0)),
        d2h=timeline(Wait(0, 1, "compute"), Wait(2, 4, "optimizer"), Busy(4, 5, 8)),
        host_queues=[timeline(Busy(0, 4, 0))],
    )

    assert use.optimizer_exposed_s == 2
    assert use.d2h.exposed_s == 2


def test_taking_empties_the_log() -> None:
    log = timeline(Busy(0, 1, 5))
    log.take()

    assert log.take() == ([], [])
