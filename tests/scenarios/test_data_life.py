"""A researcher's rows on their way into a job: held out, left out, and prepared once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.support.both_daemons import AnyDaemon, demo_spec, process_only

from horizon_client import Client
from horizon_client.job_spec_types import JobSpec
from horizon_client.resources import JobEvent

TOO_LONG = {"prompt": "why? " * 400, "completion": "Because."}
GOOD = [{"prompt": f"Why {number}?", "completion": f"Because of {number}."} for number in range(60)]
ROWS = [*GOOD[:10], TOO_LONG, *GOOD[10:]]


def push(client: Client, folder: Path, name: str, *rows: dict[str, str]) -> None:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    client.datasets.push([file], name=name)


def events_of(client: Client, job_id: str) -> list[JobEvent]:
    events = list(client.jobs.watch(job_id))
    done = client.jobs.get(job_id)
    assert done.state == "SUCCEEDED", done.message
    return events


def warnings_of(events: list[JobEvent]) -> list[str]:
    return [event.text for event in events if event.kind == "message" and event.level == "warning"]


def report_of(events: list[JobEvent]) -> dict[str, int]:
    (report,) = (dict(event.report) for event in events if event.kind == "prepare" and event.report)
    return report


def test_rows_are_held_out_left_out_and_reported(
    daemon: AnyDaemon, push_demo: Callable[[Client], None], tmp_path: Path
) -> None:
    with daemon.client(daemon.user("ada")) as client:
        push_demo(client)
        push(client, tmp_path, "rows", *ROWS)
        spec = demo_spec("held", max_steps=2)
        job = client.jobs.submit({**spec, "dataset": "rows", "eval_fraction": 0.25})
        events = events_of(client, job.job_id)
        report = report_of(events)
        assert (report["rows"], report["error_rows"]) == (61, 1)
        assert 5 < report["eval_rows"] < 30
        assert report["documents"] + report["eval_rows"] == 60
        kept = dict(client.jobs.get(job.job_id).data_report)
        assert kept.pop("packed_rows") > 0
        assert kept == report
        warnings = warnings_of(events)
        assert len(warnings) == 1
        assert warnings[0].startswith("1 of 61 rows are left out:\nrows.jsonl:11 has ")

        again = client.jobs.submit({**spec, "name": "again", "dataset": "rows", "eval_fraction": 0.25})
        repeated = events_of(client, again.job_id)
        assert report_of(repeated) == report
        # Nothing was prepared: the report is all that the preparation says.
        assert [bool(event.report) for event in repeated if event.kind == "prepare"] == [True]
        assert warnings_of(repeated) == warnings


@process_only("the training itself")
def test_held_out_rows_are_evaluated_and_prepared_data_trains_alike(
    daemon: AnyDaemon, push_demo: Callable[[Client], None], tmp_path: Path
) -> None:
    with daemon.client(daemon.user("ada")) as client:
        push_demo(client)
        push(client, tmp_path, "rows", *ROWS)
        spec: JobSpec = {
            **demo_spec("held", max_steps=4),
            "dataset": "rows",
            "eval_fraction": 0.25,
            "eval_every_steps": 2,
        }
        job = client.jobs.submit(spec)
        events = events_of(client, job.job_id)
        report = report_of(events)
        packed_rows = client.jobs.get(job.job_id).data_report["packed_rows"]
        assert report["tokens"] <= packed_rows * report["sequence_length"]
        assert report["tokens"] > 0.8 * packed_rows * report["sequence_length"]
        evals = [event for event in events if event.kind == "eval"]
        assert [event.step for event in evals] == [0, 2, 4]
        assert {event.num_targets for event in evals} == {report["eval_trained_tokens"]}
        assert evals[-1].eval_loss < evals[0].eval_loss

        repeated = events_of(client, client.jobs.submit({**spec, "name": "again"}).job_id)
        assert [e.loss for e in repeated if e.kind == "step"] == [e.loss for e in events if e.kind == "step"]
