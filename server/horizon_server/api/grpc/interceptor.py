"""What surrounds every call: who is it, what to answer when it fails, how long it took.

The only place that turns errors into gRPC statuses, and one of the two that may catch everything.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import grpc
import grpc.aio

from horizon_server.api.grpc.open_streams import OpenStreams, RequestStream, closing
from horizon_server.api.grpc.rpc_errors import metadata_bytes, told
from horizon_server.api.services import AccountsPort
from horizon_server.api.status import grpc_status
from horizon_server.errors import HorizonError, Unauthenticated
from horizon_server.records.account import Principal

_log = logging.getLogger(__name__)
_principal: ContextVar[Principal] = ContextVar("principal")

_OPEN_SERVICES = ("/grpc.health.v1.", "/grpc.reflection.")
_NO_TOKEN = "the call has no token; send metadata 'authorization: Bearer TOKEN', or run: horizon login"  # noqa: S105


class Observe(Protocol):
    """Told of every finished call; `telemetry.metrics.Metrics.on_grpc` is one."""

    def __call__(self, service: str, method: str, code: str, seconds: float, /) -> None: ...  # noqa: D102


def caller() -> Principal:
    """Return who makes the call that is being served."""
    return _principal.get()


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic when it runs
    """Authenticates every call but health and reflection, and answers its errors."""

    def __init__(self, accounts: AccountsPort, *, streams: OpenStreams, observe: Observe) -> None:
        self._accounts = accounts
        self._streams = streams
        self._observe = observe

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handler of a call; `grpc.aio` asks for one per call."""
        handler: Any = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith(_OPEN_SERVICES):
            return handler
        metadata: dict[str, str | bytes] = {item[0]: item[1] for item in handler_call_details.invocation_metadata or ()}
        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            assert not handler.request_streaming, "the contract has no call that streams both ways"
            return grpc.unary_stream_rpc_method_handler(
                self._streaming(handler.unary_stream, method, metadata), **coders
            )
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(self._taking(handler.stream_unary, method, metadata), **coders)
        return grpc.unary_unary_rpc_method_handler(self._single(handler.unary_unary, method, metadata), **coders)

    def _single(self, inner: Any, method: str, metadata: Mapping[str, str | bytes]) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            async with self._around(method, metadata, context):
                return await inner(request, context)

        return answer

    def _taking(self, inner: Any, method: str, metadata: Mapping[str, str | bytes]) -> Any:
        async def answer(request_iterator: Any, context: Any) -> Any:
            await context.send_initial_metadata(())  # see RequestStream
            async with closing(aiter(request_iterator)) as received:
                requests = RequestStream(received)
                async with self._around(method, metadata, context, requests=requests, is_stream=True):
                    response = await inner(requests, context)
                    await requests.read_out(refused=False)
                    return response

        return answer

    def _streaming(self, inner: Any, method: str, metadata: Mapping[str, str | bytes]) -> Any:
        # Not a generator itself: a cancelled call then unwinds through `inner` at once, not when it is collected.
        async def answer(request: Any, context: Any) -> None:
            around = self._around(method, metadata, context, is_stream=True)
            async with around, closing(inner(request, context)) as responses:
                async for response in responses:
                    await context.write(response)

        return answer

    @asynccontextmanager
    async def _around(
        self,
        method: str,
        metadata: Mapping[str, str | bytes],
        context: Any,
        *,
        requests: RequestStream[Any] | None = None,
        is_stream: bool = False,
    ) -> AsyncIterator[None]:
        started = time.perf_counter()
        code = "OK"
        failure: HorizonError | None = None
        try:
            async with self._streams.one() if is_stream else nullcontext():
                _principal.set(await self._authenticate(metadata))
                yield
        except HorizonError as error:
            code, failure = grpc_status(error), error
            if code == "INTERNAL":
                _log.error("%s failed: %s", method, error.message)
        except asyncio.CancelledError:
            code = "CANCELLED"
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, the caller gets a status and the log gets the traceback
            code, failure = "INTERNAL", _bug(method, error)
        finally:
            service, _, name = method.strip("/").partition("/")
            self._observe(service, name, code, time.perf_counter() - started)
        if failure is not None:
            if requests is not None:
                await requests.read_out(refused=True)
            await context.abort(*told(failure, metadata_bytes(metadata)))

    async def _authenticate(self, metadata: Mapping[str, str | bytes]) -> Principal:
        value = metadata.get("authorization", "")
        scheme, _, token = value.partition(" ") if isinstance(value, str) else ("", "", "")
        if scheme.lower() != "bearer" or not token.strip():
            raise Unauthenticated(_NO_TOKEN)
        return await self._accounts.authenticate(token.strip())


def _bug(method: str, error: Exception) -> HorizonError:
    """Log an error that nobody foresaw under an id, and return what the caller may know of it."""
    error_id = secrets.token_hex(4)
    _log.error("%s failed unexpectedly, error id %s", method, error_id, exc_info=error)
    return HorizonError(f"something went wrong inside the daemon; its log says what, under error id {error_id}")
