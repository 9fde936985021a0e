"""What the command says when something is misspelt, ambiguous, ended or missing, and what it exits with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import Result

from horizon_proto.v1 import dataset_pb2, job_pb2, model_pb2

if TYPE_CHECKING:
    from tests.unit.client.conftest import FakeDaemon

Run = Callable[..., Result]
SPEC = "name: n\nmodel: {model}\ndataset: {dataset}\n"


def test_the_help_begins_with_what_it_is(run: Run) -> None:
    text = " ".join(run("--help").stdout.split())
    assert (
        "Fine-tune language models on a shared machine. horizon sends your model and your data to a machine that runs horizond. "
        "That machine trains the model. You watch the training from here and download the result. Options:"
    ) in text


def test_the_version_is_an_option_too(run: Run) -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout.split()[0]) == (0, "horizon")


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        (("jobs", "list"), "'jobs' is not a command of horizon; did you mean job?"),
        (("job", "sumbit", "x"), "'sumbit' is not a command of horizon job; did you mean submit?"),
        (("dataset", "psuh"), "did you mean push?"),
        (("xyzzy",), "'xyzzy' is not a command of horizon; commands: login, logout, profile"),
        (("profile", "us"), "did you mean use?"),
    ],
)
def test_an_unknown_command_suggests_the_nearest(
    run: Run, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], hint: str
) -> None:
    result = run(*command)
    assert result.exit_code == 2
    assert hint in result.stderr


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("job", "get", "gsm8k-stf"), "job gsm8k-stf does not exist; did you mean gsm8k-sft? See: horizon job list"),
        (("job", "watch", "xyzzy"), "job xyzzy does not exist; see: horizon job list"),
        (
            ("model", "get", "tiny-bse"),
            "model tiny-bse does not exist; did you mean tiny-base? See: horizon model list",
        ),
        (("dataset", "get", "GSM8"), "dataset GSM8 does not exist; did you mean gsm8k? See: horizon dataset list"),
        (("checkpoint", "list", "gsm8k-stf"), "did you mean gsm8k-sft? See: horizon job list"),
    ],
)
def test_an_unknown_name_suggests_similar_ones(
    run: Run, daemon: FakeDaemon, command: tuple[str, ...], message: str
) -> None:
    daemon.add_job(job_pb2.JobSpec(name="gsm8k-sft"))
    daemon.models["tiny-base"] = model_pb2.Model(name="tiny-base")
    daemon.datasets["gsm8k"] = dataset_pb2.Dataset(name="gsm8k")
    result = run(*command)
    assert result.exit_code == 4
    assert message in result.stderr


@pytest.mark.parametrize("command", ["submit", "plan"])
@pytest.mark.parametrize(("kind", "name", "known"), [("model", "tiny-bse", "tiny-base"), ("dataset", "gsm8", "gsm8k")])
def test_a_spec_with_an_unknown_name_suggests_similar_ones(
    run: Run, daemon: FakeDaemon, command: str, kind: str, name: str, known: str
) -> None:
    daemon.models["tiny-base"] = model_pb2.Model(name="tiny-base")
    daemon.datasets["gsm8k"] = dataset_pb2.Dataset(name="gsm8k")
    method = {"submit": "SubmitJob", "plan": "PlanJob"}[command]
    daemon.refuse(method, "NOT_FOUND", f"{kind} '{name}' does not exist, or is not yours", reason="NOT_FOUND")
    text = SPEC.format(**{"model": "m", "dataset": "d"} | {kind: name})
    result = run("job", command, "-", stdin=text)
    assert result.exit_code == 4
    assert f"is not yours; did you mean {known}? See: horizon {kind} list" in result.stderr


def test_a_preview_suggests_for_what_is_missing(run: Run, daemon: FakeDaemon) -> None:
    daemon.models["tiny-base"] = model_pb2.Model(name="tiny-base")
    daemon.datasets["gsm8k"] = dataset_pb2.Dataset(name="gsm8k")
    for kind, name, known in (("model", "tiny-bse", "tiny-base"), ("dataset", "gsm8", "gsm8k")):
        daemon.refuse("PreviewDataset", "NOT_FOUND", f"{kind} '{name}' does not exist", reason="NOT_FOUND")
        names = {"dataset": "gsm8k", "model": "tiny-base"} | {kind: name}
        result = run("dataset", "preview", names["dataset"], "--model", names["model"])
        assert result.exit_code == 4
        assert f"did you mean {known}? See: horizon {kind} list" in result.stderr


def test_a_name_means_the_newest_job_and_the_command_says_so(run: Run, daemon: FakeDaemon) -> None:
    for _ in range(2):
        daemon.add_job(job_pb2.JobSpec(name="quick"), job_pb2.JOB_STATE_RUNNING)
    result = run("job", "get", "quick", "-o", "name")
    assert (result.exit_code, result.stdout) == (0, "job-2\n")
    assert result.stderr == "2 jobs are named quick; this is the newest, job-2\n"
    assert "PAUSED" in run("job", "pause", "quick").stdout
    assert daemon.jobs["job-1"].state == job_pb2.JOB_STATE_RUNNING


def test_a_job_is_named_without_a_notice_by_its_id(run: Run, daemon: FakeDaemon) -> None:
    daemon.jobs["job_abc1"] = job_pb2.Job(job_id="job_abc1", spec=job_pb2.JobSpec(name="n"))
    for text in ("job_abc1", "job_a", "n"):
        result = run("job", "get", text, "-o", "name")
        assert (result.stdout, result.stderr) == ("job_abc1\n", "")


def test_a_plan_that_does_not_fit_is_one(run: Run, daemon: FakeDaemon) -> None:
    text = SPEC.format(model="m", dataset="d")
    assert run("job", "plan", "-", stdin=text).exit_code == 0
    daemon.plan_fits = False
    refused = run("job", "plan", "-", stdin=text)
    assert refused.exit_code == 1
    assert "computed on cuda: it does not fit; needs 2 GiB" in refused.stdout
    for output in ("name", "json"):
        assert run("job", "plan", "-", "-o", output, stdin=text).exit_code == 1
    assert run("job", "plan", "-", "-o", "name", stdin=text).stdout == "does-not-fit\n"


def test_a_plan_for_the_host_has_no_device_column(run: Run, daemon: FakeDaemon) -> None:
    daemon.plan_device = "host"
    result = run("job", "plan", "-", stdin=SPEC.format(model="m", dataset="d"))
    assert result.stdout.splitlines()[0].split() == ["COMPONENT", "HOST"]
    assert "512 B" not in result.stdout


def test_an_attempt_that_never_was_is_not_found(run: Run, daemon: FakeDaemon, finished_job: str) -> None:
    daemon.log = b"some text"
    daemon.jobs[finished_job].attempt = 2
    assert run("job", "logs", "first", "--attempt", "2").stdout == "some text"
    result = run("job", "logs", "first", "--attempt", "7")
    assert result.exit_code == 4
    assert "has no attempt 7; it has had 2 attempts so far" in result.stderr


def test_cancelling_an_ended_job_says_that_it_has_ended(run: Run, daemon: FakeDaemon, finished_job: str) -> None:
    result = run("job", "cancel", "first")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "first (job-1) has already ended (SUCCEEDED); nothing to cancel\n"
    assert "CancelJob" not in daemon.calls
    assert run("job", "cancel", "first", "-o", "name").stdout == "job-1\n"


def test_stopping_says_towards_what(run: Run, daemon: FakeDaemon) -> None:
    job = daemon.add_job(job_pb2.JobSpec(name="n"), job_pb2.JOB_STATE_STOPPING)
    job.queue_position, job.reason = 0, "PAUSE"
    assert "STOPPING (to pause)" in run("job", "list").stdout
    job.wanted = "cancel"
    assert "STOPPING (to cancel)" in run("job", "get", "n").stdout


@pytest.mark.parametrize("device", ["host", "cuda"])
def test_figures_of_a_device_only_where_there_is_one(
    run: Run, daemon: FakeDaemon, finished_job: str, device: str
) -> None:
    job = daemon.jobs[finished_job]
    job.plan.device, job.plan.host_total_bytes = device, 700 << 20
    job.plan.host_bytes["other"] = 600 << 20
    job.last_step.CopyFrom(daemon.events[-2].step)
    job.last_step.host_memory_bytes["weights"] = 88 << 20
    daemon.events[1].step.host_memory_bytes["weights"] = 88 << 20
    step, page = run("job", "watch", "first").stdout.splitlines()[1], run("job", "get", "first").stdout
    assert "host store 88.0 MiB" in step
    assert "memory used:     host store 88.0 MiB" in page
    assert "700.0 MiB host memory in total, of which 600.0 MiB for the worker process" in page
    for text in (step, page):
        assert ("overlap" in text) == (device == "cuda")
        assert ("device memory" in text) == (device == "cuda")


def test_memory_with_the_worker_process_is_called_host_memory(run: Run, daemon: FakeDaemon, finished_job: str) -> None:
    daemon.events[1].step.host_memory_bytes.update({"weights": 88 << 20, "other": 12 << 20})
    assert "host memory 100.0 MiB" in run("job", "watch", "first").stdout


def test_the_list_has_what_a_researcher_looks_for(run: Run, daemon: FakeDaemon) -> None:
    job = daemon.add_job(job_pb2.JobSpec(name="n", model="tiny-base", dataset="gsm8k"), job_pb2.JOB_STATE_RUNNING)
    job.eta.FromSeconds(976)
    head, row = run("job", "list").stdout.splitlines()
    assert head.split() == ["ID", "NAME", "STATE", "MODEL", "DATASET", "STEP", "LOSS", "ETA", "AGE"]
    assert {"tiny-base", "gsm8k", "0:16:16"} <= set(row.split())
    daemon.add_job(job_pb2.JobSpec(name="other")).owner = "eve"
    assert "OWNER" in run("job", "list").stdout.splitlines()[0]


def test_a_message_is_printed_once(run: Run, daemon: FakeDaemon) -> None:
    columns = "the columns (answer, question) fit no known format"
    daemon.refuse(
        "GetNode", "INVALID_ARGUMENT", f"a.jsonl, line 1: {columns} (the first of 2 problems)",
        reason="INVALID_DATA", violations=(("line[1]", f"line 1: {columns}"), ("line[4]", "line 4: not JSON")),
    )  # fmt: skip
    lines = run("node", "status").stderr.splitlines()
    assert lines == [f"Error: a.jsonl, line 1: {columns} (the first of 2 problems)", "  line 4: not JSON"]


def test_best_needs_an_evaluation(run: Run, daemon: FakeDaemon) -> None:
    daemon.add_job(job_pb2.JobSpec(name="n"))
    daemon.add_checkpoint(10, {"config.json": b"{}"}, last=True, best=True)
    assert run("checkpoint", "list", "n").stdout.split()[-1] == "last"
    result = run("checkpoint", "pull", "n@best", "--to", "out")
    assert result.exit_code == 4
    assert (
        "has no evaluated checkpoint, so none is the best; evaluate with eval_every_steps, or pull @last"
        in result.stderr
    )


def test_logout_and_profile_remove_forget_the_token(
    run: Run, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HORIZON_SERVER", "HORIZON_TOKEN"):
        monkeypatch.delenv(name)
    for profile in ("one", "two"):
        assert (
            run("login", daemon.address, "--token-file", "-", "--profile", profile, stdin="hzn-test-token").exit_code
            == 0
        )
    out = run("logout")
    assert (
        out.stdout == f"logged out of {daemon.address}; the profile two and its token are removed from this machine\n"
    )
    assert "horizond token revoke" in out.stderr
    assert [p["name"] for p in json.loads(run("profile", "list", "-o", "json").stdout)] == ["one"]
    assert run("node", "status").exit_code == 2, "no profile is in use"
    assert run("profile", "remove", "on").stderr == "Error: there is no profile 'on'; did you mean one?\n"
    assert run("profile", "remove", "one", "-o", "name").stdout == "one\n"
    assert "hzn-test-token" not in (tmp_path / "config" / "profiles.yaml").read_text()
    assert run("logout").exit_code == 2


def test_set_priority_promises_nothing(run: Run) -> None:
    assert "not available yet" in run("job", "--help").stdout
    assert "Not available yet" in run("job", "set-priority", "--help").stdout


@pytest.mark.parametrize("command", [("job", "watch", "first"), ("job", "logs", "first"), ("job", "list")])
def test_a_reader_that_ends_early_is_not_a_failed_job(
    run: Run, daemon: FakeDaemon, finished_job: str, command: tuple[str, ...]
) -> None:
    daemon.never_ending, daemon.log = True, b"a line\n" * 100_000
    code = "from horizon_client.cli import main; main()"
    environment = {**os.environ, "HORIZON_SERVER": daemon.address, "HORIZON_TOKEN": "hzn-test-token"}
    read, write = os.pipe()
    os.close(read)  # as after `| head`, but at once
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command], env=environment, stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    _, printed = process.communicate(timeout=60)
    assert (process.returncode, printed) == (141, b"")


def test_a_spec_to_start_from(run: Run, tmp_path: Path) -> None:
    assert run("job", "init", "--to", "new.yaml").exit_code == 0
    again = run("job", "init", "--to", "new.yaml")
    assert (again.exit_code, again.stderr) == (2, "Error: new.yaml exists; choose another name\n")
    assert "cannot write nowhere/a.json" in run("job", "schema", "--to", "nowhere/a.json").stderr
    assert json.loads(run("job", "schema").stdout)["required"] == ["name", "model", "dataset"]
