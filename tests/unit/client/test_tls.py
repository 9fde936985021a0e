"""TLS: the daemon's own CA is trusted, another is not, and what went wrong is said."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from horizon_client import Client, Unavailable
from horizon_client.connection import RetryPolicy

if TYPE_CHECKING:
    from tests.unit.client.conftest import FakeDaemon

TOKEN = "hzn-test-token"
ONCE = RetryPolicy(max_attempts=1)


def _self_signed() -> tuple[bytes, bytes]:
    """Return key and certificate for 127.0.0.1, valid today."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "horizond test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private, certificate.public_bytes(pem)


@pytest.fixture
def own_ca(daemon: FakeDaemon, tmp_path: Path) -> Iterator[Path]:
    """Restart the fake daemon with TLS and return its CA file."""
    daemon.stop()
    daemon.tls = _self_signed()
    daemon.start()
    path = tmp_path / "ca.pem"
    path.write_bytes(daemon.tls[1])
    yield path


def test_own_ca_is_trusted(daemon: FakeDaemon, own_ca: Path) -> None:
    with Client(daemon.address, token=TOKEN, ca_file=own_ca) as client:
        assert client.node.status().user == "ada"


def test_other_ca_is_not(daemon: FakeDaemon, own_ca: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_bytes(_self_signed()[1])
    client = Client(daemon.address, token=TOKEN, ca_file=other, unary_retry=ONCE)
    with client, pytest.raises(Unavailable, match="not signed by the CA file in use"):
        client.node.status()
    assert daemon.calls == []


def test_plain_text_to_a_tls_port_hints_at_the_ca(daemon: FakeDaemon, own_ca: Path) -> None:
    client = Client(daemon.address, token=TOKEN, unary_retry=ONCE)
    with client, pytest.raises(Unavailable, match="pass its CA file with --ca"):
        client.node.status()
