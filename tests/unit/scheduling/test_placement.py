from __future__ import annotations

from horizon_server.records.boxes import Place
from horizon_server.scheduling.placement import best


def test_the_job_goes_where_it_ends_first() -> None:
    first = Place(box="second", estimated_end_s=20.0)
    assert best([Place(box="head", estimated_end_s=30.0), first, Place(box="third", estimated_end_s=25.0)]) is first


def test_the_first_of_equal_offers_wins() -> None:
    head = Place(box="head", estimated_end_s=20.0)
    assert best([head, Place(box="second", estimated_end_s=20.0)]) is head
    unknown = Place(box="head")
    assert best([unknown, Place(box="second")]) is unknown


def test_a_known_end_comes_before_an_unknown_one_however_late_it_is() -> None:
    late = Place(box="second", estimated_end_s=1e12)
    assert best([Place(box="head"), late]) is late


def test_a_box_that_cannot_run_the_job_never_gets_it() -> None:
    full = Place(box="head", estimated_end_s=1.0, why_not="it needs 2 GPUs and the box has 1")
    unknown = Place(box="second")
    assert best([full, unknown]) is unknown
    assert best([full]) is None


def test_no_box_offers_nothing() -> None:
    assert best([]) is None
