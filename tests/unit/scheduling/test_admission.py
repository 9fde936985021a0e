from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from tests.sharing_parts import GIB, HOUR, NODE, NOW, RULES, job, no_quota, resident, shares
from tests.support.processor import least_s

from horizon_server.scheduling.admission import QuotaCheck, as_resident, as_waiting, decide, predicted_ends
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Decision, Job, Node, Resident, Rules, kind_of


def decided(
    waiting: Sequence[Job],
    residents: Sequence[Resident] = (),
    use: Shares | None = None,
    *,
    node: Node = NODE,
    held: QuotaCheck = no_quota,
    rules: Rules = RULES,
) -> Decision:
    return decide(waiting, residents, node, use or shares(), rules, NOW, held)


def started(decision: Decision) -> list[str]:
    return [job_id for job_id, _ in decision.start]


def test_as_many_jobs_are_loaded_as_fit() -> None:
    decision = decided([job(f"j{i}", order=i, host_gib=30) for i in range(5)])

    assert decision.start == (("j0", ("host",)), ("j1", ("host",)), ("j2", ("host",)))
    assert set(decision.why) == {"j3", "j4"}


def test_the_lowest_use_by_weight_is_loaded_first_then_priority_then_place() -> None:
    jobs = [
        job("a-late", "ann", order=5),
        job("a-old", "ann", order=1),
        job("b", "bob", order=4),
        job("a-first", "ann", order=6, priority=1),
        job("eve", "eve", order=9),
    ]
    decision = decided(jobs, use=shares({"ann": 2.0, "bob": 3.0, "eve": 1.0}))
    # A user's second job gets no more of the device, so that each user's first comes first.
    assert started(decision) == ["eve", "a-first", "b", "a-old", "a-late"]


def test_of_new_users_the_one_who_submitted_first_is_first() -> None:
    jobs = [job("z", "zoe", order=1), job("a", "ann", order=2, priority=100)]

    assert started(decided(jobs)) == ["z", "a"]


def test_a_user_who_waited_too_long_is_first_whatever_was_used_but_only_with_one_job() -> None:
    use = shares({"ann": 1000.0}, used_s=NOW - 24.1 * HOUR)
    old = [job(f"a{i}", "ann", order=i, host_gib=60, since_s=NOW - 25 * HOUR + i) for i in range(3)]
    jobs = [*old, job("b", "bob", order=9, host_gib=60, priority=500)]

    assert started(decided(jobs, use=use)) == ["a0"]
    # Not one who has had the device since, with another job.
    assert started(decided(jobs, use=shares({"ann": 1000.0}, used_s=NOW - 23.9 * HOUR))) == ["b"]
    now_resident = resident("a0", "ann", host_gib=30)
    assert started(decided([*old[1:], jobs[-1]], [now_resident], use)) == ["b"]


def test_an_urgent_job_is_loaded_before_all_shares() -> None:
    jobs = [job("a", "ann", order=1, host_gib=60), job("b", "bob", order=2, host_gib=60, priority=101)]

    assert started(decided(jobs, use=shares({"bob": 50.0}))) == ["b"]


def test_no_job_is_loaded_on_a_cordoned_node() -> None:
    node = dataclasses.replace(NODE, is_open=False)

    assert decided([job("a")], node=node).why == {"a": "the node is cordoned by an admin: no job starts"}


