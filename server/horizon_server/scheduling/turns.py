"""Who gets a device next, and which part of its time each job has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from horizon_server.scheduling.shares import Shares
from horizon_server.scheduling.state import Job, Rules

MAX_TURN_WAIT_SLICES = 10
"""A job that has waited for the device for this many time slices of every job that shares it is first."""

URGENT_PRIORITY = 100
"""A priority above this, which only admins set, is above all shares."""


def next_turn(waiting: Sequence[Job], shares: Shares, now_s: float, *, rules: Rules) -> Job | None:
    """The job that gets the device now, of those that wait for it.

    First a job that has waited longer than MAX_TURN_WAIT_SLICES * len(waiting) * time_slice_s, the longest wait first.
    Then an urgent one, by priority. Then the project with the lowest decayed use by weight, in it the user with the
    lowest, of the user's jobs the one with the highest priority, and of those the one that has waited longest. Projects
    and users with the same use: the one whose job has waited longest.

    A job that waits among n jobs therefore gets the device after at most (MAX_TURN_WAIT_SLICES + 1) * n turns of a time
    slice and a step: the n - 1 others can have waited longer only once.
    """
    if not waiting:
        return None
    longest = min(waiting, key=lambda job: (job.since_s, job.order))
    if now_s - longest.since_s > MAX_TURN_WAIT_SLICES * len(waiting) * rules.time_slice_s:
        return longest
    if any(job.priority > URGENT_PRIORITY for job in waiting):
        top = max(job.priority for job in waiting)
        waiting = [job for job in waiting if job.priority == top]
    since_s: dict[tuple[str, str], float] = {}
    for job in waiting:
        for holder in ((job.project, job.user), (job.project, "")):
            since_s[holder] = min(since_s.get(holder, job.since_s), job.since_s)
    ranks = {(project, user): shares.rank(project, user, now_s) for project, user in since_s if user}

    def place(job: Job) -> tuple[float | int | str, ...]:
        project, user = job.project, job.user
        of_project, of_user = ranks[project, user]
        return (
            *(of_project, since_s[project, ""], project),
            *(of_user, since_s[project, user], user),
            *(-job.priority, job.since_s, job.order, job.job_id),
        )

    return min(waiting, key=place)


def steady_shares(jobs: Iterable[Job], shares: Shares) -> dict[str, float]:
    """The part of the device's time that each job has in the long run while exactly these share it, by job id.

    Projects divide the time by weight, the users of a project their part of it, and a user's part goes to the user's
    jobs of the highest priority in equal parts. The others have 0: they get turns only once they have waited too long.
    """
    jobs = list(jobs)
    if any(job.priority > URGENT_PRIORITY for job in jobs):
        served = [job for job in jobs if job.priority == max(job.priority for job in jobs)]
    else:
        served = jobs
    users: dict[str, dict[str, list[Job]]] = defaultdict(lambda: defaultdict(list))
    for job in served:
        users[job.project][job.user].append(job)
    result = dict.fromkeys((job.job_id for job in jobs), 0.0)
    total = sum(shares.weight_of("project", project) for project in users)
    for project, of_project in users.items():
        part = shares.weight_of("project", project) / total
        weights = sum(shares.weight_of("user", user) for user in of_project)
        for user, of_user in of_project.items():
            top = max(job.priority for job in of_user)
            first = [job for job in of_user if job.priority == top]
            for job in first:
                result[job.job_id] = part * shares.weight_of("user", user) / weights / len(first)
    return result
