"""A gRPC connection that fails where a test says so: it stands between the client and the real daemon and knows none of
its rules.

Every call is passed on message by message. A test can refuse a call, hang it, cut its stream after some bytes or
messages, change its answers, or answer it in the daemon's place.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2
from tests.support.loop_thread import LoopThread

from horizon_proto.v1 import (
    account_pb2,
    blob_pb2,
    checkpoint_pb2,
    dataset_pb2,
    housekeeping_pb2,
    job_pb2,
    model_pb2,
    node_pb2,
    sharing_pb2,
    webhook_pb2,
)

_METHODS = {
    f"/{service.full_name}/{method.name}": method
    for module in (
        account_pb2,
        blob_pb2,
        checkpoint_pb2,
        dataset_pb2,
        housekeeping_pb2,
        job_pb2,
        model_pb2,
        node_pb2,
        sharing_pb2,
        webhook_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}


@dataclass(frozen=True)
class _Refusal:
    code: grpc.StatusCode
    message: str
    trailing: tuple[tuple[str, bytes], ...] = ()


_CUT = _Refusal(grpc.StatusCode.UNAVAILABLE, "the connection was cut")


class Line:
    """A server in front of the daemon at `upstream`, and the faults of its calls, by the names of the methods."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.address = ""
        self.tls: tuple[bytes, bytes] | None = None
        """Key and certificate of the next start."""
        self.requests: list[tuple[str, Any]] = []
        """Method and first message of every call."""
        self.calls: list[str] = []
        self.sent_bytes = 0
        """Data bytes of uploads that were passed on."""
        self.chunk_sizes: list[int] = []
        self.cuts: dict[str, list[int]] = defaultdict(list)
        """After how much of the next streams the connection breaks: bytes of data, or messages that have none."""
        self.ends: dict[str, list[int]] = defaultdict(list)
        """As `cuts`, but the streams end in order, as if they were complete."""
        self.hanging: set[str] = set()
        self.change: dict[str, Callable[[Any], object]] = {}
        """Changes each answer in place."""
        self.change_request: dict[str, Callable[[Any], object]] = {}
        """Changes the first message of each call in place."""
        self.replace: dict[str, Callable[[Any], Any]] = {}
        """Answers a request in the daemon's place."""
        self._refusals: dict[str, list[_Refusal]] = defaultdict(list)
        self._port = 0
        self._thread = LoopThread()
        self._server: grpc.aio.Server | None = None
        self._channel: grpc.aio.Channel | None = None

    def start(self) -> None:
        self._thread.call(self._start())

    def stop(self) -> None:
        """Break every connection and refuse new ones until the next start, which is at the same address."""
        self._thread.call(self._stop())

    def close(self) -> None:
        self.stop()
        self._thread.close()

    def refuse(
        self,
        method: str,
        code: str,
        message: str,
        *,
        times: int = 1,
        reason: str = "",
        violations: tuple[tuple[str, str], ...] = (),
        retry_after_s: int = 0,
        named: tuple[str, str] | None = None,
    ) -> None:
        """Answer the next calls of `method` with an error, with details as the daemon sends them."""
        status = status_pb2.Status(code=grpc.StatusCode[code].value[0], message=message)
        if reason:
            status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="horizon"))
        if violations:
            bad_request = error_details_pb2.BadRequest()
            for field, description in violations:
                bad_request.field_violations.add(field=field, description=description)
            status.details.add().Pack(bad_request)
        if named:
            status.details.add().Pack(error_details_pb2.ResourceInfo(resource_type=named[0], resource_name=named[1]))
        if retry_after_s:
            retry = error_details_pb2.RetryInfo()
            retry.retry_delay.FromSeconds(retry_after_s)
            status.details.add().Pack(retry)
        trailing = (("grpc-status-details-bin", status.SerializeToString()),)
        self._refusals[method] += [_Refusal(grpc.StatusCode[code], message, trailing)] * times

    async def _start(self) -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((_PassOn(self),))
        address = f"127.0.0.1:{self._port}"
        if self.tls is None:
            self._port = server.add_insecure_port(address)
        else:
            self._port = server.add_secure_port(address, grpc.ssl_server_credentials([self.tls]))
        self.address = f"127.0.0.1:{self._port}"
        self._channel = grpc.aio.insecure_channel(self.upstream)
        await server.start()
        self._server = server

    async def _stop(self) -> None:
        server, self._server = self._server, None
        if server is not None and self._channel is not None:
            await server.stop(None)
            await self._channel.close(None)

    async def answers(self, path: str, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        """Pass one call on, with its faults."""
        method, name = _METHODS[path], path.rpartition("/")[2]
        self.calls.append(name)
        if name in self.hanging:
            await asyncio.Event().wait()
        first = GetMessageClass(method.input_type).FromString(await anext(requests))
        self.change_request.get(name, lambda message: None)(first)
        self.requests.append((name, first))
        if isinstance(first, blob_pb2.WriteBlobsRequest) and not self._refusals[name]:
            self.sent_bytes += sum(len(whole.data) for whole in first.blobs)
        if self._refusals[name]:
            await _abort(context, self._refusals[name].pop(0))
        cut = self.cuts[name].pop(0) if self.cuts[name] else None
        end = self.ends[name].pop(0) if self.ends[name] else None
        left = cut if cut is not None else end
        if left != 0:
            uploaded = self._upload(first, requests, left) if method.client_streaming else _one(first)
            async for message in self._answered(path, first, uploaded, context):
                if method.client_streaming and cut is not None:
                    break  # the daemon has what was passed on, but its answer does not arrive
                if left is not None and left < _amount(message):
                    if left and _has_data(message):
                        message.data = message.data[:left]
                        yield message.SerializeToString()
                    break
                left = None if left is None else left - _amount(message)
                yield message.SerializeToString()
            else:
                return
        if cut is not None:
            await _abort(context, _CUT)

    async def _answered(
        self, path: str, first: Any, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[Any]:
        """Yield the answers of the daemon, or of what replaces it."""
        name = path.rpartition("/")[2]
        if name in self.replace:
            yield self.replace[name](first)
            return
        sent = [
            (key, value) for key, value in context.invocation_metadata() if key in ("authorization", "x-request-id")
        ]
        assert self._channel is not None
        call = self._channel.stream_stream(path, None, None)(requests, metadata=sent)
        try:
            async for answer in call:
                message = GetMessageClass(_METHODS[path].output_type).FromString(answer)
                self.change.get(name, lambda message: None)(message)
                yield message
        except grpc.aio.AioRpcError as error:
            details = dict(error.trailing_metadata()).get("grpc-status-details-bin")  # type: ignore[arg-type,call-overload]
            kept = (("grpc-status-details-bin", details),) if details else ()
            await _abort(context, _Refusal(error.code(), error.details() or "", kept))
        finally:
            call.cancel()

    async def _upload(self, first: Any, requests: AsyncIterator[bytes], left: int | None) -> AsyncIterator[bytes]:
        """Pass on the pieces of an upload, until the cut."""
        message = first
        while True:
            data = message.chunk.data
            self.chunk_sizes.append(len(data))
            if left is not None:
                message.chunk.data = data[:left]
                left -= len(message.chunk.data)
            self.sent_bytes += len(message.chunk.data)
            yield message.SerializeToString()
            rest = await anext(requests, None) if left != 0 else None
            if rest is None:
                return
            message = type(first).FromString(rest)


class _PassOn(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not generic at run time
    """Takes every method there is; on the wire all four kinds of calls are two streams."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def service(self, details: Any) -> Any:
        path = details.method

        async def answers(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
            async for answer in self._line.answers(path, requests, context):
                yield answer

        return grpc.stream_stream_rpc_method_handler(answers)


async def _abort(context: Any, refusal: _Refusal) -> None:
    await context.abort(refusal.code, refusal.message, refusal.trailing)


async def _one(message: Any) -> AsyncIterator[bytes]:
    yield message.SerializeToString()


def _has_data(message: Any) -> bool:
    return "data" in message.DESCRIPTOR.fields_by_name


def _amount(message: Any) -> int:
    return len(message.data) if _has_data(message) else 1