def test_the_least_loaded_device_of_the_kind_is_chosen() -> None:
    node = Node(host_bytes=500 * GIB, devices={"host": 0, "cuda:0": 20 * GIB, "cuda:1": 40 * GIB})
    on_1 = resident("r", device="cuda:1", remaining_s=10.0)
    small = job("a", device="cuda", device_bytes=GIB, order=1)
    big = job("b", device="cuda", device_bytes=30 * GIB, order=2)
    tied = job("c", device="cuda", device_bytes=GIB, order=3, remaining_s=5.0)

    decision = decided([small, big, tied, job("h", order=4)], [on_1], node=node)

    assert decision.start == (("a", ("cuda:0",)), ("b", ("cuda:1",)), ("c", ("cuda:0",)), ("h", ("host",)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"host_gib": 101}, "cannot start: it needs 101.00 GiB of host memory and the node has 100.00 GiB for jobs"),
        ({"device": "cuda"}, "cannot start: it needs a device of the kind cuda and the node's devices are: host"),
        ({"device_bytes": GIB}, "cannot start: it needs 1.00 GiB of device memory and 0.0 MiB are available"),
    ],
)
def test_what_can_never_start_delays_no_other_job(values: dict[str, Any], message: str) -> None:
    decision = decided([job("a", **values), job("b", order=1)])

    assert decision.why == {"a": message}
    assert started(decision) == ["b"]


def test_of_jobs_that_a_quota_holds_back_each_names_the_one_before_it() -> None:
    def held(job: Job, residents: Sequence[Resident]) -> str:
        return (
            "quota: 1 of 1 running jobs of user ann (--max-resident-jobs); job q1 ends at about 09:00 UTC"
            if residents
            else ""
        )

    waiting = [job("q2", order=2), job("q3", order=3), job("q4", order=4, priority=5)]
    decision = decide(waiting, [resident("q1")], NODE, shares(), RULES, NOW, held)
    quota = "quota: 1 of 1 running jobs of user ann (--max-resident-jobs)"
    assert decision.why == {
        "q4": f"{quota}; job q1 ends at about 09:00 UTC",
        "q2": f"{quota}; job q4 is before it",
        "q3": f"{quota}; job q2 is before it",
    }


def test_what_a_quota_holds_back_delays_no_other_job_and_counts_what_is_loaded_now() -> None:
    def held(one: Job, residents: Sequence[Resident]) -> str:
        num = sum(other.user == one.user for other in residents)
        return "quota: 1 of 1 running jobs" if num else ""

    decision = decided([job("a1", "ann"), job("a2", "ann", order=1), job("b", "bob", order=2)], held=held)

    assert started(decision) == ["a1", "b"]
    assert decision.why == {"a2": "quota: 1 of 1 running jobs"}


def test_a_waiting_job_shows_who_frees_its_memory_and_when() -> None:
    residents = [resident("x", host_gib=50, remaining_s=900.0), resident("y", "bob", host_gib=40, remaining_s=6 * HOUR)]
    decision = decided([job("big", "eve", host_gib=60), job("next", "eve", order=1, host_gib=20)], residents)

    # Job x needs 15 minutes of a device that two share: it ends at 9:23.
    assert (
        decision.why["big"]
        == "waiting for 60.00 GiB of host memory, 10.00 GiB are free; job x frees it at about 09:23 UTC"
    )
    assert decision.why["next"] == "waiting for 20.00 GiB of host memory, 10.00 GiB are free; job big is next"


def test_a_job_that_waits_for_several_or_unknown_ends_says_so() -> None:
    one, two = resident("x", host_gib=50, remaining_s=900.0), resident("y", "bob", host_gib=40)
    big = job("big", "eve", host_gib=100)

    assert decided([big], [one, two]).why["big"].endswith("; jobs x and y hold it, and when they end is not known yet")
    later = dataclasses.replace(two, remaining_s=30 * HOUR)
    assert decided([big], [one, later]).why["big"].endswith("; jobs x and y free it at about Friday 15:08 UTC")


