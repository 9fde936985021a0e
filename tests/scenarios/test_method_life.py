"""Jobs that learn from preferences and labels, through the daemon: from the pushed rows to figures, with a kill in the
middle."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.both_daemons import AnyDaemon, demo_spec, process_only
from tests.support.daemon_process import DaemonProcess, wait_for, wait_for_state, wait_for_step
from tests.support.further import further
from tests.support.resting import references_done

from horizon_client import Client, InvalidRequest
from horizon_client.job_spec_types import JobSpec
from horizon_client.resources import JobEvent

Push = Callable[[Client], None]

ROWS: dict[str, list[dict[str, Any]]] = {
    "dpo": [
        {"prompt": f"Why {i}?", "chosen": f"Because of {i} and more.", "rejected": f"No idea about {i}."}
        for i in range(40)
    ],
    "kto": [
        {
            "prompt": f"Why {i}?",
            "completion": f"Because of {i}." if i % 2 else f"No idea about {i}.",
            "label": bool(i % 2),
        }
        for i in range(40)
    ],
}


def push(client: Client, folder: Path, method: str) -> str:
    file = folder / f"{method}-rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS[method]))
    client.datasets.push([file], name=f"{method}-rows")
    return f"{method}-rows"


def by_step(events: list[JobEvent], kind: str) -> dict[int, Any]:
    if kind == "step":
        return {event.step: (event.loss, dict(event.method_figures)) for event in events if event.kind == "step"}
    return {event.step: (event.eval_loss, dict(event.method_figures)) for event in events if event.kind == "eval"}


@process_only("the training itself")
@pytest.mark.parametrize("method", ["kto", *further("dpo")])
def test_a_killed_job_of_a_method_ends_with_the_figures_of_one_that_was_not(
    make_daemon: Callable[..., AnyDaemon], push_demo: Push, tmp_path: Path, method: str
) -> None:
    daemon = make_daemon(max_restarts=2)
    with daemon.client(daemon.user("ada")) as client:
        push_demo(client)
        plain = demo_spec("whole", max_steps=24, learning_rate=1e-3, checkpoint={"every_steps": 4, "keep_last": 1})
        del plain["train"]["train_on"]
        spec: Any = {
            **plain,
            "dataset": push(client, tmp_path, method),
            "method": method,
            method: {"beta": 0.2},
            "eval_fraction": 0.2,
            "eval_every_steps": 12,
        }
        whole = client.jobs.submit(spec)
        events = list(client.jobs.watch(whole.job_id))
        done = client.jobs.get(whole.job_id)
        assert done.state == "SUCCEEDED", done.message
        steps, evals = by_step(events, "step"), by_step(events, "eval")
        assert list(evals) == [0, 12, 24]
        assert evals[24][0] < evals[0][0]
        assert {"rewards/margins", "logps/chosen"} <= set(steps[24][1]) == set(evals[24][1])
        assert done.last_step is not None and dict(done.last_step.method_figures) == steps[24][1]
        texts = [event.text for event in events if event.kind == "message"]
        assert any(text.startswith("reference log-probabilities: 100 %") for text in texts)

        daemon.resting.after(7)
        cut = client.jobs.submit(spec | {"name": "cut"})
        wait_for_step(client, cut.job_id, 7)
        # Gone as after a sweep: the next worker computes it from the weights that the job started with.
        for file in (daemon.state_dir).rglob("references-*.safetensors"):
            file.unlink()
        [pid] = daemon.worker_pids()
        os.kill(pid, signal.SIGKILL)
        daemon.resting.go_on()
        again = wait_for_state(client, cut.job_id, "SUCCEEDED", "FAILED", timeout_s=300.0)
        assert (again.state, again.attempt) == ("SUCCEEDED", 2), again.message
        seen = list(client.jobs.watch(cut.job_id))
        assert by_step(seen, "step") == steps
        assert by_step(seen, "eval") == evals
        hashes = [
            {
                file.path: file.sha256
                for file in client.checkpoints.list(job)[0].files
                if file.path.endswith(".safetensors")
            }
            for job in (whole.job_id, cut.job_id)
        ]
        assert hashes[0] == hashes[1] and hashes[0]


@process_only("a worker that is killed, and files that stay")
def test_a_pass_over_the_data_that_is_killed_paused_and_drained_computes_only_what_is_missing(
    make_daemon: Callable[..., AnyDaemon], push_demo: Push, tmp_path: Path
) -> None:
    daemon = make_daemon(max_restarts=2)
    assert isinstance(daemon, DaemonProcess)
    user, finished = daemon.user("ada"), daemon.state_dir / "prepared"

    def place() -> int:
        return references_done(daemon.state_dir)

    with daemon.client(user) as client:
        push_demo(client)
        rows = tmp_path / "many.jsonl"
        pairs = [
            {"prompt": f"Why {i}?", "chosen": f"As {i} is {i}." * 4, "rejected": "No idea." * 4} for i in range(900)
        ]
        rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
        client.datasets.push([rows], name="many")
        spec: JobSpec = {**demo_spec("cut", max_steps=2), "dataset": "many", "method": "dpo"}
        del spec["train"]["train_on"]
        places = [0]
        daemon.resting.in_references(1)
        job_id = client.jobs.submit(spec).job_id
        for how in ("killed", "paused", "drained"):
            # Its worker rests soon after, so that the pass is not over before it is stopped.
            wait_for(lambda: place() > places[-1], 240.0, every_s=0.01)
            if how == "killed":
                [pid] = daemon.worker_pids()
                os.kill(pid, signal.SIGKILL)
                # The next worker continues where the record is now.
                places.append(place())
            elif how == "paused":
                client.jobs.pause(job_id)
                wait_for_state(client, job_id, "PAUSED")
                places.append(place())
                client.jobs.resume(job_id)
            else:
                daemon.terminate()
                places.append(place())
            daemon.resting.in_references(places[-1] + 1)
            assert not list(finished.rglob("references-*")), "the pass was over before it was stopped"
    daemon.resting.go_on()
    daemon.start()
    with daemon.client(user) as client:
        done = wait_for_state(client, job_id, "SUCCEEDED", "FAILED")
        assert (done.state, done.attempt) == ("SUCCEEDED", 4), done.message
        texts = [event.text for event in client.jobs.watch(job_id) if event.kind == "message"]
        continued = [text for text in texts if text.startswith("reference log-probabilities: continues, ")]
        tokens = [int(text.split("continues, ")[1].split(" ")[0]) for text in continued]
        assert len(tokens) == 3 and 0 < tokens[0] < tokens[1] < tokens[2]
        assert not list(daemon.state_dir.glob("jobs/*/references"))
        [file] = finished.rglob("references-*.safetensors")
        bits = file.read_bytes()
        assert tokens[-1] < len(bits) // 4
        file.unlink()
        whole = client.jobs.submit({**spec, "name": "whole"})
        assert wait_for_state(client, whole.job_id, "SUCCEEDED", "FAILED", timeout_s=240.0).state == "SUCCEEDED"
        [again] = finished.rglob("references-*.safetensors")
        assert again.name == file.name and again.read_bytes() == bits


def test_a_dataset_of_another_kind_is_refused_when_the_job_is_submitted(
    daemon: AnyDaemon, push_demo: Push, tmp_path: Path
) -> None:
    with daemon.client(daemon.user("ada")) as client:
        push_demo(client)
        name = push(client, tmp_path, "dpo")
        with pytest.raises(
            InvalidRequest, match="method is sft, which learns from data of kind text, and dataset dpo-rows is of kind"
        ):
            client.jobs.submit({**demo_spec(), "dataset": name})
        with pytest.raises(
            InvalidRequest, match="method is kto, which learns from data of kind kto, and dataset demo-chats is"
        ):
            client.jobs.submit({**demo_spec(), "method": "kto"})
