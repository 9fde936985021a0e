"""The replay of a queue in virtual time: what an estimate gains from knowing how jobs usually arrive.

Users, lengths and arrivals are those of `bench.sharing_replay`, and so are the daemon's decisions, turns and shares;
loading, running and waiting take no time here, so that hundreds of jobs count, and the machine's other work does not.
Each job is estimated when it is submitted, in three ways:

today:   the daemon's, which counts no job that is submitted later.
learned: the median of several futures, in each of which the last submissions come again, beginning at another one of
them. oracle:  from futures drawn as the real one is: who submits what and when, what steps and loading really take.
Nothing that cannot look into
         the future knows more. Of the drawn times that one is taken whose relative error is the smallest on average.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from tests.sharing_life import Life
from tests.sharing_parts import GIB, job

from bench.sharing_replay import (
    LEAST_WAIT_S,
    NUM_USERS,
    SIGMA_OF_STEPS,
    SLICE_S,
    Replayed,
    drawn_length,
    drawn_user,
    median_errors,
)
from horizon_server.records.sharing import Quota
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Node, Resident, Rules

HIT = 0.25
_USERS = [f"user-{number}" for number in range(NUM_USERS)]
_NUM_FUTURES = 15
_MOST_LEARNED = 100
_HALF_LIFE_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Case:
    """A node with memory for some jobs, and how they arrive. The first `num_unseen` of a replay are not counted."""

    num_resident: int
    arrival_s: float
    load_s: float
    load_sigma: float = 0.4
    num_jobs: int = 40
    num_unseen: int = 0
    num_replays: int = 1


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job that is submitted `gap_s` after the one before."""

    gap_s: float
    user: str
    device_s: float


Times = tuple[float, float]
"""When a job starts and ends, in seconds from its submission."""


def submissions(drawn: Random, arrival_s: float) -> Iterator[Submission]:
    """Yield the jobs of the replay, without an end."""
    while True:
        user = drawn_user(drawn, _USERS)
        device_s = drawn_length(drawn)
        yield Submission(gap_s=drawn.expovariate(1 / arrival_s), user=user, device_s=device_s)


def best_of(times_s: Iterable[float]) -> float:
    """Return that of the times whose mean error, relative to each of them, is the smallest; 0 of none."""
    ordered = sorted(max(time_s, 1e-3) for time_s in times_s)
    half, passed = sum(1 / time_s for time_s in ordered) / 2, 0.0
    for time_s in ordered:
        passed += 1 / time_s
        if passed >= half:
            return time_s
    return 0.0