class TestBackfill:
    big = job("big", "eve", host_gib=80, order=0)
    long = resident("long", "ann", host_gib=60, remaining_s=10 * HOUR)
    use = shares({"ann": 1.0, "bob": 1.0})

    def test_a_short_job_passes(self) -> None:
        short = job("short", "bob", host_gib=30, order=1, remaining_s=4 * HOUR)

        assert started(decided([self.big, short], [self.long], self.use)) == ["short"]

    def test_one_that_would_end_too_late_under_sharing_does_not(self) -> None:
        short = job("short", "bob", host_gib=30, order=1, remaining_s=6 * HOUR)
        decision = decided([self.big, short], [self.long], self.use)

        assert decision.start == ()
        assert decision.why["short"] == (
            "waiting behind job big, which is next and waits for 80.00 GiB of host memory; "
            "this job would delay it beyond 18:53 UTC"
        )

    def test_one_whose_loading_would_take_too_long_does_not(self) -> None:
        short = job("short", "bob", host_gib=30, order=1, remaining_s=4 * HOUR, load_s=3 * HOUR)

        assert decided([self.big, short], [self.long], self.use).start == ()

    def test_one_of_unknown_length_does_not(self) -> None:
        unknown = job("unknown", "bob", host_gib=30, order=1)
        decision = decided([self.big, unknown], [self.long], self.use)

        assert decision.start == ()
        assert decision.why["unknown"].endswith("how long this job takes is not known, so it may not pass")

    def test_one_of_unknown_length_passes_where_it_leaves_the_memory_free_only_once(self) -> None:
        jobs = [self.big, *(job(f"s{i}", f"user{i}", host_gib=12, order=1 + i) for i in range(3))]

        assert started(decided(jobs, [self.long], self.use)) == ["s0"]

    def test_none_passes_while_the_start_is_unknown(self) -> None:
        unknown = dataclasses.replace(self.long, remaining_s=None)
        decision = decided([self.big, job("s", "bob", host_gib=1, remaining_s=1.0, order=1)], [unknown], self.use)

        assert decision.start == ()
        assert decision.why["s"].endswith("when that starts is not known yet, so no other job may pass it")


