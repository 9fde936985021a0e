"""Limits that a call meets before a service sees it, or in the first thing that looks at what it carries."""

from __future__ import annotations

import asyncio
import socket
import uuid
from contextlib import ExitStack, suppress
from typing import Any

import grpc.aio
import pytest

from horizon_proto.v1 import blob_pb2, job_pb2, model_pb2, node_pb2
from horizon_server.api.grpc import server
from horizon_server.api.grpc.server import MAX_MESSAGE_BYTES
from horizon_server.errors import Unauthenticated
from horizon_server.services.accounts import _MAX_TOKEN_LENGTH
from horizon_server.services.pushed import MAX_ANNOUNCED_CONFIG_BYTES


@pytest.fixture
def state(state_with_chats: Any) -> Any:
    return state_with_chats


_WAIT_S = 240.0
# Else channels of one process to one address share a connection.
_OWN_CONNECTION = (("grpc.use_local_subchannel_pool", 1),)


async def _node(caller: Any) -> Any:
    return (await caller.call("node", "GetNode", node_pb2.GetNodeRequest())).node


async def test_a_message_is_bounded(world: Any) -> None:
    fits, larger = (job_pb2.GetJobRequest(job_id="x" * (MAX_MESSAGE_BYTES - room)) for room in (100, 0))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.ann.call("jobs", "GetJob", fits)
    assert caught.value.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(grpc.aio.AioRpcError, match="larger than max") as caught:
        await world.ann.call("jobs", "GetJob", larger)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_token_longer_than_any_is_not_hashed(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = world.services.accounts
    hashed: list[int] = []

    def note(secret: str) -> str:
        hashed.append(len(secret))
        return ""

    monkeypatch.setattr("horizon_server.services.accounts._hash", note)
    for length in (_MAX_TOKEN_LENGTH, _MAX_TOKEN_LENGTH + 1, 10**6):
        with pytest.raises(Unauthenticated, match="not known"):
            await accounts.authenticate("x" * length)
    assert hashed == [_MAX_TOKEN_LENGTH]


async def test_an_announced_config_is_bounded(world: Any) -> None:
    config = b'{"model_type": "llama"}' + b" " * MAX_ANNOUNCED_CONFIG_BYTES
    files = [
        blob_pb2.FileEntry(path="config.json", sha256=world.ann.ref_of(config).sha256, size_bytes=len(config)),
        blob_pb2.FileEntry(path="model.safetensors", sha256="ab" * 32, size_bytes=10),
    ]
    request = model_pb2.CreateModelRequest(request_id=str(uuid.uuid4()), name="m", files=files, config=config)
    with pytest.raises(grpc.aio.AioRpcError, match=f"at most {MAX_ANNOUNCED_CONFIG_BYTES} bytes") as caught:
        await world.ann.call("models", "CreateModel", request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def _watches(world: Any, caller: Any, number: int) -> list[Any]:
    """Open calls that do not end by themselves."""
    watches = [caller.call("jobs", "WatchJob", job_pb2.WatchJobRequest(job_id=world.job_id)) for _ in range(number)]
    for watch in watches:
        await watch.read()
    return watches


async def test_a_connection_has_a_bounded_number_of_calls(
    base_world: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CALLS_PER_CONNECTION", 3)
    job = await base_world.job()
    async with serve(base_world) as world, grpc.aio.insecure_channel(world.address, _OWN_CONNECTION) as other:
        world.job_id = job.job_id
        watches = await _watches(world, world.ann, 3)
        waiting = asyncio.ensure_future(_node(world.ann))
        for _ in range(20):  # far longer than the call that waits would take
            assert (await _node(type(world.ann)(other, base_world.tokens["ann"]))).user == "ann"
        assert not waiting.done()
        watches[0].cancel()
        assert (await asyncio.wait_for(waiting, 240)).user == "ann"


async def test_the_port_has_a_bounded_number_of_calls(
    base_world: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CALLS", 3)
    job = await base_world.job()
    async with serve(base_world) as world:
        world.job_id = job.job_id
        await _watches(world, world.ann, 3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _node(world.bob)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


class Silent:
    """Connections on which no call comes."""

    def __init__(self, world: Any, stack: ExitStack) -> None:
        self._port, self._stack = world.server.port, stack

    async def open(self, source: str = "127.0.0.1") -> socket.socket:
        """Connect, and wait until the server has sent its first frame or has ended it."""
        made = self._stack.enter_context(socket.socket())
        made.setblocking(False)
        made.bind((source, 0))
        loop = asyncio.get_running_loop()
        await loop.sock_connect(made, ("127.0.0.1", self._port))
        with suppress(ConnectionResetError):
            await asyncio.wait_for(loop.sock_recv(made, 1), 240)
        return made

    @staticmethod
    async def ends(connection: socket.socket) -> None:
        """Wait until the server ends a connection."""
        with suppress(ConnectionResetError):
            while await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 4096), _WAIT_S):
                pass

    @staticmethod
    def is_open(connection: socket.socket) -> bool:
        """Whether the server has not ended it, as far as has arrived."""
        try:
            while connection.recv(4096):
                pass
        except BlockingIOError:
            return True
        except ConnectionResetError:
            pass
        return False


@pytest.mark.parametrize(
    ("limit", "sources"),
    [("MAX_UNKNOWN", ["127.0.0.1", "127.0.0.2", "127.0.0.3"]), ("MAX_UNKNOWN_PER_ADDRESS", ["127.0.0.1"] * 3)],
)
async def test_connections_without_a_valid_token_are_bounded(
    base_world: Any, serve: Any, monkeypatch: pytest.MonkeyPatch, limit: str, sources: list[str]
) -> None:
    monkeypatch.setattr(server, limit, 2)
    monkeypatch.setattr(server, "HANDSHAKE_S", 3600)
    with ExitStack() as stack:
        async with serve(base_world) as world:
            silent = Silent(world, stack)
            opened = [await silent.open(source) for source in sources]
            await silent.ends(opened[0])
            assert [silent.is_open(one) for one in opened[1:]] == [True, True]
            assert (await _node(world.ann)).user == "ann", "there is room for who has a token"


async def test_connections_are_bounded(base_world: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(server, "HANDSHAKE_S", 3600)
    with ExitStack() as stack:
        async with serve(base_world) as world:
            silent = Silent(world, stack)
            opened = [await silent.open() for _ in range(3)]
            await silent.ends(opened[2])
            assert [silent.is_open(one) for one in opened[:2]] == [True, True]


async def test_a_handshake_is_bounded(base_world: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HANDSHAKE_S", 1)
    with ExitStack() as stack:
        async with serve(base_world) as world:
            silent = Silent(world, stack)
            await silent.ends(await silent.open())
