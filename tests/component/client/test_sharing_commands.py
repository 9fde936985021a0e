"""`horizon queue`, `usage`, `quota` and `node cordon|drain|uncordon|maintenance` against a small daemon."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import Result

from horizon_client import Client
from horizon_client.cli.output import about_text
from horizon_client.job_spec_types import JobSpec
from horizon_proto.v1 import job_pb2, node_pb2, sharing_pb2
from horizon_server.db.sharing import SharingStore
from horizon_server.records.job import JobState
from horizon_server.records.sharing import Outlook

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

Run = Callable[..., Result]
SPEC = (
    "name: first\nmodel: tiny-base\ndataset: gsm8k\ntrain: {max_steps: 3, sequence_length: 64, tokens_per_step: 128}\n"
)


@pytest.fixture
def shared(daemon: Daemon) -> tuple[str, str]:
    """A resident and a queued job with outlooks; returns their ids."""
    resident, queued = daemon.add_job("first", state=JobState.RUNNING), daemon.add_job("second")
    in_an_hour_s = time.time() + 3600
    daemon.served.parts.parts.scheduler.runtime.view.outlooks = {
        resident.job_id: Outlook(why="resident, alone on the GPU", share=0.5, estimated_end_s=in_an_hour_s),
        queued.job_id: Outlook(
            why="waiting for 3 GiB", estimated_start_s=in_an_hour_s, estimated_end_s=in_an_hour_s + 60
        ),
    }
    return resident.job_id, queued.job_id


@pytest.fixture
def as_admin(daemon: Daemon, run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs command lines as an admin."""

    async def make() -> str:
        await daemon.served.parts.user("root", role="admin")
        return await daemon.served.parts.token("root")

    monkeypatch.setenv("HORIZON_TOKEN", daemon.served.call(make()))
    return run


