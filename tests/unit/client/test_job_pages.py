"""What `horizon job get` says of a job's data."""

from __future__ import annotations

import dataclasses

import pytest

from horizon_client.cli.job_views import advice_lines, data_text, event_line, plan_page
from horizon_client.resources import (
    DeviceRange,
    DriveUse,
    MemoryPlan,
    MessageEvent,
    PredictedWays,
    PrepareEvent,
    SharedBase,
)

REPORT = {"rows": 7473, "tokens": 1_200_000, "trained_tokens": 700_000, "truncated_rows": 0, "sequence_length": 1024}


def test_only_what_is_known_is_shown() -> None:
    assert data_text({}) == ""
    assert data_text(REPORT) == "7,473 rows, 1,200,000 tokens (700,000 trained)"


def test_rows_that_did_not_go_through_whole_and_how_full_the_packed_ones_are() -> None:
    report = REPORT | {"truncated_rows": 12, "error_rows": 3, "eval_rows": 370, "packed_rows": 1200}
    assert data_text(report).split(", ")[2:] == ["12 truncated", "3 skipped", "370 held out", "packed to 97.7%"]


def test_the_events_of_a_preparation_are_readable() -> None:
    assert (
        event_line(PrepareEvent(sequence=1, time=None, done_rows=300, total_rows=7473, report={}))
        == "preparing data: 300 of 7,473 rows"
    )
    done = PrepareEvent(sequence=1, time=None, done_rows=7473, total_rows=7473, report=REPORT)
    assert event_line(done) == "data prepared: 7,473 rows, 1,200,000 tokens (700,000 trained)"


def test_a_message_of_several_lines_stays_readable_and_harmless() -> None:
    event = MessageEvent(sequence=1, time=None, level="warning", text="2 rows are skipped:\nline[9] is long\x1b[31m")
    assert event_line(event) == "warning: 2 rows are skipped:\n  line[9] is long[31m"
    assert event_line(MessageEvent(sequence=1, time=None, level="error", text="no")) == "error: no"


@pytest.mark.parametrize(
    ("parallel", "ways", "wanted"),
    [
        ("layers", PredictedWays(rows_s=6.91, layers_s=6.8), ", by layers (6.8 s a step, by rows 6.91 s): it fits"),
        ("rows", PredictedWays(rows_s=6.91, layers_s=None), ", by rows (6.91 s a step): it fits"),
        ("rows", None, ", by rows: it fits"),
        ("", None, ": it fits"),
    ],
)
def test_a_plan_for_several_devices_says_how_they_divide_a_step(
    parallel: str, ways: PredictedWays | None, wanted: str
) -> None:
    plan = MemoryPlan(
        host_bytes={},
        device_bytes={},
        host_total_bytes=0,
        device_total_bytes=0,
        host_limit_bytes=1,
        device_limit_bytes=1,
        fits=True,
        message="",
        num_parameters=10,
        device_range=None,
        node_range=None,
        device="cuda",
        prediction=None,
        compute_dtype="bfloat16",
        hint="",
        kept=None,
        num_trained_parameters=10,
        references=None,
        warnings=(),
        num_steps=None,
        steps_estimated=False,
        num_devices=2,
        num_nodes=1,
        lanes=8,
        parallel=parallel,
        ways=ways,
        base=None,
        drives=None,
    )
    assert f"computed on cuda in bfloat16 by 2 devices in 8 lanes{wanted}\n" in plan_page(plan)
    span = DeviceRange(least=1, most=4, host_bytes=3 << 30, device_bytes=0)
    kept = ", planned for 2 of 1 to 4 devices (3.0 GiB of host memory are kept for any number of them): it fits"
    page = plan_page(dataclasses.replace(plan, device_range=span))
    assert f"in 8 lanes{wanted.removesuffix(': it fits')}{kept}\n" in page
    nodes = ", planned for 1 of 1 to 4 nodes (3.0 GiB of this node's memory are kept for any number of them): it fits"
    assert f"{wanted.removesuffix(': it fits')}{nodes}\n" in plan_page(dataclasses.replace(plan, node_range=span))
    use = DriveUse(
        num_layers=3,
        num_bytes=3 << 30,
        num_drives=2,
        written_bytes=6 << 30,
        endurance_bytes=60 << 30,
        endurance_share=0.1,
        num_ends=0,
    )
    text = "states of 3 layers (3.0 GiB), read and written once a step; the job writes 6.0 GiB, 10.00% of what"
    assert f"it fits\non drives: {text} the drives are rated for\n" in plan_page(dataclasses.replace(plan, drives=use))
    for num_ends, what in ((1, " and of the head"), (2, ", the head and the embedding")):
        ends = dataclasses.replace(plan, drives=dataclasses.replace(use, num_ends=num_ends))
        assert f"on drives: states of 3 layers{what} (3.0 GiB), read" in plan_page(ends)
    base = SharedBase(num_bytes=3 << 30, num_jobs=0, key="base")
    text = "\nbase: 3.0 GiB, in memory once for all jobs on it"
    assert f"it fits{text}\n" in plan_page(dataclasses.replace(plan, base=base))
    for number, others in ((1, "1 job"), (9, "9 jobs")):
        shared = dataclasses.replace(plan, base=dataclasses.replace(base, num_jobs=number))
        assert f"it fits{text}, with {others} when planned\n" in plan_page(shared)
    # A hint needs no prediction, and submit says it after the warnings.
    hinted = dataclasses.replace(plan, hint="another tool is faster", warnings=("no",))
    assert plan_page(hinted).endswith("\nhint: another tool is faster")
    assert advice_lines(hinted) == ["warning: no", "hint: another tool is faster"]
    assert "hint" not in page and advice_lines(plan) == []