class TestDisplacement:
    use = shares({"ann": 40.0, "bob": 10.0, "eve": 1.0})
    big = job("big", "eve", host_gib=50)
    of_ann = resident("a", "ann", host_gib=60, since_s=NOW - 4 * HOUR, remaining_s=100 * HOUR, unload_s=100.0)
    of_bob = resident("b", "bob", host_gib=30, since_s=NOW - 9 * HOUR, remaining_s=100 * HOUR, unload_s=100.0)

    def displaced(self, *residents: Resident, big: Job = big, use: Shares = use) -> tuple[str, ...]:
        return decided([big], residents, use).displace

    def test_the_user_furthest_above_the_share_makes_room(self) -> None:
        decision = decided([self.big], [self.of_ann, self.of_bob], self.use)

        assert decision.displace == ("a",)
        assert decision.why["big"].endswith("; job a is checkpointed and unloaded to make room")

    def test_not_before_the_residence_is_long_enough(self) -> None:
        early = dataclasses.replace(self.of_ann, resident_since_s=NOW - 4 * HOUR + 1)

        assert self.displaced(early, self.of_bob) == ()
        assert (
            decided([self.big], [early, self.of_bob], self.use).why["big"].endswith("job a frees it at about 08:53 UTC")
        )

    @pytest.mark.parametrize(("unload_s", "expected"), [(720.0, ("a",)), (721.0, ()), (None, ())])
    def test_not_where_unloading_costs_too_much_or_an_unknown_time(
        self, unload_s: float | None, expected: tuple[str]
    ) -> None:
        assert self.displaced(dataclasses.replace(self.of_ann, unload_s=unload_s), self.of_bob) == expected

    def test_not_a_user_below_the_share_nor_where_that_makes_too_little_room(self) -> None:
        too_big = dataclasses.replace(self.big, host_bytes=75 * GIB)

        assert self.displaced(self.of_ann, self.of_bob, big=too_big) == ()

    def test_not_for_a_user_further_above_the_share(self) -> None:
        assert self.displaced(self.of_ann, self.of_bob, use=shares({"ann": 20.0, "bob": 1.0, "eve": 30.0})) == ()

    def test_not_an_urgent_job(self) -> None:
        assert self.displaced(dataclasses.replace(self.of_ann, priority=101), self.of_bob) == ()

    def test_not_a_second_one_while_the_first_is_stopping(self) -> None:
        stopping = dataclasses.replace(self.of_ann, is_stopping=True)
        other = dataclasses.replace(self.of_bob, user="ann", project="ann")
        decision = decided([self.big], [stopping, other], self.use)

        assert decision.displace == ()
        assert decision.why["big"].endswith("; job a is stopping and frees it")

    def test_no_more_jobs_than_needed(self) -> None:
        residents = [
            dataclasses.replace(
                self.of_ann, job_id=f"a{i}", host_bytes=size * GIB, resident_since_s=NOW - (9 - i) * HOUR
            )
            for i, size in enumerate([5, 50, 40])
        ]
        assert self.displaced(*residents, self_bob(5)) == ("a1",)

    def test_an_aged_job_displaces_whatever_its_user_has_used(self) -> None:
        aged = dataclasses.replace(self.big, since_s=NOW - 25 * HOUR)
        use = shares({"ann": 20.0, "bob": 1.0, "eve": 30.0}, used_s=NOW - 25 * HOUR)

        assert self.displaced(self.of_ann, self.of_bob, big=aged, use=use) == ("a",)

    def test_the_displaced_job_is_not_loaded_again_before_the_one_it_made_room_for(self) -> None:
        for big in (self.big, dataclasses.replace(self.big, since_s=NOW - 25 * HOUR)):
            assert self.displaced(self.of_ann, self.of_bob, big=big) == ("a",)
            again = as_waiting(self.of_ann, NOW)
            decision = decided([again, big], [self.of_bob], self.use)

            assert started(decision) == ["big"]
            loaded = as_resident(dataclasses.replace(big, unload_s=1.0), ("host",), NOW)
            # Nor does it displace that one in its turn, before the residence is over.
            use = shares({"ann": 1.0, "bob": 10.0, "eve": 40.0})
            later = decide([again], [loaded, self.of_bob], NODE, use, RULES, NOW + 3.9 * HOUR, no_quota)
            assert later.displace == ()

    def test_no_job_is_displaced_whose_users_other_jobs_would_take_the_memory(self) -> None:
        # Without a resident job ann would come before eve's second job.
        residents = [self.of_ann, dataclasses.replace(self.of_bob, user="eve", project="eve")]

        assert self.displaced(*residents) == ()
        # And so would another job of ann's, if she had used no device for a day.
        waiting = [self.big, job("old", "ann", since_s=NOW - 30 * HOUR, order=1)]
        use = shares({"ann": 40.0, "bob": 10.0, "eve": 1.0}, used_s=NOW - 25 * HOUR)
        assert decided(waiting, [self.of_ann, self.of_bob], use).displace == ()
        assert decided(waiting, [self.of_ann, self.of_bob], self.use).displace == ("a",)

    def test_one_that_is_loaded_in_the_same_decision_is_no_rival_of_itself(self) -> None:
        # Eve has a resident job: ann's first one comes before her second, which then does not fit.
        new = job("new", "ann", host_gib=30, order=1, since_s=NOW - 9, unload_s=10.0)
        decision = decided([new, self.big], [resident("e", "eve", host_gib=30)], self.use)

        assert started(decision) == ["new"]
        assert decision.displace == ()

    def test_none_of_a_user_who_is_alone(self) -> None:
        waiting = job("a2", "ann", host_gib=60, priority=10)

        assert decided([waiting], [self.of_ann], shares({"ann": 5.0})).displace == ()


def self_bob(size_gib: int) -> Resident:
    return dataclasses.replace(TestDisplacement.of_bob, host_bytes=size_gib * GIB)


def test_the_same_state_gives_the_same_decision_in_any_order_of_its_parts() -> None:
    random = Random(3)
    waiting, residents, use = crowd(random, 60)
    decision = decided(waiting, residents, use)
    for _ in range(5):
        random.shuffle(waiting)
        random.shuffle(residents)
        assert decided(waiting, residents, use) == decision


