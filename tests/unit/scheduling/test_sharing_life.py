"""What must hold whatever users do: see `Life.check`. First as Hypothesis finds it, then over a long time with many
jobs."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.sharing_life import Life
from tests.sharing_parts import GIB, HOUR, NOW, job

from horizon_server.records.sharing import Allowance, Quota
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Node, Rules

USERS = [f"user{i}" for i in range(5)]
WEIGHTS = st.sampled_from([0.0, 0.5, 1.0, 3.0])
PRIORITIES = st.sampled_from([-100, -1, 0, 0, 0, 1, 100, 101, 500])


class SharingLife(RuleBasedStateMachine):
    """Users, workers and admins act in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.num_jobs = 0
        self.weights = dict.fromkeys(USERS, 1.0)

    @initialize(limits=st.lists(st.sampled_from([None, 1, 2]), min_size=5, max_size=5), devices=st.sampled_from([1, 2]))
    def start(self, limits: list[int | None], devices: int) -> None:
        quotas = {user: Quota(max_resident_jobs=limit) for user, limit in zip(USERS, limits, strict=True)}
        quotas[USERS[0]] = Quota(max_host_bytes=60 * GIB)
        node = Node(host_bytes=100 * GIB, devices={f"cuda:{i}": 40 * GIB for i in range(devices)})
        rules = Rules(max_residence_s=1800.0, max_wait_s=2 * HOUR)
        self.life = Life(node, rules, Shares(2 * HOUR), quotas, step_s=7.0)

    @rule(
        user=st.sampled_from(USERS),
        project=st.sampled_from(["", "lab"]),
        host_gib=st.integers(1, 60),
        left_s=st.floats(1.0, 5000.0),
        predicted=st.sampled_from([None, 0.5, 1.0, 2.0]),
        priority=PRIORITIES,
    )
    def submit(
        self, user: str, project: str, host_gib: int, left_s: float, predicted: float | None, priority: int
    ) -> None:
        self.num_jobs += 1
        remaining_s = None if predicted is None else left_s * predicted
        values = {"project": project or user, "host_gib": host_gib, "priority": priority, "remaining_s": remaining_s}
        self.life.submit(job(f"j{self.num_jobs}", user, device="cuda", device_bytes=30 * GIB, **values), left_s)

    @rule(seconds=st.sampled_from([1.0, 65.0, 600.0, 4000.0]))
    def advance(self, seconds: float) -> None:
        self.life.advance(self.life.now_s + seconds)

    @precondition(lambda self: self.life.waiting or self.life.residents)
    @rule(how=st.sampled_from(["pause", "cancel", "die", "priority"]), priority=PRIORITIES, data=st.data())
    def act(self, how: str, priority: int, data: st.DataObject) -> None:
        running = [one.job_id for one in self.life.residents.values() if not one.is_stopping]
        jobs = sorted(running if how == "die" else [*self.life.waiting, *running])
        if jobs:
            job_id = data.draw(st.sampled_from(jobs))
            if how == "priority":
                self.life.set_priority(job_id, priority)
            else:
                getattr(self.life, how)(job_id)

    @precondition(lambda self: self.life.paused)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        self.life.resume(data.draw(st.sampled_from(sorted(self.life.paused))))

    @rule(user=st.sampled_from(USERS), weight=WEIGHTS)
    def set_weight(self, user: str, weight: float) -> None:
        self.weights[user] = weight
        self.life.shares.set_allowances(
            Allowance(holder=holder, name=name, weight=one)
            for name, one in self.weights.items()
            for holder in ("user", "project")
        )

    @rule(is_open=st.booleans())
    def cordon(self, is_open: bool) -> None:
        self.life.open(is_open)

    @invariant()
    def check(self) -> None:
        if hasattr(self, "life"):
            self.life.check()
            assert self.life.longest_turn_wait <= 1

    def teardown(self) -> None:
        """Left alone, every job ends, within the work that there is and what moving jobs costs."""
        if not hasattr(self, "life"):
            return
        self.life.open(True)
        for job_id in list(self.life.paused):
            self.life.resume(job_id)
        self.life.advance(self.life.now_s + 2 * self.life.unload_s)
        for job_id in list(self.life.paused):
            self.life.resume(job_id)
        self.life.advance(self.life.now_s + 2 * sum(self.life.left_s.values()) + 600 * len(self.life.left_s))
        assert set(self.life.ended) == set(self.life.left_s)
        self.check()


