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

from horizon_proto.v1 import job_pb2
from horizon_server.events import StepDone
from horizon_server.records.job import JobRecord, JobState

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

Run = Callable[..., Result]
SPEC = "name: n\nmodel: {model}\ndataset: {dataset}\n"


def test_the_help_begins_with_what_it_is(run: Run) -> None:
    text = " ".join(run("--help").stdout.split())
    assert (
        "Fine-tune language models on a shared machine. horizon sends your model and your data to a machine that runs "
        "horizond. That machine trains the model. You watch the training from here and download the result. Without a "
        "command, horizon shows your jobs and the machine. Options:"
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
        (
            ("job", "get", "gsm8k-stf"),
            "job 'gsm8k-stf' does not exist, or is not yours; did you mean gsm8k-sft? See: horizon job list",
        ),
        (("job", "watch", "xyzzy"), "job 'xyzzy' does not exist, or is not yours; see: horizon job list"),
        (
            ("model", "get", "tiny-bse"),
            "model 'tiny-bse' does not exist, or is not yours; did you mean tiny-base? See: horizon model list",
        ),
        (
            ("dataset", "get", "GSM8"),
            "dataset 'GSM8' does not exist, or is not yours; did you mean gsm8k? See: horizon dataset list",
        ),
        (("checkpoint", "list", "gsm8k-stf"), "did you mean gsm8k-sft? See: horizon job list"),
    ],
)
def test_an_unknown_name_suggests_similar_ones(
    run: Run, daemon: Daemon, command: tuple[str, ...], message: str
) -> None:
    daemon.add_job("gsm8k-sft")
    result = run(*command)
    assert result.exit_code == 4
    assert message in result.stderr


@pytest.mark.parametrize("command", ["submit", "plan"])
@pytest.mark.parametrize(("kind", "name", "known"), [("model", "tiny-bse", "tiny-base"), ("dataset", "gsm8", "gsm8k")])
def test_a_spec_with_an_unknown_name_suggests_similar_ones(
    run: Run, daemon: Daemon, command: str, kind: str, name: str, known: str
) -> None:
    if (command, kind) == ("plan", "dataset"):
        daemon.line.refuse("PlanJob", "NOT_FOUND", "other words", reason="NOT_FOUND", named=("dataset", name))
    text = SPEC.format(**{"model": "tiny-base", "dataset": "gsm8k"} | {kind: name})
    result = run("job", command, "-", stdin=text)
    assert result.exit_code == 4
    assert f"is not yours; did you mean {known}? See: horizon {kind} list" in result.stderr


def test_a_preview_suggests_for_what_is_missing(run: Run) -> None:
    for kind, name, known in (("model", "tiny-bse", "tiny-base"), ("dataset", "gsm8", "gsm8k")):
        names = {"dataset": "gsm8k", "model": "tiny-base"} | {kind: name}
        result = run("dataset", "preview", names["dataset"], "--model", names["model"])
        assert result.exit_code == 4
        assert f"did you mean {known}? See: horizon {kind} list" in result.stderr


def test_a_name_means_the_newest_job_and_the_command_says_so(run: Run, daemon: Daemon) -> None:
    older, newer = (daemon.add_job("quick") for _ in range(2))
    result = run("job", "get", "quick", "-o", "name")
    assert (result.exit_code, result.stdout) == (0, f"{newer.job_id}\n")
    assert result.stderr == f"2 jobs are named quick; this is the newest, {newer.job_id}\n"
    assert "PAUSED" in run("job", "pause", "quick").stdout
    assert daemon.job(older.job_id).job_state == "QUEUED"


def test_a_job_is_named_without_a_notice_by_its_id(run: Run, daemon: Daemon) -> None:
    job_id = daemon.add_job("n").job_id
    for text in (job_id, job_id[:6], "n"):
        result = run("job", "get", text, "-o", "name")
        assert (result.stdout, result.stderr) == (f"{job_id}\n", "")


