"""Jobs that may use several numbers of devices: what they start with, and when they change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from tests.sharing_parts import HOUR, NODE, NOW, job, no_quota, resident, shares

from horizon_server.scheduling.admission import as_resident, decide
from horizon_server.scheduling.ranges import PAYS_TIMES
from horizon_server.scheduling.simulation import outlooks, simulate
from horizon_server.scheduling.state import Decision, Job, Node, Resident, Rules

KEEP_S, CHANGE_S = 300.0, 20.0
RULES = Rules(keep_devices_s=KEEP_S)
# Held for long enough.
LONG_AGO = NOW - KEEP_S


def node(num_devices: int = 4, *out: int, **values: Any) -> Node:
    broken = {f"host:{index}": "withdrawn by an admin" for index in out}
    return dataclasses.replace(NODE, devices={f"host:{i}": 0 for i in range(num_devices)}, out=broken, **values)


def on(job_id: str, *devices: int, more: int = 0, least: int | None = None, **values: Any) -> Resident:
    """A job on devices, which may have `more` besides its fewest, `least` or else as many as it has."""
    usual: dict[str, Any] = {"on_since_s": LONG_AGO, "change_s": CHANGE_S, "remaining_s": 10 * HOUR}
    names = tuple(f"host:{index}" for index in devices)
    return resident(
        job_id, job_id, devices=names, num_devices=least or len(devices), more_devices=more, **{**usual, **values}
    )


def decided(
    residents: Sequence[Resident], waiting: Sequence[Job] = (), on_node: Node | None = None, **rules: Any
) -> Decision:
    return decide(waiting, residents, on_node or node(), shares(), dataclasses.replace(RULES, **rules), NOW, no_quota)


def changes(residents: Sequence[Resident], on_node: Node | None = None) -> dict[str, list[int]]:
    """Devices of those that change."""
    found = decided(residents, on_node=on_node)
    assert not found.leave
    return {job_id: [int(name.removeprefix("host:")) for name in names] for job_id, names in found.change}


def test_it_starts_with_what_nobody_else_is_loaded_for() -> None:
    wide = job("wide", num_devices=2, more_devices=6)
    assert decided([], [wide]).start == (("wide", ("host:0", "host:1", "host:2", "host:3")),)
    assert decided([on("r", 1)], [wide]).start == (("wide", ("host:0", "host:2", "host:3")),)
    pair = job("pair", "bob", order=1, num_devices=2)
    assert dict(decided([], [wide, pair]).start) == {"wide": ("host:0", "host:1"), "pair": ("host:2", "host:3")}
    shared = [on(f"r{index}", index) for index in range(4)]
    assert decided(shared, [wide]).start == (("wide", ("host:0", "host:1")),), "its fewest, where all are used"
    other = job("other", "bob", order=1, num_devices=1, more_devices=1)
    assert dict(decided([], [wide, other]).start) == {
        "wide": ("host:0", "host:1", "host:3"),
        "other": ("host:2",),
    }, "those that come first by the shares take more first"


def test_devices_are_left_to_jobs_that_are_loaded_as_soon_as_fewer_are_being_loaded() -> None:
    jobs = [job("first", num_devices=1, more_devices=3), job("next", "bob", order=1, num_devices=2)]
    found = decided([], jobs, max_loading_jobs=1)
    assert found.start == (("first", ("host:0", "host:1")),)


def test_a_resident_job_takes_free_devices_and_gives_back_what_others_need() -> None:
    assert changes([on("r", 0, more=3)]) == {"r": [0, 1, 2, 3]}
    assert changes([on("r", 0, more=1)]) == {"r": [0, 1]}
    assert changes([on("r", 0, 1, 2, 3, more=3, least=1), on("s", 1)]) == {"r": [0, 2, 3]}
    assert changes([on("r", 0, 1, more=1, least=1), on("s", 0), on("t", 1), on("u", 1)], node(2)) == {"r": [0]}
    assert changes([on("r", 0, 1, more=2), on("s", 1)], node(2)) == {}, "it is at its fewest"
    assert changes([on("r", 0, 1, least=1, more=1), on("s", 0, 1)], node(2)) == {}, "that helps nobody"
    assert changes([on("r", 0, more=1), on("s", 0)], node(2)) == {"r": [1]}, "it leaves a shared device for a free one"
    assert changes([on("r", 0), on("s", 0)], node(2)) == {}, "a job with one number stays where it is"


def test_users_with_less_use_take_more_first_and_the_rest_is_for_the_next() -> None:
    residents = [on("a", 0, more=2), on("b", 1, more=2)]
    found = decide([], residents, node(), shares({"a": 5.0}), RULES, NOW, no_quota)
    assert dict(found.change) == {"b": ("host:1", "host:2", "host:3")}
    found = decide([], residents, node(5), shares({"b": 5.0}), RULES, NOW, no_quota)
    assert dict(found.change) == {"a": ("host:0", "host:2", "host:3"), "b": ("host:1", "host:4")}


@pytest.mark.parametrize(
    "kept",
    [
        {"on_since_s": NOW - KEEP_S + 1},
        {"is_loading": True},
        {"is_stopping": True},
        {"can_change": False},
        # Of what is left, half would be saved.
        {"remaining_s": 2 * PAYS_TIMES * CHANGE_S},
    ],
)
def test_it_keeps_what_it_has_where_a_change_is_not_due_or_does_not_pay(kept: dict[str, Any]) -> None:
    assert changes([on("r", 0, more=1)], node(2)) == {"r": [0, 1]}
    assert changes([on("r", 0, more=1, **kept)], node(2)) == {}
    assert changes([on("r", 0, more=1, remaining_s=2 * PAYS_TIMES * CHANGE_S + 1)], node(2)) == {"r": [0, 1]}


def test_nothing_is_given_back_for_a_job_that_is_loaded_or_ends_soon() -> None:
    def given(**other: Any) -> bool:
        return bool(changes([on("r", 0, 1, least=1, more=1), on("s", 0, **other)], node(2)))

    assert given() and given(remaining_s=None)
    assert not given(is_loading=True)
    assert not given(is_stopping=True)
    assert not given(remaining_s=PAYS_TIMES * CHANGE_S)


def test_devices_that_are_out_of_service_are_left_at_once() -> None:
    def left(one: Resident, *others: Resident) -> Decision:
        return decided([one, *others], on_node=node(4, 1))

    new: dict[str, Any] = {"on_since_s": NOW}
    assert left(on("r", 0, 1, 2, least=1, more=3, **new)).change == (("r", ("host:0", "host:2")),)
    assert left(on("r", 1, more=3, **new)).change == (("r", ("host:0",)),)
    assert left(on("r", 0, 1, **new)).change == (("r", ("host:0", "host:2")),), "a job with one number moves too"
    busy = [on("s", 0), on("t", 0), on("u", 3)]
    assert left(on("r", 1, **new), *busy).change == (("r", ("host:2",)),)
    too_many = left(on("r", 0, 1, 2, 3))
    assert (too_many.change, too_many.leave) == ((), ("r",))
    assert left(on("r", 0, 1, 2, 3, is_loading=True)).leave == ("r",)
    assert left(on("r", 0, 1, is_loading=True)).change == (), "a job that is being loaded moves later"
    closed = decide([], [on("r", 0, 1)], node(4, 1, is_open=False), shares(), RULES, NOW, no_quota)
    assert closed.change == (("r", ("host:0", "host:2")),)


def test_a_job_for_which_too_few_devices_are_left_says_what_would_let_it_start() -> None:
    waiting = [job("w", num_devices=2), job("one", order=1), job("range", order=2, num_devices=1, more_devices=1)]
    found = decided([], waiting, node(2, 1))
    assert dict(found.start) == {"one": ("host:0",), "range": ("host:0",)}
    assert found.why["w"] == (
        "cannot start: it needs 2 host devices and the node has: host:0; host:1 is withdrawn by an admin; with gpus: "
        "1-2 it would run on the others"
    )
    assert decided([], [job("w")], node(1, 0)).why["w"].endswith("are: none; host:0 is withdrawn by an admin")


def simulated(residents: Sequence[Resident], waiting: Sequence[Job] = (), num_devices: int = 2) -> dict[str, float]:
    """When each job ends, in seconds from now."""
    found = simulate(waiting, residents, node(num_devices), shares(), RULES, NOW, no_quota)
    return {name: one.end_s - NOW for name, one in found.items() if one.end_s is not None}


def test_the_simulation_knows_what_a_number_of_devices_is_worth() -> None:
    assert simulated([], [job("w", num_devices=1, more_devices=1, remaining_s=2 * HOUR)]) == {"w": pytest.approx(HOUR)}
    ends = simulated([on("r", 0, more=1, remaining_s=2 * HOUR)])
    assert ends == {"r": pytest.approx(HOUR + CHANGE_S)}, "it takes the other one now"


def test_the_simulation_plays_changes_forward() -> None:
    # The other one has ended after 1000 s; then, an hour is left of which half is saved.
    ends = simulated([on("r", 0, more=1, remaining_s=1000 + HOUR), on("s", 1, remaining_s=1000.0)])
    assert ends == {"s": pytest.approx(1000), "r": pytest.approx(1000 + CHANGE_S + HOUR / 2, rel=0.01)}
    # A job that comes gets one of two, once it is loaded and the first has had them for long enough.
    new = on("r", 0, 1, least=1, more=1, remaining_s=HOUR, on_since_s=NOW)
    ends = simulated([new], [job("w", "bob", remaining_s=HOUR, load_s=10.0)])
    assert ends["w"] == pytest.approx(HOUR + KEEP_S / 2 + CHANGE_S, rel=0.05)
    # Until then they share one; from then on it has half of what it had, and at the end both again.
    assert 1.4 * HOUR < ends["r"] < 1.8 * HOUR


def test_a_job_that_changes_is_charged_for_what_it_has() -> None:
    use = shares()
    ends = simulate([], [on("r", 0, more=1, remaining_s=2 * HOUR)], node(2), use, RULES, NOW, no_quota)
    assert ends["r"].end_s == pytest.approx(NOW + HOUR + CHANGE_S)
    assert use.use_of("r", "r", NOW) == 0.0, "the shares that are given stay as they are"


def test_the_outlook_says_how_many_it_uses_of_how_many() -> None:
    found = outlooks([], [on("r", 0, 1, least=1, more=2)], node(2), shares(), RULES, NOW, no_quota)
    assert found["r"].why == "resident, the only job on host:0 and host:1 (2 of 1 to 3 devices)"
    gone = outlooks([], [on("r", 0, 1)], node(2, 1), shares(), RULES, NOW, no_quota)
    assert gone["r"].why == "a device of it is out of service: it is checkpointed and queued again"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_each_job_has_what_it_may_have_and_changes_seldom(seed: int) -> None:
    pick, now_s, num_devices = Random(seed), NOW, 4
    residents: dict[str, Resident] = {}
    changed_s: dict[str, float] = {}
    out: set[int] = set()
    for number in range(300):
        now_s += pick.choice([5.0, 60.0])
        if pick.random() < 0.2:
            residents.pop(pick.choice(["", *sorted(residents)]), None)
        if pick.random() < 0.05:
            out = set() if out else {pick.randrange(num_devices)}
        least = pick.randint(1, 2)
        more = pick.randint(0, num_devices - least)
        waiting = [] if len(residents) > 5 else [job(f"j{number}", num_devices=least, more_devices=more)]
        on_node = node(num_devices, *out)
        found = decide(waiting, list(residents.values()), on_node, shares(), RULES, now_s, no_quota)
        for job_id, names in found.start:
            loaded = as_resident(waiting[0], names, now_s)
            residents[job_id] = dataclasses.replace(loaded, is_loading=False, ready_s=now_s, change_s=CHANGE_S)
        for job_id, names in found.change:
            one = residents[job_id]
            assert set(names) != set(one.devices)
            is_forced = not on_node.out.keys().isdisjoint(one.devices)
            assert is_forced or now_s - one.on_since_s >= KEEP_S
            assert one.more_devices or is_forced, "a job with one number stays where it is"
            residents[job_id] = dataclasses.replace(one, devices=names, on_since_s=now_s)
            changed_s[job_id] = now_s
        for job_id in found.leave:
            del residents[job_id]
        for one in residents.values():
            assert one.num_devices <= len(one.devices) == len(set(one.devices)) <= one.most_devices
            assert on_node.out.keys().isdisjoint(one.devices)
            assert list(one.devices) == sorted(one.devices, key=list(on_node.devices).index)
    assert changed_s, "some have changed"
