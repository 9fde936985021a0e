"""Client certificates: with `tls_client_ca`, gRPC and HTTP serve only clients that show one of that authority."""

from __future__ import annotations

import datetime
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from horizon_client import AsyncClient, Unavailable
from horizon_client.connection import RetryPolicy
from horizon_client.errors import BadConfig
from horizon_client.profiles import Profile, ProfileFile, resolve_endpoint
from horizon_server.api.grpc.server import start_grpc_server
from horizon_server.api.http.server import make_app, start_http_server
from horizon_server.errors import BadSetting
from horizon_server.network import own_certificate, with_client_authority

ONCE = RetryPolicy(max_attempts=1)


def write_pair(folder: Path, name: str, signer: tuple[Any, Any] | None = None) -> tuple[Any, Any]:
    """Write NAME.pem and NAME.key, signed by `signer` or by itself, and return key and certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(signer[1].subject if signer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False)
        .sign(signer[0] if signer else key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (folder / f"{name}.pem").write_bytes(certificate.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / f"{name}.key").write_bytes(private)
    return key, certificate


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_pair(tmp_path, "ann", write_pair(tmp_path, "authority"))
    write_pair(tmp_path, "eve", write_pair(tmp_path, "other"))
    return tmp_path


async def test_grpc_serves_only_clients_of_the_authority(base_world: Any, files: Path) -> None:
    made = own_certificate(files / "tls", ())
    tls = with_client_authority(made, files / "authority.pem")
    server = await start_grpc_server(base_world.services, address="127.0.0.1:0", tls=tls)
    try:
        for name, is_served in (("ann", True), ("eve", False), (None, False)):
            client = AsyncClient(
                f"127.0.0.1:{server.port}",
                token=base_world.tokens["ann"],
                ca_file=made.authority,
                client_cert=name and files / f"{name}.pem",
                client_key=name and files / f"{name}.key",
                unary_retry=ONCE,
            )
            if is_served:
                assert (await client.node.status()).user == "ann"
            else:
                with pytest.raises(Unavailable, match="--client-cert"):
                    await client.node.status()
            await client.close()
    finally:
        await server.stop(0)


async def test_http_serves_only_clients_of_the_authority(base_world: Any, files: Path) -> None:
    made = own_certificate(files / "tls", ())
    app = make_app(base_world.services, base_world.metrics, metrics_open=True, ready=lambda: None)
    server = await start_http_server(app, "127.0.0.1", 0, with_client_authority(made, files / "authority.pem"))
    try:
        for name, is_served in (("ann", True), ("eve", False), (None, False)):
            trust = ssl.create_default_context(cafile=str(made.authority))
            if name:
                trust.load_cert_chain(files / f"{name}.pem", files / f"{name}.key")
            async with httpx.AsyncClient(verify=trust) as client:
                if is_served:
                    assert (await client.get(f"https://127.0.0.1:{server.port}/version")).status_code == 200
                else:
                    with pytest.raises(httpx.TransportError):
                        await client.get(f"https://127.0.0.1:{server.port}/version")
    finally:
        await server.stop()


def test_a_file_without_a_certificate_is_refused(files: Path) -> None:
    made = own_certificate(files / "tls", ())
    assert with_client_authority(made, None) is made
    for name, why in (("none.pem", "No such file"), ("ann.key", "contains no PEM certificate")):
        with pytest.raises(BadSetting, match=f"tls_client_ca: .*{name} cannot be used: .*{why}"):
            with_client_authority(made, files / name)


def test_a_profile_keeps_the_places(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HORIZON_SERVER", "HORIZON_TOKEN", "HORIZON_CA", "HORIZON_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HORIZON_CONFIG_DIR", str(files / "config"))
    cert, key = files / "ann.pem", files / "ann.key"
    ProfileFile().save(
        Profile(
            name="box", server="box:7171", token="t", ca_file=files / "authority.pem", client_cert=cert, client_key=key
        )
    )
    endpoint = resolve_endpoint()
    assert (endpoint.client_cert, endpoint.client_key) == (cert, key)
    pair = endpoint.client_pair()
    assert pair is not None
    assert pair == (key.read_bytes(), cert.read_bytes())
    with pytest.raises(BadConfig, match="pass --client-key too"):
        resolve_endpoint("box:7171", ca_file=files / "authority.pem", client_cert=cert)
    with pytest.raises(BadConfig, match="contains no PEM client key"):
        resolve_endpoint(client_cert=cert, client_key=cert).client_pair()