def test_a_plan_that_does_not_fit_is_one(run: Run, planned: job_pb2.MemoryPlan) -> None:
    text = SPEC.format(model="tiny-base", dataset="gsm8k")
    assert run("job", "plan", "-", stdin=text).exit_code == 0
    planned.fits, planned.message = False, "needs 2 GiB"
    refused = run("job", "plan", "-", stdin=text)
    assert refused.exit_code == 1
    assert "computed on cuda in bfloat16: it does not fit; needs 2 GiB" in refused.stdout
    for output in ("name", "json"):
        assert run("job", "plan", "-", "-o", output, stdin=text).exit_code == 1
    assert run("job", "plan", "-", "-o", "name", stdin=text).stdout == "does-not-fit\n"


def test_a_plan_for_the_host_has_no_device_column(run: Run, planned: job_pb2.MemoryPlan) -> None:
    planned.device = "host"
    result = run("job", "plan", "-", stdin=SPEC.format(model="tiny-base", dataset="gsm8k"))
    assert result.stdout.splitlines()[0].split() == ["COMPONENT", "HOST"]
    assert "512 B" not in result.stdout


def test_an_attempt_that_never_was_is_not_found(run: Run, daemon: Daemon) -> None:
    job = daemon.add_job("first", state=JobState.FAILED)
    job = daemon.move(daemon.move(job, JobState.QUEUED), JobState.PREPARING, attempt=2)
    daemon.write_log(job, b"some text")
    assert run("job", "logs", "first", "--attempt", "2").stdout == "some text"
    result = run("job", "logs", "first", "--attempt", "7")
    assert result.exit_code == 4
    assert "has no attempt 7; it has had 2 attempts so far" in result.stderr


def test_cancelling_an_ended_job_says_that_it_has_ended(run: Run, daemon: Daemon, finished_job: JobRecord) -> None:
    result = run("job", "cancel", "first")
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == f"first ({finished_job.job_id}) has already ended (SUCCEEDED); nothing to cancel\n"
    assert "CancelJob" not in daemon.calls
    assert run("job", "cancel", "first", "-o", "name").stdout == f"{finished_job.job_id}\n"


def test_stopping_says_towards_what(run: Run, running_job: JobRecord) -> None:
    assert run("job", "pause", "first").exit_code == 0
    assert "STOPPING (to pause)" in run("job", "list").stdout
    assert run("job", "cancel", "first").exit_code == 0
    assert "STOPPING (to cancel)" in run("job", "get", "first").stdout


@pytest.mark.parametrize("tokens", [None, 12345.6])
def test_the_noise_scale_is_shown_once_it_is_known(
    run: Run, daemon: Daemon, make_step: Callable[..., StepDone], tokens: float | None
) -> None:
    daemon.add_job("first", make_step(1, noise_scale_tokens=tokens), state=JobState.SUCCEEDED)
    page = run("job", "get", "first").stdout
    assert ("about 12,346 tokens a step" in page) == (tokens is not None)
    assert ("noise scale" in page) == (tokens is not None)


@pytest.mark.parametrize("device", ["host", "cuda", "host:0,host:1", "cuda:0,cuda:1"])
def test_figures_of_a_device_only_where_there_is_one(
    run: Run, daemon: Daemon, make_step: Callable[..., StepDone], device: str
) -> None:
    figures = {"host_memory_bytes": {"weights": 88 << 20}}
    daemon.add_job("first", *(make_step(n, **figures) for n in range(1, 11)), state=JobState.SUCCEEDED)

    def planned_for_device(answer: job_pb2.GetJobResponse) -> None:
        plan = answer.job.plan
        plan.device, plan.host_total_bytes = device, 700 << 20
        plan.host_bytes["other"] = 600 << 20

    daemon.line.change["GetJob"] = planned_for_device
    step, page = run("job", "watch", "first").stdout.splitlines()[4], run("job", "get", "first").stdout
    assert "host store 88.0 MiB" in step
    assert "memory used:     host store 88.0 MiB" in page
    assert "700.0 MiB host memory in total, of which 600.0 MiB for the worker process" in page
    for text in (step, page):
        assert ("overlap" in text) == device.startswith("cuda")
        assert ("device memory" in text) == device.startswith("cuda")


def test_memory_with_the_worker_process_is_called_host_memory(
    run: Run, daemon: Daemon, make_step: Callable[..., StepDone]
) -> None:
    memory = {"weights": 88 << 20, "other": 12 << 20}
    daemon.add_job("first", make_step(1, host_memory_bytes=memory), state=JobState.SUCCEEDED)
    assert "host memory 100.0 MiB" in run("job", "watch", "first").stdout


