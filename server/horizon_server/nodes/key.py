"""The key of a fleet: a private key and its certificate in one file, of which every node of the fleet has a copy.

With it nodes know each other, both ways, and nobody else reads what they say. Who has the file may do all that a node
may.
"""

from __future__ import annotations

import datetime
import os
import ssl
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from horizon_server.errors import BadSetting

_NAME = "horizon-fleet"
_DAYS = 20 * 365


def make_key(file: Path) -> None:
    """Write a new key, which only this account can read.

    Raises:
        BadSetting: the file is there already, or cannot be written.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _NAME)]), datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of machines differ.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(_NAME)]), critical=False)
        # Its own authority: a node trusts this certificate and no other.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()),
            critical=False,
        )
        .add_extension(
            x509.KeyUsage(
                digital_signature=True,
                key_cert_sign=True,
                content_commitment=False,
                key_encipherment=False,
                data_encipherment=False,
                key_agreement=False,
                crl_sign=False,
                encipher_only=False,
                decipher_only=False,
            ),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise BadSetting(
            f"{file} is there already; nodes that have a copy of it would be shut out by another key"
        ) from None
    except OSError as error:
        raise BadSetting(f"{file} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(private + certificate.public_bytes(serialization.Encoding.PEM))


def server_context(file: Path) -> ssl.SSLContext:
    """What a node accepts connections with: only of those that have the key. Raises BadSetting."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _with_key(context, file)


def client_context(file: Path) -> ssl.SSLContext:
    """What another node is connected to with, which has to have the key too; `SERVER_NAME` is its name. Raises
    BadSetting."""
    return _with_key(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), file)


SERVER_NAME = _NAME
"""The name in every node's certificate: it is the key that counts, not the address."""


def _with_key(context: ssl.SSLContext, file: Path) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        is_open = bool(file.stat().st_mode & 0o077)
        context.load_cert_chain(file)
        text = file.read_text("ascii")
        context.load_verify_locations(cadata=text[text.index("-----BEGIN CERTIFICATE") :])
    except (ssl.SSLError, ValueError) as error:
        raise _unusable(file, "it is not the key of a fleet") from error
    except OSError as error:
        raise _unusable(file, error.strerror or str(error)) from error
    if is_open:
        raise BadSetting(f"setting fleet_key_file: others than its owner can read {file}; run chmod 600 {file}")
    return context


def _unusable(file: Path, why: str) -> BadSetting:
    return BadSetting(f"setting fleet_key_file: {file} cannot be used: {why}; horizond node key makes one")
