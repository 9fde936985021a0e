"""What surrounds every call: who calls, what is answered when it fails, how long it took.

The only place that turns errors into gRPC statuses, and one of the two that may catch everything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from horizon_server.api.services import OpenStreams, Services
from horizon_server.api.status import status_of
from horizon_server.errors import HorizonError, InvalidSpec, TooManyCalls, Unauthenticated
from horizon_server.records.account import Principal

_log = logging.getLogger(__name__)
_principal: ContextVar[Principal] = ContextVar("principal")

# A quarter of the server's calls: one user's watches cannot take them from all others.
MAX_CALLS_PER_USER = 256
MAX_VIOLATIONS = 100

# Probes and tools for exploring a server have no token.
_OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")
# Of a request stream whose answer is there: how long messages that are on their way are awaited, in all and for each.
_READ_OUT_S = 2.0
_SILENCE_S = 0.25
_REFUSED_SILENCE_S = 0.015
# gRPC clients refuse more trailing metadata than this by default, and then the user would see neither code nor message. So the details
# of an error are cut to what fits; a client that takes more sends its limit under this key.
_DEFAULT_METADATA_BYTES = 8192
_METADATA_BYTES_KEY = "horizon-max-metadata-bytes"
_MOST_METADATA_BYTES = 128 * 1024
# For other trailers, and the 32 bytes that HTTP/2 counts for each.
_OVERHEAD_BYTES = 1024
_MAX_MESSAGE_BYTES = 1200

Observe = Callable[[str, str, str, float], None]
"""Counts a finished call: service, method, code, seconds."""
Metadata = Mapping[str, str | bytes]
Trailers = tuple[tuple[str, str | bytes], ...]


def caller() -> Principal:
    """Return who makes the call that is being served."""
    return _principal.get()


@dataclass(frozen=True)
class _Call:
    """What is known of a call when its headers have arrived: an error in place of the caller is its answer."""

    method: str
    metadata: Metadata
    caller: Principal | Exception


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic when it runs
    """Authenticates every call but health and reflection, and answers its errors."""

    def __init__(self, services: Services, *, streams: OpenStreams, observe: Observe) -> None:
        self._services = services
        self._streams = streams
        self._observe = observe
        self._num_calls: Counter[str] = Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of a call; `grpc.aio` asks for one per call, when its headers have arrived."""
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith(_OPEN_SERVICES):
            return handler
        metadata: Metadata = {item[0]: item[1] for item in handler_call_details.invocation_metadata or ()}
        call = _Call(method, metadata, await self._identify(metadata))
        coders = {
            "request_deserializer": _decoding(method, handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if handler.request_streaming:
            assert not handler.response_streaming, "the contract has no call that streams both ways"
            return grpc.stream_unary_rpc_method_handler(self._request_stream(handler.stream_unary, call), **coders)
        if isinstance(call.caller, Exception):
            # gRPC would wait for the request first, and a refused caller could hold the call open by never sending one.
            async def refuse(_requests: Any, context: Any) -> None:
                async with self._around(call, context):
                    raise AssertionError("the call was to be refused")

            return grpc.stream_unary_rpc_method_handler(refuse, **coders)
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(self._response_stream(handler.unary_stream, call), **coders)

        async def answer(request: Any, context: Any) -> Any:
            async with self._around(call, context):
                return await handler.unary_unary(_decoded(request), context)

        return grpc.unary_unary_rpc_method_handler(answer, **coders)

    async def _identify(self, metadata: Metadata) -> Principal | Exception:
        value = metadata.get("authorization", "")
        scheme, _, token = value.partition(" ") if isinstance(value, str) else ("", "", "")
        if scheme.lower() != "bearer" or not token.strip():
            return Unauthenticated(
                "the call has no token; send metadata 'authorization: Bearer TOKEN', or run: horizon login"
            )
        try:
            return await self._services.accounts.authenticate(token.strip())
        except Exception as error:  # noqa: BLE001  # raised again in `_around`, which can answer it
            return error

    def _request_stream(self, inner: Any, call: _Call) -> Any:
        async def answer(request_iterator: Any, context: Any) -> Any:
            # A client whose write is under way when the answer arrives reports an internal error instead of the answer: nearly always
            # when the status comes alone, nearly never when metadata came before it.
            await context.send_initial_metadata(())
            async with aclosing(aiter(request_iterator)) as received:
                requests = _RequestStream(received)
                async with self._around(call, context, requests=requests, is_stream=True):
                    response = await inner(requests, context)
                    await requests.read_out(refused=False)
                    return response

        return answer

    def _response_stream(self, inner: Any, call: _Call) -> Any:
        # Not a generator itself: a cancelled call then unwinds through `inner` at once, not when it is collected.
        async def answer(request: Any, context: Any) -> None:
            around = self._around(call, context, is_stream=True)
            async with around, aclosing(inner(_decoded(request), context)) as responses:
                async for response in responses:
                    await context.write(response)

        return answer

    @asynccontextmanager
    async def _around(
        self, call: _Call, context: Any, *, requests: _RequestStream | None = None, is_stream: bool = False
    ) -> AsyncIterator[None]:
        started = time.perf_counter()
        code = "OK"
        failure: HorizonError | None = None
        try:
            if isinstance(call.caller, Exception):
                raise call.caller
            async with self._streams.one() if is_stream else nullcontext(), self._counted(call.caller.name):
                _principal.set(call.caller)
                yield
        except HorizonError as error:
            code, failure = status_of(error).grpc, error
            if code == "INTERNAL":
                _log.error("%s failed: %s", call.method, error.message)
            if isinstance(error, Unauthenticated) and "authorization" in call.metadata:
                self._services.refused_tokens.add(context.peer())
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller gets a status and the log gets the traceback
            error_id = secrets.token_hex(4)
            _log.error("%s failed unexpectedly, error id %s", call.method, error_id, exc_info=error)
            code = "INTERNAL"
            failure = HorizonError(
                f"something went wrong inside the daemon; its log says what, under error id {error_id}"
            )
        finally:
            # Before the answer, so that a caller who has it finds the call counted.
            service, _, name = call.method.strip("/").partition("/")
            self._observe(service, name, code, time.perf_counter() - started)
        if failure is not None:
            if requests is not None:
                await requests.read_out(refused=True)
            await context.abort(*to_grpc_status(failure, metadata_bytes(call.metadata)))

    @asynccontextmanager
    async def _counted(self, name: str) -> AsyncIterator[None]:
        """Count the block as an open call of that user, so that one user cannot take all of the server's calls."""
        if self._num_calls[name] >= MAX_CALLS_PER_USER:
            raise TooManyCalls(
                f"{name} has {MAX_CALLS_PER_USER} calls open, the maximum; end some watches, then call again",
                retry_after_s=1.0,
            )
        self._num_calls[name] += 1
        try:
            yield
        finally:
            self._num_calls[name] -= 1
            if not self._num_calls[name]:
                del self._num_calls[name]


def _decoding(method: str, decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a deserializer that answers an error instead of raising it."""

    # gRPC decodes before it calls the server, where nothing could answer, and would log a traceback for each: a caller without a token
    # could fill the disk with them.
    def decode_or_refuse(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            return InvalidSpec(f"the message is not a valid request of {method}; use a client of the daemon's version")

    return decode_or_refuse


def _decoded(request: Any) -> Any:
    if isinstance(request, InvalidSpec):
        raise request
    return request


class _RequestStream:
    """The decoded messages of a client; `read_out` lets the client finish writing before it gets its answer."""

    def __init__(self, requests: AsyncIterator[Any]) -> None:
        self._requests = requests
        self._num_read = 0

    def __aiter__(self) -> _RequestStream:
        return self

    async def __anext__(self) -> Any:
        request = await anext(self._requests)
        self._num_read += 1
        return _decoded(request)

    async def read_out(self, *, refused: bool) -> None:
        """Drop what still comes, until it ends or pauses."""
        # A client that was refused at its first message may send the next one only when it has the answer.
        silence_s = _REFUSED_SILENCE_S if refused and self._num_read <= 1 else _SILENCE_S
        with suppress(TimeoutError, StopAsyncIteration):
            async with asyncio.timeout(_READ_OUT_S):
                while True:
                    await asyncio.wait_for(anext(self._requests), silence_s)


def metadata_bytes(metadata: Metadata) -> int:
    """Return how much trailing metadata the caller takes."""
    given = metadata.get(_METADATA_BYTES_KEY, "")
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) < 10:
        return min(max(int(given), _DEFAULT_METADATA_BYTES), _MOST_METADATA_BYTES)
    return _DEFAULT_METADATA_BYTES


def to_grpc_status(
    error: HorizonError, max_bytes: int = _DEFAULT_METADATA_BYTES
) -> tuple[grpc.StatusCode, str, Trailers]:
    """Return code, message and trailing metadata of an error, as `context.abort` takes them."""
    message = clip(error.message)
    status = status_pb2.Status(code=code_pb2.Code.Value(status_of(error).grpc), message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain="horizon"))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    room = max_bytes - _OVERHEAD_BYTES - _encoded_bytes(message) - status.ByteSize()
    # The first violations that together fit: a client shows those it gets, and refuses trailers that are too long.
    fitting = error_details_pb2.BadRequest()
    for violation in error.violations[:MAX_VIOLATIONS]:
        one = error_details_pb2.BadRequest.FieldViolation(
            field=clip(violation.field), description=clip(violation.description)
        )
        room -= one.ByteSize() + 8
        if room < 0:
            break
        fitting.field_violations.append(one)
    if fitting.field_violations:
        status.details.add().Pack(fitting)
    rendered = rpc_status.to_status(status)
    return rendered.code, rendered.details, rendered.trailing_metadata


def clip(message: str) -> str:
    """Return the message, cut where it would not fit into a header."""
    if _encoded_bytes(message) <= _MAX_MESSAGE_BYTES:
        return message
    kept = message[:_MAX_MESSAGE_BYTES]
    while _encoded_bytes(kept) > _MAX_MESSAGE_BYTES:
        kept = kept[: len(kept) * 9 // 10]
    return kept + " ..."


def _encoded_bytes(message: str) -> int:
    """Return the size after percent-encoding, which is how gRPC sends a status message."""
    return sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in message.encode("utf-8", "replace"))