def test_the_list_has_what_a_researcher_looks_for(run: Run, daemon: Daemon, make_step: Callable[..., StepDone]) -> None:
    job = daemon.add_job("n", state=JobState.RUNNING)
    daemon.append(job, make_step(1, eta_s=976.0))
    head, row = run("job", "list").stdout.splitlines()
    assert head.split() == ["ID", "NAME", "STATE", "MODEL", "DATASET", "STEP", "LOSS", "ETA", "AGE"]
    assert {"tiny-base", "gsm8k", "0:16:16"} <= set(row.split())
    daemon.add_job("other")

    def of_another(answer: job_pb2.ListJobsResponse) -> None:
        answer.jobs[0].owner = "eve"

    daemon.line.change["ListJobs"] = of_another
    assert "OWNER" in run("job", "list").stdout.splitlines()[0]


def test_a_message_is_printed_once(run: Run, daemon: Daemon) -> None:
    columns = "the columns (answer, question) fit no known format"
    daemon.line.refuse(
        "GetNode",
        "INVALID_ARGUMENT",
        f"a.jsonl, line 1: {columns} (the first of 2 problems)",
        reason="INVALID_DATA",
        violations=(("line[1]", f"line 1: {columns}"), ("line[4]", "line 4: not JSON")),
    )
    lines = run("node", "status").stderr.splitlines()
    assert lines == [f"Error: a.jsonl, line 1: {columns} (the first of 2 problems)", "  line 4: not JSON"]


def test_a_problem_of_a_row_names_its_place_once(run: Run, daemon: Daemon) -> None:
    Path("a.jsonl").write_text('{"prompt": 1, "completion": "b"}\n{"prompt": "a", "completion": 2}\n')
    lines = run("dataset", "push", "a.jsonl").stderr.splitlines()
    assert lines[1:] == ["  a.jsonl:2: completion is 2; it must be a string"]


def test_best_needs_an_evaluation(run: Run, daemon: Daemon) -> None:
    daemon.add_checkpoint(daemon.add_job("n"), 10, {"config.json": b"{}"})
    assert run("checkpoint", "list", "n").stdout.split()[-1] == "last"
    result = run("checkpoint", "pull", "n@best", "--to", "out")
    assert result.exit_code == 4
    assert (
        "has no evaluated checkpoint, so none is the best; evaluate with eval_every_steps, or pull @last"
        in result.stderr
    )


def test_logout_and_profile_remove_forget_the_token(
    run: Run, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("HORIZON_SERVER", "HORIZON_TOKEN"):
        monkeypatch.delenv(name)
    for profile in ("one", "two"):
        assert (
            run("login", daemon.address, "--token-file", "-", "--profile", profile, stdin=daemon.token).exit_code == 0
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
    assert daemon.token not in (tmp_path / "config" / "profiles.yaml").read_text()
    assert run("logout").exit_code == 2


@pytest.mark.parametrize("command", [("job", "watch", "first"), ("job", "logs", "first"), ("job", "list")])
def test_a_reader_that_ends_early_is_not_a_failed_job(
    run: Run, daemon: Daemon, running_job: JobRecord, command: tuple[str, ...]
) -> None:
    daemon.write_log(running_job, b"a line\n" * 100_000)
    code = "from horizon_client.cli import main; main()"
    environment = {**os.environ, "HORIZON_SERVER": daemon.address, "HORIZON_TOKEN": daemon.token}
    read, write = os.pipe()
    os.close(read)  # as after `| head`, but at once
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command], env=environment, stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    try:
        _, printed = process.communicate(timeout=240)
    finally:
        process.kill()
    assert (process.returncode, printed) == (141, b"")


def test_a_spec_to_start_from(run: Run, tmp_path: Path) -> None:
    assert run("job", "init", "--to", "new.yaml").exit_code == 0
    again = run("job", "init", "--to", "new.yaml")
    assert (again.exit_code, again.stderr) == (2, "Error: new.yaml exists; choose another name\n")
    assert "cannot write nowhere/a.json" in run("job", "schema", "--to", "nowhere/a.json").stderr
    assert json.loads(run("job", "schema").stdout)["required"] == ["name", "model", "dataset"]
