"""Calls that never send, calls without a token, and the audit log of calls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from horizon_proto.v1 import housekeeping_pb2, housekeeping_pb2_grpc, job_pb2, node_pb2, node_pb2_grpc
from horizon_server.api import limits
from horizon_server.api.effects import EFFECTS, Effect
from horizon_server.api.grpc import interceptor
from horizon_server.api.grpc.audited import resource_of
from horizon_server.db.audit import MAX_CHARS
from horizon_server.records.audit import UNKNOWN, AuditEntry
from horizon_server.records.job import JobState

UNDECODABLE = b"\x0a\xff\xff\xff\xff\x0f"
READING = ("Get", "List", "Watch", "Read", "Plan", "Simulate", "Preview", "WhoAmI")


@pytest.fixture
def state(state_with_chats: Any) -> Any:
    return state_with_chats


async def never() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


@pytest.mark.parametrize("method", ["/horizon_proto.v1.NodeService/GetNode", "/horizon_proto.v1.JobService/WatchJob"])
async def test_a_call_that_never_sends_its_message_ends(
    world: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interceptor, "FIRST_MESSAGE_S", 0.2)
    call = world.channel.stream_unary(method)(never(), metadata=world.ann.metadata, timeout=240)
    assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not arrive" in await call.details()


async def test_a_call_that_has_not_sent_its_message_counts_as_its_users(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CALLS_PER_USER", 2)
    make = world.channel.stream_unary("/horizon_proto.v1.NodeService/GetNode")
    calls = [make(never(), metadata=world.ann.metadata, timeout=240) for _ in range(3)]
    async with asyncio.timeout(240):
        done, _ = await asyncio.wait(
            [asyncio.ensure_future(call.code()) for call in calls], return_when=asyncio.FIRST_COMPLETED
        )
    assert {one.result() for one in done} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert (await world.bob.call("node", "GetNode", node_pb2.GetNodeRequest())).node.user == "bob"
    for call in calls:
        call.cancel()


async def test_watches_of_health_are_few_and_leave_room_for_all_others(world: Any) -> None:
    stub: Any = health_pb2_grpc.HealthStub(world.channel)
    watches = [stub.Watch(health_pb2.HealthCheckRequest(), timeout=240) for _ in range(40)]
    answers = await asyncio.gather(*(watch.read() for watch in watches), return_exceptions=True)
    refused = [one for one in answers if isinstance(one, grpc.aio.AioRpcError)]
    assert len(refused) == 40 - limits.MAX_OPEN_CALLS_PER_ADDRESS
    assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    for watch in watches:
        watch.cancel()
    assert (await world.ann.call("node", "GetNode", node_pb2.GetNodeRequest())).node.user == "ann"


async def test_a_call_without_a_token_does_not_last(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    long_s = 3600.0
    monkeypatch.setattr(interceptor, "OPEN_CALL_S", long_s)
    scopes: list[asyncio.Timeout] = []
    timeout = asyncio.timeout

    def noted(delay: float | None) -> asyncio.Timeout:
        scope = timeout(delay)
        if delay == long_s:
            scopes.append(scope)
        return scope

    monkeypatch.setattr(asyncio, "timeout", noted)
    stub: Any = health_pb2_grpc.HealthStub(world.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=240)
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    (scope,) = scopes
    scope.reschedule(asyncio.get_running_loop().time())  # its time is over, now that it has answered
    assert await watch.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    "method", ["/grpc.health.v1.Health/Check", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]
)
async def test_what_cannot_be_decoded_leaves_no_traceback_without_a_token(
    world: Any, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        call = world.channel.stream_unary(method)(iter([UNDECODABLE]), timeout=240)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING] == []


async def test_changes_are_in_the_audit_log_before_they_are_answered(world: Any) -> None:
    job = await world.job()
    await world.ann.call("jobs", "CancelJob", job_pb2.CancelJobRequest(job_id=job.job_id))
    with pytest.raises(grpc.aio.AioRpcError):
        await world.bob.call("jobs", "PauseJob", job_pb2.PauseJobRequest(job_id=job.job_id))
    with pytest.raises(grpc.aio.AioRpcError):
        await world.eve.call("jobs", "CancelJob", job_pb2.CancelJobRequest(job_id="\x1b[2Jx" * 200))
    await world.ann.call("jobs", "GetJob", job_pb2.GetJobRequest(job_id=job.job_id))
    first, second, third = await world.services.audit.entries(limit=100)
    assert (first.user, first.action, first.resource, first.outcome, first.origin) == (
        "ann",
        "JobService.CancelJob",
        job.job_id,
        "OK",
        "127.0.0.1",
    )
    (token,) = [one for one in await world.services.accounts.tokens() if one.user == "ann"]
    assert first.token_id == token.token_id
    assert (second.user, second.outcome) == ("bob", "NOT_FOUND")
    assert third.user == "eve"
    assert third.resource.isprintable(), "it is shown on an admin's terminal"
    assert len(third.resource) == MAX_CHARS["resource"]


async def test_each_deletion_of_many_is_audited(world: Any) -> None:
    jobs = [await world.job(name=name, state=JobState.CANCELLED) for name in ("one", "two")]
    stub: Any = housekeeping_pb2_grpc.HousekeepingServiceStub(world.channel)
    for dry_run in (True, False):
        request = housekeeping_pb2.DeleteRequest(
            kind=housekeeping_pb2.RESOURCE_KIND_JOB, keys=[job.job_id for job in jobs], dry_run=dry_run
        )
        answers = [one async for one in stub.Delete(request, metadata=world.ann.metadata, timeout=240)]
        assert len(answers) == 2
    request = housekeeping_pb2.DeleteRequest(kind=housekeeping_pb2.RESOURCE_KIND_JOB, keys=["none"])
    with pytest.raises(grpc.aio.AioRpcError):
        await stub.Delete(request, metadata=world.ann.metadata, timeout=240).read()
    entries = await world.services.audit.entries(limit=100)
    assert [(one.action, one.resource, one.outcome) for one in entries] == [
        *(("HousekeepingService.Delete", job.job_id, "OK") for job in jobs),
        ("HousekeepingService.Delete", "", "NOT_FOUND"),
    ]


async def test_a_submission_is_audited_with_the_job_that_it_made(world: Any) -> None:
    spec = job_pb2.JobSpec(name="night", model="none", dataset="chats")
    request = job_pb2.SubmitJobRequest(request_id="0d9f7a8e-9f4e-4d0e-8f43-7d2c3e0a9f11", spec=spec)
    with pytest.raises(grpc.aio.AioRpcError):
        await world.ann.call("jobs", "SubmitJob", request)
    (entry,) = await world.services.audit.entries(limit=100)
    assert (entry.action, entry.resource) == ("JobService.SubmitJob", "night")
    made = job_pb2.SubmitJobResponse(job=job_pb2.Job(job_id="job_1"))
    assert resource_of(made) == "job_1"


async def test_refusals_of_one_user_cannot_fill_the_audit_log(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizon_server.services.audit.MAX_REFUSED_A_MINUTE", 3)
    for _ in range(10):
        with pytest.raises(grpc.aio.AioRpcError):
            await world.bob.call("jobs", "PauseJob", job_pb2.PauseJobRequest(job_id="nope"))
    assert len(await world.services.audit.entries(limit=100)) == 3


async def test_a_change_that_may_have_been_made_stays_in_the_audit_log_among_any_number_of_refusals(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horizon_server.services.audit.MAX_REFUSED_A_MINUTE", 1)
    audit = world.services.audit
    outcomes = ["NOT_FOUND", "NOT_FOUND", "CANCELLED", "INTERNAL", "NOT_FOUND", "OK"]
    for outcome in outcomes:
        entry = await audit.begin(world.principal("ann"), origin="", action="a", resource="r")
        await audit.end(replace(entry, outcome=outcome))
    assert [one.outcome for one in await audit.entries(limit=9)] == ["NOT_FOUND", "CANCELLED", "INTERNAL", "OK"]


async def test_the_oldest_entries_go(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    audit = world.services.audit
    for name in ("one", "two", "three"):
        entry = await audit.begin(world.principal("ann"), origin="", action="a", resource=name)
        await audit.end(replace(entry, outcome="OK"))
    monkeypatch.setattr("horizon_server.services.audit.MAX_ENTRIES", 2)
    assert await audit.expire(365.0) == 1
    assert [entry.resource for entry in await audit.entries(limit=9)] == ["two", "three"]
    assert await audit.expire(0.0) == 2


async def test_a_change_that_is_cut_has_an_entry(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kill -9 leaves is what is in the database while the change is being made."""
    job = await world.job()
    is_changing = asyncio.Event()

    async def cut(*_: Any, **__: Any) -> None:
        is_changing.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(world.services.jobs, "cancel", cut)
    request = job_pb2.CancelJobRequest(job_id=job.job_id)
    call = asyncio.ensure_future(world.ann.call("jobs", "CancelJob", request))
    async with asyncio.timeout(240):
        await is_changing.wait()
    (entry,) = await world.services.audit.entries(outcome=UNKNOWN, limit=9)
    assert (entry.user, entry.action, entry.resource) == ("ann", "JobService.CancelJob", job.job_id)
    call.cancel()
    async with asyncio.timeout(240):  # its client has left, which is known
        while entry.outcome == UNKNOWN:
            (entry,) = await world.services.audit.entries(limit=9)
    assert entry.outcome == "CANCELLED"


