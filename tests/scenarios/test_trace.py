"""What an operator sees of a worker's queues when asking for it, and what an evaluation tells of itself."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from tests.support.both_daemons import AnyDaemon, demo_spec, process_only

from horizon_client import Client


@process_only("the queues of a real worker")
def test_an_attempt_leaves_its_trace_and_an_evaluation_its_figures(
    make_daemon: Callable[..., AnyDaemon], push_demo: Callable[[Client], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HORIZOND_TRACE_WORKERS", "true")
    daemon = make_daemon()
    with daemon.client(daemon.user("ada")) as client:
        push_demo(client)
        job = client.jobs.submit({**demo_spec(max_steps=2), "eval_dataset": "demo-chats"})
        events = list(client.jobs.watch(job.job_id))
        assert client.jobs.get(job.job_id).state == "SUCCEEDED"

    (trace_file,) = (daemon.state_dir / "jobs" / job.job_id).glob("attempt-*/trace.json")
    trace = json.loads(trace_file.read_text())["traceEvents"]
    queues = {event["tid"]: event["args"]["name"] for event in trace if event["ph"] == "M"}
    assert set(queues.values()) == {"h2d", "compute", "d2h", "optimizer", "optimizer rows"}
    ran = {(queues[event["tid"]], event["name"]) for event in trace if event.get("cat") == "work"}
    assert {("h2d", "unit 1"), ("compute", "forward 1"), ("compute", "backward 1"), ("d2h", "gradient 1")} <= ran
    assert ("optimizer", "update 1") in ran

    evals = [event for event in events if event.kind == "eval"]
    assert [event.step for event in evals] == [0, 2]
    for event in evals:
        assert event.num_tokens > event.num_targets > 0
        assert event.duration_s > 0
