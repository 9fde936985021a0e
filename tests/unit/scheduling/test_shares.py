from __future__ import annotations

import pytest
from tests.sharing_parts import HOUR, NOW

from horizon_server.records.sharing import Allowance, ShareUse
from horizon_server.scheduling.shares import Shares


def test_a_use_counts_half_after_each_half_life() -> None:
    shares = Shares(24 * HOUR)
    shares.charge("lab", "ann", 1000.0, NOW)

    assert shares.use_of("lab", "ann", NOW + 24 * HOUR) == 500.0
    assert shares.use_of("lab", "ann", NOW + 72 * HOUR) == 125.0
    assert shares.use_of("lab", "ann", NOW + 12 * HOUR) == pytest.approx(1000 * 0.5**0.5)


def test_charges_decay_from_the_time_they_were_made() -> None:
    shares = Shares(HOUR)
    shares.charge("lab", "ann", 100.0, NOW)
    shares.charge("lab", "ann", 100.0, NOW + HOUR)

    assert shares.use_of("lab", "ann", NOW + 2 * HOUR) == pytest.approx(75.0)


def test_who_has_used_nothing_ranks_before_all() -> None:
    shares = Shares(HOUR)
    shares.charge("lab", "ann", 1e-9, NOW)
    shares.charge("own", "bob", 1e-9, NOW)

    assert shares.rank("new", "eve", NOW) < shares.rank("own", "bob", NOW)
    assert shares.rank("lab", "eve", NOW) < shares.rank("lab", "ann", NOW)


def test_a_use_ranks_by_weight_first_of_the_project_then_of_the_user() -> None:
    shares = Shares(HOUR)
    shares.set_allowances(
        [Allowance(holder="project", name="big", weight=3.0), Allowance(holder="user", name="bob", weight=2.0)]
    )
    shares.charge("big", "ann", 200.0, NOW)
    shares.charge("big", "bob", 200.0, NOW)
    shares.charge("small", "eve", 150.0, NOW)

    assert shares.rank("big", "bob", NOW) == pytest.approx((400 / 3, 100.0))
    assert shares.rank("big", "bob", NOW) < shares.rank("big", "ann", NOW) < shares.rank("small", "eve", NOW)


def test_a_clock_that_goes_backwards_loses_no_charge_and_adds_none() -> None:
    shares = Shares(HOUR)
    shares.charge("lab", "ann", 100.0, NOW)
    shares.charge("lab", "ann", 100.0, NOW - 10 * HOUR)

    assert shares.use_of("lab", "ann", NOW - 10 * HOUR) == 200.0
    assert shares.use_of("lab", "ann", NOW) == 200.0
    assert shares.uses(NOW - HOUR) == [ShareUse(project="lab", user="ann", device_s=200.0, as_of_s=NOW)]


def test_stored_uses_give_the_same_shares_again() -> None:
    shares = Shares(HOUR)
    for i, (project, user) in enumerate([("lab", "ann"), ("lab", "bob"), ("own", "ann"), ("lab", "ann")]):
        shares.charge(project, user, 100.0 * (i + 1), NOW + i * 700)
    again = Shares(HOUR, [*reversed(shares.uses(NOW + 3000)), *Shares(HOUR).uses(NOW)])

    for project, user in [("lab", "ann"), ("lab", "bob"), ("own", "ann")]:
        assert again.rank(project, user, NOW + 5000) == pytest.approx(shares.rank(project, user, NOW + 5000))


def test_uses_as_of_different_times_add_up_in_their_project() -> None:
    uses = [
        ShareUse(project="lab", user="ann", device_s=100.0, as_of_s=NOW + HOUR),
        ShareUse(project="lab", user="bob", device_s=100.0, as_of_s=NOW),
    ]
    assert Shares(HOUR, uses).rank("lab", "ann", NOW + HOUR) == (150.0, 100.0)


def test_a_copy_is_charged_on_its_own() -> None:
    shares = Shares(HOUR, allowances=[Allowance(holder="user", name="ann", weight=2.0)])
    shares.charge("lab", "ann", 100.0, NOW)
    copy = shares.copy()
    copy.charge("lab", "ann", 100.0, NOW)

    assert shares.rank("lab", "ann", NOW) == (100.0, 50.0)
    assert copy.rank("lab", "ann", NOW) == (200.0, 100.0)


def test_a_weight_of_nothing_is_served_last_and_divides_nothing_by_zero() -> None:
    shares = Shares(HOUR, allowances=[Allowance(holder="project", name="idle", weight=0.0)])
    shares.charge("idle", "ann", 1.0, NOW)
    shares.charge("lab", "bob", 1000.0, NOW)

    assert shares.rank("lab", "bob", NOW) < shares.rank("idle", "ann", NOW)


def test_what_was_used_elsewhere_counts_once() -> None:
    shares = Shares(24 * HOUR)
    shares.charge("lab", "ann", 100.0, NOW)
    uses = [
        ShareUse(project="lab", user="ann", device_s=300.0, as_of_s=NOW),
        ShareUse(project="lab", user="bob", device_s=50.0, as_of_s=NOW),
    ]
    for _ in range(3):
        shares.raise_to(uses)
    assert (shares.use_of("lab", "ann", NOW), shares.use_of("lab", "bob", NOW)) == (300.0, 50.0)
    # What it knows more of stays.
    shares.charge("lab", "ann", 10.0, NOW)
    shares.raise_to(uses)
    assert shares.use_of("lab", "ann", NOW) == 310.0
    assert shares.rank("lab", "ann", NOW) == (360.0, 310.0)