def test_a_decision_about_500_jobs_takes_less_than_20_ms() -> None:
    waiting, residents, use = crowd(Random(1), 500)
    assert least_s(lambda: decided(waiting, residents, use), 0.020) < 0.020


def crowd(random: Random, num_jobs: int) -> tuple[list[Job], list[Resident], Shares]:
    users = [f"user{i}" for i in range(20)]
    waiting = [
        job(
            f"j{i}",
            random.choice(users),
            priority=random.randint(-3, 3),
            order=i,
            host_gib=random.uniform(2, 60),
            since_s=NOW - random.random() * 40 * HOUR,
            remaining_s=random.choice([None, random.uniform(60, 100_000)]),
        )
        for i in range(num_jobs)
    ]
    residents = [
        resident(
            f"r{i}",
            random.choice(users),
            host_gib=9.5,
            remaining_s=random.uniform(60, 100_000),
            since_s=NOW - random.random() * 10 * HOUR,
            unload_s=60.0,
        )
        for i in range(10)
    ]
    return waiting, residents, shares({user: random.random() * 20 for user in users})


def test_the_processes_of_jobs_that_share_a_gpu_leave_the_largest_its_memory() -> None:
    node = dataclasses.replace(NODE, devices={"cuda:0": 10 * GIB}, process_bytes=GIB)
    large = resident("large", "ann", device="cuda:0", device_bytes=8 * GIB)
    jobs = [job(name, name, device="cuda", device_bytes=GIB, order=order) for order, name in enumerate("bc")]

    decision = decided(jobs, [large], node=node)

    assert started(decision) == ["b", "c"]
    third = decided(
        [job("d", "dan", device="cuda", device_bytes=GIB)],
        [large, *(resident(name, name, device="cuda:0", device_bytes=GIB) for name in "bc")],
        node=node,
    )
    assert started(third) == []
    assert third.why["d"].startswith("waiting for device memory: each job that shares a GPU keeps 1.00 GiB of it")


FEW = dataclasses.replace(RULES, max_loading_jobs=3, max_loading_jobs_of_user=2)
"""At most three jobs are loaded at a time, of a user at most two."""


def test_of_one_user_only_a_few_jobs_are_loaded_at_a_time_and_those_of_others_pass() -> None:
    waiting = [*(job(f"e{i}", "eve", order=i, host_gib=1) for i in range(50)), job("bob", "bob", order=99, host_gib=1)]
    decision = decided(waiting, rules=FEW)
    assert started(decision) == ["e0", "bob", "e1"]
    assert (
        decision.why["e2"]
        == "2 jobs of user eve are being loaded, and 2 may be at a time; it follows when one is ready"
    )
    assert len(decision.why) == 48


def test_a_job_that_has_asked_for_its_first_turn_lets_the_next_one_be_loaded() -> None:
    waiting = [job(f"e{i}", "eve", order=i, host_gib=1) for i in range(5)]
    loading = [resident(f"r{i}", "eve", host_gib=1, is_loading=True) for i in range(2)]
    assert started(decided(waiting, loading, rules=FEW)) == []
    ready = [dataclasses.replace(loading[0], is_loading=False), loading[1]]
    assert started(decided(waiting, ready, rules=FEW)) == ["e0"]
    # Nor does one that is being taken out again hold the others.
    stopping = [dataclasses.replace(loading[0], is_stopping=True), loading[1]]
    assert started(decided(waiting, stopping, rules=FEW)) == ["e0"]


def test_while_jobs_of_others_train_one_job_of_a_user_is_loaded_at_a_time() -> None:
    waiting = [job(f"e{i}", "eve", order=i, host_gib=1) for i in range(5)]
    trains = resident("ada", "ada", host_gib=1)
    decision = decided(waiting, [trains], rules=FEW)
    assert started(decision) == ["e0"]
    assert decision.why["e1"] == (
        "1 job of user eve is being loaded, and 1 may be at a time while jobs of others train; it follows when one is "
        "ready"
    )
    # One's own job that trains, or one of another that is being loaded or taken out, is no reason.
    for other in (
        resident("own", "eve", host_gib=1),
        dataclasses.replace(trains, is_loading=True),
        dataclasses.replace(trains, is_stopping=True),
    ):
        assert started(decided(waiting, [other], rules=FEW)) == ["e0", "e1"]