TestSharingLife = SharingLife.TestCase
TestSharingLife.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class Lab:
    """20 users: 12 of them always have three jobs, the others submit now and then. All pause, resume, cancel, and
    workers die."""

    half_life_s = 4 * HOUR
    rules = Rules(max_residence_s=40 * 60.0, max_wait_s=4 * HOUR)

    def __init__(self, seed: int) -> None:
        self.random = random = Random(seed)
        self.users = [f"user{i}" for i in range(20)]
        self.busy = self.users[:12]
        self.weights = {user: random.choice([1.0, 1.0, 2.0, 3.0]) for user in self.users}
        allowances = [Allowance(holder="project", name=user, weight=one) for user, one in self.weights.items()]
        quotas = {
            user: Quota(max_resident_jobs=random.choice([None, 2, 3]), max_host_bytes=random.choice([None, 50 * GIB]))
            for user in self.users
        }
        node = Node(host_bytes=100 * GIB, devices={"host": 0})
        self.life = Life(node, self.rules, Shares(self.half_life_s, allowances=allowances), quotas, step_s=7.0)
        self.num_jobs = 0

    def submit(self, user: str) -> None:
        self.num_jobs += 1
        left_s = 10 + self.random.expovariate(1 / 140)
        predicted_s = None if self.random.random() < 0.1 else left_s * self.random.uniform(0.8, 1.2)
        values = {"priority": self.random.choice([0, 0, 0, 5, -5]), "host_gib": self.random.uniform(2, 30)}
        self.life.submit(job(f"j{self.num_jobs}", user, remaining_s=predicted_s, **values), left_s)

    def act(self) -> None:
        """What a minute brings."""
        life, random = self.life, self.random
        own = [*life.waiting.values(), *life.residents.values()]
        for user in self.busy:
            for _ in range(sum(one.user == user for one in own), 3):
                self.submit(user)
        if random.random() < 0.15:
            self.submit(random.choice(self.users[12:]))
        running = sorted(one.job_id for one in life.residents.values() if not one.is_stopping)
        chance = random.random()
        if chance < 0.03 and life.waiting:
            life.pause(random.choice(sorted(life.waiting)))
        elif chance < 0.06 and running:
            life.pause(random.choice(running))
        elif chance < 0.15 and life.paused:
            life.resume(random.choice(sorted(life.paused)))
        elif chance < 0.17 and running:
            life.cancel(random.choice(running))
        elif chance < 0.19 and running:
            life.die(random.choice(running))
        elif chance < 0.20 and life.waiting:
            life.set_priority(random.choice(sorted(life.waiting)), random.choice([-5, 5, 50]))

    def share_error(self) -> float:
        """The largest difference of an always busy user's part of the device from what the weights give, relative to
        that."""
        used_s = sum(self.life.used_s[user] for user in self.busy)
        weights = sum(self.weights[user] for user in self.busy)
        return max(abs(self.life.used_s[user] / used_s / (self.weights[user] / weights) - 1) for user in self.busy)


@pytest.mark.parametrize("seed", [1])
def test_shares_hold_over_ten_half_lives_of_a_lab_and_no_job_is_lost(seed: int) -> None:
    lab = Lab(seed)
    life = lab.life
    while life.now_s < NOW + 10 * lab.half_life_s:
        lab.act()
        life.advance(life.now_s + 60)

    assert lab.num_jobs >= 1000
    assert lab.share_error() < 0.05
    assert life.longest_turn_wait <= 1
    assert life.num_displaced > 10
    # No user who has a job is without a resident one for longer than max_wait_s and a residence, in which memory
    # becomes free.
    assert max(life.longest_without_s.values()) < lab.rules.max_wait_s + lab.rules.max_residence_s

    for job_id in sorted(life.paused):
        life.resume(job_id)
    life.advance(life.now_s + 12 * HOUR)
    assert set(life.ended) == set(life.left_s)
