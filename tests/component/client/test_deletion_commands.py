"""`delete` of one and of many, and `job keep`, from the user's side."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
from click.testing import Result
from tests.component.client.conftest import Daemon

from horizon_client import Client
from horizon_client.errors import InUse, InvalidRequest, NotFound
from horizon_server.records.job import JobRecord, JobState

Run = Callable[..., Result]


@pytest.fixture
def jobs(daemon: Daemon) -> list[JobRecord]:
    """A failed, a succeeded and a running job; the first two have a checkpoint."""
    states = (JobState.FAILED, JobState.SUCCEEDED, JobState.RUNNING)
    made = [daemon.add_job(state.value.lower(), state=state) for state in states]
    for job in made[:2]:
        daemon.add_checkpoint(job, 10, {"model.safetensors": b"w" * 1024})
    return made


def test_a_job_is_deleted_after_a_look_and_a_question(
    run: Run, daemon: Daemon, jobs: list[JobRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = run("job", "delete", "failed")
    assert refused.exit_code == 2
    assert "add --yes to delete this, or --dry-run to only see it" in refused.output
    monkeypatch.setattr("horizon_client.cli.deletion._can_ask", lambda: True)
    no = run("job", "delete", "failed", stdin="n\n")
    assert no.exit_code == 130
    assert "delete 1 job, " in no.output
    assert len(daemon.jobs()) == 3
    yes = run("job", "delete", "failed", stdin="y\n")
    assert yes.exit_code == 0, yes.output
    assert f"deleted job failed ({jobs[0].job_id})" in yes.stdout
    assert [job.job_id for job in daemon.jobs()] == [jobs[2].job_id, jobs[1].job_id]


def test_many_jobs_are_deleted_by_filter(run: Run, daemon: Daemon, jobs: list[JobRecord]) -> None:
    would = run("job", "delete", "--state", "failed", "--state", "succeeded", "--dry-run")
    assert would.exit_code == 0, would.output
    assert f"would delete job failed ({jobs[0].job_id}), 1." in would.stdout
    assert "2 jobs would be deleted" in would.stderr
    assert len(daemon.jobs()) == 3
    assert run("job", "delete", "--older-than", "30d", "--yes").exit_code == 0
    assert len(daemon.jobs()) == 3
    done = run("job", "delete", "--state", "failed", "--state", "succeeded", "--yes", "-o", "json")
    assert done.exit_code == 0, done.output
    assert {one["key"] for one in json.loads(done.stdout)} == {jobs[0].job_id, jobs[1].job_id}
    assert [job.job_id for job in daemon.jobs()] == [jobs[2].job_id]


def test_what_is_in_use_is_refused_and_the_exit_code_says_so(run: Run, daemon: Daemon, jobs: list[JobRecord]) -> None:
    result = run("job", "delete", "running", "failed", "--yes", "-o", "name")
    assert result.exit_code == 2
    assert result.stdout == f"{jobs[0].job_id}\n"
    assert f"job {jobs[2].job_id} is RUNNING; only a job that has ended can be deleted" in result.stderr
    dataset = run("dataset", "delete", "gsm8k")
    assert dataset.exit_code == 2
    assert f"dataset gsm8k is needed by job {jobs[2].job_id} of ada" in dataset.stderr
    assert run("dataset", "delete", "gsm8k", "--dry-run").exit_code == 2
    unknown = run("dataset", "delete", "gsm8")
    assert unknown.exit_code == 4
    assert "gsm8k" in unknown.stderr


def test_checkpoints_of_many_jobs(run: Run, daemon: Daemon, jobs: list[JobRecord]) -> None:
    assert run("checkpoint", "delete", "failed").exit_code == 2
    assert "JOB --all" in run("checkpoint", "delete", "failed").stderr
    one = run("checkpoint", "delete", "failed@10")
    assert one.stdout == f"deleted checkpoint {jobs[0].job_id}@10 of failed\n"
    every = run("checkpoint", "delete", "succeeded", "--all", "--yes")
    assert every.exit_code == 0, every.output
    assert every.stdout == f"deleted checkpoint {jobs[1].job_id}@10 of succeeded\n"
    assert run("checkpoint", "delete", "succeeded@last").exit_code == 2
    nothing = run("checkpoint", "delete", "--state", "failed", "--yes")
    assert (nothing.exit_code, nothing.stdout) == (0, "")


def test_nothing_named_is_a_mistake_of_usage(run: Run) -> None:
    for kind in ("dataset", "model", "job", "checkpoint"):
        result = run(kind, "delete")
        assert result.exit_code == 2
        assert "name what to delete, or select it with --older-than" in result.stderr
    assert run("dataset", "delete", "a", "--owner", "bob").exit_code == 2
    other = run("dataset", "delete", "--older-than", "1d", "--owner", "bob", "--yes")
    assert other.exit_code == 3, other.output


def test_an_announced_deletion_is_shown_and_taken_back(run: Run, daemon: Daemon, jobs: list[JobRecord]) -> None:
    job = jobs[1]
    store = daemon.served.parts.parts.journal.store
    daemon.served.call(store.set(job.job_id, deletion_s=1_900_000_000.0))
    assert "horizon job keep" in run("job", "get", job.job_id).stdout
    assert "2030-03-17" in run("job", "list").stdout
    assert json.loads(run("job", "get", job.job_id, "-o", "json").stdout)["deletion_time"].startswith("2030-03-17")
    kept = run("job", "keep", "succeeded")
    assert kept.stdout == f"the checkpoints of succeeded ({job.job_id}) are kept until you delete them\n"
    shown = json.loads(run("job", "get", job.job_id, "-o", "json").stdout)
    assert (shown["deletion_time"], shown["keep_files"]) == (None, True)
    assert run("job", "keep", "running").exit_code == 2


def test_one_checkpoint_is_kept_and_no_longer(run: Run, jobs: list[JobRecord]) -> None:
    job_id = jobs[0].job_id
    kept = run("checkpoint", "keep", "failed@10")
    assert kept.stdout == f"step 10 of {job_id} is kept until you delete it\n", kept.output
    assert run("checkpoint", "list", "failed").stdout.split()[-1] == "kept"
    undone = run("checkpoint", "keep", "failed@10", "--undo")
    assert undone.stdout == f"step 10 of {job_id} may be deleted automatically again\n"
    assert "kept" not in run("checkpoint", "list", "failed").stdout
    assert run("checkpoint", "keep", "failed@11").exit_code == 4


def test_one_job_is_deleted_where_jobs_are(client: Client, jobs: list[JobRecord]) -> None:
    succeeded = client.jobs.get("succeeded").job_id
    client.jobs.delete("succeeded")
    with pytest.raises(NotFound):
        client.jobs.get(succeeded)
    with pytest.raises(InUse, match="is RUNNING; only a job that has ended can be deleted"):
        client.jobs.delete("running")


def test_the_library_yields_each_result(client: Client, jobs: list[JobRecord]) -> None:
    would = list(client.housekeeping.delete("job", older_than=timedelta(microseconds=1), dry_run=True))
    assert {one.key for one in would} == {jobs[0].job_id, jobs[1].job_id}
    with pytest.raises(NotFound):
        list(client.housekeeping.delete("job", ["nothing"]))
    with pytest.raises(InvalidRequest, match="one of dataset, model, job, checkpoint"):
        list(client.housekeeping.delete("user", ["ada"]))
    with pytest.raises(InvalidRequest, match="state is"):
        list(client.housekeeping.delete("job", states=["gone"]))