def test_the_node_loads_few_jobs_at_a_time_those_of_the_lowest_use_first() -> None:
    users = ["ann", "bob", "cleo", "dan", "eve"]
    waiting = [job(user, user, order=i, host_gib=1) for i, user in enumerate(users)]
    use = shares({user: 5.0 - i for i, user in enumerate(users)})
    decision = decided(waiting, use=use, rules=FEW)
    assert started(decision) == ["eve", "dan", "cleo"]
    assert decision.why["ann"] == "3 jobs are being loaded, and 3 may be at a time; it follows in the order of shares"
    # What waits until another one's data is prepared uses no processor.
    waits = [resident(user, user, host_gib=1, is_loading=True, waits_to_prepare=True) for user in ("x", "y", "z")]
    assert started(decided(waiting, waits, use=use, rules=FEW)) == ["eve", "dan", "cleo"]


def test_the_bound_of_loading_displaces_nobody_and_keeps_no_memory() -> None:
    loading = [resident(f"r{i}", f"user{i}", host_gib=20, is_loading=True, unload_s=0.0) for i in range(3)]
    decision = decided([job("a", host_gib=10), job("b", host_gib=10)], loading, rules=FEW)
    assert (started(decision), decision.displace) == ([], ())


def test_without_a_rule_all_are_loaded() -> None:
    assert len(started(decided([job(f"j{i}", order=i, host_gib=1) for i in range(30)]))) == 30


SEVERAL_GPUS = Node(
    host_bytes=500 * GIB, devices={"host": 0, "cuda:0": 20 * GIB, "cuda:1": 40 * GIB, "cuda:2": 40 * GIB}
)


def test_a_job_of_several_devices_gets_those_with_the_fewest_jobs_in_the_nodes_order() -> None:
    pair = job("p", device="cuda", num_devices=2, device_bytes=GIB)
    residents = [resident("r", device="cuda:1"), resident("s", "bob", devices=("cuda:0", "cuda:1"))]

    assert decided([pair], node=SEVERAL_GPUS).start == (("p", ("cuda:0", "cuda:1")),)
    assert decided([pair], residents, node=SEVERAL_GPUS).start == (("p", ("cuda:0", "cuda:2")),)
    large = dataclasses.replace(pair, device_bytes=30 * GIB)
    assert decided([large], residents, node=SEVERAL_GPUS).start == (("p", ("cuda:1", "cuda:2")),)
    divided = Node(host_bytes=500 * GIB, devices={f"host:{index}": 0 for index in range(12)})
    wide = job("w", num_devices=12)
    assert decided([wide], node=divided).start == (("w", tuple(f"host:{index}" for index in range(12))),)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_devices": 4}, "cannot start: it needs 4 cuda devices and the node has: cuda:0, cuda:1, cuda:2"),
        (
            {"num_devices": 3, "device_bytes": 30 * GIB},
            "cannot start: it needs 30.00 GiB of device memory on each of its devices and 20.00 GiB are available",
        ),
        ({"num_devices": 2, "device": "host"}, "cannot start: it needs 2 host devices and the node has: host"),
    ],
)
def test_a_job_of_more_devices_than_there_are_can_never_start(values: dict[str, Any], message: str) -> None:
    decision = decided([job("a", **{"device": "cuda", **values}), job("b", order=1)], node=SEVERAL_GPUS)

    assert decision.why == {"a": message}
    assert started(decision) == ["b"]


def test_a_job_of_several_devices_waits_where_processes_leave_too_few_of_them_enough_memory() -> None:
    node = dataclasses.replace(SEVERAL_GPUS, process_bytes=GIB)
    full = [resident(f"r{index}", device=f"cuda:{index}", device_bytes=40 * GIB) for index in (1, 2)]
    decision = decided([job("p", device="cuda", num_devices=2, device_bytes=GIB)], full, node=node)

    assert decision.start == ()
    assert decision.why["p"].startswith("waiting for device memory")