def test_the_queue_is_a_table_with_reasons(
    run: Run, daemon: Daemon, shared: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outlook = daemon.served.parts.parts.scheduler.runtime.view.outlooks[shared[0]]
    assert outlook.estimated_end_s is not None
    in_an_hour = about_text(datetime.fromtimestamp(outlook.estimated_end_s, UTC))
    head, first, second = run("queue").stdout.splitlines()
    assert head.split() == ["JOB", "PLACE", "OWNER", "STATE", "PRIORITY", "STEP", "SHARE", "START", "END", "WHY"]
    assert first.split(maxsplit=9) == [
        "first",
        "-",
        "ada",
        "RUNNING",
        "0",
        "-",
        "50%",
        "-",
        in_an_hour,
        "resident, alone on the GPU",
    ]
    assert second.split()[:7] == ["second", "1", "ada", "QUEUED", "0", "-", "-"]
    assert second.endswith("waiting for 3 GiB")
    assert run("queue", "-o", "name").stdout.split() == [*shared]
    assert [entry["position"] for entry in json.loads(run("queue", "-o", "json").stdout)] == [0, 1]
    monkeypatch.setattr("horizon_client.cli.output.terminal_width", lambda: 80)
    assert max(map(len, run("queue").stdout.splitlines())) <= 80


def test_what_others_do_is_not_named(run: Run, daemon: Daemon, shared: tuple[str, str]) -> None:
    def of_bob(answer: sharing_pb2.GetQueueResponse) -> None:
        for field in ("name", "project", "priority", "step", "num_steps"):
            answer.jobs[1].ClearField(field)
        answer.jobs[1].owner, answer.jobs[1].outlook.why = "bob", ""

    daemon.line.change["GetQueue"] = of_bob
    line = run("queue").stdout.splitlines()[2].split()
    assert (line[:7], line[-1]) == ([shared[1], "1", "bob", "QUEUED", "-", "-", "-"], "-")


def test_jobs_show_where_they_stand(run: Run, shared: tuple[str, str]) -> None:
    page = dict(line.split(":", 1) for line in run("job", "get", "first").stdout.splitlines())
    assert page["why"].strip() == "resident, alone on the GPU"
    assert page["share"].strip() == "50% of the device's time"
    assert "starts" not in page and "ends" in page, "it has started"
    assert "starts:" in run("job", "get", "second").stdout
    listed = run("job", "list").stdout.splitlines()
    assert listed[0].split()[-4:] == ["SHARE", "START", "END", "WHY"]
    assert "ETA" not in listed[0]
    assert json.loads(run("job", "get", "second", "-o", "json").stdout)["outlook"]["why"] == "waiting for 3 GiB"


def test_a_list_of_jobs_that_have_ended_is_as_before(run: Run, daemon: Daemon) -> None:
    daemon.add_job("first", state=JobState.SUCCEEDED)
    assert "ETA" in run("job", "list").stdout
    assert "WHY" not in run("job", "list").stdout


def test_a_simulation_queues_nothing(run: Run, daemon: Daemon) -> None:
    Path("job.yaml").write_text(SPEC)
    result = run("queue", "simulate", "job.yaml", "--set", "name=other")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "why:" in result.stdout
    assert "starts now, " in result.stdout
    assert "share 1" in result.stdout, "it is the only job"
    warned = run("queue", "simulate", "job.yaml", "--set", "eval_every_steps=5")
    assert "\nwarning: eval_every_steps is 5, and the job has no eval set" in warned.stdout
    assert set(json.loads(run("queue", "simulate", "-", "-o", "json", stdin=SPEC).stdout)) == {
        "outlook",
        "plan",
        "places",
    }
    assert daemon.jobs() == []
    unknown = run("queue", "simulate", "job.yaml", "--set", "model=tiny-bass")
    assert (unknown.exit_code, "tiny-base" in unknown.stderr) == (4, True)


def test_the_server_may_be_named_between_queue_and_simulate(
    run: Run, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HORIZON_SERVER")
    Path("job.yaml").write_text(SPEC)
    assert run("queue", "--server", daemon.address, "simulate", "job.yaml").exit_code == 0


def test_usage_by_project_and_user(run: Run, daemon: Daemon) -> None:
    job = daemon.add_job("first", state=JobState.SUCCEEDED)
    store = SharingStore(daemon.served.parts.database)
    charged = store.charge("ada", "ada", job_id=job.job_id, device_s=3725.0, num_tokens=12345, now_s=time.time())
    daemon.served.call(charged)
    head, line = run("usage", "--since", "2h").stdout.splitlines()
    assert head.split()[:4] == ["PROJECT", "USER", "DEVICE", "TIME"]
    assert line.split()[:4] == ["ada", "ada", "1:02:05", "12,345"]
    assert line.split()[-3:] == ["1", "0", "0"]
    (usage,) = json.loads(run("usage", "-o", "json").stdout)
    assert (usage["device_s"], usage["jobs"]) == (3725.0, {"SUCCEEDED": 1})
    assert run("usage", "-o", "name").stdout == "ada/ada\n"
    for bad in ("soon", "0h", "-3d", "1e9w", "9999999999w"):
        refused = run("usage", "--since", bad)
        assert (refused.exit_code, "such as 90m or 7d" in refused.stderr) == (2, True), bad


def test_quotas_with_what_frees_them(run: Run, daemon: Daemon) -> None:
    quotas = [
        sharing_pb2.QuotaLimit(quota="resident_jobs", limit=2, used=2, frees="a resident job ends"),
        sharing_pb2.QuotaLimit(quota="host_bytes", used=3 << 30),
    ]
    allowance = sharing_pb2.AllowanceUse(holder="user", name="ada", weight=3, quotas=quotas)
    daemon.line.replace["GetQuota"] = lambda request: sharing_pb2.GetQuotaResponse(allowances=[allowance])
    assert run("quota").stdout.splitlines() == [
        "user ada:  weight 3",
        "",
        "OF        QUOTA          LIMIT     USED  WHAT FREES IT",
        "user ada  resident_jobs      2        2  a resident job ends",
        "user ada  host_bytes         -  3.0 GiB  -",
    ]


def test_only_admins_steer_the_node(run: Run) -> None:
    for command in (["cordon"], ["drain"], ["uncordon"], ["maintenance", "--cancel"], ["withdraw", "host"]):
        refused = run("node", *command)
        assert (refused.exit_code, "only an admin" in refused.stderr) == (3, True), command


def test_cordon_drain_and_uncordon(as_admin: Run, daemon: Daemon) -> None:
    assert as_admin("node", "cordon", "--message", "new driver").stdout.endswith(
        ": cordoned: no job starts (new driver)\n"
    )
    assert "cordoned: no job starts (new driver)" in as_admin("node", "status").stdout
    assert "drained" in as_admin("node", "drain").stdout
    assert json.loads(as_admin("node", "uncordon", "-o", "json").stdout)["mode"] == "open"
    with (
        Client(daemon.address, token=daemon.token) as client,
        pytest.raises(Exception, match="must be one of open, cordoned"),
    ):
        client.node.set_mode("closed")


def test_a_device_is_withdrawn_and_restored_whatever_else_is_set(as_admin: Run) -> None:
    as_admin("node", "cordon", "--message", "new GPU")
    withdrawn = as_admin("node", "withdraw", "host")
    assert withdrawn.stdout.endswith("(new GPU); host is out of service: withdrawn by an admin\n")
    assert "nobody (0 resident jobs); is out of service: withdrawn by an admin" in as_admin("node", "status").stdout
    found = json.loads(as_admin("node", "uncordon", "-o", "json").stdout)
    assert (found["condition"]["withdrawn"], found["mode"]) == (["host"], "open")
    unknown = as_admin("node", "withdraw", "cuda:7")
    assert (unknown.exit_code, "the devices of this node are: host" in unknown.stderr) == (2, True)
    assert as_admin("node", "restore", "host").stdout.endswith(": open\n")
    again = as_admin("node", "restore", "host")
    assert (again.exit_code, "device is 'host'; out of service are: none" in again.stderr) == (2, True)


def test_a_maintenance_window_is_kept_by_a_cordon_and_cancelled(as_admin: Run) -> None:
    set_ = as_admin("node", "maintenance", "--from", "2126-11-23T18:00", "--for", "90m", "--message", "move")
    assert (set_.exit_code, set_.stderr) == (0, "")
    local = datetime(2126, 11, 23, 18).astimezone()
    condition = json.loads(as_admin("node", "cordon", "-o", "json").stdout)["condition"]
    assert condition["window_start_time"] == local.astimezone(UTC).isoformat()
    assert condition["window_end_time"] == (local + timedelta(minutes=90)).astimezone(UTC).isoformat()
    assert "maintenance:" in as_admin("node", "status").stdout
    cancelled = json.loads(as_admin("node", "maintenance", "--cancel", "-o", "json").stdout)
    assert (cancelled["condition"]["window_start_time"], cancelled["mode"]) == (None, "cordoned")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--from", "2126-11-23T18:00"],
        ["--for", "2h"],
        ["--cancel", "--for", "2h"],
        ["--from", "tomorrow", "--for", "2h"],
    ],
)
def test_a_window_needs_begin_and_length(run: Run, arguments: list[str]) -> None:
    assert run("node", "maintenance", *arguments).exit_code == 2


