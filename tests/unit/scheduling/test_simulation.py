from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from random import Random

import pytest
from tests.sharing_life import Life
from tests.sharing_parts import GIB, HOUR, NODE, NOW, RULES, job, no_quota, resident, shares
from tests.support.processor import least_s

from horizon_server.records.sharing import Allowance
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.simulation import Estimate, outlooks, simulate
from horizon_server.scheduling.state import Job, Node, Resident, Rules, Window


def simulated(
    waiting: Sequence[Job], residents: Sequence[Resident] = (), use: Shares | None = None, node: Node = NODE
) -> dict[str, Estimate]:
    return simulate(waiting, residents, node, use or shares(), RULES, NOW, no_quota)


def times(estimate: Estimate) -> tuple[float, float]:
    """Start and end, in seconds from now."""
    assert estimate.start_s is not None
    assert estimate.end_s is not None
    return estimate.start_s - NOW, estimate.end_s - NOW


def test_jobs_that_fit_share_the_device_and_end_accordingly() -> None:
    estimates = simulated([job("short", "ann", remaining_s=600.0), job("long", "bob", order=1, remaining_s=3600.0)])

    assert times(estimates["short"]) == pytest.approx((0, 1200), abs=61)
    assert times(estimates["long"]) == pytest.approx((0, 4200), abs=1)


def test_weights_and_earlier_use_decide_who_ends_first() -> None:
    jobs = [job("a", "ann", remaining_s=6000.0), job("b", "bob", order=1, remaining_s=6000.0)]

    weighted = simulated(jobs, use=shares(weights={"ann": 3.0}))
    assert weighted["a"].end_s == pytest.approx(NOW + 8000, abs=100)
    # Ann has used an hour more: bob has the device alone but for the turns of jobs that have waited too long.
    used = simulated(jobs, use=shares({"ann": 5.0}))
    assert used["b"].end_s == pytest.approx(NOW + 6000 * 21 / 20, rel=0.05)


def test_a_job_starts_when_memory_is_free() -> None:
    residents = [resident("r", "ann", host_gib=80, remaining_s=1000.0)]
    estimates = simulated([job("w", "bob", host_gib=30, remaining_s=500.0)], residents)

    assert times(estimates["r"]) == pytest.approx((0, 1000))
    assert times(estimates["w"]) == pytest.approx((1000, 1500))


def test_jobs_that_wait_for_other_nodes_have_an_outlook() -> None:
    node = dataclasses.replace(NODE, further={"a:1": ""})
    uses = resident("r", "ann", remaining_s=1000.0, further_nodes=1)
    waits = job("w", "bob", remaining_s=500.0, further_nodes=1)
    assert times(simulated([waits], [uses], node=node)["w"]) == pytest.approx((1000, 1500))
    # When a job of another node ends, nobody here knows.
    taken = dataclasses.replace(node, further={"a:1": "works for a job of another node"})
    never = simulated([waits, job("n", "cat", remaining_s=100.0)], node=taken)
    assert never["w"].start_s is None
    assert never["n"].start_s is not None
    assert set(outlooks([waits], [uses], node, shares(), RULES, NOW, no_quota)) == {"r", "w"}


def test_a_job_has_no_turn_while_it_is_loaded_and_others_have_the_device_meanwhile() -> None:
    residents = [
        resident("r", "ann", host_gib=40, remaining_s=1000.0),
        # Of the 200 s that are expected, 80 are left.
        dataclasses.replace(resident("l", "cat", host_gib=10, remaining_s=100.0), ready_s=NOW + 80.0),
    ]
    estimates = simulated([job("w", "bob", host_gib=40, remaining_s=500.0, load_s=300.0)], residents)

    assert times(estimates["l"]) == pytest.approx((0, 280), abs=121)
    assert times(estimates["w"]) == pytest.approx((0, 1200), abs=121)
    assert times(estimates["r"]) == pytest.approx((0, 1600), abs=1)


def test_a_device_waits_where_all_its_jobs_are_being_loaded() -> None:
    estimates = simulated([job("w", "bob", remaining_s=500.0, load_s=300.0)])

    assert times(estimates["w"]) == pytest.approx((0, 800))


