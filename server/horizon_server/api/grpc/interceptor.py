"""What surrounds every call: who calls, what is answered when it fails, how long it took.

The only place that turns errors into gRPC statuses, and one of the two that may catch everything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from horizon_server.api.audited import TRAIL, Trail
from horizon_server.api.connections import Connections
from horizon_server.api.effects import EFFECTS, Effect
from horizon_server.api.grpc.audited import asked_by, outcome_of, resource_of
from horizon_server.api.limits import OPEN_CALL_S, address_of, place_of
from horizon_server.api.services import OpenStreams, Services
from horizon_server.errors import HorizonError, InvalidSpec, NotFound, Stalled, TooManyCalls, Unauthenticated
from horizon_server.records.account import Principal
from horizon_server.services.access import require_scope

_log = logging.getLogger(__name__)
_principal: ContextVar[Principal] = ContextVar("principal")

MAX_VIOLATIONS = 100
# How long the message of a call may take after its headers: it is 4 MiB at most.
FIRST_MESSAGE_S = 20.0
# What a stream that is ended gives a message that is under way.
LAST_MESSAGE_S = 1.0

# Probes and tools for exploring a server have no token.
_OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")
# Of a request stream whose answer is there: how long messages that are on their way are awaited, in all and for each.
_READ_OUT_S = 2.0
_SILENCE_S = 0.25
_REFUSED_SILENCE_S = 0.015
# gRPC clients refuse more trailing metadata than this by default, and then the user would see neither code nor message.
# So the details of an error are cut to what fits; a client that takes more sends its limit under this key.
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
    """What is known of a call when its headers have arrived."""

    method: str
    metadata: Metadata
    is_stream: bool

    @property
    def name(self) -> str:
        """Service and method, as `api.effects` names it."""
        return self.method.rpartition(".")[2]

    @property
    def effect(self) -> Effect:
        """What it does; health and reflection only read."""
        return Effect.READ if self.method.startswith(_OPEN_SERVICES) else EFFECTS[self.name]


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic when it runs
    """Authenticates every call but health and reflection, limits and audits it, and answers its errors."""

    def __init__(self, services: Services, *, streams: OpenStreams, observe: Observe, connections: Connections) -> None:
        self._services = services
        self._streams = streams
        self._observe = observe
        self._connections = connections
        self._tasks: set[asyncio.Task[None]] = set()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of a call; `grpc.aio` asks for one per call, when its headers have arrived."""
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None:
            return handler
        call = _Call(
            method,
            {item[0]: item[1] for item in handler_call_details.invocation_metadata or ()},
            is_stream=bool(handler.request_streaming or handler.response_streaming),
        )
        if method.startswith(_OPEN_SERVICES):
            answer = self._open_call(handler, call)
        elif handler.request_streaming:
            assert not handler.response_streaming, "the contract has no call that streams both ways"
            answer = self._request_stream(handler.stream_unary, call)
        elif handler.response_streaming:
            answer = self._response_stream(handler.unary_stream, call)
        else:
            answer = self._unary(handler.unary_unary, call)
        # To gRPC every call streams its requests: otherwise it would call the handler only when the message has
        # arrived, and a caller who never sends one would hold the call open without being known or limited.
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return make(
            answer,
            request_deserializer=_decoding(method, handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    @asynccontextmanager
    async def _admitted(self, call: _Call, peer: str) -> AsyncIterator[Principal]:
        value = call.metadata.get("authorization", "")
        scheme, _, token = value.partition(" ") if isinstance(value, str) else ("", "", "")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated(
                "the call has no token; send metadata 'authorization: Bearer TOKEN', or run: horizon login"
            )
        async with self._services.logins.admitted(token.strip(), peer, is_change=call.effect.is_audited) as principal:
            self._connections.identified(*place_of(peer), principal.name)
            require_scope(principal, "read")
            yield principal

    def _unary(self, inner: Any, call: _Call) -> Any:
        async def answer(_requests: Any, context: Any) -> Any:
            async with self._around(call, context) as trail:
                request = await self._allowed(call, context, trail)
                response = await inner(request, context)
                # Before the answer: a change that was acknowledged is in the log.
                if call.effect.is_audited:
                    await trail.end(changed=resource_of(response))
                return response

        return answer

    def _request_stream(self, inner: Any, call: _Call) -> Any:
        async def answer(request_iterator: Any, context: Any) -> Any:
            # A client whose write is under way when the answer arrives reports an internal error instead of the answer:
            # nearly always when the status comes alone, nearly never when metadata came before it.
            await context.send_initial_metadata(())
            async with aclosing(aiter(request_iterator)) as received:
                requests = _RequestStream(received)
                async with self._around(call, context, requests=requests):
                    # Before the first message, so that nobody sends a content that will be refused.
                    require_scope(caller(), call.effect.need)
                    response = await inner(requests, context)
                    await requests.read_out(refused=False)
                    return response

        return answer

    def _response_stream(self, inner: Any, call: _Call) -> Any:
        # Not a generator itself: a cancelled call then unwinds through `inner` at once, not when it is collected.
        async def answer(_requests: Any, context: Any) -> None:
            async with self._around(call, context) as trail:
                request = await self._allowed(call, context, trail)
                is_change_of_many = call.effect is Effect.CHANGE_MANY and not getattr(request, "dry_run", False)
                async with aclosing(inner(request, context)) as responses:
                    async for response in responses:
                        if is_change_of_many:
                            outcome, message = outcome_of(response)
                            await trail.end(changed=resource_of(response), outcome=outcome, message=message)
                        await write_whole(context, response)
                if call.effect is Effect.CHANGE:
                    await trail.end()

        return answer

    async def _allowed(self, call: _Call, context: Any, trail: Trail) -> Any:
        """Return the message of a call that its token allows; a change of one thing is in the audit log by then. Raises
        NotAllowed."""
        request = await _first_message(context)
        if call.effect.is_audited:
            trail.asked = asked_by(request)
        require_scope(caller(), call.effect.need)
        if call.effect is Effect.CHANGE:
            await trail.begin()
        return request

    def _open_call(self, handler: Any, call: _Call) -> Any:
        """Answer health and reflection: without a token, so for few at a time, and not for long."""

        async def answer(requests: Any, context: Any) -> Any:
            address = address_of(context.peer())
            try:
                with self._services.limits.of_address(address):
                    async with asyncio.timeout(OPEN_CALL_S):
                        if handler.request_streaming:
                            async for response in handler.stream_stream(_decoded_each(requests), context):
                                await context.write(response)
                            return None
                        request = await _first_message(context)
                        return await (handler.unary_stream or handler.unary_unary)(request, context)
            except TimeoutError:
                failure: HorizonError = Stalled(f"a call without a token may last {OPEN_CALL_S:.0f} s; call again")
            except HorizonError as error:
                failure = error
                await self._services.limits.hold_back(address)
            return await context.abort(*to_grpc_status(failure, metadata_bytes(call.metadata)))

        return answer

    @asynccontextmanager
    async def _around(
        self, call: _Call, context: Any, *, requests: _RequestStream | None = None
    ) -> AsyncIterator[Trail]:
        started = time.perf_counter()
        code = "OK"
        failure: HorizonError | None = None
        trail: Trail | None = None
        try:
            async with (
                self._admitted(call, context.peer()) as principal,
                self._streams.one(principal) if call.is_stream else nullcontext(),
            ):
                _principal.set(principal)
                origin = address_of(context.peer())
                trail = Trail(self._services.audit, principal, origin=origin, call=call.name)
                TRAIL.set(trail)
                yield trail
        except HorizonError as error:
            code, failure = error.status.grpc, error
            if code == "INTERNAL":
                _log.error("%s failed: %s", call.method, error.message)
        except asyncio.CancelledError:
            code = "CANCELLED"
            # The change may have been made: the client has left before its answer.
            if trail is not None and trail.asked is not None and call.effect.is_audited:
                self._later(trail.end(outcome="CANCELLED"))
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
            if trail is not None and call.effect.is_audited:
                await trail.end(outcome=failure.reason, message=failure.message)
            if requests is not None:
                await requests.read_out(refused=True)
            if isinstance(failure, Unauthenticated | TooManyCalls):
                await self._services.limits.hold_back(address_of(context.peer()))
            await context.abort(*to_grpc_status(failure, metadata_bytes(call.metadata)))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def write_whole(context: Any, response: Any) -> None:
    """Write a message of a stream. When the stream is ended meanwhile, the message leaves first: gRPC takes no status
    beside a first message, and the caller would not learn why its stream has ended."""
    writing = asyncio.ensure_future(context.write(response))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        # It fails when the caller has gone, which nobody needs to know.
        writing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.wait([writing], timeout=LAST_MESSAGE_S)
        raise


async def _first_message(context: Any) -> Any:
    """Return the message of a call that has one. Raises Stalled when it does not arrive."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_S):
            request = await context.read()
    except TimeoutError as error:
        raise Stalled(f"the call's message did not arrive within {FIRST_MESSAGE_S:.0f} s; call again") from error
    if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
        raise InvalidSpec("the call ended without a message; use a client of the daemon's version")
    return _decoded(request)


async def _decoded_each(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        yield _decoded(request)


def _decoding(method: str, decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Return a deserializer that answers an error instead of raising it."""

    # gRPC decodes before it calls the server, where nothing could answer, and would log a traceback for each: a caller
    # without a token could fill the disk with them.
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
    status = status_pb2.Status(code=code_pb2.Code.Value(error.status.grpc), message=message)
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain="horizon"))
    if isinstance(error, NotFound) and error.kind:
        named = error_details_pb2.ResourceInfo(resource_type=error.kind, resource_name=clip(error.name))
        status.details.add().Pack(named)
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
