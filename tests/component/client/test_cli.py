"""The `horizon` command against a small daemon: outputs, exit codes, messages."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from horizon_client.cli.root import horizon
from horizon_client.connection import UNARY_RETRY
from horizon_proto.v1 import dataset_pb2, job_pb2
from horizon_server.events import StepDone
from horizon_server.records.job import JobRecord, JobState
from horizon_server.version import VERSION

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

Run = Callable[..., Result]


def _commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, (*path, name))
        else:
            yield (*path, name), command


EVERY_COMMAND = dict(_commands(horizon))


def test_the_promised_commands_are_there() -> None:
    promised = """login; profile list; profile use; version; dataset push; dataset list; dataset get; dataset delete;
        dataset preview; model push; model list; model get; model delete; job plan; job submit; job list;
        job get; job watch; job metrics; job plot;
        job compare; job clone; job retry; top; job logs; job cancel; job pause; job resume; job set-priority; queue
        simulate; usage; quota; node cordon; node drain; node uncordon; node maintenance; node withdraw;
        node restore; plan; checkpoint list; checkpoint pull; checkpoint delete; node status"""
    assert {tuple(command.split()) for command in promised.split(";")} <= set(EVERY_COMMAND)


@pytest.mark.parametrize("path", EVERY_COMMAND, ids=" ".join)
def test_every_help_has_an_example_and_fits(path: tuple[str, ...]) -> None:
    result = CliRunner().invoke(horizon, [*path, "--help"])
    assert result.exit_code == 0
    assert f"Example:\n    horizon {' '.join(path)}" in result.stdout
    has_output = any(p.name == "output" for p in EVERY_COMMAND[path].params)
    # These print what a log or a model says.
    streams = {("job", "logs"), ("checkpoint", "sample"), ("checkpoint", "chat")}
    assert has_output or path in streams | {
        ("login",),
        ("mcp",),
        ("completion",),
        ("job", "init"),
        ("job", "schema"),
        ("job", "import"),
    }


def test_login_checks_remembers_and_says_who(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text(f"{daemon.token}\n")
    token.chmod(0o600)
    runner = CliRunner()
    result = runner.invoke(horizon, ["login", daemon.address, "--token-file", str(token), "--profile", "box"])
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"logged in to {socket.gethostname()} ({daemon.address}) as ada, role user; profile box\n"
    listed = runner.invoke(horizon, ["profile", "list", "-o", "json"])
    assert [(p["name"], p["in_use"]) for p in json.loads(listed.stdout)] == [("box", True)]
    assert daemon.token not in listed.stdout
    assert "ada, role user" in runner.invoke(horizon, ["node", "status"]).stdout
    assert runner.invoke(horizon, ["profile", "use", "box", "-o", "name"]).stdout == "box\n"
    assert runner.invoke(horizon, ["profile", "use", "nope"]).exit_code == 4


def test_login_with_a_wrong_token_remembers_nothing(daemon: Daemon) -> None:
    runner = CliRunner()
    result = runner.invoke(horizon, ["login", daemon.address, "--token-file", "-"], input="wrong\n")
    assert result.exit_code == 3
    assert "Error: the token is not known" in result.stderr
    assert runner.invoke(horizon, ["profile", "list", "-o", "name"]).stdout == ""
    assert runner.invoke(horizon, ["login", "gpubox:1", "--token-file", "-"], input="t\n").exit_code == 2


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [("INVALID_ARGUMENT", 2), ("FAILED_PRECONDITION", 2), ("PERMISSION_DENIED", 3), ("NOT_FOUND", 4), ("INTERNAL", 5)],
)
def test_exit_codes(run: Run, daemon: Daemon, code: str, exit_code: int) -> None:
    daemon.line.refuse("GetNode", code, "that went wrong", reason="R")
    result = run("node", "status")
    assert (result.exit_code, result.stdout, result.stderr) == (exit_code, "", "Error: that went wrong\n")


def test_usage_errors_are_two(run: Run) -> None:
    assert run("job", "nonsense").exit_code == 2
    assert run("job", "get").exit_code == 2
    assert run("job", "list", "-o", "xml").exit_code == 2
    assert run("checkpoint", "pull", "job@soon", "--to", "x").exit_code == 2


def test_nothing_configured_is_two(monkeypatch: pytest.MonkeyPatch, daemon: Daemon) -> None:
    result = CliRunner().invoke(horizon, ["node", "status"])
    assert result.exit_code == 2
    assert "horizon login HOST:PORT" in result.stderr


def test_violations_one_a_line_and_at_most_hundred(run: Run, daemon: Daemon) -> None:
    violations = [(f"line[{n}].text", f"line[{n}].text is empty") for n in range(149)]
    daemon.line.refuse(
        "GetJob",
        "INVALID_ARGUMENT",
        "150 rows\nare bad\x1b[31m",
        reason="R",
        violations=(("a", "a is too long"), *violations),
    )
    lines = run("job", "get", "x").stderr.splitlines()
    assert lines[0] == "Error: 150 rows are bad[31m"  # no line break, no escape
    assert lines[1:3] == ["  a is too long", "  line[0].text is empty"]
    assert len(lines) == 102
    assert lines[-1] == "  ... and 50 more"


@pytest.fixture
def rows(run: Run) -> Path:
    """A dataset file in the working folder."""
    path = Path("train.jsonl")
    path.write_text('{"question": "1+1?", "answer": "2", "text": "1"}\n' * 3)
    return path


def test_dataset_life(run: Run, rows: Path) -> None:
    pushed = run(
        "dataset",
        "push",
        "train.jsonl",
        "--name",
        "sums",
        "--map",
        "prompt=question",
        "completion=answer",
        "-o",
        "json",
    )
    assert pushed.exit_code == 0, pushed.stderr
    answer = json.loads(pushed.stdout)
    assert answer["dataset"]["field_map"] == {"prompt": "question", "completion": "answer"}
    assert answer["sent_bytes"] == rows.stat().st_size
    assert "sent 147 B of 147 B" in pushed.stderr
    again = run("dataset", "push", "train.jsonl", "-o", "name")
    assert (again.stdout, again.stderr.splitlines()[-1]) == ("train\n", "sent 0 B of 147 B")
    assert run("dataset", "list", "-o", "name").stdout == "train\nsums\ngsm8k\n"
    assert yaml.safe_load(run("dataset", "get", "sums", "-o", "yaml").stdout)["num_rows"] == 3
    assert run("dataset", "delete", "sums").stdout == "deleted dataset sums\n"
    assert run("dataset", "get", "sums").exit_code == 4


def test_dataset_list_walks_all_pages(run: Run, daemon: Daemon) -> None:
    for n in range(5):
        daemon.add_dataset(f"d{n}")

    def of_two(request: dataset_pb2.ListDatasetsRequest) -> None:
        request.page_size = min(request.page_size, 2)

    daemon.line.change_request["ListDatasets"] = of_two
    assert run("dataset", "list", "-o", "name").stdout.split() == ["d4", "d3", "d2", "d1", "d0", "gsm8k"]
    assert run("dataset", "list", "-o", "name", "--limit", "3").stdout.split() == ["d4", "d3", "d2"]
    assert daemon.calls.count("ListDatasets") == 3 + 2


def test_bad_row_is_named_before_anything_is_sent(run: Run, daemon: Daemon, rows: Path) -> None:
    rows.write_text('{"text": "a"}\n{"text": 1\n')
    result = run("dataset", "push", "train.jsonl", "--name", "x")
    assert result.exit_code == 2
    assert "Error: train.jsonl:2 is not JSON" in result.stderr
    assert daemon.calls == []


@pytest.fixture
def previewed(daemon: Daemon) -> None:
    """Answer previews with one row as often as asked for."""

    def answer(request: dataset_pb2.PreviewDatasetRequest) -> dataset_pb2.PreviewDatasetResponse:
        spans = [dataset_pb2.PreviewSpan(text="Q: 1+1?"), dataset_pb2.PreviewSpan(text=" 2", trained=True)]
        row = dataset_pb2.PreviewRow(
            spans=spans, num_tokens=5, num_trained_tokens=1, file="a.jsonl", unit="line", number=request.offset + 1
        )
        options = {name: getattr(request, name) for name in ("train_on", "method", "sequence_length")}
        return dataset_pb2.PreviewDatasetResponse(
            rows=[row] * request.num_rows, num_rows=1234, format=dataset_pb2.DATASET_FORMAT_MESSAGES, **options
        )

    daemon.line.replace["PreviewDataset"] = answer


def test_preview_marks_the_trained_part(run: Run, previewed: None) -> None:
    result = run("dataset", "preview", "sums", "--model", "tiny", "-n", "2", "--offset", "6", "--train-on", "all")
    assert result.stdout.splitlines() == [
        "sums: 1,234 rows, messages; method sft, train_on all, sequence_length 1024",
        "trained text is between [[ and ]]",
        *["", "--- a.jsonl line 7: 5 tokens, 1 trained ---", "Q: 1+1?[[ 2]]"] * 2,
    ]


def test_preview_in_full_for_programs(run: Run, previewed: None) -> None:
    plain = json.loads(run("dataset", "preview", "sums", "--model", "tiny", "-n", "1", "-o", "json").stdout)
    (row,) = plain["rows"]
    assert row["spans"] == [
        {"text": "Q: 1+1?", "trained": False, "weight": None},
        {"text": " 2", "trained": True, "weight": None},
    ]
    assert (row["file"], row["unit"], row["number"]) == ("a.jsonl", "line", 1)
    assert (plain["num_rows"], plain["format"], plain["train_on"]) == (1234, "messages", "assistant")
    assert run("dataset", "preview", "sums", "--model", "tiny", "-o", "name").stdout == "a.jsonl line 1\n" * 3


def test_preview_refuses_what_is_out_of_range_before_it_asks(run: Run, daemon: Daemon) -> None:
    for flags in (["-n", "0"], ["-n", "101"], ["--offset", "-1"], ["--train-on", "user"], ["--sequence-length", "7"]):
        assert run("dataset", "preview", "sums", "--model", "tiny", *flags).exit_code == 2
    assert daemon.calls == []


def _job_yaml(**fields: Any) -> str:
    Path("job.yaml").write_text(yaml.safe_dump({"name": "first", "model": "tiny-base", "dataset": "gsm8k", **fields}))
    return "job.yaml"


def test_submit_pushes_local_files_first(run: Run, daemon: Daemon, rows: Path) -> None:
    result = run("job", "submit", _job_yaml(dataset="./train.jsonl"), "--set", "train.learning_rate=1e-5", "-o", "name")
    (job,) = daemon.jobs()
    assert (result.exit_code, result.stdout) == (0, f"{job.job_id}\n")
    assert (job.spec.dataset, job.spec.train.learning_rate) == ("train", 1e-5)
    assert yaml.safe_load(run("dataset", "get", "train", "-o", "yaml").stdout)["state"] == "READY"
    assert "pushing the dataset train.jsonl" in result.stderr


def test_taken_name_gets_a_piece_of_the_hash(run: Run, daemon: Daemon, rows: Path) -> None:
    daemon.add_dataset("train")
    assert run("job", "submit", _job_yaml(dataset="./train.jsonl")).exit_code == 0
    (job,) = daemon.jobs()
    assert job.spec.dataset.startswith("train-")
    assert len(job.spec.dataset) == len("train-") + 8


def test_a_job_file_says_the_columns_of_its_data(run: Run, daemon: Daemon, rows: Path) -> None:
    Path("qa.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 3)
    text = "name: mapped\nmodel: tiny-base\ndataset: ./qa.jsonl\nmap: {prompt: question, completion: answer}\n"
    assert "did you mean" not in run("job", "submit", "-", stdin=text.replace("map", "mpa")).stdout
    result = run("job", "submit", "-", stdin=text)
    assert result.exit_code == 0, result.stderr
    assert daemon.jobs()[0].spec.dataset == "qa"
    dataset = json.loads(run("dataset", "get", "qa", "-o", "json").stdout)
    assert (dataset["format"], dataset["field_map"]) == (
        "prompt-completion",
        {"prompt": "question", "completion": "answer"},
    )
    again = run("job", "submit", "-", stdin=text)
    assert again.exit_code == 0 and daemon.jobs()[0].spec.dataset == "qa", "it is the same dataset"
    texts = "name: texts\nmodel: tiny-base\ndataset: ./notes.jsonl\nformat: text\nmap: {text: note}\n"
    Path("notes.jsonl").write_text('{"note": "a", "prompt": "p", "completion": "c"}\n' * 3)
    assert run("job", "submit", "-", stdin=texts).exit_code == 0
    assert json.loads(run("dataset", "get", "notes", "-o", "json").stdout)["format"] == "text"
    for change, words in (
        (
            ("--set", "dataset=gsm8k"),
            "map is for data files that the job file names, and dataset 'gsm8k' is not a file here",
        ),
        (
            ("--no-push",),
            "map is for data files that are pushed, and nothing is pushed here (--no-push, in Python push=False): "
            "leave map out",
        ),
        (("--set", "format=csv"), "format is 'csv'; it must be one of auto, messages, prompt-completion"),
        (("--set", "map=[1]"), "map is [1]; it must name a column for each field, such as {prompt: question}"),
    ):
        refused = run("job", "submit", "-", *change, stdin=text)
        assert refused.exit_code == 2 and words in refused.stderr


def test_pushed_name_wins_over_a_local_file_of_that_name(run: Run, daemon: Daemon, rows: Path) -> None:
    Path("gsm8k").write_text("not data")
    assert run("job", "submit", _job_yaml()).exit_code == 0
    (job,) = daemon.jobs()
    assert job.spec.dataset == "gsm8k"
    assert not {"WriteBlob", "WriteBlobs"} & set(daemon.calls)


def test_malformed_spec_uploads_nothing(run: Run, daemon: Daemon, rows: Path) -> None:
    result = run("job", "submit", _job_yaml(dataset="./train.jsonl", trian={}))
    assert result.exit_code == 2
    assert "trian is not a field of the job spec; did you mean train?" in result.stderr
    assert daemon.calls == []


@pytest.mark.parametrize(("field", "what"), [("model", "folder"), ("eval_dataset", "file or folder")])
def test_a_local_path_that_is_not_there_uploads_nothing(
    run: Run, daemon: Daemon, rows: Path, field: str, what: str
) -> None:
    result = run("job", "submit", _job_yaml(**{"dataset": "./train.jsonl", field: "./none"}))
    assert result.exit_code == 2
    assert f"{field} is './none', and there is no such {what} on this machine" in result.stderr
    assert daemon.calls == []


def test_submit_prints_the_warning_of_the_plan(run: Run, daemon: Daemon, rows: Path) -> None:
    result = run("job", "submit", _job_yaml(train={"max_steps": 2}))
    assert result.exit_code == 0
    assert "warning: train.warmup_steps is 10 and train.max_steps is 2" in result.stderr


def test_spec_from_stdin_and_no_push(run: Run, daemon: Daemon, rows: Path) -> None:
    text = "name: n\nmodel: tiny-base\ndataset: train.jsonl\n"
    assert run("job", "submit", "-", "--no-push", stdin=text).exit_code == 4, "nothing of that name was pushed"
    sent = [request for method, request in daemon.line.requests if method == "SubmitJob"]
    assert [request.spec.dataset for request in sent] == ["train.jsonl"]
    daemon.add_dataset("train.jsonl")
    assert run("job", "submit", "-", "--no-push", stdin=text).exit_code == 0
    assert not {"WriteBlob", "WriteBlobs"} & set(daemon.calls)


def test_same_request_id_is_one_job(run: Run, daemon: Daemon) -> None:
    request_id = str(uuid.uuid4())
    ids = {run("job", "submit", _job_yaml(), "--request-id", request_id, "-o", "name").stdout for _ in range(2)}
    assert ids == {f"{job.job_id}\n" for job in daemon.jobs()}
    assert len(ids) == 1


def test_plan(run: Run, planned: job_pb2.MemoryPlan) -> None:
    result = run("job", "plan", _job_yaml())
    assert result.exit_code == 0
    assert "weights     4.0 KiB   512 B" in result.stdout
    assert "1,024 parameters, computed on cuda in bfloat16: it fits" in result.stdout
    assert "predicted: 2,048 tokens/s (limited by compute), 0.25 s per step" in result.stdout
    assert "\ntotal: about 360 steps, about 2 min, estimated from the size of the files\n" in result.stdout
    before = (
        "before step 1: reference log-probabilities of 245,760 tokens, estimated from the size of the files, at "
        "8,192 tokens/s"
    )
    assert f"{before}, about 0:00:30" in result.stdout
    kept = (
        "kept on the device: weights of 12 layers (768.0 MiB), packed weights of 16 layers (256.0 MiB), activations of "
        "1 layer (512.0 MiB), weights of head and embedding (1.0 GiB)\n"
        "kept in host memory: attention outputs of 2 layers (256.0 MiB); saves about 4% of a step"
    )
    assert kept in result.stdout
    assert "hint: another setting is faster" in result.stdout
    plan = json.loads(run("job", "plan", _job_yaml(), "-o", "json").stdout)["plan"]
    assert (plan["fits"], plan["prediction"]["total_s"], plan["references"]["total_s"]) == (True, 90, 30)


def test_plan_of_the_daemon_itself(run: Run) -> None:
    plan = json.loads(run("job", "plan", _job_yaml(), "-o", "json").stdout)["plan"]
    assert (plan["fits"], plan["device"]) == (True, "host")
    assert plan["host_total_bytes"] == sum(plan["host_bytes"].values()) > 0


def test_steering(run: Run, daemon: Daemon) -> None:
    job = daemon.add_job("first")
    assert "PAUSED" in run("job", "pause", "first").stdout
    assert "QUEUED" in run("job", "resume", "first").stdout
    assert run("job", "resume", "first").exit_code == 2
    assert run("job", "set-priority", "first", "7").stdout == f"first ({job.job_id}): QUEUED #1, priority 7\n"
    assert run("job", "set-priority", "first", "-5").stdout == f"first ({job.job_id}): QUEUED #1, priority -5\n"
    refused = run("job", "set-priority", "first", "500")
    assert (refused.exit_code, "only an admin" in refused.stderr) == (3, True)
    assert run("job", "cancel", "first", "-o", "name").stdout == f"{job.job_id}\n"
    assert run("job", "list", "--state", "cancelled", "-o", "name").stdout == f"{job.job_id}\n"
    assert run("job", "list", "--state", "running", "-o", "name").stdout == ""


def test_tables_fit_eighty_columns(
    run: Run, daemon: Daemon, make_step: Callable[..., StepDone], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "a-very-long-name-" * 3
    jobs = []
    for n in range(3):
        jobs.append(daemon.add_job(name + str(n), state=JobState.RUNNING))
        daemon.append(jobs[-1], make_step(12345, num_steps=99999, eta_s=99999.0))

    def of_many_owners(answer: job_pb2.ListJobsResponse) -> None:
        for n, job in enumerate(answer.jobs):
            job.owner, job.spec.model, job.spec.dataset = f"user-{n}", "a-long-model" * 3, "a-long-dataset" * 3

    daemon.line.change["ListJobs"] = of_many_owners
    monkeypatch.setattr("horizon_client.cli.output.terminal_width", lambda: 80)
    lines = run("job", "list").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines] == ["ID", *(job.job_id for job in reversed(jobs))], "ids are whole"
    assert all("RUNNING" in line and "12345/99999" in line for line in lines[1:])
    monkeypatch.setattr("horizon_client.cli.output.terminal_width", lambda: None)
    assert f"{name}0" in run("job", "list").stdout


def test_watch_in_a_pipe_prints_lines_and_succeeds(run: Run, finished_job: JobRecord) -> None:
    result = run("job", "watch", "first")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert [line.split(":")[0] for line in lines[:4]] == ["QUEUED", "PREPARING", "STARTING", "RUNNING"]
    assert lines[4].startswith("step 1/10  loss 1.0000  grad_norm 0.500  lr 1.00e-04  100 tokens/s")
    assert lines[-3].startswith("step 10/10  loss 0.1000")  # quick steps are thinned out, the last one is not
    assert lines[-2:] == ["SUCCEEDED", f"first ({finished_job.job_id}) SUCCEEDED after 10 of 10 steps"]


def test_watch_as_json_lines(run: Run, finished_job: JobRecord) -> None:
    printed = run("job", "watch", finished_job.job_id, "-o", "json").stdout
    events = [json.loads(line) for line in printed.splitlines()]
    assert [e["sequence"] for e in events] == list(range(1, 16))
    steps = [e for e in events if e["event"] == "step"]
    assert [e["loss"] for e in steps] == [1 / n for n in range(1, 11)]


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_watch_of_a_job_that_failed_is_one(run: Run, daemon: Daemon, state: JobState) -> None:
    job = daemon.add_job("first", state=state, message="killed at the memory limit")
    result = run("job", "watch", job.job_id)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].endswith(": killed at the memory limit")


def test_submit_and_watch_keeps_stdout_for_the_id(run: Run, daemon: Daemon, finished_job: JobRecord) -> None:
    daemon.line.replace["SubmitJob"] = lambda request: job_pb2.SubmitJobResponse(
        job=job_pb2.Job(job_id=finished_job.job_id, spec=request.spec)
    )
    spec = "name: first\nmodel: tiny-base\ndataset: gsm8k\n"
    result = run("job", "submit", "-", "--watch", "-o", "name", stdin=spec)
    assert (result.exit_code, result.stdout) == (0, f"{finished_job.job_id}\n")
    assert "step 10/10" in result.stderr


def test_loss_that_is_not_a_number_stays_json(run: Run, daemon: Daemon, make_step: Callable[..., StepDone]) -> None:
    job = daemon.add_job("first", make_step(1, loss=math.nan), state=JobState.SUCCEEDED)
    first_step = run("job", "watch", job.job_id, "-o", "json").stdout.splitlines()[4]
    assert json.loads(first_step, parse_constant=pytest.fail)["loss"] is None


def test_logs_as_json_are_the_events(run: Run, finished_job: JobRecord, running_job: JobRecord) -> None:
    lines = [json.loads(line) for line in run("job", "logs", finished_job.job_id, "-o", "json").stdout.splitlines()]
    assert [line["sequence"] for line in lines] == list(range(1, 16))
    so_far = run("job", "logs", running_job.job_id, "-o", "json").stdout.splitlines()
    assert [json.loads(line)["sequence"] for line in so_far] == [1, 2, 3, 4, 5, 6], "it does not wait for more"
    assert run("job", "logs", finished_job.job_id, "-o", "json", "--attempt", "1").exit_code == 2


def test_logs_are_the_bytes(run: Run, daemon: Daemon, finished_job: JobRecord) -> None:
    daemon.write_log(finished_job, b"epoch 1\nepoch \xff 2\n")
    assert run("job", "logs", finished_job.job_id).stdout_bytes == b"epoch 1\nepoch \xff 2\n"


def test_pull(run: Run, daemon: Daemon, finished_job: JobRecord) -> None:
    job_id = finished_job.job_id
    daemon.add_checkpoint(finished_job, 10, {"config.json": b"{}", "trainer/state.json": b"{}"})
    result = run("checkpoint", "pull", "first@last", "--to", "out")
    assert (result.exit_code, result.stdout) == (0, f"step 10 of {job_id} is in out (2 B received)\n")
    assert Path("out/config.json").read_bytes() == b"{}"
    assert run("checkpoint", "list", job_id, "-o", "name").stdout == f"{job_id}@10\n"
    assert run("checkpoint", "pull", f"{job_id}@11", "--to", "out").exit_code == 4
    assert run("checkpoint", "delete", f"{job_id}@10").exit_code == 0
    assert run("checkpoint", "delete", job_id).exit_code == 2


def test_version(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(run("version", "-o", "json").stdout)["server"] == VERSION
    monkeypatch.delenv("HORIZON_SERVER")
    before_login = run("version")
    assert before_login.exit_code == 0
    assert "not configured" in before_login.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    assert "_HORIZON_COMPLETE" in CliRunner().invoke(horizon, ["completion", shell]).stdout


def test_server_that_is_away_is_five(run: Run, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    # Commands wait a minute for a daemon that restarts. The policy is frozen, and a default of several constructors.
    monkeypatch.setitem(vars(UNARY_RETRY), "max_elapsed_s", 0.5)
    daemon.line.stop()
    result = run("job", "cancel", "x")
    assert result.exit_code == 5
    assert "nothing listens there; is the daemon running" in result.stderr


def _interrupt(daemon: Daemon, *args: str, when: bytes) -> tuple[int, str]:
    """Run the real command, send SIGINT once `when` was printed, return exit code and all that was printed."""
    code = "import sys; from horizon_client.cli import main; sys.argv[0] = 'horizon'; main()"
    environment = {**os.environ, "HORIZON_SERVER": daemon.address, "HORIZON_TOKEN": daemon.token}
    with subprocess.Popen(
        [sys.executable, "-c", code, *args], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        # Ends the reads below too, so that a command that hangs fails its test.
        too_late = threading.Timer(60, process.kill)
        too_late.start()
        try:
            assert process.stdout is not None
            printed = b""
            while when not in printed:
                line = process.stdout.readline()
                assert line, printed
                printed += line
            process.send_signal(signal.SIGINT)
            printed += process.stdout.read()
            return process.wait(240), printed.decode()
        finally:
            too_late.cancel()
            process.kill()


def test_interrupted_watch_says_how_to_come_back(run: Run, daemon: Daemon, running_job: JobRecord) -> None:
    code, printed = _interrupt(daemon, "job", "watch", "first", when=b"step 1/10")
    assert code == 130
    assert printed.endswith("the job continues; to return to it: horizon job watch " + running_job.job_id + "\n")
    assert "Traceback" not in printed


def test_interrupted_push_says_how_to_go_on(run: Run, daemon: Daemon, rows: Path) -> None:
    daemon.line.hanging.add("FinalizeDataset")
    code, printed = _interrupt(daemon, "dataset", "push", "train.jsonl", when=b"verifying on the server: train")
    assert code == 130
    assert "the same command continues from there" in printed
    assert "Traceback" not in printed