def test_displacement_is_simulated_too() -> None:
    use = shares({"ann": 50.0, "eve": 1.0})
    long = resident("long", "ann", host_gib=80, remaining_s=30 * HOUR, since_s=NOW - HOUR, unload_s=100.0)
    estimates = simulated([job("w", "eve", host_gib=50, remaining_s=HOUR)], [long], use)

    # Three hours later the residence is long enough; saving takes half of what saving and loading take.
    assert estimates["w"].start_s == pytest.approx(NOW + 3 * HOUR + 50, abs=16 * 60)
    assert estimates["long"].start_s == NOW - HOUR
    assert estimates["long"].end_s == pytest.approx(NOW + 31 * HOUR + 50, abs=60)


def test_nothing_is_estimated_of_what_depends_on_a_job_of_unknown_length() -> None:
    residents = [resident("unknown", "ann", host_gib=60), resident("known", "bob", host_gib=30, remaining_s=600.0)]
    estimates = simulated([job("w", "eve", host_gib=50, remaining_s=60.0)], residents)

    assert estimates["unknown"].end_s is None
    assert estimates["known"].end_s == pytest.approx(NOW + 1200, abs=61)
    assert estimates["w"] == Estimate()


def test_nothing_starts_on_a_cordoned_node_or_against_a_quota() -> None:
    node = dataclasses.replace(NODE, is_open=False)
    residents = [resident("r", remaining_s=600.0)]

    estimates = simulated([job("w", remaining_s=60.0)], residents, node=node)
    assert estimates["w"] == Estimate()
    assert times(estimates["r"]) == pytest.approx((0, 600))
    held = simulate([job("w", remaining_s=60.0)], (), NODE, shares(), RULES, NOW, lambda job, residents: "quota")
    assert held == {"w": Estimate()}


class TestAMaintenanceWindow:
    window = Window(start_s=NOW + 1000, end_s=NOW + 8200, message="new GPU")
    node = dataclasses.replace(NODE, window=window)

    def test_a_running_job_is_taken_out_and_continues_after_it(self) -> None:
        estimates = simulated([], [resident("r", remaining_s=3000.0, load_s=50.0)], node=self.node)
        assert times(estimates["r"]) == pytest.approx((0, 8200 + 50 + 2000))

    def test_a_job_that_ends_before_it_is_left_alone(self) -> None:
        estimates = simulated([], [resident("r", remaining_s=900.0)], node=self.node)
        assert times(estimates["r"]) == pytest.approx((0, 900))

    def test_a_job_that_would_start_in_it_starts_at_its_end(self) -> None:
        node = dataclasses.replace(NODE, window=Window(start_s=NOW + 800, end_s=NOW + 2000))
        residents = [resident("r", "ann", host_gib=80, remaining_s=900.0)]
        estimates = simulated([job("w", "bob", host_gib=80, remaining_s=500.0)], residents, node=node)
        assert times(estimates["r"])[1] > 2000
        assert times(estimates["w"])[0] >= 2000

    def test_in_the_window_jobs_start_at_its_end(self) -> None:
        now = dataclasses.replace(NODE, is_open=False, window=Window(start_s=NOW - 100, end_s=NOW + 500))
        assert times(simulated([job("w", remaining_s=60.0)], node=now)["w"]) == pytest.approx((500, 560))
        shut = dataclasses.replace(now, window=Window(start_s=NOW - 100, end_s=NOW + 500, opens=False))
        assert simulated([job("w", remaining_s=60.0)], node=shut)["w"] == Estimate()

    def test_the_reason_names_it_to_jobs_that_it_concerns(self) -> None:
        jobs = [resident("long", "ann", remaining_s=3000.0), resident("short", "bob", remaining_s=60.0)]
        found = outlooks([], jobs, self.node, shares(), RULES, NOW, no_quota)
        assert found["long"].why.endswith("; paused from 09:10 to 11:10 UTC (new GPU)")
        assert "paused" not in found["short"].why
        unknown = outlooks([], [resident("unknown")], self.node, shares(), RULES, NOW, no_quota)
        assert "; paused from 09:10 to 11:10 UTC" in unknown["unknown"].why
        far = dataclasses.replace(self.node, window=Window(start_s=NOW + 200_000, end_s=NOW + 300_000))
        assert "paused" not in outlooks([], [resident("unknown")], far, shares(), RULES, NOW, no_quota)["unknown"].why


