"""What surrounds every call: tokens, errors, metrics, health, reflection, draining, TLS."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from horizon_proto.v1 import checkpoint_pb2, dataset_pb2, job_pb2, model_pb2, node_pb2, node_pb2_grpc
from horizon_server.api.grpc import interceptor
from horizon_server.api.grpc.interceptor import (
    CallInterceptor,
    Trailers,
    clip,
    metadata_bytes,
    to_grpc_status,
    write_whole,
)
from horizon_server.api.grpc.server import SERVICE_NAMES, start_grpc_server
from horizon_server.errors import BadSetting, Draining, FieldViolation, InvalidData, UploadInProgress
from horizon_server.events import EvalDone
from horizon_server.network import ServerCertificate, own_certificate

GET_NODE = node_pb2.GetNodeRequest()


@pytest.fixture
def state(state_with_chats: Any) -> Any:
    return state_with_chats


def info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    trailers: Any = error.trailing_metadata()
    status = status_pb2.Status.FromString(dict(trailers)["grpc-status-details-bin"])
    found = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(found)
    return found


async def test_the_node_knows_who_asks(world: Any) -> None:
    node = (await world.eve.call("node", "GetNode", GET_NODE)).node
    assert (node.user, node.role) == ("eve", "viewer")
    assert set(node.num_jobs) >= {"QUEUED", "RUNNING"}


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer wrong", "Bearer " + "x" * 5000, "hzn_x"]
)
async def test_calls_need_a_token(world: Any, value: str | None) -> None:
    stub: Any = node_pb2_grpc.NodeServiceStub(world.channel)
    metadata = () if value is None else (("authorization", value),)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetNode(GET_NODE, metadata=metadata, timeout=240)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert info(caught.value).reason == "UNAUTHENTICATED"
    assert value is None or len(value) < 9 or value not in str(caught.value.details())


async def test_a_lower_case_scheme_is_fine(world: Any) -> None:
    stub: Any = node_pb2_grpc.NodeServiceStub(world.channel)
    metadata = (("authorization", f"bearer {world.tokens['ann']}"),)
    assert (await stub.GetNode(GET_NODE, metadata=metadata, timeout=240)).node.user == "ann"


async def test_a_bug_is_reported_by_an_id_and_logged_with_its_traceback(
    world: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise KeyError("secret inside")

    monkeypatch.setattr(world.journal.store, "get", broken)
    request = job_pb2.GetJobRequest(job_id="job_1")
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
        await world.ann.call("jobs", "GetJob", request)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    sentence = caught.value.details() or ""
    assert "secret" not in sentence
    (record,) = [one for one in caplog.records if one.name == CallInterceptor.__module__]
    assert sentence.rsplit(" ", 1)[1] in record.getMessage()
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)
    stream = world.ann.call("jobs", "WatchJob", job_pb2.WatchJobRequest(job_id="job_1"))
    with pytest.raises(grpc.aio.AioRpcError, match="error id"):
        await stream.read()


async def test_every_call_is_observed(world: Any) -> None:
    await world.ann.call("node", "GetNode", GET_NODE)
    with pytest.raises(grpc.aio.AioRpcError):
        await world.ann.call("jobs", "GetJob", job_pb2.GetJobRequest(job_id="nope"))
    assert world.calls == [
        ("horizon_proto.v1.NodeService", "GetNode", "OK"),
        ("horizon_proto.v1.JobService", "GetJob", "NOT_FOUND"),
    ]


async def test_health_needs_no_token_and_says_when_work_is_not_taken(world: Any) -> None:
    stub: Any = health_pb2_grpc.HealthStub(world.channel)
    for serving, expected in ((True, "SERVING"), (False, "NOT_SERVING"), (True, "SERVING")):
        await world.server.set_serving(serving)
        for name in ("", *SERVICE_NAMES):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=240)
            assert health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status) == expected
    await world.server.set_serving(False)
    assert (await world.ann.call("node", "GetNode", GET_NODE)).node.user == "ann", "calls are answered all the same"


async def test_reflection_lists_the_services_without_a_token(world: Any) -> None:
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(world.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    answers = [answer async for answer in stub.ServerReflectionInfo(iter([request]), timeout=240)]
    assert {service.name for service in answers[0].list_services_response.service} >= set(SERVICE_NAMES)


async def test_stopping_ends_streams_so_that_clients_reconnect(world: Any) -> None:
    job = await world.job()
    stream = world.ann.call("jobs", "WatchJob", job_pb2.WatchJobRequest(job_id=job.job_id))
    assert (await stream.read()).event.sequence == 1
    stopping = asyncio.create_task(world.server.stop(60))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stream.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert info(caught.value).reason == "DRAINING"
    await asyncio.wait_for(stopping, 240)
    assert world.num_watching(job) == 0


async def test_a_message_under_way_leaves_before_its_stream_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    # gRPC refuses a status beside a first message, and the caller would not learn why its stream has ended.
    monkeypatch.setattr(interceptor, "LAST_MESSAGE_S", 60.0)
    left, is_writing, may_leave = [], asyncio.Event(), asyncio.Event()

    class Context:
        async def write(self, message: str) -> None:
            is_writing.set()
            await may_leave.wait()
            left.append(message)

    writing = asyncio.create_task(write_whole(Context(), "a message"))
    await is_writing.wait()
    writing.cancel()
    await asyncio.sleep(0)
    assert not writing.done()
    may_leave.set()
    with pytest.raises(asyncio.CancelledError):
        await writing
    assert left == ["a message"]


async def test_a_message_that_fails_after_its_stream_has_ended_is_not_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(interceptor, "LAST_MESSAGE_S", 60.0)
    is_writing, fails = asyncio.Event(), asyncio.Event()

    class Context:
        async def write(self, message: str) -> None:
            is_writing.set()
            await fails.wait()
            raise RuntimeError("the caller has gone")

    writing = asyncio.create_task(write_whole(Context(), "a message"))
    await is_writing.wait()
    # Ended, and ended again by gRPC, which leaves the message behind.
    for _ in range(2):
        writing.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await writing
    fails.set()
    await asyncio.sleep(0.01)
    gc.collect()
    assert caplog.records == []


async def test_a_client_that_goes_away_ends_the_watch_at_once_and_leaves_no_traceback(
    world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    job = await world.job(EvalDone(step=0, eval_loss=2.0, num_targets=5))
    stream = world.ann.call("jobs", "WatchJob", job_pb2.WatchJobRequest(job_id=job.job_id, after_sequence=1))
    assert (await stream.read()).event.eval.eval_loss == 2.0
    assert world.num_watching(job) == 1
    with caplog.at_level(logging.INFO):
        stream.cancel()
        await world.until_unwatched(job)
        async with asyncio.timeout(240):
            while not world.calls:  # noqa: ASYNC110  # nothing announces it
                await asyncio.sleep(0.01)
    assert world.calls[-1][1:] == ("WatchJob", "CANCELLED")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


UNDECODABLE = b"\x0a\xff\xff\xff\xff\x0f"


def calls_of_the_contract() -> list[Any]:
    modules = (job_pb2, dataset_pb2, model_pb2, checkpoint_pb2, node_pb2)
    services = [service for module in modules for service in module.DESCRIPTOR.services_by_name.values()]
    return [pytest.param(s.full_name, method, id=method.name) for s in services for method in s.methods]


@pytest.mark.parametrize(("service", "method"), calls_of_the_contract())
async def test_a_message_that_cannot_be_decoded_is_refused_without_a_traceback(
    world: Any, service: str, method: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kind = f"{'stream' if method.client_streaming else 'unary'}_{'stream' if method.server_streaming else 'unary'}"
    call = getattr(world.channel, kind)(f"/{service}/{method.name}")
    for metadata, code in (((), "UNAUTHENTICATED"), (world.ann.metadata, "INVALID_ARGUMENT")):
        request = iter([UNDECODABLE]) if method.client_streaming else UNDECODABLE
        with caplog.at_level(logging.INFO), pytest.raises(grpc.aio.AioRpcError) as caught:
            response = call(request, metadata=metadata, timeout=240)
            await (response.read() if method.server_streaming else response)
        assert caught.value.code().name == code
    assert f"not a valid request of /{service}/{method.name}" in str(caught.value.details())
    assert [record for record in caplog.records if record.exc_info or record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("method", ["/horizon_proto.v1.NodeService/GetNode", "/horizon_proto.v1.JobService/WatchJob"])
async def test_a_call_without_a_token_is_refused_before_its_message_arrives(world: Any, method: str) -> None:
    async def silent() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    calls = [world.channel.stream_unary(method)(silent(), timeout=240) for _ in range(20)]
    async with asyncio.timeout(240):
        codes = [await call.code() for call in calls]
    assert {code.name for code in codes} == {"UNAUTHENTICATED"}


async def test_one_user_cannot_take_all_calls(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horizon_server.api.limits.MAX_CALLS_PER_USER", 3)
    job = await world.job()
    request = job_pb2.WatchJobRequest(job_id=job.job_id)
    watches = [world.ann.call("jobs", "WatchJob", request) for _ in range(3)]
    for watch in watches:
        await watch.read()
    with pytest.raises(grpc.aio.AioRpcError, match="ann has 3 calls open") as caught:
        await world.ann.call("node", "GetNode", GET_NODE)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await world.bob.call("node", "GetNode", GET_NODE)).node.user == "bob"
    watches[0].cancel()
    async with asyncio.timeout(240):
        while world.num_watching(job) > 2:  # noqa: ASYNC110  # the server learns of it through the network
            await asyncio.sleep(0.005)
    async with asyncio.timeout(240):
        # The watch is over a moment before its call is.
        while world.services.limits._num_of_user["ann"] > 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert (await world.ann.call("node", "GetNode", GET_NODE)).node.user == "ann"


async def test_refused_tokens_leave_one_line_a_minute(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    stub: Any = node_pb2_grpc.NodeServiceStub(world.channel)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            with pytest.raises(grpc.aio.AioRpcError):
                await stub.GetNode(GET_NODE, metadata=(("authorization", "Bearer guessed"),), timeout=240)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "refused 1 wrong" in line
    assert "127.0.0.1" in line
    assert "guessed" not in line


async def test_a_port_in_use_is_reported(world: Any) -> None:
    with pytest.raises(
        BadSetting, match=r"cannot listen on .*: Address already in use; choose another HOST:PORT with --grpc"
    ):
        await start_grpc_server(world.services, address=world.address, tls=None)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:7171", "node.example:7171"])
async def test_beyond_loopback_tls_is_a_must(world: Any, address: str) -> None:
    with pytest.raises(BadSetting, match="needs TLS"):
        await start_grpc_server(world.services, address=address, tls=None)


async def test_tls_with_the_daemons_own_certificate(world: Any, tmp_path: Path) -> None:
    files = own_certificate(tmp_path / "tls", ())
    server = await start_grpc_server(world.services, address="127.0.0.1:0", tls=files)
    assert files.authority is not None
    trusted = grpc.ssl_channel_credentials(files.authority.read_bytes())
    async with grpc.aio.secure_channel(f"127.0.0.1:{server.port}", trusted) as channel:
        stub: Any = node_pb2_grpc.NodeServiceStub(channel)
        assert (await stub.GetNode(GET_NODE, metadata=world.ann.metadata, timeout=240)).node.user == "ann"
    await server.stop(0)
    missing = ServerCertificate(certificate=tmp_path / "no.pem", key=tmp_path / "no.key", authority=None)
    with pytest.raises(BadSetting, match="cannot be read"):
        await start_grpc_server(world.services, address="127.0.0.1:0", tls=missing)


def size_of(trailers: Trailers, sentence: str) -> int:
    escaped = sum(1 if 0x20 <= byte <= 0x7E and byte != ord("%") else 3 for byte in sentence.encode())
    return sum(len(key) + len(value) + 32 for key, value in trailers) + escaped + 64


@pytest.mark.parametrize("character", ["x", "\u00e4", "\U0001f642", "%", "\n"])
def test_details_always_fit_into_what_the_receiver_takes(character: str) -> None:
    violations = [FieldViolation(field=f"line[{i}].{character * 50}", description=character * 400) for i in range(300)]
    error = InvalidData("bad: " + character * 5000, violations=violations)
    _, sentence, trailers = to_grpc_status(error)
    assert size_of(trailers, sentence) < 8192
    status = status_pb2.Status.FromString(trailers[0][1])
    assert status.message == sentence
    assert len(clip(sentence).encode()) < 1300
    room = metadata_bytes({"horizon-max-metadata-bytes": "65536"})
    bounded = status_pb2.Status.FromString(to_grpc_status(error, room)[2][0][1])
    found = error_details_pb2.BadRequest()
    assert bounded.details[-1].Unpack(found)
    assert 1 < len(found.field_violations) <= 100
    assert size_of(to_grpc_status(error, room)[2], sentence) < 65536


@pytest.mark.parametrize("said", ["", "-1", "1", "x", "999999999999", "\u0663", b"9"])
def test_what_a_client_says_it_takes_is_not_trusted_blindly(said: str | bytes) -> None:
    assert metadata_bytes({"horizon-max-metadata-bytes": said}) == 8192
    assert metadata_bytes({"horizon-max-metadata-bytes": "99999999"}) == 128 * 1024


def test_a_retry_time_is_in_the_details() -> None:
    for error, code in (
        (Draining("x", retry_after_s=2.5), "UNAVAILABLE"),
        (UploadInProgress("x", retry_after_s=2.5), "ABORTED"),
    ):
        status_code, _, trailers = to_grpc_status(error)
        assert status_code.name == code
        retry = error_details_pb2.RetryInfo()
        assert status_pb2.Status.FromString(trailers[0][1]).details[1].Unpack(retry)
        assert retry.retry_delay.ToTimedelta().total_seconds() == 2.5
