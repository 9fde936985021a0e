"""The gRPC server: which services it has, how it listens, how it shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio
from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from horizon_server.api.connections import Connections
from horizon_server.api.effects import EFFECTS
from horizon_server.api.grpc.calls import CALLS, SERVICES, Call
from horizon_server.api.grpc.convert import packed, response
from horizon_server.api.grpc.interceptor import CallInterceptor, Observe, caller
from horizon_server.api.limits import MAX_CALLS_PER_USER
from horizon_server.api.services import OpenStreams, Services
from horizon_server.errors import BadSetting
from horizon_server.network import ServerCertificate, bound_socket, is_loopback, parse_address

MAX_MESSAGE_BYTES = 4 * 2**20
# At the same time; more are refused with RESOURCE_EXHAUSTED. Watching clients hold one each.
MAX_CALLS = 1024
# On one connection; a client waits with more.
MAX_CALLS_PER_CONNECTION = MAX_CALLS_PER_USER
# Together with those of HTTP far below 1,024, the usual limit of a process's descriptors: workers and files need some
# too.
MAX_CONNECTIONS = 512
# On which no call has presented a valid token: in all, and from one address.
MAX_UNKNOWN = 128
MAX_UNKNOWN_PER_ADDRESS = 32
# How long a new connection may take for TLS and the first frames.
HANDSHAKE_S = 10
SERVICE_NAMES = tuple(service.full_name for service in SERVICES)
METHODS = frozenset(f"{service.name}/{method.name}" for service in SERVICES for method in service.methods)


async def start_grpc_server(
    services: Services, *, address: str, tls: ServerCertificate | None, observe: Observe = lambda *call: None
) -> GrpcServer:
    """Start to serve on `address` (HOST:PORT, port 0 picks a free one).

    Raises:
        BadSetting: when the address cannot be listened on, or is beyond loopback without TLS.
    """
    assert CALLS.keys() == METHODS == EFFECTS.keys(), "every call of the contract is in api.grpc.calls and api.effects"
    parsed = parse_address("grpc", address)
    credentials, certificates = None, _Certificates()
    if tls is not None:
        try:
            await asyncio.to_thread(certificates.load, tls)
        except OSError as error:
            raise BadSetting(f"the TLS files cannot be read: {error}") from error
        credentials = grpc.dynamic_ssl_server_credentials(
            certificates.newest, lambda: certificates.newest, tls.client_authority is not None
        )
    elif not is_loopback(parsed.host):
        raise BadSetting(
            f"the gRPC address {address} is beyond loopback and needs TLS, because others could read the tokens; set "
            "tls_cert and tls_key"
        )
    # gRPC would print a line of its own before it fails, and give no reason.
    bound_socket("grpc", parsed).close()
    streams = OpenStreams(services.accounts)
    connections = Connections(max_unknown=MAX_UNKNOWN, max_unknown_per_address=MAX_UNKNOWN_PER_ADDRESS)
    interceptor = CallInterceptor(services, streams=streams, observe=observe, connections=connections)
    server = grpc.aio.server(
        interceptors=(interceptor,),
        options=_options(),
        maximum_concurrent_rpcs=MAX_CALLS,
    )
    # Not registered besides, as generated code does: a method that is has a request of its own waiting in gRPC, and
    # each call that comes in goes through all of them.
    server.add_generic_rpc_handlers([_handlers(services, service) for service in SERVICES])
    health_servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    reflection.enable_server_reflection((*SERVICE_NAMES, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    try:
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    except RuntimeError as error:
        raise BadSetting(f"grpc: cannot listen on {address}; choose another HOST:PORT with --grpc") from error
    await server.start()
    started = GrpcServer(server, health_servicer, streams, connections, certificates, port)
    await started.set_serving(serving=True)
    return started


class _Certificates:
    """What new TLS connections are served with. Thread: gRPC reads `newest` for each handshake, in a thread of its
    own."""

    newest: grpc.ServerCertificateConfiguration
    """There once `load` has read one."""

    def load(self, tls: ServerCertificate) -> None:
        """Read the files. Raises OSError."""
        pair = tls.key.read_bytes(), tls.certificate.read_bytes()
        clients = tls.client_authority.read_bytes() if tls.client_authority else None
        self.newest = grpc.ssl_server_certificate_configuration([pair], clients)


def _handlers(services: Services, service: ServiceDescriptor) -> grpc.GenericRpcHandler[Any, Any]:
    """Return what gRPC calls for the methods of a service."""
    handlers = {
        method.name: _handler(services, method, CALLS[f"{service.name}/{method.name}"]) for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _handler(services: Services, method: MethodDescriptor, call: Call) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the one handler that there is: request in, one call of a use case, its result or results out as
    messages."""
    answer = message_factory.GetMessageClass(method.output_type)

    def answered(result: Any) -> Any:
        fields = call.fields(result)
        if not call.is_frequent:
            return response(answer, **fields)
        (name, records), *others = fields.items()
        return packed(answer, name, records if isinstance(records, Sequence) else [records], **dict(others))

    async def one(request: Any, context: Any) -> Any:
        return answered(await call.serve(services, caller(), request))

    async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
        # Closed with the call: left to the garbage collector, a watch would stay registered after its client has gone.
        async with aclosing(call.serve(services, caller(), request)) as results:
            async for result in results:
                yield answered(result)

    decode = message_factory.GetMessageClass(method.input_type).FromString
    if method.client_streaming:
        return grpc.stream_unary_rpc_method_handler(one, decode, _encoded)
    if method.server_streaming:
        return grpc.unary_stream_rpc_method_handler(stream, decode, _encoded)
    return grpc.unary_unary_rpc_method_handler(one, decode, _encoded)


