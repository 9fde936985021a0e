"""Commands about several jobs and about jobs again: metrics, plot, compare, clone, retry, watch of several, top, and
`horizon` alone."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from horizon_client.cli.compare import differences
from horizon_client.cli.figures import terminal_plot
from horizon_client.cli.root import horizon
from horizon_proto.v1 import job_pb2
from horizon_server.events import EvalDone, StepDone
from horizon_server.records.job import JobRecord, JobState

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

Run = Callable[..., Result]
MakeStep = Callable[..., StepDone]


@pytest.fixture
def two_jobs(daemon: Daemon, make_step: MakeStep) -> tuple[JobRecord, JobRecord]:
    """`first` and `second`, which has another learning rate and an evaluation."""
    first = daemon.add_job("first", *map(make_step, range(1, 11)), state=JobState.SUCCEEDED)
    evaluation = EvalDone(step=10, eval_loss=0.25, num_targets=8, num_tokens=9, duration_s=1.0)
    steps = [make_step(step, loss=2 / step) for step in range(1, 11)]
    second = daemon.add_job(
        "second", *steps, evaluation, state=JobState.SUCCEEDED, train={"learning_rate": 2e-4, "max_steps": 10}
    )
    return first, second


def test_metrics_as_a_table_csv_and_json(run: Run, two_jobs: tuple[JobRecord, JobRecord]) -> None:
    shown = run("job", "metrics", "second")
    assert (shown.exit_code, shown.stdout.split("\n")[0].split()[:3]) == (0, ["STEP", "LOSS", "EVAL_LOSS"])
    rows = list(csv.DictReader(io.StringIO(run("job", "metrics", "second", "-o", "csv").stdout)))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 11)]
    assert (rows[0]["loss"], rows[0]["eval_loss"], rows[9]["eval_loss"]) == ("2.0", "", "0.25")
    assert rows[0]["time"].endswith("+00:00")
    one = json.loads(run("job", "metrics", "second", "--figure", "loss", "-o", "json").stdout)
    assert set(one[0]) == {"step", "time", "loss"} and one[1]["loss"] == 1.0
    unknown = run("job", "metrics", "second", "--figure", "lss")
    assert (unknown.exit_code, unknown.stdout) == (2, "") and "did you mean loss?" in unknown.stderr


def test_a_long_job_is_shown_in_thirty_rows(run: Run, daemon: Daemon, make_step: MakeStep) -> None:
    daemon.add_job("long", *map(make_step, range(1, 102)), state=JobState.RUNNING)
    shown = run("job", "metrics", "long")
    lines = shown.stdout.splitlines()[1:]
    assert len(lines) <= 30 and lines[-1].startswith(" 101 ")
    assert f"{len(lines)} of 101 rows" in shown.stderr


def test_plots_in_the_terminal_and_as_data(run: Run, two_jobs: tuple[JobRecord, JobRecord]) -> None:
    drawn = run("job", "plot", "first", "second")
    assert drawn.exit_code == 0
    assert all(text in drawn.stdout for text in ("loss", "first", "second", "step")) and "\x1b" not in drawn.stdout
    points = json.loads(run("job", "plot", "first", "--figure", "grad_norm", "-o", "json").stdout)
    assert points == {"first": {"steps": [*range(1, 11)], "grad_norm": [0.5] * 10}}
    none = run("job", "plot", "first", "--figure", "eval_loss")
    assert none.exit_code == 2 and "no figure 'eval_loss'" in none.stderr


def test_a_plot_fits_its_width_and_has_colours_only_where_they_help() -> None:
    curves = {"a": ([1, 2, 3], [3.0, 2.0, 1.0]), "b": ([1, 2, 3], [1.0, 2.0, 3.0])}
    narrow = terminal_plot(curves, "loss", is_log=False, width=40, color=False)
    assert max(map(len, narrow.splitlines())) <= 40 and "\x1b" not in narrow
    assert "\x1b" in terminal_plot(curves, "loss", is_log=False, width=40, color=True)


def test_a_plot_is_a_picture(run: Run, two_jobs: tuple[JobRecord, JobRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert run("job", "plot", "first", "second", "--to", "loss.png").exit_code == 0
    assert Path("loss.png").read_bytes().startswith(b"\x89PNG")
    other = run("job", "plot", "first", "--to", "loss.xyz")
    assert other.exit_code == 2 and "cannot write loss.xyz" in other.stderr
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    missing = run("job", "plot", "first", "--to", "again.png")
    assert missing.exit_code == 2 and "pip install 'horizon-train[plot]'" in missing.stderr


def test_compare_shows_what_differs_first(run: Run, two_jobs: tuple[JobRecord, JobRecord]) -> None:
    shown = run("job", "compare", "first", "second")
    assert shown.exit_code == 0
    above, below = shown.stdout.split("\n\n")
    fields = {line.split()[0]: line.split()[1:] for line in above.splitlines()}
    assert fields["FIELD"] == ["first", "second"]
    assert fields["train.learning_rate"] == ["1e-05", "0.0002"]
    assert "model" not in fields and "loss" in below and "last eval_loss" in below
    found = json.loads(run("job", "compare", "first", "second", "-o", "json").stdout)
    assert found["jobs"] == [job.job_id for job in two_jobs]
    assert found["figures"]["loss"] == [0.1, 0.2] and found["figures"]["last eval_loss"] == [None, 0.25]
    assert "model" in json.loads(run("job", "compare", "first", "second", "--all", "-o", "json").stdout)["spec"]
    assert run("job", "compare", "first").exit_code == 2


def test_differences_of_specs_have_dotted_names() -> None:
    left, right = {"a": {"b": 1, "c": [1]}, "d": None}, {"a": {"b": 2, "c": [1]}}
    assert differences([left, right]) == {"a.b": [1, 2]}


def test_a_clone_is_a_new_job_with_changes(
    run: Run, daemon: Daemon, two_jobs: tuple[JobRecord, JobRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    cloned = run("job", "clone", "second", "--set", "name=third", "--set", "train.seed=7", "-o", "name")
    job = daemon.job(cloned.stdout.strip())
    assert (job.spec.name, job.spec.train.seed, job.spec.train.learning_rate) == ("third", 7, 2e-4)

    def edit(text: str, extension: str) -> str:
        spec = yaml.safe_load(text)
        assert (spec["train"]["seed"], extension) == (8, ".yaml")
        spec["name"] = "edited"
        return yaml.safe_dump(spec)

    monkeypatch.setattr(click, "edit", edit)
    edited = run("job", "clone", "second", "--set", "train.seed=8", "--edit")
    assert edited.exit_code == 0 and "submitted edited as job_" in edited.stdout
    monkeypatch.setattr(click, "edit", lambda *_, **__: None)
    assert "nothing was submitted" in run("job", "clone", "second", "--edit").stderr
    assert [job.spec.name for job in daemon.jobs()] == ["edited", "third", "second", "first"]


def test_retry_continues_a_failed_job_and_submits_a_cancelled_one_again(run: Run, daemon: Daemon) -> None:
    failed = daemon.add_job("failed", state=JobState.FAILED)
    retried = run("job", "retry", "failed")
    assert retried.exit_code == 0 and f"failed ({failed.job_id}) continues from its start: QUEUED" in retried.stdout
    cancelled = daemon.add_job("cancelled", state=JobState.CANCELLED)
    again = run("job", "retry", "cancelled", "-o", "name").stdout.strip()
    assert again != cancelled.job_id and daemon.job(again).spec == cancelled.spec
    daemon.add_job("done", state=JobState.SUCCEEDED)
    done = run("job", "retry", "done")
    assert done.exit_code == 2 and "horizon job clone" in done.stderr


def test_several_jobs_are_watched_in_one_view(run: Run, daemon: Daemon, two_jobs: tuple[JobRecord, JobRecord]) -> None:
    watched = run("job", "watch", "first", "second")
    assert watched.exit_code == 0
    assert any(line.startswith("first   step 10/10") for line in watched.stdout.splitlines())
    assert any(line.startswith("second  step 10/10") for line in watched.stdout.splitlines())
    daemon.add_job("failed", state=JobState.FAILED)
    lines = run("job", "watch", "first", "failed", "-o", "json")
    assert lines.exit_code == 1
    ids = {json.loads(line)["job_id"] for line in lines.stdout.splitlines()}
    assert ids == {two_jobs[0].job_id, daemon.jobs()[0].job_id}


def test_top_shows_the_machine_and_its_jobs(run: Run, daemon: Daemon, running_job: JobRecord) -> None:
    shown = run("top")
    assert shown.exit_code == 0
    assert "1 on the device, 0 waiting" in shown.stdout and "memory  [" in shown.stdout
    row = next(line for line in shown.stdout.splitlines() if line.startswith("first"))
    assert "ada" in row and "RUNNING" in row and "0.5000" in row
    data: Any = json.loads(run("top", "--once", "-o", "json").stdout)
    assert set(data) == {"node", "queue", "jobs"}


def test_horizon_alone_shows_what_is_asked_first(run: Run, daemon: Daemon, running_job: JobRecord) -> None:
    shown = run()
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert "logged in as ada" in shown.stdout and "1 job on the device, 0 waiting" in shown.stdout
    assert any(line.startswith("first") and "RUNNING" in line for line in shown.stdout.splitlines())
    assert "horizon job watch first" in shown.stdout
    daemon.move(running_job, JobState.FAILED, message="out of memory")
    ended = run().stdout
    assert "no job that runs or waits" in ended and "Your last: first FAILED" in ended and "out of memory" in ended


def test_horizon_alone_before_a_login_says_how(daemon: Daemon) -> None:
    shown = CliRunner().invoke(horizon, [])
    assert shown.exit_code == 0 and "horizon login HOST:7171 --token-file" in shown.stdout


def test_jobs_are_listed_by_owner_and_text(run: Run, daemon: Daemon, two_jobs: tuple[JobRecord, JobRecord]) -> None:
    assert run("job", "list", "--search", "SECO", "-o", "name").stdout.split() == [two_jobs[1].job_id]
    assert run("job", "list", "--owner", "bob", "-o", "name").stdout == ""
    request = daemon.line.requests[-1][1]
    assert isinstance(request, job_pb2.ListJobsRequest) and request.owner == "bob"
