"""What surrounds every call: who calls, what is answered when it fails, how long it took.

The only place that turns errors into gRPC statuses, and one of the two that may catch everything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from horizon_server.api.grpc.request_stream import RequestStream, decoded, decoding
from horizon_server.api.grpc.rpc_errors import metadata_bytes, to_grpc_status
from horizon_server.api.open_streams import OpenStreams, closing
from horizon_server.api.services import Services
from horizon_server.api.status import status_of
from horizon_server.errors import HorizonError, TooManyCalls, Unauthenticated
from horizon_server.records.account import Principal

_log = logging.getLogger(__name__)
_principal: ContextVar[Principal] = ContextVar("principal")

MAX_CALLS_PER_USER = 256

_OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")
_NO_TOKEN = "the call has no token; send metadata 'authorization: Bearer TOKEN', or run: horizon login"  # noqa: S105


Observe = Callable[[str, str, str, float], None]
"""Counts a finished call: service, method, code, seconds."""


def caller() -> Principal:
    """Return who makes the call that is being served."""
    return _principal.get()


Metadata = dict[str, str | bytes]


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
            "request_deserializer": decoding(method, handler.request_deserializer),
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
                return await handler.unary_unary(decoded(request), context)

        return grpc.unary_unary_rpc_method_handler(answer, **coders)

    async def _identify(self, metadata: Metadata) -> Principal | Exception:
        value = metadata.get("authorization", "")
        scheme, _, token = value.partition(" ") if isinstance(value, str) else ("", "", "")
        if scheme.lower() != "bearer" or not token.strip():
            return Unauthenticated(_NO_TOKEN)
        try:
            return await self._services.accounts.authenticate(token.strip())
        except Exception as error:  # noqa: BLE001  # raised again in `_around`, which can answer it
            return error

    def _request_stream(self, inner: Any, call: _Call) -> Any:
        async def answer(request_iterator: Any, context: Any) -> Any:
            await context.send_initial_metadata(())  # RequestStream says why
            async with closing(aiter(request_iterator)) as received:
                requests = RequestStream(received)
                async with self._around(call, context, requests=requests, is_stream=True):
                    response = await inner(requests, context)
                    await requests.read_out(refused=False)
                    return response

        return answer

    def _response_stream(self, inner: Any, call: _Call) -> Any:
        # Not a generator itself: a cancelled call then unwinds through `inner` at once, not when it is collected.
        async def answer(request: Any, context: Any) -> None:
            around = self._around(call, context, is_stream=True)
            async with around, closing(inner(decoded(request), context)) as responses:
                async for response in responses:
                    await context.write(response)

        return answer

    @asynccontextmanager
    async def _around(
        self, call: _Call, context: Any, *, requests: RequestStream[Any] | None = None, is_stream: bool = False
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