def _encoded(answer: Any) -> bytes:
    """Return an answer as it is sent; some are made so, of pieces that were made before."""
    return answer if isinstance(answer, bytes) else bytes(answer.SerializeToString())


def _options() -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        # Laptops behind NAT ping every 30 s; by default the server would answer pings under 5 minutes with GOAWAY.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
        # And the server finds out about laptops that were closed.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        # What was received but not yet read when a connection breaks is sent again, so an upload may run ahead of its
        # reader by little more than the piece it waits for. By default the window grows to several MiB.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.max_concurrent_streams", MAX_CALLS_PER_CONNECTION),
        ("grpc.max_allowed_incoming_connections", MAX_CONNECTIONS),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_S * 1000),
        ("grpc.http2.settings_timeout", HANDSHAKE_S * 1000),
        # Two daemons on one port would share the calls between them, silently.
        ("grpc.so_reuseport", 0),
    )


class GrpcServer:
    """A running server. `port` is the one it listens on."""

    def __init__(
        self,
        server: grpc.aio.Server,
        health_servicer: Any,
        streams: OpenStreams,
        connections: Connections,
        certificates: _Certificates,
        port: int,
    ) -> None:
        self._server = server
        self._certificates = certificates
        self._looking = asyncio.create_task(connections.run(port), name="grpc-connections")
        self._health = health_servicer
        self._streams = streams
        self.port = port

    async def set_serving(self, serving: bool) -> None:
        """Set what health checks answer: whether new work is taken, which is not so while draining. Calls are answered
        all the same."""
        statuses = health_pb2.HealthCheckResponse
        status = statuses.SERVING if serving else statuses.NOT_SERVING
        for name in ("", *SERVICE_NAMES):
            await self._health.set(name, status)

    async def load_certificate(self, tls: ServerCertificate) -> None:
        """Serve new connections with the certificate as its files are now. Raises OSError."""
        await asyncio.to_thread(self._certificates.load, tls)

    async def stop(self, grace: float) -> None:
        """End all streams with UNAVAILABLE, let other calls finish for `grace` seconds, and stop listening."""
        await self.set_serving(False)
        self._streams.end()
        await self._server.stop(grace)
        self._looking.cancel()