async def test_a_client_that_leaves_while_the_first_entry_is_written_has_one_entry(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, audit = await world.job(), world.services.audit
    is_writing, may_answer, insert = asyncio.Event(), asyncio.Event(), audit.insert

    async def slow(entry: AuditEntry) -> int:
        number: int = await insert(entry)
        is_writing.set()
        await may_answer.wait()
        return number

    monkeypatch.setattr(audit, "insert", slow)
    call = asyncio.ensure_future(world.ann.call("jobs", "CancelJob", job_pb2.CancelJobRequest(job_id=job.job_id)))
    async with asyncio.timeout(240):
        await is_writing.wait()
        call.cancel()
        while not any(name == "CancelJob" for _, name, _ in world.calls):  # noqa: ASYNC110  # the server has seen that it left
            await asyncio.sleep(0.01)
        may_answer.set()
        outcomes: list[str] = []
        while "CANCELLED" not in outcomes:
            outcomes = [one.outcome for one in await audit.entries(limit=9)]
    assert outcomes == ["CANCELLED"]


async def test_each_deletion_of_many_has_an_entry_before_it_is_made(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [await world.job(name=name, state=JobState.CANCELLED) for name in ("one", "two")]
    seen: list[list[tuple[str, str]]] = []
    delete = world.services.jobs.delete

    async def look_and_delete(principal: Any, key: str) -> None:
        seen.append([(one.resource, one.outcome) for one in await world.services.audit.entries(limit=9)])
        await delete(principal, key)

    monkeypatch.setattr(world.services.jobs, "delete", look_and_delete)
    stub: Any = housekeeping_pb2_grpc.HousekeepingServiceStub(world.channel)
    request = housekeeping_pb2.DeleteRequest(kind=housekeeping_pb2.RESOURCE_KIND_JOB, keys=[job.job_id for job in jobs])
    answers = [one async for one in stub.Delete(request, metadata=world.ann.metadata, timeout=240)]
    first, second = (job.job_id for job in jobs)
    assert len(answers) == 2
    assert seen == [[(first, UNKNOWN)], [(first, "OK"), (second, UNKNOWN)]]


async def test_a_change_that_the_token_does_not_allow_is_audited(world: Any) -> None:
    _, secret = await world.services.accounts.create_token("root", lifetime_s=60.0, scope="read")
    stub: Any = node_pb2_grpc.NodeServiceStub(world.channel)
    request = node_pb2.SetNodeRequest(condition=node_pb2.NodeCondition(mode=node_pb2.NODE_MODE_DRAINED))
    with pytest.raises(grpc.aio.AioRpcError, match="allows no changes"):
        await stub.SetNode(request, metadata=[("authorization", f"Bearer {secret}")], timeout=240)
    (entry,) = await world.services.audit.entries(limit=9)
    assert (entry.user, entry.action, entry.outcome) == ("root", "NodeService.SetNode", "NOT_ALLOWED")


def test_calls_that_only_look_are_named_like_it() -> None:
    """A call that is declared to read passes with a token of scope read: one look at the name more."""
    names = {name.partition("/")[2]: effect for name, effect in EFFECTS.items()}
    assert [name for name, effect in names.items() if (effect is Effect.READ) != name.startswith(READING)] == []
