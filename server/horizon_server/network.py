"""Where the daemon listens: HOST:PORT, what counts as loopback, and the certificates for addresses beyond it."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from horizon_server.errors import BadSetting

# Laptops keep the authority's certificate, so that its end would have everybody fetch another one.
_AUTHORITY_DAYS = 20 * 365
_SERVER_DAYS = 5 * 365
RENEWED_DAYS = 30
"""How long before its end the daemon makes a new certificate of its own."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """A host name or IP address, and a port from 0 (any free one) to 65535."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(setting: str, text: str) -> Address:
    """Return the address in HOST:PORT; IPv6 hosts are in brackets.

    Raises:
        BadSetting: naming the setting, when it is not one.
    """
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise BadSetting(f"{setting} {text!r} is not HOST:PORT such as 127.0.0.1:7171 or 0.0.0.0:7171")
    return Address(host=host, port=int(port))


def bound_socket(setting: str, address: Address, *, remedy: str = "") -> socket.socket:
    """Return a socket that is bound to the address; `remedy` is what to do where it cannot be had, if that is not to
    give another one with the option of the setting's name.

    Raises:
        BadSetting: naming the setting, when the address is not this machine's or is in use.
    """
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise BadSetting(f"{setting}: {address} is not a valid listen address: {error}") from error
    try:
        # A restart must not wait for the connections of the last daemon to time out.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
    except OSError as error:
        listener.close()
        raise BadSetting(
            f"{setting}: cannot listen on {address}: {error.strerror or error}; "
            f"{remedy or f'choose another HOST:PORT with --{setting}'}"
        ) from error
    return listener


def interface_of(address: str) -> str:
    """Return the name of the network interface with this address; gloo and NCCL are told to use it.

    Raises:
        BadSetting: no interface has it.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    raise BadSetting(f"setting fleet_address: no network interface of this machine has the address {address}")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class ServerCertificate:
    """Paths of PEM files. `authority` is what clients are given, None when the administrator brought a certificate."""

    certificate: Path
    key: Path
    authority: Path | None
    client_authority: Path | None = None
    """Where clients must show a certificate: the file of the authority that signs theirs."""

    @property
    def expires_s(self) -> float:
        """When the certificate ends or, where that is earlier, its authority; in Unix seconds."""
        files = [self.certificate] if self.authority is None else [self.certificate, self.authority]
        return min(_load(file).not_valid_after_utc.timestamp() for file in files)

    def stamp(self) -> tuple[int, ...]:
        """Return what changes when one of the files is replaced or written. Raises OSError."""
        stats = self.certificate.stat(), self.key.stat()
        return tuple(number for stat in stats for number in (stat.st_ino, stat.st_mtime_ns, stat.st_size))

    def check(self) -> None:
        """Let pass a certificate with its key. Raises OSError, also where one of the two was replaced without the
        other."""
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key)


def given_certificate(certificate: Path, key: Path) -> ServerCertificate:
    """Return the administrator's own certificate.

    Raises:
        BadSetting: when a file is missing.
    """
    for name, path in (("tls_cert", certificate), ("tls_key", key)):
        if not path.is_file():
            raise BadSetting(f"setting {name}: {path} does not exist")
    return ServerCertificate(certificate=certificate, key=key, authority=None)


def with_client_authority(certificate: ServerCertificate, authority: Path | None) -> ServerCertificate:
    """Return the certificate of a server whose clients must show one that `authority` has signed; None asks for none.

    Raises:
        BadSetting: when the file of the authority is missing or has no certificate.
    """
    if authority is None:
        return certificate
    try:
        x509.load_pem_x509_certificates(authority.read_bytes())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it contains no PEM certificate"
        raise BadSetting(f"setting tls_client_ca: {authority} cannot be used: {why}") from error
    return replace(certificate, client_authority=authority)


def own_certificate(folder: Path, names: tuple[str, ...]) -> ServerCertificate:
    """Return the certificate below `folder`, made on first use, and made again when `names` has one that it does not
    cover, when its key is another one, or `RENEWED_DAYS` before its end."""
    files = ServerCertificate(certificate=folder / "server.pem", key=folder / "server.key", authority=folder / "ca.pem")
    wanted = {"localhost", "127.0.0.1", "::1", socket.gethostname(), socket.getfqdn(), *names}
    if _serves(files, wanted):
        return files
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # The authority is kept, so that people who copied its certificate to their laptops need no other.
    authority_key, authority = _authority(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = (
        _builder(f"horizond on {socket.gethostname()}", authority.subject, key.public_key(), _SERVER_DAYS)
        .add_extension(x509.SubjectAlternativeName([_general_name(n) for n in sorted(wanted)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    _write_key(files.key, key)
    files.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return files


def _serves(files: ServerCertificate, wanted: set[str]) -> bool:
    """Whether the certificate is there, for these names, with its key, and for long enough."""
    try:
        files.check()
    except OSError:
        return False
    loaded = _load(files.certificate)
    named = loaded.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    covered = (*named.get_values_for_type(x509.DNSName), *named.get_values_for_type(x509.IPAddress))
    ends = loaded.not_valid_after_utc - datetime.timedelta(days=RENEWED_DAYS)
    return wanted <= {str(name) for name in covered} and datetime.datetime.now(datetime.UTC) < ends


def _load(file: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(file.read_bytes())


def _authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key_file, certificate_file = folder / "ca.key", folder / "ca.pem"
    if key_file.is_file() and certificate_file.is_file():
        key = serialization.load_pem_private_key(key_file.read_bytes(), password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return key, _load(certificate_file)
    key = ec.generate_private_key(ec.SECP256R1())
    common_name = f"horizon authority of {socket.gethostname()}"
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(common_name, _name(common_name), key.public_key(), _AUTHORITY_DAYS)
        # It signs servers only: no authority below it would be accepted.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write_key(key_file, key)
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return key, certificate


def _builder(common_name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(common_name))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # A laptop's clock may be behind the server's.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(common_name: str) -> x509.Name:
    # RFC 5280, appendix A.1: ub-common-name is 64. The names that are checked are those of the extension.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name[:64])])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    # Created with this mode, because a chmod afterwards would leave a moment in which others can read it.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(pem)
