"""A certificate whose files are replaced is served to new connections, by gRPC and by HTTP, without a restart."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from pathlib import Path
from typing import Any

from cryptography import x509

from horizon_client import AsyncClient
from horizon_server.api.certificates import watch_certificate
from horizon_server.api.grpc.server import start_grpc_server
from horizon_server.api.http.server import make_app, start_http_server
from horizon_server.network import given_certificate, own_certificate
from horizon_server.settings import load_settings


def serial_of(certificate: Path) -> int:
    return x509.load_pem_x509_certificate(certificate.read_bytes()).serial_number


def put(source: Path, target: Path) -> None:
    """Replace a file in one moment."""
    copy = target.with_suffix(".new")
    copy.write_bytes(source.read_bytes())
    copy.replace(target)


async def served(port: int) -> int:
    """The serial number of the certificate that a new connection gets."""

    def connect() -> int:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection(("127.0.0.1", port), timeout=240) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secure,
        ):
            return x509.load_der_x509_certificate(secure.getpeercert(True) or b"").serial_number

    return await asyncio.to_thread(connect)


async def test_new_connections_get_the_new_certificate_and_open_ones_stay(base_world: Any, tmp_path: Path) -> None:
    old, new = own_certificate(tmp_path / "old", ()), own_certificate(tmp_path / "new", ())
    assert old.authority is not None
    cert, key = tmp_path / "server.pem", tmp_path / "server.key"
    put(old.certificate, cert)
    put(old.key, key)
    tls = given_certificate(cert, key)
    settings = load_settings(state_dir=tmp_path / "state", tls_cert=cert, tls_key=key)
    grpc_server = await start_grpc_server(base_world.services, address="127.0.0.1:0", tls=tls)
    app = make_app(base_world.services, base_world.metrics, metrics_open=False, ready=lambda: None)
    http_server = await start_http_server(app, "127.0.0.1", 0, tls)
    watching = asyncio.create_task(
        watch_certificate(settings, tls, (grpc_server, http_server), base_world.metrics, look_every_s=0.02)
    )
    ports = grpc_server.port, http_server.port
    try:
        async with AsyncClient(
            f"localhost:{grpc_server.port}", token=base_world.tokens["ann"], ca_file=old.authority
        ) as client:
            await client.account.whoami()
            assert [await served(port) for port in ports] == [serial_of(old.certificate)] * 2
            put(new.key, key)
            os.utime(key)
            for _ in range(5):
                assert [await served(port) for port in ports] == [serial_of(old.certificate)] * 2, "half of a pair"
            put(new.certificate, cert)
            async with asyncio.timeout(240):
                while [await served(port) for port in ports] != [serial_of(new.certificate)] * 2:
                    pass
            await client.account.whoami()  # on the connection that was open
        shown_s = base_world.metrics.registry.get_sample_value("horizon_tls_certificate_expiry_timestamp_seconds")
        assert shown_s == tls.expires_s
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await grpc_server.stop(0)
        await http_server.stop()
