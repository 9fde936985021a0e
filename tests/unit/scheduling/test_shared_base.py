"""Jobs on one frozen base: their memory is counted once, by admission, by quotas, and in what is told."""

from __future__ import annotations

from random import Random

from tests.sharing_parts import GIB, HOUR, NODE, NOW, RULES, job, no_quota, resident, shares

from horizon_server.records.plan import HeldMemory, SharedBase
from horizon_server.records.sharing import Allowance, Quota
from horizon_server.scheduling.admission import decide
from horizon_server.scheduling.quotas import why_not_resident
from horizon_server.scheduling.simulation import outlooks
from horizon_server.scheduling.state import Decision, Job, Resident

BASE = SharedBase(key="base", num_bytes=50 * GIB)
OTHER = SharedBase(key="other", num_bytes=50 * GIB)


def decided(waiting: list[Job], residents: list[Resident]) -> Decision:
    return decide(waiting, residents, NODE, shares(), RULES, NOW, no_quota)


def started(decision: Decision) -> list[str]:
    return [job_id for job_id, _ in decision.start]


def students(number: int) -> list[Job]:
    return [job(f"j{i}", order=i, host_gib=55, base=BASE) for i in range(number)]


def test_ten_jobs_on_one_base_are_loaded_where_it_is_there_once() -> None:
    # 50 for the base and 5 for each job: ten of them are all of the node's 100.
    decision = decided(students(12), [])
    assert started(decision) == [f"j{i}" for i in range(10)]
    assert decision.why["j10"].startswith("waiting for 5.00 GiB of host memory, 0.0 MiB are free")


def test_jobs_on_two_bases_or_on_none_share_nothing() -> None:
    for other in (OTHER, None):
        decision = decided([job("second", host_gib=55, base=other)], [resident("first", host_gib=55, base=BASE)])
        assert started(decision) == []
        assert decision.why["second"].startswith("waiting for 55.00 GiB of host memory, 45.00 GiB are free")


def test_a_base_is_there_until_the_last_job_on_it_has_ended() -> None:
    ends = {"first": NOW + HOUR, "second": NOW + 2 * HOUR}
    residents = [resident(name, host_gib=55, base=BASE, remaining_s=end - NOW) for name, end in ends.items()]
    whole = [job("whole", host_gib=90)]
    decision = decide(whole, residents, NODE, shares(), RULES, NOW, no_quota, ends=dict(ends))
    assert started(decision) == []
    # The end of the first frees 5 GiB only.
    assert "jobs first and second free it at about" in decision.why["whole"]


def test_a_job_on_the_base_that_is_there_may_pass_where_one_with_its_own_may_not() -> None:
    # Two hours long, behind a job that starts in one hour and leaves 10 GiB beside the base.
    first = resident("first", host_gib=65, base=BASE, remaining_s=HOUR)
    stays = resident("stays", host_gib=55, base=BASE, remaining_s=100 * HOUR)
    head = job("head", order=0, host_gib=35)
    own = job("own", order=1, host_gib=55, remaining_s=2 * HOUR)
    sharing = job("sharing", order=2, host_gib=55, base=BASE, remaining_s=2 * HOUR)
    decision = decide(
        [head, own, sharing],
        [first, stays],
        NODE,
        shares(),
        RULES,
        NOW,
        no_quota,
        ends={"first": NOW + HOUR, "stays": NOW + 100 * HOUR},
    )
    assert started(decision) == ["sharing"]


def test_a_quota_counts_the_base_of_a_users_jobs_once() -> None:
    allowance = Allowance(holder="user", name="ann", quota=Quota(max_host_bytes=60 * GIB))
    mine = [resident("mine", host_gib=55, base=BASE)]
    assert why_not_resident(allowance, job("more", host_gib=55, base=BASE), mine, now_s=NOW) == ""
    refused = why_not_resident(allowance, job("more", host_gib=55, base=OTHER), mine, now_s=NOW)
    assert "and this job needs 55.00 GiB" in refused


def test_a_job_is_told_with_how_many_others_it_shares_its_base() -> None:
    residents = [resident(f"r{i}", host_gib=55, base=BASE) for i in range(3)]
    told = outlooks([job("next", host_gib=55, base=BASE)], residents, NODE, shares(), RULES, NOW, no_quota)
    assert told["next"].why == "starts now; its base (50.00 GiB) is in memory already, shared with 3 jobs"
    assert told["r1"].why.endswith("; its base (50.00 GiB) is shared with 2 jobs")
    alone = outlooks([job("one", host_gib=55, base=BASE)], [], NODE, shares(), RULES, NOW, no_quota)
    assert alone["one"].why == "starts now"


def test_what_jobs_have_together_does_not_depend_on_who_came_and_left_before() -> None:
    chance = Random(3)
    bases = [None, BASE, OTHER]
    memory, present = HeldMemory(), list[tuple[int, SharedBase | None]]()
    for _ in range(500):
        if present and chance.random() < 0.45:
            memory.remove(*present.pop(chance.randrange(len(present))))
        else:
            base = chance.choice(bases)
            one = (chance.randrange(1, 9) + (base.num_bytes if base else 0), base)
            present.append(one)
            memory.add(*one)
        own = sum(num_bytes - (base.num_bytes if base else 0) for num_bytes, base in present)
        there = {base.key: base.num_bytes for _, base in present if base}
        assert memory.num_bytes == own + sum(there.values())
        assert memory.bases == there.keys()
