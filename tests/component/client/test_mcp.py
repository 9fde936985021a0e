"""`horizon mcp`: an assistant's own client calls the tools, which call a real daemon."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner, Result
from mcp import Client as Assistant
from mcp import StdioServerParameters
from mcp.client.stdio import stdio_client
from tests.component.client.conftest import QUICK

from horizon_client import AsyncClient
from horizon_client.cli.mcp.answers import MOST_TEXT_CHARACTERS, cut, last_lines
from horizon_client.cli.mcp.reading import READING
from horizon_client.cli.mcp.server import assistant_server
from horizon_client.cli.mcp.writing import WRITING
from horizon_client.cli.root import horizon
from horizon_proto.v1 import checkpoint_pb2, job_pb2
from horizon_server.events import EvalDone, StepDone
from horizon_server.records.job import JobRecord, JobState

if TYPE_CHECKING:
    from tests.component.client.conftest import Daemon

Run = Callable[..., Result]
MakeStep = Callable[..., StepDone]

NOT_THERE = "does not exist, or is not yours"
SPEC = """
name: planned
model: tiny-base
dataset: gsm8k
train: {max_steps: 10, sequence_length: 64, tokens_per_step: 128}
"""


@asynccontextmanager
async def assistant(daemon: Daemon, *, may_write: bool = False, token: str = "") -> AsyncIterator[Assistant]:
    """An assistant that is connected to the tools."""
    client = AsyncClient(daemon.address, token=token or daemon.token, unary_retry=QUICK, stream_retry=QUICK)
    async with client, Assistant(assistant_server(client, may_write=may_write)) as connected:
        yield connected


async def answer(to: Assistant, tool: str, **arguments: Any) -> dict[str, Any]:
    """Return what a tool answers; the text that every assistant reads says the same."""
    result = await to.call_tool(tool, arguments)
    (text,) = (getattr(part, "text", "") for part in result.content)
    assert not result.is_error, text
    assert result.structured_content is not None and json.loads(text) == result.structured_content
    found: dict[str, Any] = result.structured_content
    return found


async def refusal(to: Assistant, tool: str, **arguments: Any) -> str:
    """Return the message of an error that a tool answers with."""
    result = await to.call_tool(tool, arguments)
    assert result.is_error
    return "".join(getattr(part, "text", "") for part in result.content)


@pytest.fixture
def two_jobs(daemon: Daemon, make_step: MakeStep) -> tuple[JobRecord, JobRecord]:
    """`first`, and `second` with another learning rate and an evaluation."""
    first = daemon.add_job("first", *map(make_step, range(1, 11)), state=JobState.SUCCEEDED)
    evaluation = EvalDone(step=10, eval_loss=0.25, num_targets=8, num_tokens=9, duration_s=1.0)
    steps = [make_step(step, loss=2 / step) for step in range(1, 11)]
    second = daemon.add_job(
        "second", *steps, evaluation, state=JobState.SUCCEEDED, train={"learning_rate": 2e-4, "max_steps": 10}
    )
    return first, second


async def test_every_tool_says_what_it_is_and_what_it_takes(daemon: Daemon) -> None:
    async with assistant(daemon, may_write=True) as connected:
        tools = {tool.name: tool for tool in (await connected.list_tools()).tools}
    assert [*tools] == [*READING, *WRITING]
    for name, tool in tools.items():
        assert tool.description and tool.description.endswith(".") and "\n" not in tool.description
        assert tool.annotations is not None and tool.annotations.read_only_hint is (name in READING)
        for argument, schema in tool.input_schema["properties"].items():
            assert schema.get("description"), f"{name}: {argument}"
            assert schema.get("type") or schema.get("anyOf"), f"{name}: {argument}"
    assert tools["cancel_job"].annotations and tools["cancel_job"].annotations.destructive_hint
    assert tools["list_jobs"].input_schema["properties"]["limit"]["maximum"] == 100


async def test_without_write_nothing_can_be_changed(daemon: Daemon, running_job: JobRecord) -> None:
    async with assistant(daemon) as connected:
        assert {tool.name for tool in (await connected.list_tools()).tools} == {*READING}
        assert "horizon mcp --write" in (connected.instructions or "")
        for tool in WRITING:
            assert "Unknown tool" in await refusal(connected, tool, job="first", spec=SPEC)
        for tool in READING:
            given: dict[str, Any] = {"jobs": ["first", "first"]} if tool == "compare_jobs" else {"job": "first"}
            await connected.call_tool(tool, {"spec": SPEC, **given})
    assert daemon.job(running_job.job_id).job_state is JobState.RUNNING and len(daemon.jobs()) == 1
    reads = {"PlanJob", "SimulateJob", "GetJob", "ListJobs", "WatchJob", "GetJobMetrics", "GetJobLogs"}
    reads |= {"ListCheckpoints", "ListModels", "ListDatasets", "GetQueue", "GetNode"}
    assert set(daemon.calls) <= reads


async def test_a_job_is_planned_and_a_bad_spec_refused(daemon: Daemon, planned: job_pb2.MemoryPlan) -> None:
    async with assistant(daemon) as connected:
        plan = (await answer(connected, "plan_job", spec=SPEC, overrides=["train.max_steps=20"]))["plan"]
        assert (plan["fits"], plan["host_total_bytes"], plan["hint"]) == (True, 12288, "another setting is faster")
        assert plan["prediction"]["tokens_per_second"] == 2048
        as_json = json.dumps({"name": "a", "model": "tiny-base", "dataset": "gsm8k"})
        assert (await answer(connected, "plan_job", spec=as_json))["plan"]["fits"]
        assert "line 2: not YAML" in await refusal(connected, "plan_job", spec="a: 1\nb: [")
        # A path is not opened: the text itself is the spec
        assert "must contain a mapping" in await refusal(connected, "plan_job", spec=__file__)


async def test_messages_of_the_daemon_reach_the_assistant(daemon: Daemon) -> None:
    async with assistant(daemon) as connected:
        found = await refusal(connected, "plan_job", spec=SPEC.replace("max_steps: 10", "max_stpes: 10"))
        assert "max_stpes" in found and "did you mean" in found
        assert "tiny-bas" in (message := await refusal(connected, "plan_job", spec=SPEC.replace("base", "bas")))
        assert "tiny-base" in message
        wrong = await refusal(connected, "list_jobs", limit=1000)
        assert "less than or equal to 100" in wrong


async def test_when_a_job_would_start_and_end(daemon: Daemon) -> None:
    async with assistant(daemon) as connected:
        found = await answer(connected, "simulate_job", spec=SPEC)
    assert found["outlook"]["why"] and found["plan"]["fits"] and daemon.jobs() == []


async def test_the_fields_of_a_spec_are_found(daemon: Daemon) -> None:
    async with assistant(daemon) as connected:
        names = await answer(connected, "list_job_fields")
        assert "train.learning_rate" in names["fields"] and names["required"] == ["name", "model", "dataset"]
        fields = (await answer(connected, "list_job_fields", search="learning_rate"))["fields"]
        assert fields["train.learning_rate"]["description"] and "train.seed" not in fields


async def test_jobs_are_listed_and_a_long_list_is_cut(daemon: Daemon, make_step: MakeStep) -> None:
    for number in range(3):
        daemon.add_job(f"job-{number}", make_step(1), state=JobState.RUNNING)
    daemon.add_job("waiting")
    async with assistant(daemon) as connected:
        everything = await answer(connected, "list_jobs")
        assert [job["name"] for job in everything["jobs"]] == ["waiting", "job-2", "job-1", "job-0"]
        assert everything["jobs"][1]["step"] == "1/10" and "note" not in everything
        two = await answer(connected, "list_jobs", limit=2)
        assert len(two["jobs"]) == 2 and "cut after 2" in two["note"]
        running = await answer(connected, "list_jobs", states=["running"], search="job-1")
        assert [job["name"] for job in running["jobs"]] == ["job-1"]
        queue = await answer(connected, "show_queue", limit=1)
        assert len(queue["queue"]) == 1 and "4 jobs in all" in queue["note"]


async def test_one_job_with_its_figures_and_its_spec(daemon: Daemon, two_jobs: tuple[JobRecord, JobRecord]) -> None:
    async with assistant(daemon) as connected:
        shown = await answer(connected, "show_job", job="second")
        assert shown["facts"]["id"] == two_jobs[1].job_id and shown["facts"]["state"] == "SUCCEEDED"
        assert shown["figures"]["loss"] == 0.2 and shown["figures"]["last eval_loss"] == 0.25
        assert "spec" not in shown
        spec = (await answer(connected, "show_job", job="second", with_spec=True))["spec"]
        assert spec["train"]["learning_rate"] == 2e-4
        table = await answer(connected, "show_job_figures", job="second", limit=5)
        assert [row["step"] for row in table["rows"]] == [2, 4, 6, 8, 10] and "5 of 10 rows" in table["note"]
        assert table["rows"][-1]["eval_loss"] == 0.25 and table["rows"][0]["loss"] == 1.0
        assert "overlap_ratio" in table["names_of_all_figures"]
        one = await answer(connected, "show_job_figures", job="second", figures=["grad_norm"])
        assert one["rows"][0] == {"step": 1, "grad_norm": 0.5} and "note" not in one
        assert "did you mean loss?" in await refusal(connected, "show_job_figures", job="second", figures=["lss"])


async def test_jobs_are_compared_as_the_command_does(run: Run, daemon: Daemon, two_jobs: tuple[JobRecord, ...]) -> None:
    async with assistant(daemon) as connected:
        found = await answer(connected, "compare_jobs", jobs=["first", "second"])
        assert "at least 2 items" in await refusal(connected, "compare_jobs", jobs=["first"])
    assert found == json.loads(run("job", "compare", "first", "second", "-o", "json").stdout)
    assert found["spec"]["train.learning_rate"] == [1e-5, 2e-4]


async def test_events_and_log_end_where_the_job_is(daemon: Daemon, running_job: JobRecord) -> None:
    daemon.write_log(running_job, b"".join(b"line %d\x1b[0m\n" % number for number in range(1000)))
    async with assistant(daemon) as connected:
        told = (await answer(connected, "show_job_events", job="first"))["events"]
        assert told[-1].endswith("RUNNING") and not any("loss" in line for line in told)
        steps = await answer(connected, "show_job_events", job="first", with_steps=True, limit=1)
        assert "step 2/10" in steps["events"][0] and "older events" in steps["note"]
        log = await answer(connected, "show_job_log", job="first", limit=2)
        assert log["lines"] == ["line 998[0m", "line 999[0m"] and log["note"] == "the last 2 of 1,000 lines"
        assert "no attempt 7" in await refusal(connected, "show_job_log", job="first", attempt=7)
    assert daemon.add_job("new").job_id
    async with assistant(daemon) as connected:
        assert (await answer(connected, "show_job_events", job="new"))["events"]


def test_long_texts_are_cut() -> None:
    assert cut("abc", 3) == "abc" and cut("abcd", 3) == "abc... (1 more characters)"
    found = last_lines("\n".join(["x" * 5000] * 100), 100)
    assert sum(map(len, found["lines"])) <= MOST_TEXT_CHARACTERS and "of 100 lines" in found["note"]


async def test_what_there_is_to_train_and_where(daemon: Daemon, finished_job: JobRecord) -> None:
    for step in (5, 10):
        daemon.add_checkpoint(finished_job, step, {"config.json": b"{}"}, eval_loss=1 / step)
    async with assistant(daemon) as connected:
        (model,) = (await answer(connected, "list_models"))["models"]
        assert (model["name"], model["state"]) == ("tiny-base", "READY")
        (dataset,) = (await answer(connected, "list_datasets"))["datasets"]
        assert (dataset["name"], dataset["rows"]) == ("gsm8k", "8")
        found = await answer(connected, "list_checkpoints", job="first", limit=1)
        assert found["checkpoints"][0]["step"] == "10" and "last" in found["checkpoints"][0]["marks"]
        assert "cut after 1" in found["note"]
        assert (await answer(connected, "show_node"))["facts"]["you"] == "ada, role user"


async def test_jobs_of_others_are_not_found(daemon: Daemon) -> None:
    token = daemon.served.user("bob")
    daemon.add_job("secret", state=JobState.RUNNING)
    async with assistant(daemon, may_write=True, token=token) as connected:
        assert (await answer(connected, "list_jobs"))["jobs"] == []
        for tool in ("show_job", "show_job_figures", "show_job_events", "show_job_log", "list_checkpoints"):
            assert NOT_THERE in await refusal(connected, tool, job="secret")
        assert NOT_THERE in await refusal(connected, "compare_jobs", jobs=["secret", "secret"])
        for tool in ("pause_job", "resume_job", "cancel_job"):
            assert NOT_THERE in await refusal(connected, tool, job="secret")
        assert NOT_THERE in await refusal(connected, "sample_checkpoint", checkpoint="secret@last", prompts=["a"])
    (job,) = daemon.jobs()
    assert job.job_state is JobState.RUNNING


async def test_with_write_a_job_is_submitted_once_and_controlled(daemon: Daemon, make_step: MakeStep) -> None:
    request_id = "9e107d9d-372b-4b68-8d4c-4e5b9a2f1c11"
    async with assistant(daemon, may_write=True) as connected:
        given = {"spec": SPEC, "overrides": ["name=made"], "request_id": request_id}
        made = await answer(connected, "submit_job", **given)
        assert (await answer(connected, "submit_job", **given))["facts"]["id"] == made["facts"]["id"]
        (job,) = daemon.jobs()
        assert (job.spec.name, made["figures"]["state"]) == ("made", "QUEUED")
        paused = await answer(connected, "pause_job", job="made")
        assert paused["figures"]["state"] == "PAUSED"
        assert (await answer(connected, "resume_job", job="made"))["figures"]["state"] == "QUEUED"
        assert "resume" in await refusal(connected, "resume_job", job="made")
        assert (await answer(connected, "cancel_job", job="made"))["figures"]["state"] == "CANCELLED"
        assert (await answer(connected, "cancel_job", job="made"))["figures"]["state"] == "CANCELLED"
        assert "did you mean made?" in await refusal(connected, "cancel_job", job="mad")


async def test_a_token_that_allows_no_changes_is_a_second_lock(daemon: Daemon, running_job: JobRecord) -> None:
    async with AsyncClient(daemon.address, token=daemon.token) as client:
        token = (await client.account.create_token(label="assistant", scope="read")).secret
    async with assistant(daemon, may_write=True, token=token) as connected:
        assert (await answer(connected, "show_job", job="first"))["figures"]["state"] == "RUNNING"
        assert "scope read" in await refusal(connected, "cancel_job", job="first")
        assert "scope read" in await refusal(connected, "submit_job", spec=SPEC)


async def test_a_checkpoint_answers(daemon: Daemon, finished_job: JobRecord) -> None:
    daemon.add_checkpoint(finished_job, 10, {"config.json": b"{}"})
    asked: list[checkpoint_pb2.SampleCheckpointRequest] = []

    def sample(request: checkpoint_pb2.SampleCheckpointRequest) -> checkpoint_pb2.SampleCheckpointResponse:
        asked.append(request)
        text = checkpoint_pb2.SampledText(prompt=0, text="four", ended="stop", num_tokens=2)
        return checkpoint_pb2.SampleCheckpointResponse(text=text)

    daemon.line.replace["SampleCheckpoint"] = sample
    async with assistant(daemon, may_write=True) as connected:
        given = {"checkpoint": "first@last", "prompts": ["2+2?"]}
        found = await answer(connected, "sample_checkpoint", **given, system="Count.", max_tokens=8)
        assert "at most 8 items" in await refusal(connected, "sample_checkpoint", **given | {"prompts": ["a"] * 9})
    assert found == {"answers": [{"answer": "four", "num_tokens": 2, "ended": "stop"}], "notes": []}
    (request,) = asked
    assert (request.job_id, request.step, request.max_tokens) == (finished_job.job_id, 10, 8)
    assert [message.content for message in request.prompts[0].messages] == ["Count.", "2+2?"]


async def test_an_assistants_program_starts_the_command(daemon: Daemon, finished_job: JobRecord) -> None:
    environment = {"HORIZON_SERVER": daemon.address, "HORIZON_TOKEN": daemon.token, "PATH": os.environ["PATH"]}
    program = StdioServerParameters(command=sys.executable, args=["-m", "horizon_client", "mcp"], env=environment)
    async with Assistant(stdio_client(program)) as connected:
        assert connected.server_info is not None and connected.server_info.name == "horizon"
        assert {tool.name for tool in (await connected.list_tools()).tools} == {*READING}
        assert (await answer(connected, "show_job", job="first"))["facts"]["id"] == finished_job.job_id
        assert NOT_THERE in await refusal(connected, "show_job", job="nobody")


def test_without_the_package_the_command_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server", None)
    missing = run("mcp")
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert missing.stderr == (
        "Error: horizon mcp needs the package mcp, which is not installed: pip install 'horizon-train[mcp]'\n"
    )


def test_help_and_a_missing_server_need_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = CliRunner().invoke(horizon, ["mcp", "--help"])
    assert shown.exit_code == 0 and "--write" in shown.stdout and "Model Context Protocol" in shown.stdout
    for name in ("HORIZON_SERVER", "HORIZON_TOKEN", "HORIZON_CA", "HORIZON_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HORIZON_CONFIG_DIR", "/nonexistent")
    nowhere = CliRunner().invoke(horizon, ["mcp"])
    assert nowhere.exit_code == 2 and "horizon login" in nowhere.stderr