def test_places_follow_priorities_and_the_first_share_is_the_one_at_the_start() -> None:
    residents = [resident("r", "ann", host_gib=50, remaining_s=600.0)]
    waiting = [job("p1", "bob", order=1, host_gib=60), job("p2", "bob", order=2, host_gib=60, priority=10)]
    found = outlooks(waiting, residents, NODE, shares(), RULES, NOW, no_quota)
    assert {one: found[one].place for one in found} == {"r": 0, "p1": 2, "p2": 1}
    small, large = job("a", "bob", remaining_s=60.0), job("a", "bob", host_gib=60, remaining_s=60.0)
    asked = outlooks([small], residents, NODE, shares(), RULES, NOW, no_quota, asked="a")
    assert asked["a"].share == pytest.approx(1 / 2)
    later = outlooks([large], residents, NODE, shares(), RULES, NOW, no_quota, asked="a")
    assert later["a"].share == pytest.approx(1)


def test_two_devices_work_at_the_same_time() -> None:
    node = Node(host_bytes=100 * GIB, devices={"cuda:0": GIB, "cuda:1": GIB})
    jobs = [job(f"j{i}", order=i, device="cuda", remaining_s=1000.0) for i in range(2)]

    assert {one.end_s for one in simulated(jobs, node=node).values()} == {NOW + 1000}


def test_the_shares_given_are_not_charged() -> None:
    use = shares({"ann": 1.0})
    simulated([job("a", remaining_s=6000.0)], use=use)

    assert use.use_of("ann", "ann", NOW) == HOUR


class TestOutlooks:
    node = Node(host_bytes=100 * GIB, devices={"cuda:0": GIB})

    def why(self, *residents: Resident, use: Shares | None = None, node: Node = node) -> dict[str, str]:
        found = outlooks([], residents, node, use or shares(), RULES, NOW, no_quota)
        return {job_id: outlook.why for job_id, outlook in found.items()}

    def test_a_resident_job_shows_its_share(self) -> None:
        jobs = [resident(f"j{i}", f"user{i}", device="cuda:0", remaining_s=600.0) for i in range(3)]
        found = outlooks([], jobs, self.node, shares(), RULES, NOW, no_quota)

        assert found["j1"].why == "resident, 3 jobs share the GPU, its share 1/3"
        assert found["j1"].share == pytest.approx(1 / 3)
        assert found["j1"].estimated_start_s == NOW
        assert found["j1"].estimated_end_s == pytest.approx(NOW + 1740, abs=61)

    def test_alone_on_one_of_several_gpus_and_on_the_host(self) -> None:
        two = Node(host_bytes=GIB, devices={"cuda:0": GIB, "cuda:1": GIB})

        assert self.why(resident("a", device="cuda:1"), node=two) == {"a": "resident, the only job on cuda:1"}
        assert self.why(resident("a"), node=NODE) == {"a": "resident, the only job on the host device"}

    def test_an_uneven_share_is_given_in_percent(self) -> None:
        use = shares(weights={"ann": 1.37})
        whys = self.why(resident("a", "ann", device="cuda:0"), resident("b", "bob", device="cuda:0"), use=use)

        assert whys["a"] == "resident, 2 jobs share the GPU, its share 58%"

    def test_a_job_that_another_precedes_names_it(self) -> None:
        low, high = resident("low", device="cuda:0"), resident("high", device="cuda:0", priority=7)
        urgent = resident("urgent", "eve", device="cuda:0", priority=200)

        assert (
            self.why(low, high)["low"]
            == "resident, 2 jobs share the GPU; job high of the same user, with priority 7, goes first"
        )
        whys = self.why(low, high, urgent)
        assert whys["high"] == "resident, 3 jobs share the GPU; the urgent job urgent with priority 200 goes first"
        assert whys["urgent"] == "resident, 3 jobs share the GPU, its share 1"

    def test_a_stopping_job_says_so(self) -> None:
        whys = self.why(resident("a", device="cuda:0", is_stopping=True), resident("b", device="cuda:0"))

        assert whys == {"a": "stopping: its host memory is being freed", "b": "resident, the only job on the GPU"}

    def test_a_waiting_job_names_what_it_waits_for_with_the_simulated_time(self) -> None:
        # Bob has used much: ann's job has the GPU almost alone, and ends long before equal parts would end it.
        use = shares({"bob": 50.0})
        residents = [
            resident("x", "ann", device="cuda:0", host_gib=60, remaining_s=4 * HOUR),
            resident("y", "bob", device="cuda:0", host_gib=10, remaining_s=20 * HOUR),
        ]
        waiting = [job("w", "eve", device="cuda", host_gib=80, remaining_s=60.0), job("never", host_gib=101, order=1)]
        found = outlooks(waiting, residents, self.node, use, RULES, NOW, no_quota)

        ends = time.strftime("%H:%M", time.gmtime(found["x"].estimated_end_s))
        assert (
            found["w"].why
            == f"waiting for 80.00 GiB of host memory, 30.00 GiB are free; job x frees it at about {ends} UTC"
        )
        assert found["w"].estimated_start_s == found["x"].estimated_end_s
        assert found["never"].why.startswith("cannot start: it needs 101.00 GiB")
        assert found["never"].estimated_start_s is None

    def test_jobs_that_start_or_make_room_now_say_so(self) -> None:
        use = shares({"ann": 50.0, "eve": 1.0})
        long = resident("long", host_gib=80, remaining_s=30 * HOUR, since_s=NOW - 5 * HOUR, unload_s=100.0)
        found = outlooks([job("w", "eve", host_gib=50)], [long], NODE, use, RULES, NOW, no_quota)
        assert (
            found["long"].why
            == "its user is above the share: it is checkpointed, unloaded and queued again to make room"
        )

        found = outlooks([job("w", "eve", host_gib=20)], [long], NODE, use, RULES, NOW, no_quota)
        assert found["w"].why == "starts now"


