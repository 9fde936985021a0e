"""Where the daemon is and how it may be reached: addresses, tokens, CA files, and the rule that plain text stays on this machine."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path

from horizon_client.errors import BadConfig

DEFAULT_PORT = 7171
SYSTEM_CA = "system"
"""Instead of a CA file: trust the certificate authorities that gRPC ships with."""

_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%]+)\]|(?P<host>[A-Za-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")
_TOKEN = re.compile(r"[\x21-\x7e]{1,4096}")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A daemon's address and the credentials for it.

    `ca_file` None means plain text, which is allowed on loopback only; the word `system` means the authorities gRPC ships with.
    """

    server: str
    token: str | None = field(default=None, repr=False)
    ca_file: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "server", normal_address(self.server))
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise BadConfig(
                "the token is not one line of printable characters; pass the file that `horizond token create` wrote"
            )
        if self.ca_file is None and not self.is_loopback:
            raise BadConfig(
                f"{self.server} is not on this machine, so the connection needs TLS: pass the daemon's CA file with --ca "
                f"(horizond prints its path at the first start), or --ca {SYSTEM_CA} for a publicly signed certificate"
            )

    @property
    def host(self) -> str:
        """Host name or address, without brackets and port."""
        return self.server.rpartition(":")[0].strip("[]")

    @property
    def is_loopback(self) -> bool:
        """Whether the traffic never leaves this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def root_certificates(self) -> bytes | None:
        """Return the PEM to trust, or None for gRPC's own.

        Raises:
            BadConfig: when the file cannot be read or contains no certificate.
        """
        if self.ca_file is None or str(self.ca_file) == SYSTEM_CA:
            return None
        return read_ca_file(self.ca_file)


def normal_address(text: str) -> str:
    """Return `text` as HOST:PORT, IPv6 in brackets, the default port filled in.

    Raises:
        BadConfig: when it is not an address.
    """
    bare_six = text.count(":") > 1 and not text.startswith("[")
    match = _ADDRESS.fullmatch(f"[{text}]" if bare_six else text)
    port = int(match["port"] or DEFAULT_PORT) if match else 0
    if match is None or not 0 < port < 65536:
        raise BadConfig(f"{text!r} is not a server address; write HOST:PORT, such as gpubox:{DEFAULT_PORT}")
    return f"{'[' + match['six'] + ']' if match['six'] else match['host']}:{port}"


def read_ca_file(path: Path) -> bytes:
    """Return the content of a CA file.

    Raises:
        BadConfig: when it cannot be read or contains no certificate.
    """
    try:
        pem = path.read_bytes()
    except OSError as error:
        raise BadConfig(f"cannot read the CA file {path}: {error.strerror}") from error
    if b"-----BEGIN CERTIFICATE-----" not in pem:
        raise BadConfig(f"{path} contains no PEM certificate; pass the CA file that horizond wrote")
    return pem


def read_token_file(path: Path) -> str:
    """Return the token in a file.

    Raises:
        BadConfig: when it cannot be read, or is not one line of text.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise BadConfig(f"cannot read the token file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path} is not a token file: it contains bytes that are not ASCII text") from error
    if not _TOKEN.fullmatch(token):
        raise BadConfig(f"{path} is not a token file: it must contain the token alone, on one line")
    return token