def test_the_node_says_whose_turn_it_is(run: Run, daemon: Daemon) -> None:
    def shared(answer: node_pb2.GetNodeResponse) -> None:
        node = answer.node
        node.time_slice_s = 60.0
        del node.devices[:]
        node.devices.add(name="cuda:0", holder="job_1", num_residents=3)
        node.share_uses.add(project="lab", user="bob", device_s=600)

    daemon.line.change["GetNode"] = shared
    page = run("node", "status").stdout
    assert "job_1 (3 resident jobs)" in page
    assert "bob in lab 0:10:00" in page
    assert "60 s each; use counts half after 1d 0:00:00" in page


def test_a_client_method_for_every_command(daemon: Daemon, client: Client) -> None:
    assert client.jobs.queue() == []
    assert client.sharing.usage()[0].user == "ada"
    assert [one.holder for one in client.sharing.quota()] == ["user", "project"]
    job = daemon.add_job("first")
    assert client.jobs.set_priority(job.job_id, 4).priority == 4
    spec: JobSpec = {"name": "x", "model": "tiny-base", "dataset": "gsm8k"}
    assert client.jobs.simulate(spec).outlook.why
    request = daemon.line.requests[-1]
    assert isinstance(request[1], sharing_pb2.SimulateJobRequest) and isinstance(request[1].spec, job_pb2.JobSpec)
