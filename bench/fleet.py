"""Where the jobs of a fleet are sent: the mean time from submission to end, as a ratio to round robin, in virtual time.

Four boxes, each with a queue of its own, which is played with the daemon's decisions, turns and shares
(`tests.sharing_life`). The same jobs come to the same boxes and are sent:

round robin: to each box that can run the job in its turn.
at random:   to any box that can run it.
fastest:     where the job would end first if the box's queue were empty.
fewest jobs: where the fewest jobs are, those on their way included, by the number and the speed of the box's GPUs.
first end:   where the job is predicted to end first (`scheduling.placement`). Each box plays its queue with the job in
             it; the time to copy the job's files is added.

Each job uses one GPU. Half of the jobs come soon after another one of the same user. All files of a job are copied,
each time, at the full rate of the network. A box learns of a job when its files are there; in the rows "boxes know what
is on its way", when the job is sent. What a job needs is predicted with an error, drawn for each job and box; once it
has had its first turn, it is known.

python -m bench.fleet                 # about 10 minutes on two cores
python -m bench.fleet --quick         # two seeds instead of six
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random

from tests.sharing_life import Life
from tests.sharing_parts import GIB, HOUR, NOW, job

from horizon_server.records.boxes import Place
from horizon_server.records.sharing import Quota
from horizon_server.scheduling.placement import best
from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Node, Rules

_USERS = [f"user-{number}" for number in range(8)]
_USER_WEIGHTS = [1 / (1 + number) for number in range(len(_USERS))]
# Of models of 1, 3, 7, 14 and 32 billion parameters, trained with Adam, 16 bytes each.
_HOST_GIB = (16, 48, 112, 224, 512)
_SIZE_WEIGHTS = (3, 3, 4, 2, 1)
# What is copied has 2 bytes a parameter.
_HOST_BY_FILES = 8
_MEDIAN_S, _LENGTH_SIGMA = 900.0, 1.4
_SWEEP_PART, _SWEEP_GAP_S = 0.5, 20.0
_FIXED_LOAD_S, _LOAD_BYTES_PER_S, _LOAD_SIGMA = 20.0, 1e9, 0.4
_RULES = Rules(max_loading_jobs=4, max_loading_jobs_of_user=2)
_QUOTAS = {user: Quota(max_resident_jobs=4) for user in _USERS}
_HALF_LIFE_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Box:
    """A machine of the fleet. `speed` is that of one of its GPUs, relative to the fastest."""

    name: str
    num_gpus: int
    speed: float
    host_gib: int


# The first one of each fleet is the head, which has all files.
LARGE_BOX = (
    Box(name="head", num_gpus=2, speed=0.7, host_gib=512),
    Box(name="large", num_gpus=8, speed=1.0, host_gib=2048),
    Box(name="single", num_gpus=1, speed=0.7, host_gib=256),
    Box(name="slow", num_gpus=1, speed=0.3, host_gib=128),
)
MIXED = (
    Box(name="head", num_gpus=2, speed=0.7, host_gib=512),
    Box(name="fast", num_gpus=2, speed=1.0, host_gib=512),
    Box(name="many", num_gpus=4, speed=0.4, host_gib=1024),
    Box(name="slow", num_gpus=1, speed=0.3, host_gib=128),
)
EQUAL = tuple(Box(name=name, num_gpus=3, speed=1.0, host_gib=1024) for name in ("head", "second", "third", "fourth"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """How much the fleet has to do, and what is known of it.

    `load` is the device time that is submitted on average, by what the fleet has. Predictions are wrong by at most
    `error`, relative to what the job needs.
    """

    boxes: tuple[Box, ...]
    load: float = 0.5
    error: float = 0.2
    network_gbps: float = 1.0
    knows_coming: bool = False
    """Whether a box counts the jobs that are on their way to it."""
    num_jobs: int = 200


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job that is submitted at `at_s`."""

    job_id: str
    at_s: float
    user: str
    host_gib: int
    needed_s: Mapping[str, float]
    """Device seconds, by box."""
    predicted_s: Mapping[str, float]
    load_s: float
    """What loading is expected to take."""
    real_load_s: float
    copy_s: float
    """What it takes to copy its files to a box that is not the head."""


