"""Following a job from afar: across a restart of the daemon, until Ctrl-C, as text, as data and as server-sent
events."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from threading import Timer

import httpx
import yaml
from tests.support.daemon_process import wait_for_state, wait_for_step
from tests.support.node import Node, Shell, quick_spec


def read_until(process: Popen[str], words: str, timeout_s: float = 300.0) -> list[str]:
    """Return the lines of stdout up to the one that holds `words`."""
    assert process.stdout is not None
    lines: list[str] = []
    too_late = Timer(timeout_s, process.kill)  # which ends the lines
    too_late.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if words in line:
                return lines
    finally:
        too_late.cancel()
    raise AssertionError(f"{words!r} never came: {lines}")


def test_a_watch_goes_on_across_a_restart_of_the_daemon(own_node: Callable[..., Node], tmp_path: Path) -> None:
    with_port = own_node()
    address = with_port.daemon.endpoints["grpc"]
    # The worker rests there until the daemon drains.
    with_port.daemon.resting.after(3)
    with with_port.client() as client:
        job = client.jobs.submit(quick_spec("watched", max_steps=60, checkpoint={"every_steps": 0}))
    watch = with_port.shell(tmp_path).start("job", "watch", job.job_id, "-o", "json")
    lines = read_until(watch, '"step"')
    assert with_port.daemon.terminate() == 0
    with_port.daemon.resting.go_on()
    restarted = type(with_port.daemon)(with_port.daemon.state_dir, "--grpc", address)
    try:
        restarted.start()
        # Not by `communicate`, which does not know of lines that were read ahead.
        rest = read_until(watch, '"SUCCEEDED"', timeout_s=300.0)
        _, notes = watch.communicate(timeout=300)
        assert watch.returncode == 0, notes
        assert f"the watch of {job.job_id} was cut" in notes
        events = [json.loads(line) for line in [*lines, *rest]]
        assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
        assert {event["step"] for event in events if event["event"] == "step"} >= set(range(1, 61))
        assert (events[-1]["event"], events[-1]["state"]) == ("state", "SUCCEEDED")
    finally:
        restarted.close()


def test_ctrl_c_leaves_the_job_running_and_says_how_to_come_back(node: Node, shell: Shell) -> None:
    with node.client() as client:
        job = client.jobs.submit(quick_spec("interrupted", max_steps=100_000))
        watch = shell.start("job", "watch", job.job_id)
        read_until(watch, "step ")
        watch.send_signal(signal.SIGINT)
        _, notes = watch.communicate(timeout=180)
        assert watch.returncode == 130, notes
        assert f"the job continues; to return to it: horizon job watch {job.job_id}" in notes
        assert "Traceback" not in notes
        wait_for_step(client, job.job_id, client.jobs.get(job.job_id).step + 2)
        shell.works("job", "cancel", job.job_id)
        assert shell.run("job", "watch", job.job_id, "-o", "name").returncode == 1
        assert wait_for_state(client, job.job_id, "CANCELLED").reason == "CANCELLED"


def test_a_job_as_table_name_json_and_yaml_and_the_node(node: Node, shell: Shell) -> None:
    with node.client() as client:
        job = client.jobs.submit(quick_spec("shown"))
        wait_for_state(client, job.job_id, "SUCCEEDED")
    assert shell.works("job", "get", "shown", "-o", "name") == f"{job.job_id}\n"
    as_json = json.loads(shell.works("job", "get", "shown", "-o", "json"))
    as_yaml = yaml.safe_load(shell.works("job", "get", "shown", "-o", "yaml"))
    assert as_json["job_id"] == as_yaml["job_id"] == job.job_id
    assert (as_json["state"], as_json["step"], as_json["num_steps"]) == ("SUCCEEDED", 2, 2)
    assert as_json["spec"]["train"]["max_steps"] == as_yaml["spec"]["train"]["max_steps"] == 2
    assert "SUCCEEDED" in shell.works("job", "get", "shown")
    assert "step 2/2: loss" in shell.works("job", "logs", "shown")
    status = json.loads(shell.works("node", "status", "-o", "json"))
    assert (status["user"], status["role"]) == ("ada", "user")
    assert status["host_memory_limit_bytes"] > 2**30


def test_server_sent_events_go_on_after_the_last_event_id(node: Node) -> None:
    with node.client() as client:
        job = client.jobs.submit(quick_spec("events", max_steps=4))
        wait_for_state(client, job.job_id, "SUCCEEDED")
        last = client.jobs.get(job.job_id).last_sequence
    url = f"http://{node.daemon.endpoints['http']}/horizon/v1/jobs/{job.job_id}/events"
    headers = {"authorization": f"Bearer {node.token}"}
    whole = _frames(httpx.get(url, headers=headers, timeout=180).text)
    assert [number for number, _ in whole] == [*range(1, last + 1), 0]
    assert [kind for _, kind in whole].count("step") == 4
    assert whole[-1] == (0, "end")
    rest = _frames(httpx.get(url, headers={**headers, "Last-Event-ID": str(last - 2)}, timeout=180).text)
    assert rest == whole[-3:]
    assert httpx.get(url, headers={**headers, "Last-Event-ID": str(last)}, timeout=180).status_code == 204
    wrong = httpx.get(url, headers={**headers, "Last-Event-ID": "yesterday"}, timeout=180)
    assert wrong.status_code == 422
    assert "last-event-id is 'yesterday': it must be a whole number" in wrong.text
    assert httpx.get(url, timeout=180).status_code == 401
    assert httpx.get(url.replace(job.job_id, "job_nope"), headers=headers, timeout=180).status_code == 404


def _frames(text: str) -> list[tuple[int, str]]:
    """The number (0 without one) and the kind of every frame."""
    found = []
    for frame in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in frame.splitlines() if ": " in line)
        if "event" in fields:
            found.append((int(fields.get("id", 0)), fields["event"]))
    return found