@dataclass(kw_only=True)
class Replay:
    """One queue's life, from an empty node."""

    case: Case
    drawn: Random
    life: Life = field(init=False)
    seen: list[Submission] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        most = min(4, self.case.num_resident)
        rules = Rules(time_slice_s=SLICE_S, max_loading_jobs=4, max_loading_jobs_of_user=2)
        node = Node(host_bytes=10 * GIB * self.case.num_resident, devices={"host": 0})
        quotas = {user: Quota(max_resident_jobs=most) for user in _USERS}
        self.life = Life(node, rules, Shares(_HALF_LIFE_S), quotas, step_s=0.1)

    def run(self) -> dict[str, list[Replayed]]:
        """Return estimates and what came, by the way of estimating."""
        future = Random(self.drawn.random())
        found: dict[str, dict[str, Times]] = {}
        submitted_s: dict[str, float] = {}
        source = submissions(self.drawn, self.case.arrival_s)
        for number in range(self.case.num_jobs):
            job_id = f"job-{number}"
            self.seen.append(one := next(source))
            self.life.advance(self.life.now_s + one.gap_s)
            self._submit(self.life, job_id, one, self.drawn)
            submitted_s[job_id] = self.life.now_s
            if number >= self.case.num_unseen:
                found[job_id] = self._estimates(job_id, future)
        while len(self.life.ended) < self.case.num_jobs:
            self.life.advance(self.life.now_s + 60.0)
        replayed: dict[str, list[Replayed]] = {}
        for job_id, estimates in found.items():
            start_s, end_s = (of[job_id] - submitted_s[job_id] for of in (self.life.started_s, self.life.ended_s))
            for name, (estimated_start_s, estimated_end_s) in estimates.items():
                replayed.setdefault(name, []).append(
                    Replayed(
                        estimated_start_s=estimated_start_s,
                        estimated_end_s=estimated_end_s,
                        start_s=start_s,
                        end_s=end_s,
                    )
                )
        return replayed

    def _submit(self, life: Life, job_id: str, one: Submission, drawn: Random | None) -> None:
        """Submit a job that takes what is predicted, or what is drawn."""
        left_s, load_s = one.device_s, self.case.load_s
        if drawn is not None:
            left_s *= math.exp(drawn.gauss(0, SIGMA_OF_STEPS))
            load_s *= math.exp(drawn.gauss(0, self.case.load_sigma))
        life.submit(job(job_id, one.user, remaining_s=one.device_s, load_s=load_s), left_s)

    def _estimates(self, job_id: str, future: Random) -> dict[str, Times]:
        drawn = [self._played(job_id, submissions(future, self.case.arrival_s), future) for _ in range(_NUM_FUTURES)]
        starts = (start_s for start_s, _ in drawn if start_s >= LEAST_WAIT_S)
        learned = [self._played(job_id, again, None) for again in self._continuations()]
        return {
            "today": self._of_daemon(job_id),
            "learned": (statistics.median(one[0] for one in learned), statistics.median(one[1] for one in learned)),
            "oracle": (best_of(starts), best_of(end_s for _, end_s in drawn)),
        }

    def _continuations(self) -> list[Iterator[Submission]]:
        """Return futures in which what was submitted last comes again, once; each begins at another submission."""
        last = self.seen[-_MOST_LEARNED:]
        begins = sorted({len(last) * number // _NUM_FUTURES for number in range(_NUM_FUTURES)})
        return [iter([*last[begin:], *last[:begin]]) for begin in begins]

    def _of_daemon(self, job_id: str) -> Times:
        """Return what the daemon says: what is loaded is expected to take the usual time."""
        found = self.life.estimates(lambda _: self.case.load_s)[job_id]
        assert found.start_s is not None
        assert found.end_s is not None
        return found.start_s - self.life.now_s, found.end_s - self.life.now_s

    def _played(self, asked: str, arrivals: Iterator[Submission], drawn: Random | None) -> Times:
        """Return when a job starts and ends in one future; what is not known of the present jobs is as predicted, or
        drawn."""
        life, began_s = self.life.fork(), self.life.now_s

        def factor(sigma: float) -> float:
            return 1.0 if drawn is None else math.exp(drawn.gauss(0, sigma))

        for job_id, one in [*life.waiting.items(), *life.residents.items()]:
            load_s = self.case.load_s * factor(self.case.load_sigma)
            if isinstance(one, Resident):
                ready_s = max(began_s, one.resident_since_s + load_s) if one.is_loading else one.ready_s
                life.residents[job_id] = dataclasses.replace(one, ready_s=ready_s)
            else:
                life.waiting[job_id] = dataclasses.replace(one, load_s=load_s)
            if self.life.known_s(job_id) is None:
                assert one.remaining_s is not None
                life.left_s[job_id] = one.remaining_s * factor(SIGMA_OF_STEPS)
        number = 0
        while asked not in life.ended:
            following = next(arrivals, None)
            life.advance(life.now_s + (60.0 if following is None else following.gap_s))
            if following is not None:
                number += 1
                self._submit(life, f"later-{number}", following, drawn)
        return life.started_s[asked] - began_s, life.ended_s[asked] - began_s


def replay(case: Case) -> dict[str, list[Replayed]]:
    """Return the estimates of all replays of a case, by the way of estimating. The same at each call."""
    result: dict[str, list[Replayed]] = {}
    for seed in range(case.num_replays):
        for name, jobs in Replay(case=case, drawn=Random(seed)).run().items():
            result.setdefault(name, []).extend(jobs)
    return result


def hits(jobs: Sequence[Replayed]) -> Times:
    """Return the parts of the jobs whose start, and whose end, is within a quarter of its estimate; of starts only
    those that waited."""
    waited = [one for one in jobs if one.start_s >= LEAST_WAIT_S]
    starts = [abs(one.estimated_start_s / one.start_s - 1) <= HIT for one in waited]
    ends = [abs(one.estimated_end_s / one.end_s - 1) <= HIT for one in jobs]
    return statistics.mean(starts) if starts else math.nan, statistics.mean(ends)


FULL = (
    Case(num_resident=5, arrival_s=2.0, load_s=0.5, num_replays=20),
    Case(num_resident=5, arrival_s=2.0, load_s=0.7, load_sigma=0.9, num_replays=20),
    Case(num_resident=3, arrival_s=1.8, load_s=0.5, num_jobs=160, num_unseen=40, num_replays=3),
    Case(num_resident=2, arrival_s=1.8, load_s=0.05, num_jobs=160, num_unseen=40, num_replays=3),
)


def print_table(*, quick: bool, write: Callable[[str], None] = print) -> None:
    """Print the errors of each way of estimating, of each case."""
    titles = (
        "memory for",
        "a job every s",
        "loading s",
        "jobs",
        "of them waited",
        "estimate",
        "median error of the start",
        "within 25%",
        "estimated / real start",
        "median error of the end",
        "within 25%",
        "estimated / real end",
    )
    write("| " + " | ".join(titles) + " |\n" + "| --- " * len(titles) + "|")
    for case in FULL:
        made = dataclasses.replace(case, num_replays=max(1, case.num_replays // 5)) if quick else case
        for name, jobs in replay(made).items():
            (start, end), (start_hits, end_hits) = median_errors(jobs), hits(jobs)
            waited = [one for one in jobs if one.start_s >= LEAST_WAIT_S]
            bias = statistics.median(one.estimated_start_s / one.start_s for one in waited) if waited else math.nan
            bias_of_end = statistics.median(one.estimated_end_s / one.end_s for one in jobs)
            write(
                f"| {case.num_resident} | {case.arrival_s:g} | {case.load_s:g}, sigma {case.load_sigma:.0%} | "
                f"{len(jobs)} | {len(waited)} | {name} | {start:.1%} | {start_hits:.0%} | {bias:.2f} | {end:.1%} | "
                f"{end_hits:.0%} | {bias_of_end:.2f} |"
            )
