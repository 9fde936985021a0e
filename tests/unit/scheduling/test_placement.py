from __future__ import annotations

from horizon_server.scheduling.placement import Offer, best


def test_the_job_goes_where_it_ends_first() -> None:
    first = Offer(box="second", end_s=20.0)
    assert best([Offer(box="head", end_s=30.0), first, Offer(box="third", end_s=25.0)]) is first


def test_the_first_of_equal_offers_wins() -> None:
    head = Offer(box="head", end_s=20.0)
    assert best([head, Offer(box="second", end_s=20.0)]) is head
    unknown = Offer(box="head", end_s=None)
    assert best([unknown, Offer(box="second", end_s=None)]) is unknown


def test_a_known_end_comes_before_an_unknown_one_however_late_it_is() -> None:
    late = Offer(box="second", end_s=1e12)
    assert best([Offer(box="head", end_s=None), late]) is late


def test_a_box_that_cannot_run_the_job_never_gets_it() -> None:
    full = Offer(box="head", end_s=1.0, why_not="it needs 2 GPUs and the box has 1")
    unknown = Offer(box="second", end_s=None)
    assert best([full, unknown]) is unknown
    assert best([full]) is None


def test_no_box_offers_nothing() -> None:
    assert best([]) is None