def lab(seed: int) -> tuple[Life, dict[str, float]]:
    """A node on which 20 users have submitted 200 jobs, and the device seconds that each is predicted to need."""
    random = Random(seed)
    users = [f"user{i}" for i in range(20)]
    allowances = [Allowance(holder="project", name=user, weight=random.choice([1.0, 1.0, 3.0])) for user in users]
    use = Shares(24 * HOUR, allowances=allowances)
    for user in users:
        use.charge(user, user, random.random() * HOUR, NOW)
    life = Life(Node(host_bytes=100 * GIB, devices={"cuda:0": GIB}), Rules(), use, step_s=5.0)
    predicted_s = {f"j{i}": random.uniform(300, 4000) for i in range(200)}
    for job_id, left_s in predicted_s.items():
        values = {"priority": random.choice([0, 0, 5]), "host_gib": random.uniform(5, 45), "remaining_s": left_s}
        life.submit(job(job_id, random.choice(users), device="cuda", **values), left_s)
    return life, predicted_s


@pytest.mark.parametrize(("noise", "most"), [(0.0, 0.05), (0.2, 0.15)])
def test_estimates_are_close_to_what_then_happens(noise: float, most: float) -> None:
    life, predicted_s = lab(6)
    estimates = simulate(list(life.waiting.values()), (), life.node, life.shares, life.rules, life.now_s, no_quota)
    random = Random(6)
    life.left_s = {job_id: left_s * random.uniform(1 - noise, 1 + noise) for job_id, left_s in predicted_s.items()}
    life.advance(NOW + 1.5 * sum(life.left_s.values()))

    assert set(life.ended) == set(predicted_s)
    errors = []
    for job_id, estimate in estimates.items():
        assert estimate.start_s is not None
        assert estimate.end_s is not None
        errors.append(abs(estimate.end_s - life.ended_s[job_id]) / (life.ended_s[job_id] - NOW))
        if life.started_s[job_id] > NOW:
            errors.append(abs(estimate.start_s - life.started_s[job_id]) / (life.started_s[job_id] - NOW))
    assert statistics.median(errors) < most


def test_days_of_200_jobs_are_simulated_in_less_than_a_second() -> None:
    life, _ = lab(5)
    waiting = list(life.waiting.values())

    def work() -> None:
        simulate(waiting, (), life.node, life.shares, life.rules, life.now_s, no_quota)

    assert least_s(work, 1.0) < 1.0


