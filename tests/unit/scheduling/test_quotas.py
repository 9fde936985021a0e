from __future__ import annotations

import pytest
from tests.sharing_parts import GIB, HOUR, NOW, job, resident

from horizon_server.records.sharing import Allowance, Quota
from horizon_server.scheduling.quotas import why_not_queued, why_not_resident, why_not_stored, with_defaults
from horizon_server.scheduling.texts import jobs_text, time_text

DAY = 24 * HOUR


def ann(**quota: float) -> Allowance:
    return Allowance(holder="user", name="ann", quota=Quota(**quota))  # type: ignore[arg-type]


def test_without_a_limit_nothing_is_refused() -> None:
    residents = [resident(f"r{i}", host_gib=1000) for i in range(100)]

    assert why_not_queued(ann(), [one.job_id for one in residents]) == ""
    assert why_not_stored(ann(), 10**15, 10**15) == ""
    assert why_not_resident(ann(), job("j"), residents, device_s=10**9, now_s=NOW) == ""


def test_queued_jobs() -> None:
    assert why_not_queued(ann(max_queued_jobs=3), ["a", "b"]) == ""
    assert why_not_queued(ann(max_queued_jobs=2), ["a", "b"]) == (
        "quota: 2 of 2 queued jobs of user ann (--max-queued-jobs); cancel or wait for one of: a and b"
    )
    assert (
        why_not_queued(ann(max_queued_jobs=1), ["a"])
        == "quota: 1 of 1 queued jobs of user ann (--max-queued-jobs); cancel or wait for job a"
    )
    assert why_not_queued(ann(max_queued_jobs=0), []) == (
        "quota: 0 of 0 queued jobs of user ann (--max-queued-jobs); an admin can raise it: horizond user set ann"
    )


def test_stored_bytes() -> None:
    lab = Allowance(holder="project", name="lab", quota=Quota(max_stored_bytes=10 * GIB))

    assert why_not_stored(lab, 9 * GIB, GIB) == ""
    assert why_not_stored(lab, 9 * GIB, 3 * GIB) == (
        "quota: 9.00 GiB of 10.00 GiB stored by project lab (--max-stored), and this needs 3.00 GiB more; "
        "delete datasets, models or checkpoints of at least 2.00 GiB"
    )
    assert why_not_stored(lab, 0, 11 * GIB).endswith("11.00 GiB more; an admin can raise it: horizond project set lab")


def test_running_jobs() -> None:
    residents = [resident("a"), resident("b")]

    assert why_not_resident(ann(max_resident_jobs=3), job("j"), residents, now_s=NOW) == ""
    held = why_not_resident(ann(max_resident_jobs=2), job("j"), residents, now_s=NOW)
    assert held == "quota: 2 of 2 running jobs of user ann (--max-resident-jobs); cancel or wait for one of: a and b"
    ends = {"a": None, "b": NOW + 20 * 60}
    held = why_not_resident(ann(max_resident_jobs=2), job("j"), residents, now_s=NOW, ends=ends)
    assert held == "quota: 2 of 2 running jobs of user ann (--max-resident-jobs); job b ends at about 09:13 UTC"


def test_host_memory() -> None:
    quota = ann(max_host_bytes=25 * GIB)

    assert why_not_resident(quota, job("j", host_gib=15), [resident("a")], now_s=NOW) == ""
    assert why_not_resident(quota, job("j", host_gib=20), [resident("a")], now_s=NOW) == (
        "quota: 10.00 GiB of 25.00 GiB host memory of user ann (--max-host-memory), and this job needs 20.00 GiB; "
        "cancel or wait for job a"
    )
    assert why_not_resident(quota, job("j", host_gib=26), [resident("a")], now_s=NOW).endswith(
        "this job needs 26.00 GiB; an admin can raise it: horizond user set ann"
    )


def test_device_hours_of_the_last_7_days() -> None:
    quota = ann(device_hours_per_week=10.0)

    assert why_not_resident(quota, job("j"), [], device_s=9.99 * HOUR, now_s=NOW) == ""
    # 1.2 of 11.2 hours leave the last 7 days in 18 hours.
    assert why_not_resident(quota, job("j"), [], device_s=11.2 * HOUR, now_s=NOW) == (
        "quota: 11.2 of 10 device hours of user ann in the last 7 days (--device-hours-per-week); "
        "at the present rate free again at about Friday 02:53 UTC"
    )
    assert why_not_resident(ann(device_hours_per_week=0.0), job("j"), [], now_s=NOW) == (
        "quota: 0 of 0 device hours of user ann in the last 7 days (--device-hours-per-week); an admin can raise it: "
        "horizond user set ann"
    )


@pytest.mark.parametrize(
    ("after_s", "text"),
    [
        (0.0, "08:53 UTC"),
        (15 * HOUR, "23:53 UTC"),
        (16 * HOUR, "Friday 00:53 UTC"),
        (5.9 * DAY, "Wednesday 06:29 UTC"),
        (7 * DAY, "16 October 08:53 UTC"),
        (300 * DAY, "5 August 2026 08:53 UTC"),
        (-DAY, "8 October 08:53 UTC"),
    ],
)
def test_a_time_is_written_as_short_as_it_is_clear(after_s: float, text: str) -> None:
    assert time_text(NOW + after_s, NOW) == text


def test_many_jobs_are_not_all_named() -> None:
    assert jobs_text(["a"]) == "job a"
    assert jobs_text(["a", "b", "c"]) == "jobs a, b and c"
    assert jobs_text(list("abcde")) == "jobs a, b, c and 2 more"


def test_where_no_admin_has_set_another_number_a_user_has_the_nodes_and_a_project_has_none() -> None:
    assert with_defaults(ann(), max_resident_jobs=4).quota.max_resident_jobs == 4
    assert with_defaults(ann(max_resident_jobs=9), max_resident_jobs=4).quota.max_resident_jobs == 9
    lab = Allowance(holder="project", name="lab")
    assert with_defaults(lab, max_resident_jobs=4) == lab


def test_short_device_times_are_in_seconds() -> None:
    held = why_not_resident(ann(device_hours_per_week=0.001), job("j"), [], device_s=38.0, now_s=NOW)
    assert held.startswith("quota: 38 s of 3.6 s on devices of user ann in the last 7 days (--device-hours-per-week); ")