def submissions(case: Case, drawn: Random) -> list[Submission]:
    """Return the jobs of a replay, in their order."""
    mean_s = _MEDIAN_S * math.exp(_LENGTH_SIGMA**2 / 2)
    arrival_s = mean_s / (case.load * sum(box.num_gpus * box.speed for box in case.boxes))
    apart_s = (arrival_s - _SWEEP_PART * _SWEEP_GAP_S) / (1 - _SWEEP_PART)
    found: list[Submission] = []
    at_s, user = NOW, ""
    for number in range(case.num_jobs):
        in_sweep = number > 0 and drawn.random() < _SWEEP_PART
        user = user if in_sweep else drawn.choices(_USERS, _USER_WEIGHTS)[0]
        at_s += drawn.expovariate(1 / (_SWEEP_GAP_S if in_sweep else apart_s))
        (host_gib,) = drawn.choices(_HOST_GIB, _SIZE_WEIGHTS)
        device_s = drawn.lognormvariate(math.log(_MEDIAN_S), _LENGTH_SIGMA)
        files_bytes = host_gib * GIB / _HOST_BY_FILES
        load_s = _FIXED_LOAD_S + files_bytes / _LOAD_BYTES_PER_S
        needed_s = {box.name: device_s / box.speed for box in case.boxes}
        found.append(
            Submission(
                job_id=f"job-{number}",
                at_s=at_s,
                user=user,
                host_gib=host_gib,
                needed_s=needed_s,
                predicted_s={
                    name: seconds * (1 + drawn.uniform(-case.error, case.error)) for name, seconds in needed_s.items()
                },
                load_s=load_s,
                real_load_s=load_s * drawn.lognormvariate(0, _LOAD_SIGMA),
                copy_s=files_bytes / (case.network_gbps * 1e9 / 8),
            )
        )
    return found


class Queue:
    """One box's life, and the jobs that are on their way to it."""

    def __init__(self, box: Box, *, is_head: bool, knows_coming: bool) -> None:
        self.box, self._is_head = box, is_head
        self.last_number = -1
        """Of the last job that was sent here, its number."""
        self._knows_coming = knows_coming
        node = Node(host_bytes=box.host_gib * GIB, devices={f"cuda:{number}": 0 for number in range(box.num_gpus)})
        self._life = Life(node, _RULES, Shares(_HALF_LIFE_S), _QUOTAS)
        self._coming: list[tuple[float, Submission]] = []
        self._sent: dict[str, Submission] = {}

    @property
    def num_present(self) -> int:
        """How many jobs have been sent here that have not ended."""
        return len(self._sent) - len(self._life.ended)

    @property
    def ended_s(self) -> Mapping[str, float]:
        """When each job ended."""
        return self._life.ended_s

    def why_not(self, one: Submission) -> str:
        """Why a job cannot run here."""
        if one.host_gib <= self.box.host_gib:
            return ""
        return f"it needs {one.host_gib} GiB of host memory and the box has {self.box.host_gib}"

    def alone_s(self, one: Submission) -> float:
        """How long the job is predicted to take here, from its submission on, if no other job is here."""
        return self._copy_s(one) + one.load_s + one.predicted_s[self.box.name]

    def offer(self, one: Submission) -> Place:
        """What the box says of a job."""
        if why_not := self.why_not(one):
            return Place(box=self.box.name, why_not=why_not)
        life, known = self._life.fork(), {**self._sent, one.job_id: one}
        for _, coming in self._coming if self._knows_coming else []:
            self._submit(life, coming)
        self._submit(life, one)
        end_s = life.estimates(lambda job_id: known[job_id].load_s)[one.job_id].end_s
        return Place(box=self.box.name, estimated_end_s=None if end_s is None else end_s + self._copy_s(one))

    def send(self, one: Submission, number: int) -> None:
        """Begin to copy a job's files: it is in the queue once they are here."""
        self.last_number = number
        self._sent[one.job_id] = one
        self._coming.append((one.at_s + self._copy_s(one), one))

    def advance(self, until_s: float) -> None:
        """Play to a time."""
        for arrival_s, one in sorted(self._coming, key=lambda coming: coming[0]):
            if arrival_s <= until_s:
                self._life.advance(arrival_s)
                self._submit(self._life, one)
        self._coming = [coming for coming in self._coming if coming[0] > until_s]
        self._life.advance(until_s)

    def _copy_s(self, one: Submission) -> float:
        return 0.0 if self._is_head else one.copy_s

    def _submit(self, life: Life, one: Submission) -> None:
        name = self.box.name
        values = {"device": "cuda", "host_gib": one.host_gib, "load_s": one.real_load_s}
        life.submit(job(one.job_id, one.user, remaining_s=one.predicted_s[name], **values), one.needed_s[name])


Choose = Callable[[Sequence[Queue], Submission, Random], Queue]
"""Which of the boxes that can run a job gets it."""


def _round_robin(able: Sequence[Queue], _: Submission, __: Random) -> Queue:
    return min(able, key=lambda queue: queue.last_number)


def _at_random(able: Sequence[Queue], _: Submission, drawn: Random) -> Queue:
    return drawn.choice(able)