def test_a_job_of_several_devices_ends_when_it_would_on_the_busiest_and_its_share_is_the_smallest() -> None:
    pair = resident("p", "ann", devices=("cuda:0", "cuda:1"), remaining_s=100.0)
    other = resident("o", "bob", device="cuda:1", remaining_s=1000.0)

    ends = predicted_ends([pair, other], shares(), NOW)
    assert ends == {"p": NOW + 200.0, "o": NOW + 1100.0}
    endless = resident("p", "ann", devices=("cuda:0", "cuda:1"), remaining_s=100.0, priority=-1)
    first = resident("f", "ann", device="cuda:1")
    assert predicted_ends([endless, first], shares(), NOW) == {}


def test_a_job_of_several_nodes_waits_for_as_many_as_it_needs() -> None:
    node = dataclasses.replace(NODE, further={"a:1": "", "b:1": "works for a job of another node", "c:1": ""})
    three, four, two = (job(f"of {num}", order=num, further_nodes=num - 1) for num in (3, 4, 2))

    decision = decided([two, three, four], node=node)
    assert started(decision) == ["of 2"]
    busy = "b:1 works for a job of another node"
    assert decision.why == {
        "of 3": f"waiting for nodes: it needs 2 further nodes; {busy}, job of 2 uses 1 of 3",
        "of 4": f"waiting for nodes: it needs 3 further nodes; {busy}",
    }
    # A job that needs none passes those that wait.
    assert started(decided([four, job("alone", order=9)], node=node)) == ["alone"]
    assert started(decided([three], node=node)) == ["of 3"]


def test_two_jobs_never_have_the_same_further_node() -> None:
    node = dataclasses.replace(NODE, further={"a:1": ""})
    first, second = (job(job_id, order=order, further_nodes=1) for order, job_id in enumerate(("first", "second")))

    decision = decided([first, second], node=node)
    assert started(decision) == ["first"]
    waits = "waiting for nodes: it needs 1 further node; job first uses 1 of 1"
    assert decision.why == {"second": waits}
    # Nor once it is resident, whose own nodes count as free.
    decision = decided([second], [resident("first", further_nodes=1)], node=node)
    assert (started(decision), decision.why) == ([], {"second": waits})
    too_many = decided([dataclasses.replace(second, further_nodes=2)], node=node)
    assert too_many.why == {"second": "cannot start: it needs 2 further nodes and this one knows 1"}


def test_a_job_with_a_range_of_nodes_waits_for_the_fewest_and_is_counted_with_those_that_it_has() -> None:
    node = dataclasses.replace(NODE, further={"a:1": "", "b:1": ""})
    needs_one, needs_none = job("one", order=1, further_nodes=1), job("none", order=2)
    # It could do with none, and has both.
    has_two = resident("has two", further_nodes=0, more_nodes=2, remaining_s=100.0)

    decision = decided([needs_one, needs_none], [has_two], node=node)
    assert started(decision) == ["none"]
    waits = "waiting for nodes: it needs 1 further node; job has two uses 2 of 2"
    assert decision.why == {"one": waits}
    # Queued again, it needs the fewest, on which it takes longer.
    again = as_waiting(has_two, NOW)
    assert (again.further_nodes, again.remaining_s) == (0, 300.0)
    has_one = dataclasses.replace(has_two, more_nodes=1)
    assert started(decided([needs_one], [has_one], node=node)) == ["one"]


@pytest.mark.parametrize(
    ("device", "kind"), [("host", "host"), ("host:0", "host"), ("cuda:0", "cuda"), ("host:0,host:1", "host")]
)
def test_the_kind_of_a_device_is_what_is_before_its_number(device: str, kind: str) -> None:
    assert kind_of(device) == kind
