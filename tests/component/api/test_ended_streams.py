"""Open streams end when their caller may not have opened them any more: a revoked token, a disabled user, a membership
taken away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from horizon_proto.v1 import job_pb2, job_pb2_grpc
from horizon_server.api.grpc.server import start_grpc_server
from horizon_server.api.http.routes import event_frames
from horizon_server.api.services import OpenStreams
from horizon_server.errors import NotAllowed, Unauthenticated
from horizon_server.records.account import Principal

WAIT_S = 240.0


@pytest.fixture
def state(state_with_chats: Any) -> Any:
    return state_with_chats


@pytest_asyncio.fixture
async def watcher(base_world: Any) -> tuple[str, str]:
    """A member of ann's project: id and secret of their token."""
    await base_world.daemon.user("cleo")
    await base_world.services.accounts.add_member("ann", "cleo", "viewer")
    token, secret = await base_world.services.accounts.create_token("cleo", lifetime_s=None)
    return token.token_id, secret


Take = Callable[[Any, str], Awaitable[object]]
ENDINGS: dict[str, tuple[Take, str]] = {
    "revoked": (lambda accounts, token_id: accounts.revoke_token(token_id), "UNAUTHENTICATED"),
    "disabled": (lambda accounts, _: accounts.disable("cleo", is_disabled=True), "UNAUTHENTICATED"),
    "removed": (lambda accounts, _: accounts.remove_user("cleo"), "UNAUTHENTICATED"),
    "no member": (lambda accounts, _: accounts.remove_member("ann", "cleo"), "PERMISSION_DENIED"),
}


@pytest.mark.parametrize("why", ENDINGS)
async def test_a_watch_ends_with_the_right_to_it(base_world: Any, watcher: tuple[str, str], why: str) -> None:
    token_id, secret = watcher
    job = await base_world.job()
    take, code = ENDINGS[why]
    server = await start_grpc_server(base_world.services, address="127.0.0.1:0", tls=None)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel, asyncio.timeout(WAIT_S):
        stub: Any = job_pb2_grpc.JobServiceStub(channel)
        watch: Any = stub.WatchJob(
            job_pb2.WatchJobRequest(job_id=job.job_id), metadata=[("authorization", f"Bearer {secret}")]
        )
        answers = aiter(watch)
        await anext(answers)
        await take(base_world.services.accounts, token_id)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await anext(answers)
        assert ended.value.code().name == code
    await server.stop(0)
    assert base_world.num_watching(job) == 0


async def test_an_event_stream_ends_with_its_token(base_world: Any, watcher: tuple[str, str]) -> None:
    token_id, secret = watcher
    job = await base_world.job()
    accounts = base_world.services.accounts
    caller = await accounts.authenticate(secret)
    streams = OpenStreams(accounts, check_every_s=0.01)
    frames = event_frames(base_world.services.jobs.watch(caller, job.job_id), streams, caller)
    async with asyncio.timeout(WAIT_S):
        assert [(await anext(frames)).event for _ in range(2)] == [None, "state"]
        await accounts.revoke_token(token_id)
        problem = await anext(frames)
    assert problem.event == "problem"
    assert json.loads(str(problem.data))["error"]["reason"] == "UNAUTHENTICATED"
    streams.end()


@pytest_asyncio.fixture
async def held(base_world: Any) -> AsyncIterator[Callable[[Principal], Awaitable[None]]]:
    streams = OpenStreams(base_world.services.accounts, check_every_s=0.01)

    async def hold(principal: Principal) -> None:
        async with streams.one(principal), asyncio.timeout(WAIT_S):
            await asyncio.Event().wait()

    yield hold
    streams.end()


async def test_a_lost_role_ends_a_stream_and_a_new_membership_does_not(base_world: Any, held: Any) -> None:
    accounts = base_world.services.accounts
    await base_world.daemon.user("vera", role="viewer")
    vera = await accounts.authenticate(await base_world.daemon.token("vera"))
    bob = await accounts.authenticate(base_world.tokens["bob"])
    of_bob = asyncio.create_task(held(bob))
    of_vera = asyncio.create_task(held(vera))
    await accounts.add_member("ann", "bob", "member")
    await accounts.set_role("vera", "user")
    with pytest.raises(NotAllowed, match="role or a membership of vera"):
        await of_vera
    assert not of_bob.done(), "a caller who may do more now is not disturbed"
    await accounts.disable("bob", is_disabled=True)
    with pytest.raises(Unauthenticated):
        await of_bob