def _fastest(able: Sequence[Queue], one: Submission, _: Random) -> Queue:
    return min(able, key=lambda queue: queue.alone_s(one))


def _fewest_jobs(able: Sequence[Queue], _: Submission, __: Random) -> Queue:
    return min(able, key=lambda queue: (queue.num_present + 1) / (queue.box.num_gpus * queue.box.speed))


def _first_end(able: Sequence[Queue], one: Submission, _: Random) -> Queue:
    found = best([queue.offer(one) for queue in able])
    assert found is not None
    return next(queue for queue in able if queue.box.name == found.box)


ROUND_ROBIN, FEWEST_JOBS, FIRST_END = "round robin", "fewest jobs", "first end"
WAYS: Mapping[str, Choose] = {
    ROUND_ROBIN: _round_robin,
    "at random": _at_random,
    "fastest": _fastest,
    FEWEST_JOBS: _fewest_jobs,
    FIRST_END: _first_end,
}


def mean_time_s(case: Case, jobs: Sequence[Submission], choose: Choose, drawn: Random) -> float:
    """Return the mean time from submission to end."""
    queues = [Queue(box, is_head=box is case.boxes[0], knows_coming=case.knows_coming) for box in case.boxes]
    for number, one in enumerate(jobs):
        for queue in queues:
            queue.advance(one.at_s)
        choose([queue for queue in queues if not queue.why_not(one)], one, drawn).send(one, number)
    until_s = jobs[-1].at_s
    while any(queue.num_present for queue in queues):
        until_s += HOUR
        for queue in queues:
            queue.advance(until_s)
    ended_s = {job_id: end_s for queue in queues for job_id, end_s in queue.ended_s.items()}
    return statistics.mean(ended_s[one.job_id] - one.at_s for one in jobs)


def times_s(case: Case, seed: int, ways: Sequence[str] = tuple(WAYS)) -> dict[str, float]:
    """Return the mean time from submission to end of the same jobs, by the way of sending them. The same at each
    call."""
    jobs = submissions(case, Random(seed))
    return {way: mean_time_s(case, jobs, WAYS[way], Random(seed)) for way in ways}


FLEETS: Mapping[str, tuple[Box, ...]] = {"large box": LARGE_BOX, "mixed": MIXED, "equal": EQUAL}
_LOADS = (0.3, 0.5, 0.8)
_USUAL = Case(boxes=MIXED)
_CASES: tuple[tuple[str, str, Case], ...] = (
    *((name, "", Case(boxes=boxes, load=load)) for name, boxes in FLEETS.items() for load in _LOADS),
    ("mixed", "exact predictions", replace(_USUAL, error=0.0)),
    ("mixed", "predictions +-50 %", replace(_USUAL, error=0.5)),
    ("mixed", "10 Gbit/s", replace(_USUAL, network_gbps=10.0)),
    *(("mixed", "boxes know what is on its way", replace(_USUAL, load=load, knows_coming=True)) for load in _LOADS),
)


def print_fleets() -> None:
    """Print what the fleets are."""
    for name, boxes in FLEETS.items():
        texts = (f"{one.num_gpus} x {one.speed:g} with {one.host_gib} GiB" for one in boxes)
        print(f"{name}: {', '.join(texts)}")


def print_table(*, num_seeds: int) -> None:
    """Print the times, as ratios of the same seed to round robin: the median of the seeds."""
    others = [way for way in WAYS if way != ROUND_ROBIN]
    titles = ("fleet", "load", "other than usual", "round robin h", *others, "first end, of each seed", "/ fewest jobs")
    print("| " + " | ".join(titles) + " |\n" + "| --- " * len(titles) + "|")
    for name, change, case in _CASES:
        found = [times_s(case, seed) for seed in range(num_seeds)]

        def ratios(way: str, to: str, found: Sequence[Mapping[str, float]] = found) -> list[float]:
            return sorted(one[way] / one[to] for one in found)

        cells = [f"{statistics.median(ratios(way, ROUND_ROBIN)):.2f}" for way in others]
        of_seeds = ratios(FIRST_END, ROUND_ROBIN)
        to_fewest = statistics.median(ratios(FIRST_END, FEWEST_JOBS))
        print(
            f"| {name} | {case.load:g} | {change} | {statistics.median(one[ROUND_ROBIN] for one in found) / HOUR:.1f} "
            f"| {' | '.join(cells)} | {of_seeds[0]:.2f} to {of_seeds[-1]:.2f} | {to_fewest:.2f} |",
            flush=True,
        )


def main() -> None:
    """Print the fleets and the table."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two seeds instead of six, whose figures vary more")
    arguments = parser.parse_args()
    print_fleets()
    print()
    print_table(num_seeds=2 if arguments.quick else 6)


if __name__ == "__main__":
    main()