def test_a_few_jobs_at_a_time_are_loaded_and_the_next_begins_when_one_is_ready() -> None:
    rules = dataclasses.replace(RULES, max_loading_jobs=4, max_loading_jobs_of_user=1)
    jobs = [job(f"e{i}", "eve", order=i, host_gib=1, remaining_s=10.0, load_s=100.0) for i in range(4)]
    estimates = simulate(jobs, [], NODE, shares(), rules, NOW, no_quota)
    assert [times(estimates[f"e{i}"])[0] for i in range(4)] == pytest.approx([0, 100, 200, 300])
    assert times(estimates["e3"])[1] == pytest.approx(410)
    # One of which the load takes longer than expected is ready at any moment.
    late = resident("r", "eve", host_gib=1, remaining_s=10.0, is_loading=True)
    estimates = simulate(jobs, [late], NODE, shares(), rules, NOW, no_quota)
    assert times(estimates["e0"])[0] == pytest.approx(0)


def test_many_short_jobs_of_one_user_are_estimated_in_no_time() -> None:
    rules = dataclasses.replace(RULES, max_loading_jobs=4, max_loading_jobs_of_user=2)
    jobs = [job(f"e{i}", "eve", order=i, host_gib=1, remaining_s=1.0, load_s=20.0) for i in range(500)]
    began_s = time.process_time()
    estimates = simulate(jobs, [resident("a", remaining_s=1e5)], NODE, shares(), rules, NOW, no_quota)
    assert all(one.end_s is not None for one in estimates.values())
    assert time.process_time() - began_s < 20


TWO = Node(host_bytes=100 * GIB, devices={"host:0": 0, "host:1": 0})


def test_a_job_of_two_devices_and_one_on_each_end_as_their_use_of_both_says() -> None:
    pair = resident("pair", "ann", devices=("host:0", "host:1"), remaining_s=600.0)
    singles = [resident(f"s{index}", f"u{index}", device=f"host:{index}", remaining_s=600.0) for index in range(2)]

    assert times(simulated([], [pair], node=TWO)["pair"]) == pytest.approx((0, 600))
    estimates = simulated([], [pair, *singles], node=TWO)
    # It is charged for both devices, and so has a third of the time.
    assert times(estimates["pair"]) == pytest.approx((0, 1200), abs=130)
    for name in ("s0", "s1"):
        assert times(estimates[name]) == pytest.approx((0, 900), abs=130)


def test_where_a_job_of_two_devices_stands_is_said_of_both() -> None:
    pair = resident("pair", "ann", devices=("host:0", "host:1"), remaining_s=600.0)
    single = resident("single", "bob", device="host:1", remaining_s=600.0)
    found = outlooks([], [pair, single], TWO, shares(), RULES, NOW, no_quota)

    assert found["pair"].why == "resident, 2 jobs share host:0 and host:1, its share 1/2"
    assert found["single"].why == "resident, 2 jobs share host:1, its share 1/2"
    assert found["pair"].share == found["single"].share == 0.5
    alone = outlooks([], [pair], TWO, shares(), RULES, NOW, no_quota)
    assert alone["pair"].why == "resident, the only job on host:0 and host:1"


@pytest.mark.parametrize("seed", range(20))
def test_jobs_of_any_number_of_devices_all_end_and_none_before_it_can(seed: int) -> None:
    random = Random(seed)
    num_devices = random.randint(2, 4)
    node = Node(host_bytes=60 * GIB, devices={f"host:{index}": 0 for index in range(num_devices)})
    waiting = [
        job(
            f"j{index}",
            f"u{random.randint(0, 3)}",
            order=index,
            priority=random.choice([0, 0, 5]),
            num_devices=random.randint(1, num_devices),
            remaining_s=random.uniform(10.0, 5000.0),
            load_s=random.choice([0.0, 30.0]),
            unload_s=1.0,
        )
        for index in range(12)
    ]
    estimates = simulated(waiting, node=node, use=shares({"u0": random.uniform(0.0, 3.0)}))
    total_s = sum((one.remaining_s or 0.0) + one.load_s for one in waiting)
    for one in waiting:
        start_s, end_s = times(estimates[one.job_id])
        assert one.remaining_s is not None
        assert start_s + one.load_s + one.remaining_s <= end_s + 1e-3
        assert end_s <= 1.5 * total_s
    work_s = sum((one.remaining_s or 0.0) * one.num_devices for one in waiting)
    assert max(times(one)[1] for one in estimates.values()) >= work_s / num_devices - 1e-3
