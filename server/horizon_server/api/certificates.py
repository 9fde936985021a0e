"""The certificate that gRPC and HTTP serve with, and what becomes of it while the daemon runs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import structlog

from horizon_server.api.grpc.server import GrpcServer
from horizon_server.api.http.server import HttpServer
from horizon_server.blobs.concurrency import in_thread
from horizon_server.errors import HorizonError
from horizon_server.network import (
    Address,
    ServerCertificate,
    given_certificate,
    is_loopback,
    own_certificate,
    parse_address,
    with_client_authority,
)
from horizon_server.settings import Settings
from horizon_server.telemetry.metrics import Metrics

log = structlog.get_logger(__name__)

CERTIFICATE_EVERY_S = 30.0
"""How soon a certificate is served that was replaced."""


def addresses_of(settings: Settings) -> tuple[Address, Address]:
    """Return where gRPC and HTTP are to be served."""
    return parse_address("grpc", settings.grpc), parse_address("http", settings.http)


def certificate_of(settings: Settings, *addresses: Address) -> ServerCertificate | None:
    """Return the certificate to serve with; None on loopback, where none was asked for."""
    if settings.tls_cert is not None and settings.tls_key is not None:
        certificate = given_certificate(settings.tls_cert, settings.tls_key)
    elif settings.tls_client_ca is None and all(is_loopback(address.host) for address in addresses):
        return None
    else:
        # These two mean all addresses of the machine, and no client connects to them.
        hosts = tuple(a.host for a in addresses if a.host not in ("0.0.0.0", "::"))  # noqa: S104
        certificate = own_certificate(settings.state_dir / "tls", (*hosts, *settings.tls_names))
    return with_client_authority(certificate, settings.tls_client_ca)


async def watch_certificate(
    settings: Settings,
    certificate: ServerCertificate | None,
    servers: Sequence[GrpcServer | HttpServer],
    metrics: Metrics,
    *,
    look_every_s: float = CERTIFICATE_EVERY_S,
) -> None:
    """Serve new connections with a certificate whose files are replaced, and make a new one of the daemon's own before
    it ends. Connections that are open stay."""
    stamp = None if certificate is None else await in_thread(certificate.stamp)
    while certificate is not None:
        await asyncio.sleep(look_every_s)
        try:
            await in_thread(partial(certificate_of, settings, *addresses_of(settings)))
            now = await in_thread(certificate.stamp)
            if now == stamp:
                continue
            await in_thread(certificate.check)
            expires_s = await in_thread(lambda: certificate.expires_s)
            for server in servers:
                await server.load_certificate(certificate)
        except (HorizonError, OSError) as error:
            # Perhaps one of the two files is replaced already and the other one is not.
            log.warning("the new certificate cannot be used yet; the one before stays", why=str(error))
            continue
        stamp = now
        metrics.set_certificate_expiry(expires_s)
        log.info("new connections get the new certificate", file=str(certificate.certificate))
